"""Contents of `/v1/status` and `/v1/history`: counters, tiers, scheduler, the servers around it, an hour of samples.

Invariant: there are at most `_FINE_MAX + _COARSE_MAX` samples, in the order of time: one for each of the last minutes'
5 s, one a minute before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from kvtide.clock import Clock
from kvtide.server.metrics import Metrics, NamespaceStatus, TenantTotals
from kvtide.server.regions import Region
from kvtide.server.scheduler import Scheduler, TenantLoad
from kvtide.tier.pool import Member, PoolServer
from kvtide.types import TierStats

SAMPLE_S = 5.0
_FINE_MAX = 120
_COARSE_S = 60.0
_COARSE_MAX = 60
_PROBE_S_MAX = 1.0
# Members that are looked at; of a larger pool every server shows its first ones.
MEMBERS_MAX = 64


class MemberStatus(msgspec.Struct, frozen=True):
    """One server of the pool; `share` of the slots is its, at any rank. `is_up` says whether it takes connections."""

    name: str
    address: str
    weight: float
    share: float
    is_here: bool
    is_up: bool | None


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool's map as this server has it."""

    epoch: int
    replicas: int
    members: list[MemberStatus]


class RegionStatus(msgspec.Struct, frozen=True):
    """A region and its centre, or a centre (`is_centre`), of which the other figures are nothing.

    `behind_s` is how long ago all that the centre wrote was known here, None if it never was.
    """

    is_centre: bool
    behind_s: float | None
    waiting_objects: int
    sent_objects: int
    sent_bytes: int
    given_up_objects: int


class Outlook:
    """Looks around. Runs on the event loop."""

    def __init__(self, member: Member | None, region: Region | None, clock: Clock) -> None:
        self._member = member
        self._region = region
        self._clock = clock
        self._up: dict[str, bool] = {}

    async def look(self) -> None:
        """Find out which members of the pool take connections."""
        servers = self._servers()
        found = await asyncio.gather(*(_is_up(server.address) for server in servers))
        self._up = {server.name: is_up for server, is_up in zip(servers, found, strict=True)}

    def _servers(self) -> Sequence[PoolServer]:
        placement = self._member.placement if self._member is not None else None
        return placement.map.servers[:MEMBERS_MAX] if placement is not None else ()

    def pool(self) -> PoolStatus | None:
        """Return the pool; None for a server of none, or without a map."""
        placement = self._member.placement if self._member is not None else None
        if self._member is None or placement is None:
            return None
        slots = placement.map.slots
        members = [
            MemberStatus(
                server.name,
                server.origin,
                server.weight,
                len(placement.slots_of(position)) / slots,
                server.name == self._member.name,
                self._up.get(server.name),
            )
            for position, server in enumerate(self._servers())
        ]
        return PoolStatus(placement.map.epoch, placement.replicas, members)

    def region(self) -> RegionStatus | None:
        """Return what is known of other regions; None for a server without any."""
        region = self._region
        if region is None:
            return None
        sync, as_of_s = region.synchroniser, region.as_of_s()
        behind_s = None if as_of_s is None else max(0.0, self._clock.wall_s() - as_of_s)
        if region.central is None or sync is None:
            return RegionStatus(True, None, 0, 0, 0, 0)
        return RegionStatus(False, behind_s, sync.waiting, sync.sent_objects, sync.sent_bytes, sync.given_up)


async def _is_up(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_S_MAX):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


class TenantStatus(msgspec.Struct, frozen=True):
    """One tenant: bytes since the server began, what it has queued now, how long its bodies waited."""

    tenant: str
    weight: float
    sent_bytes: int
    received_bytes: int
    waiting_sends: int
    in_flight_slices: int
    unsent_bytes: int
    wait_s_mean: float | None
    wait_s_p99: float | None


class LinkStatus(msgspec.Struct, frozen=True):
    """A way in and out of the server: `clients`, or another server or store that it talks to."""

    name: str
    is_up: bool
    connections: int
    sent_bytes: int
    received_bytes: int


class Status(msgspec.Struct, frozen=True):
    """The body of `/v1/status`. Counters only grow; whoever wants rates takes differences over `uptime_s`."""

    version: str
    uptime_s: float
    # Of prompts' full blocks, as clients say: from any tier of theirs or ours, and by reason not.
    loaded_tokens: int
    missed_tokens: dict[str, int]
    # What was read here, once an object: `found`, or why not.
    reads: dict[str, int]
    corrupt_objects: int
    policy: str
    slots: int
    slots_used: int
    tiers: list[TierStats]
    tenants: list[TenantStatus]
    namespaces: list[NamespaceStatus]
    links: list[LinkStatus]
    pool: PoolStatus | None = None
    region: RegionStatus | None = None


def server_status(
    metrics: Metrics,
    tiers: Sequence[TierStats],
    scheduler: Scheduler,
    uptime_s: float,
    version: str,
    outlook: Outlook | None = None,
) -> Status:
    """Put together what the dashboard shows."""
    tenants = _tenants(metrics, scheduler)
    clients = LinkStatus(
        "clients",
        True,
        metrics.connections(),
        sum(tenant.sent_bytes for tenant in tenants),
        sum(tenant.received_bytes for tenant in tenants),
    )
    namespaces = metrics.namespaces()
    missed: Counter[str] = Counter()
    for each in namespaces:
        missed.update(each.missed_tokens)
    return Status(
        version=version,
        uptime_s=uptime_s,
        loaded_tokens=sum(each.loaded_tokens for each in namespaces),
        missed_tokens=dict(missed),
        reads=metrics.reads(),
        corrupt_objects=metrics.corrupt_objects(),
        policy=scheduler.settings.policy,
        slots=scheduler.settings.slots,
        slots_used=scheduler.slots_used,
        tiers=list(tiers),
        tenants=tenants,
        namespaces=namespaces,
        links=[clients],
        pool=outlook.pool() if outlook is not None else None,
        region=outlook.region() if outlook is not None else None,
    )


def _tenants(metrics: Metrics, scheduler: Scheduler) -> list[TenantStatus]:
    """Return every label that has counted something, with what its tenants have in the scheduler now."""
    queued: dict[str, TenantLoad] = {}
    for load in scheduler.loads():
        label = metrics.label(load.tenant)
        before = queued.get(label, TenantLoad(label, 0, 0, 0))
        queued[label] = TenantLoad(label, *(one + other for one, other in zip(before[1:], load[1:], strict=True)))
    weights = {metrics.label(tenant): weight for tenant, weight in scheduler.settings.weights.items()}
    totals = {total.tenant: total for total in metrics.tenants()}
    return [
        _tenant(
            totals.get(label, TenantTotals(label, 0, 0, 0, 0.0, None)),
            queued.get(label, TenantLoad(label, 0, 0, 0)),
            weights.get(label, 1.0),
        )
        for label in dict.fromkeys([*totals, *queued])
    ]


def _tenant(total: TenantTotals, load: TenantLoad, weight: float) -> TenantStatus:
    return TenantStatus(
        tenant=total.tenant,
        weight=weight,
        sent_bytes=total.sent_bytes,
        received_bytes=total.received_bytes,
        waiting_sends=load.waiting_sends,
        in_flight_slices=load.in_flight_slices,
        unsent_bytes=load.unsent_bytes,
        wait_s_mean=total.wait_s_sum / total.waits if total.waits else None,
        wait_s_p99=total.wait_s_p99,
    )


class Sample(msgspec.Struct, frozen=True):
    """Counters at one moment; they only grow, but for what waits. Differences are rates."""

    uptime_s: float
    loaded_tokens: int
    missed_tokens: dict[str, int]
    sent_bytes: int
    received_bytes: int
    evictions: int
    waiting_sends: int

    @staticmethod
    def of(status: Status) -> Sample:
        """Return what a status says that is kept."""
        return Sample(
            status.uptime_s,
            status.loaded_tokens,
            status.missed_tokens,
            status.links[0].sent_bytes,
            status.links[0].received_bytes,
            sum(tier.evictions for tier in status.tiers),
            sum(tenant.waiting_sends for tenant in status.tenants),
        )


class History:
    """The samples of the last hour. One thread uses it."""

    def __init__(self) -> None:
        self._fine: deque[Sample] = deque(maxlen=_FINE_MAX)
        self._coarse: deque[Sample] = deque(maxlen=_COARSE_MAX)

    def note(self, sample: Sample) -> None:
        """Keep a sample."""
        self._fine.append(sample)
        if not self._coarse or sample.uptime_s - self._coarse[-1].uptime_s >= _COARSE_S:
            self._coarse.append(sample)

    def samples(self) -> list[Sample]:
        """Return what is kept, the oldest first."""
        since_s = self._fine[0].uptime_s if self._fine else 0.0
        return [*(each for each in self._coarse if each.uptime_s < since_s), *self._fine]


def history_body(history: History) -> bytes:
    """Return the samples as JSON."""
    return msgspec.json.encode({"samples": history.samples()})
