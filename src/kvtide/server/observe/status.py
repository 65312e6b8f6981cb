"""What the dashboard polls: one JSON object about the whole server, made from its counters, tiers and scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from kvtide.server.metrics import Metrics, TenantTotals
from kvtide.server.observe.outlook import Outlook, PoolStatus, RegionStatus
from kvtide.server.scheduler import Scheduler, TenantLoad
from kvtide.tier import TierStats


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


class NamespaceStatus(msgspec.Struct, frozen=True):
    """One namespace's tokens as clients say, since the server began; `model` is what its objects call it."""

    tenant: str
    namespace: str
    model: str
    loaded_tokens: int
    missed_tokens: dict[str, int]


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
    namespaces = [NamespaceStatus(*totals) for totals in metrics.namespaces()]
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


def status_body(status: Status) -> bytes:
    """Return the status as JSON."""
    return msgspec.json.encode(status)
