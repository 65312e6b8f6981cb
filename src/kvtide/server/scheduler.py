"""A fixed number of send slots, shared between owners by a policy that says whose turn it is.

A **send** is one response body on its way to one client, a **slice** the part of it that holds a send slot, a **flow**
all that one owner has to send: a tenant, or a client's address on a server that asks nobody for a token. Policies
choose between flows and never see clients: connections do not buy a share.
No I/O, no threads, no clock of its own: the caller serialises its calls and passes the time. Invariant: every byte that
was enqueued is sent, in flight, waiting or dropped, and never two of these.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from kvtide.errors import RequestRefused
from kvtide.evict import Recent

WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0
# Owners without anything to send whose counters are remembered.
_LEFT_OWNERS_MAX = 1024
_CREDIT_SLICES = 8


@dataclass(slots=True, eq=False)
class Send:
    """One body to send. Others only read it. `turn`: its arrival, then after each slice the next free number."""

    owner: str
    client: str
    size: int
    priority: int
    enqueued_s: float
    turn: int
    started_s: float | None = None
    ended_s: float | None = None
    sent_bytes: int = 0
    is_in_flight: bool = False
    is_cancelled: bool = False

    @property
    def wait_s(self) -> float:
        """Seconds from `enqueue` to the first slice. Only after that."""
        assert self.started_s is not None
        return self.started_s - self.enqueued_s

    @property
    def unsent_bytes(self) -> int:
        """Bytes that are still to be sent, those in flight included."""
        return self.size - self.sent_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Bytes `[offset, offset + size)` of a send that may go out now. Holds a slot until `finish`."""

    send: Send
    offset: int
    size: int


class Flow:
    """One owner's sends that wait, until none is left. A client's keep their order and go one at a time."""

    def __init__(self, owner: str, weight: float) -> None:
        self.owner = owner
        self.weight = weight
        self.in_flight = 0
        self.sends = 0
        # Each client's sends, oldest first.
        self.queues: dict[str, deque[Send]] = {}
        # The oldest send of each client that has no slice in flight.
        self._heads: dict[str, Send] = {}

    @property
    def waiting(self) -> int:
        """Sends without a slice in flight."""
        return self.sends - self.in_flight

    @property
    def unsent_bytes(self) -> int:
        """Bytes of all sends that are still to be sent."""
        return sum(send.unsent_bytes for queue in self.queues.values() for send in queue)

    @property
    def is_ready(self) -> bool:
        """True if some client could be sent to."""
        return bool(self._heads)

    def head(self) -> Send:
        """Return the send to go on with: highest priority first, then in turn. Only when ready."""
        return min(self._heads.values(), key=lambda send: (-send.priority, send.turn))

    def add(self, send: Send) -> None:
        """Queue a send after its client's others."""
        self.sends += 1
        self.queues.setdefault(send.client, deque()).append(send)
        self._refresh(send.client)

    def remove(self, send: Send) -> None:
        """Drop a send that is done or cancelled and not in flight."""
        assert not send.is_in_flight
        self.sends -= 1
        self.queues[send.client].remove(send)
        if not self.queues[send.client]:
            del self.queues[send.client]
        self._refresh(send.client)

    def start(self, send: Send) -> None:
        """Note that a slice of the head is in flight."""
        assert self._heads[send.client] is send
        send.is_in_flight = True
        self.in_flight += 1
        self._refresh(send.client)

    def stop(self, send: Send) -> None:
        """Note that its slice is not in flight any more."""
        assert send.is_in_flight
        send.is_in_flight = False
        self.in_flight -= 1
        self._refresh(send.client)

    def _refresh(self, client: str) -> None:
        queue = self.queues.get(client)
        if queue and not queue[0].is_in_flight:
            self._heads[client] = queue[0]
        else:
            self._heads.pop(client, None)

    def check(self) -> None:
        """Assert that counts and heads are what the queues say."""
        sends = [send for queue in self.queues.values() for send in queue]
        assert self.sends == len(sends) > 0
        assert self.in_flight == sum(send.is_in_flight for send in sends)
        assert all(not send.is_in_flight for queue in self.queues.values() for send in list(queue)[1:])
        heads = {client: queue[0] for client, queue in self.queues.items() if not queue[0].is_in_flight}
        assert self._heads == heads


class SendPolicy(ABC):
    """Chooses whose turn it is among flows that it knows from `enter` to `leave`."""

    # Whether bodies are cut into slices; without, a body is one slice.
    has_slices: bool

    def __init__(self, slice_bytes: int, rng: random.Random) -> None:
        self._slice_bytes, self._rng = slice_bytes, rng

    @abstractmethod
    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return one of the flows that could send now, never none."""

    def enter(self, flow: Flow) -> None:  # noqa: B027  (most policies have nothing to note)
        """Note that an owner that had nothing to send has something now."""

    def leave(self, flow: Flow) -> None:  # noqa: B027
        """Note that an owner has nothing left to send."""

    def charge(self, flow: Flow, size: int) -> None:  # noqa: B027
        """Note that so many bytes of a flow have been granted, or, if negative, were granted and not sent."""


class FifoPolicy(SendPolicy):
    """Whole bodies in order of arrival: what a server without a scheduler does."""

    has_slices = False

    def pick(self, ready: Sequence[Flow]) -> Flow:
        return min(ready, key=lambda flow: flow.head().turn)


class LotteryPolicy(SendPolicy):
    """Whole bodies, drawn: the fewer requests of a client wait, the likelier it is.

    As in the report, whose clients are owners here: invert the number of requests that each has waiting, softmax the
    list. The inverses lie in (0, 1], so that no one is more than e times likelier than another.
    """

    has_slices = False

    def pick(self, ready: Sequence[Flow]) -> Flow:
        return self._rng.choices(ready, [math.exp(1 / flow.waiting) for flow in ready])[0]


class VtcPolicy(SendPolicy):
    """Virtual token counter (Sheng et al. 2024) in bytes: the flow that got least by weight is next.

    A flow lags behind the highest counter that was served by `_CREDIT_SLICES` at most: so it loses nothing between two
    requests, and saves up no more while it has nothing to send or its readers stall. One that is ahead stays so when it
    leaves and comes back; a new one begins at that highest counter.
    """

    has_slices = True

    def __init__(self, slice_bytes: int, rng: random.Random) -> None:
        super().__init__(slice_bytes, rng)
        self._served: dict[Flow, float] = {}
        self._left: Recent[str, float] = Recent(_LEFT_OWNERS_MAX)
        self._highest = 0.0

    def enter(self, flow: Flow) -> None:
        """Go on where the flow left, or begin at the highest counter."""
        self._served[flow] = self._left.pop(flow.owner, self._highest)

    def leave(self, flow: Flow) -> None:
        self._left[flow.owner] = self._served.pop(flow)

    def charge(self, flow: Flow, size: int) -> None:
        self._served[flow] = self._counter(flow) + size / flow.weight

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return the flow of least counter, the one that came first among equals."""
        flow = min(ready, key=self._counter)
        self._highest = max(self._highest, self._served[flow])
        return flow

    def _counter(self, flow: Flow) -> float:
        return max(self._served[flow], self._highest - _CREDIT_SLICES * self._slice_bytes / flow.weight)


POLICIES: Mapping[str, type[SendPolicy]] = MappingProxyType(
    {"fifo": FifoPolicy, "lottery": LotteryPolicy, "vtc": VtcPolicy}
)


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy of sharing, and every bound of the scheduler. ValueError for an unknown policy or a bad bound."""

    policy: str = "vtc"
    slots: int = 8
    # 4 ms of a link of 1 Gbit/s, so that no body blocks another. The last slice of a body may be half as much longer:
    # a few bytes more than a slice don't wait for a turn of their own.
    slice_bytes: int = 512 << 10
    # Sends of one tenant that may wait or be in flight; more are refused.
    tenant_sends_max: int = 256
    # Slots that one tenant may hold: its slow readers leave the others to the rest.
    tenant_slots_max: int = 4
    # Bits of bodies a second; 0 for as much as the sockets take. Somewhat less than the link carries keeps the queue
    # here, where it is shared fairly, instead of in the kernel and in switches.
    link_bits_s: float = 0.0
    # Tenants with another weight than 1.
    weights: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown send policy {self.policy!r}, expected one of {', '.join(POLICIES)}")
        for name in ("slots", "slice_bytes", "tenant_sends_max", "tenant_slots_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 <= self.link_bits_s < math.inf:
            raise ValueError(f"link_bits_s must not be negative, got {self.link_bits_s!r}")
        bounds = f"{WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
        for tenant, weight in self.weights.items():
            if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
                raise ValueError(f"expected a weight of {bounds}, tenant {tenant!r} has {weight!r}")


class Scheduler:
    """Grants slices of queued sends, at most `slots` at a time."""

    def __init__(self, settings: SchedulerSettings, rng: random.Random) -> None:
        self.settings = settings
        self._policy = POLICIES[settings.policy](settings.slice_bytes, rng)
        self._flows: dict[str, Flow] = {}
        self._in_flight: set[Slice] = set()
        self._turns = 0
        # When the link will have sent what was granted, if it sends at its rate.
        self._link_free_s = -math.inf
        self._enqueued_bytes = self._sent_bytes = self._dropped_bytes = 0

    def adopt(self, settings: SchedulerSettings) -> None:
        """Share by other settings, of the same policy and slice, from the next grant on."""
        assert (settings.policy, settings.slice_bytes) == (self.settings.policy, self.settings.slice_bytes)
        self.settings = settings
        for flow in self._flows.values():
            flow.weight = settings.weights.get(flow.owner, 1.0)

    @property
    def slots_used(self) -> int:
        """Slices in flight."""
        return len(self._in_flight)

    def flows(self) -> list[Flow]:
        """Return what each owner has here, to be read only."""
        return list(self._flows.values())

    def enqueue(self, owner: str, client: str, size: int, now_s: float, priority: int = 0) -> Send:
        """Queue a body of `size` bytes after the others of its client, which is one connection.

        A higher priority goes before the owner's other clients and takes nothing from other owners. RequestRefused
        (429) if the owner has as much here as it may.
        """
        assert size > 0
        flow = self._flows.get(owner)
        if flow is not None and flow.sends >= self.settings.tenant_sends_max:
            text = f"{owner!r} has {flow.sends} sends waiting, the most that it may have"
            raise RequestRefused(429, text, retry_after_s=1.0)
        if flow is None:
            flow = self._flows[owner] = Flow(owner, self.settings.weights.get(owner, 1.0))
            self._policy.enter(flow)
        send = Send(owner, client, size, priority, now_s, self._next_turn())
        flow.add(send)
        self._enqueued_bytes += size
        return send

    def grant(self, now_s: float) -> list[Slice]:
        """Return the slices that may be sent from now on, until no slot is free or nobody has anything to send.

        With `link_bits_s` also until the link has one slice to send beside its present one: ask at `next_grant_s`.
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
        return 8 * size / self.settings.link_bits_s if self.settings.link_bits_s else 0.0

    def finish(self, part: Slice, sent_bytes: int, now_s: float) -> None:
        """Free the slot of a slice of which so many bytes went out; what did not is queued again unless cancelled."""
        assert part in self._in_flight
        assert 0 <= sent_bytes <= part.size
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
        """Grant nothing more of a send. A slice in flight keeps its slot until `finish`. Idempotent."""
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
