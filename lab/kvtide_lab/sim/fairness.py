"""Clients that share one link through the server's own scheduler, on a clock of their own.

The link sends granted slices one after the other at its full rate. A client keeps a number of requests under way, each
on its own connection, and asks again one round trip after a body has ended.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvtide.server.scheduler import POLICIES, Scheduler, SchedulerSettings, Send, Slice
from kvtide_lab.measuring import percentile


class ClientMix(NamedTuple):
    """So many clients that ask for bodies of one size, each with `connections` requests under way."""

    size: int
    clients: int
    connections: int = 1
    weight: float = 1.0


# The case that whole bodies can't share fairly.
FAIRNESS_MIX = (ClientMix(16 << 20, 1), ClientMix(512 << 10, 7))


class FairnessSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One link and who uses it. ValueError for anything that is not positive."""

    mix: tuple[ClientMix, ...] = FAIRNESS_MIX
    link_bits_s: float = 1e9
    slots: int = 2
    slice_bytes: int = 512 << 10
    round_trip_s: float = 0.0005
    duration_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("link_bits_s", "slots", "slice_bytes", "duration_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not self.mix or any(min(each) <= 0 for each in self.mix):
            raise ValueError(f"every kind of client needs a size, a count, connections and a weight, got {self.mix}")
        if self.round_trip_s < 0:
            raise ValueError(f"round_trip_s must not be negative, got {self.round_trip_s}")

    @property
    def slice_round_s(self) -> float:
        """Seconds in which the link sends one slice of every client."""
        return 8 * self.slice_bytes * sum(each.clients for each in self.mix) / self.link_bits_s


class FairnessRow(msgspec.Struct, frozen=True):
    """One policy. `jain` is over bytes by weight, waits are until the first byte, `small` means the smallest bodies.

    `largest_share` is what the clients with the largest bodies got of all bytes.
    """

    policy: str
    jain: float
    throughput_mb_s: float
    largest_share: float
    wait_ms_p50: float
    wait_ms_p99: float
    small_wait_ms_p50: float
    small_wait_ms_p99: float
    small_request_ms_p99: float


class FairnessReport(msgspec.Struct, frozen=True):
    """All policies in one setup. `slice_round_ms` is what waits are to be compared with."""

    clients: int
    link_mbit_s: float
    slots: int
    slice_bytes: int
    slice_round_ms: float
    duration_s: float
    jain_fifo: float
    jain_lottery: float
    jain_vtc: float
    rows: list[FairnessRow]


class Served(NamedTuple):
    """One client's share: bytes, and for each body the wait for its first byte and the time to its last."""

    size: int
    weight: float
    sent_bytes: int
    waits_s: Sequence[float]
    requests_s: Sequence[float]


def _jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 if all are equal, 1/n if one has everything. 1 for nothing at all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class _Client:
    """One tenant: what it asks for and what came."""

    def __init__(self, kind: ClientMix) -> None:
        self.kind = kind
        self.sent_bytes = 0
        self.waits_s: list[float] = []
        self.requests_s: list[float] = []

    def note(self, send: Send, sent_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        if send.ended_s is not None:
            self.waits_s.append(send.wait_s)
            self.requests_s.append(send.ended_s - send.enqueued_s)

    def served(self) -> Served:
        return Served(self.kind.size, self.kind.weight, self.sent_bytes, self.waits_s, self.requests_s)


def _simulate(policy: str, setup: FairnessSetup) -> list[Served]:
    kinds = [kind for kind in setup.mix for _ in range(kind.clients)]
    clients = {f"client-{number}": _Client(kind) for number, kind in enumerate(kinds)}
    scheduler = Scheduler(
        SchedulerSettings(
            policy=policy,
            slots=setup.slots,
            tenant_slots_max=setup.slots,
            slice_bytes=setup.slice_bytes,
            weights={name: client.kind.weight for name, client in clients.items()},
        ),
        random.Random(setup.seed),
    )
    # (time, number, what happens): a connection that asks, as (client, connection), or a slice that has gone out.
    events: list[tuple[float, int, tuple[str, str] | Slice]] = []
    connections = [(name, f"{name}.{each}") for name in clients for each in range(clients[name].kind.connections)]
    random.Random(setup.seed).shuffle(connections)
    for number, connection in enumerate(connections):
        events.append((0.0, number, connection))
    number, link_free_s = len(events), 0.0
    while events and events[0][0] < setup.duration_s:
        now_s, _, event = heapq.heappop(events)
        if isinstance(event, Slice):
            send = event.send
            scheduler.finish(event, event.size, now_s)
            clients[send.owner].note(send, event.size)
            if send.ended_s is not None:
                number += 1
                heapq.heappush(events, (now_s + setup.round_trip_s, number, (send.owner, send.client)))
        else:
            scheduler.enqueue(*event, clients[event[0]].kind.size, now_s)
        for part in scheduler.grant(now_s):
            number += 1
            link_free_s = max(link_free_s, now_s) + 8 * part.size / setup.link_bits_s
            heapq.heappush(events, (link_free_s, number, part))
    return [client.served() for client in clients.values()]


def fairness_row(policy: str, served: Sequence[Served], duration_s: float) -> FairnessRow:
    """Sum up what the clients got under one policy."""
    total = sum(each.sent_bytes for each in served)
    smallest, largest = min(each.size for each in served), max(each.size for each in served)
    waits = [wait_s for each in served for wait_s in each.waits_s]
    small = [each for each in served if each.size == smallest]
    small_waits = [wait_s for each in small for wait_s in each.waits_s]
    small_requests = [request_s for each in small for request_s in each.requests_s]
    return FairnessRow(
        policy=policy,
        jain=_jain([each.sent_bytes / each.weight for each in served]),
        throughput_mb_s=total / duration_s / 1e6,
        largest_share=sum(each.sent_bytes for each in served if each.size == largest) / total if total else 0.0,
        wait_ms_p50=1e3 * percentile(waits, 0.5),
        wait_ms_p99=1e3 * percentile(waits, 0.99),
        small_wait_ms_p50=1e3 * percentile(small_waits, 0.5),
        small_wait_ms_p99=1e3 * percentile(small_waits, 0.99),
        small_request_ms_p99=1e3 * percentile(small_requests, 0.99),
    )


def run_fairness(setup: FairnessSetup) -> FairnessReport:
    """Serve the same clients under every policy."""
    return fairness_report(setup, [fairness_row(each, _simulate(each, setup), setup.duration_s) for each in POLICIES])


def fairness_report(setup: FairnessSetup, rows: list[FairnessRow]) -> FairnessReport:
    """Put the rows of all policies under one head."""
    index = {row.policy: row.jain for row in rows}
    return FairnessReport(
        clients=sum(each.clients for each in setup.mix),
        link_mbit_s=setup.link_bits_s / 1e6,
        slots=setup.slots,
        slice_bytes=setup.slice_bytes,
        slice_round_ms=1e3 * setup.slice_round_s,
        duration_s=setup.duration_s,
        jain_fifo=index["fifo"],
        jain_lottery=index["lottery"],
        jain_vtc=index["vtc"],
        rows=rows,
    )
