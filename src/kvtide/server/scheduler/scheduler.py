"""A fixed number of send slots, shared between owners by a policy that says who may send next.

No I/O, no threads, no clock of its own: the caller serialises its calls and passes the time. Invariant: every byte that
was enqueued is sent, in flight, waiting or dropped, and never two of these.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvtide.errors import QueueFull
from kvtide.server.scheduler.policies import Flow, Owner, Send, Slice, policy_named

WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy of sharing, and every bound of the scheduler. ValueError for one that is not positive."""

    policy: str = "vtc"
    slots: int = 8
    # A body goes out in slices of so many bytes, 4 ms of a link of 1 Gbit/s, so that no body blocks another. The last
    # slice may be half as much longer: a few bytes more than a slice don't wait for a turn of their own.
    slice_bytes: int = 512 << 10
    # Sends of one tenant that may wait or be in flight; more are refused.
    tenant_sends_max: int = 256
    # Slots that one tenant may hold: its slow readers leave the others to the rest.
    tenant_slots_max: int = 4
    # What the server may send, in bits of bodies a second; 0 for as much as the sockets take. Somewhat less than the
    # link carries keeps the queue here, where it is shared fairly, instead of in the kernel and in switches.
    link_bits_s: float = 0.0
    # Tenants with another weight than 1.
    weights: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        for name in ("slots", "slice_bytes", "tenant_sends_max", "tenant_slots_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 <= self.link_bits_s < math.inf:
            raise ValueError(f"link_bits_s must not be negative, got {self.link_bits_s!r}")
        for tenant, weight in self.weights.items():
            if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
                raise ValueError(
                    f"expected a weight of {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, tenant {tenant!r} has {weight!r}"
                )


class TenantLoad(NamedTuple):
    """The sends of one tenant, or of one address without a token, in the scheduler."""

    tenant: str
    waiting_sends: int
    in_flight_slices: int
    unsent_bytes: int


class Scheduler:
    """Grants slices of queued sends, at most `slots` at a time."""

    def __init__(self, settings: SchedulerSettings, rng: random.Random) -> None:
        self.settings = settings
        self._policy = policy_named(settings.policy, settings.slice_bytes, rng)
        self._flows: dict[Owner, Flow] = {}
        self._in_flight: set[Slice] = set()
        self._turns = 0
        # When the link will have sent what was granted, if it sends at its rate.
        self._link_free_s = -math.inf
        self._enqueued_bytes = self._sent_bytes = self._dropped_bytes = 0

    def adopt(self, settings: SchedulerSettings) -> None:
        """Share by other settings from the next grant on; who has more than a new bound lets in keeps it meanwhile.

        AssertionError for another policy or slice.
        """
        assert (settings.policy, settings.slice_bytes) == (self.settings.policy, self.settings.slice_bytes)
        self.settings = settings
        for flow in self._flows.values():
            flow.weight = settings.weights.get(flow.owner.tenant, 1.0)

    @property
    def slots_used(self) -> int:
        """Slices in flight."""
        return len(self._in_flight)

    def loads(self) -> list[TenantLoad]:
        """Return what each owner has here that has anything; several of one tenant are several loads."""
        return [
            TenantLoad(flow.owner.tenant, flow.waiting, flow.in_flight, flow.unsent_bytes)
            for flow in self._flows.values()
        ]

    def enqueue(self, tenant: str, client: str, size: int, now_s: float, priority: int = 0, address: str = "") -> Send:
        """Queue a body of `size` bytes after the others of its client, which is one connection.

        The owner is the tenant, or where nobody shows a token the client's address. A higher priority goes before the
        owner's other clients and takes nothing from other owners. QueueFull if the owner has as much here as it may;
        ValueError for a body without bytes.
        """
        if size <= 0:
            raise ValueError(f"a send has at least one byte, got {size}")
        owner = Owner(tenant, address)
        flow = self._flows.get(owner)
        if flow is not None and flow.sends >= self.settings.tenant_sends_max:
            whose = address or f"tenant {tenant!r}"
            raise QueueFull(f"{whose} has {flow.sends} sends waiting, the most that it may have")
        if flow is None:
            flow = self._flows[owner] = Flow(owner, self.settings.weights.get(tenant, 1.0))
            self._policy.enter(flow)
        send = Send(owner, client, size, priority, now_s, self._next_turn())
        flow.add(send)
        self._enqueued_bytes += size
        return send

    def grant(self, now_s: float) -> list[Slice]:
        """Return the slices that may be sent from now on, until no slot is free or nobody has anything to send.

        With `link_bits_s` also until the link has one slice to send beside the one that it sends; `next_grant_s` tells
        when to ask again.
        """
        granted: list[Slice] = []
        while self.slots_used < self.settings.slots and self._grant_s() <= now_s:
            ready = [flow for flow in self._flows.values() if self._may_send(flow)]
            if not ready:
                break
            flow = self._policy.pick(ready)
            granted.append(self._start(flow, flow.head(), now_s))
        return granted

    def next_grant_s(self) -> float | None:
        """Return when `grant` will give slices although nothing is finished before, or None if it won't."""
        is_full = self.slots_used >= self.settings.slots
        if is_full or not self.settings.link_bits_s or not any(map(self._may_send, self._flows.values())):
            return None
        return self._grant_s()

    def _grant_s(self) -> float:
        if not self.settings.link_bits_s:
            return -math.inf
        return self._link_free_s - self._link_s(self.settings.slice_bytes)

    def _link_s(self, size: int) -> float:
        """Return how long the link takes for so many bytes."""
        return 8 * size / self.settings.link_bits_s if self.settings.link_bits_s else 0.0

    def finish(self, part: Slice, sent_bytes: int, now_s: float) -> None:
        """Free the slot of a slice of which so many bytes went out; what did not is queued again unless cancelled.

        ValueError for a slice that is not in flight or more bytes than it has.
        """
        if part not in self._in_flight:
            raise ValueError(f"{part} is not in flight")
        if not 0 <= sent_bytes <= part.size:
            raise ValueError(f"expected 0 to {part.size} sent bytes, got {sent_bytes}")
        send, flow = part.send, self._flows[part.send.owner]
        self._in_flight.remove(part)
        self._policy.charge(flow, sent_bytes - part.size)
        self._link_free_s -= self._link_s(part.size - sent_bytes)
        self._sent_bytes += sent_bytes
        send.sent_bytes += sent_bytes
        send.turn = self._next_turn()
        flow.stop(send)
        if send.is_cancelled or not send.unsent_bytes:
            send.ended_s = now_s
            self._drop(flow, send)

    def cancel(self, send: Send) -> None:
        """Give up on a send: nothing more of it is granted. A slice in flight keeps its slot until `finish`.

        Does nothing for a send that is done or cancelled.
        """
        if send.is_cancelled or not send.unsent_bytes:
            return
        send.is_cancelled = True
        if not send.is_in_flight:
            self._drop(self._flows[send.owner], send)

    def _may_send(self, flow: Flow) -> bool:
        return flow.is_ready and flow.in_flight < self.settings.tenant_slots_max

    def _start(self, flow: Flow, send: Send, now_s: float) -> Slice:
        slice_bytes, size = self.settings.slice_bytes, send.unsent_bytes
        if self._policy.has_slices and size > slice_bytes * 3 // 2:
            size = slice_bytes
        part = Slice(send, send.sent_bytes, size)
        if send.started_s is None:
            send.started_s = now_s
        flow.start(send)
        self._policy.charge(flow, size)
        self._link_free_s = max(self._link_free_s, now_s) + self._link_s(size)
        self._in_flight.add(part)
        return part

    def _drop(self, flow: Flow, send: Send) -> None:
        self._dropped_bytes += send.unsent_bytes
        flow.remove(send)
        if not flow.sends:
            del self._flows[flow.owner]
            self._policy.leave(flow)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def check(self) -> None:
        """Assert that all accounts agree."""
        assert self.slots_used <= self.settings.slots
        for flow in self._flows.values():
            flow.check()
            assert flow.in_flight <= self.settings.tenant_slots_max
            assert flow.sends <= self.settings.tenant_sends_max
        assert sum(flow.in_flight for flow in self._flows.values()) == self.slots_used
        unsent = sum(flow.unsent_bytes for flow in self._flows.values())
        assert self._enqueued_bytes == self._sent_bytes + self._dropped_bytes + unsent
        assert all(part.send.is_in_flight and part.offset == part.send.sent_bytes for part in self._in_flight)
