"""Replays a trace through the real index and a real policy, on a clock that only the trace moves; beside the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from kvtide.clock import ManualClock
from kvtide.evict.policies.advised import AdvisedPolicy
from kvtide.index import RadixIndex
from kvtide_lab.sim.belady import belady_hits
from kvtide_lab.sim.hints import hints_of
from kvtide_lab.sim.policies import policy_named
from kvtide_lab.sim.workload import Trace, tenant_namespace

BELADY = "belady"
# Where LRU and the bound are closer, the share of the gap between them says nothing.
GAP_MIN = 0.002


class TenantHits(msgspec.Struct, frozen=True):
    """One tenant's blocks: asked for and hit."""

    tenant: str
    requests: int
    blocks: int
    hit_blocks: int
    hit_rate: float


class ReplayResult(msgspec.Struct, frozen=True):
    """A replay: leading held blocks of the requests, counted before each request is stored."""

    policy: str
    capacity_blocks: int
    blocks: int
    hit_blocks: int
    tenants: tuple[TenantHits, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Return the share of the blocks of all requests that were hit."""
        return self.hit_blocks / max(1, self.blocks)


class TraceRow(msgspec.Struct, frozen=True):
    """One policy at one capacity, between LRU and the bound; `gap_closed` is None where these two hit the same."""

    policy: str
    capacity_share: float
    capacity_blocks: int
    hit_blocks: int
    hit_rate: float
    lru_hit_rate: float
    belady_hit_rate: float
    gap_closed: float | None
    tenants: tuple[TenantHits, ...]


class TraceReport(msgspec.Struct, frozen=True):
    """All replays of one trace. Hit rates are by blocks, prefix-closed."""

    trace: str
    block_tokens: int
    requests: int
    blocks: int
    unique_blocks: int
    rows: list[TraceRow]


class PolicyStanding(msgspec.Struct, frozen=True):
    """One policy at one capacity of one trace, beside the best of the fixed ones: `regret` is what that hits more."""

    trace: str
    capacity_share: float
    capacity_blocks: int
    hit_rates: dict[str, float]
    best: str
    regret: float
    gap_closed: float | None


class StandingReport(msgspec.Struct, frozen=True):
    """A policy beside fixed ones on several traces.

    gap_closed_mean: over rows where LRU and the bound are GAP_MIN of hit rate apart at least; None if there is none.
    """

    policy: str
    regret_max: float
    gap_closed_mean: float | None
    rows: list[PolicyStanding]


def capacity_blocks(trace: Trace, share: float) -> int:
    """Return a share of the trace's unique blocks in blocks, at least one. ValueError unless 0 < share <= 1."""
    if not 0 < share <= 1:
        raise ValueError(f"a capacity is a share of the unique blocks, more than 0 and at most 1, got {share}")
    return max(1, int(share * trace.unique_blocks))


def replay(trace: Trace, policy: str, blocks_max: int, hints: str | None = None) -> ReplayResult:
    """Match and insert every request in order.

    hints: the kind of advice that comes with the requests, for policies that take any. ValueError for an unknown
    policy or kind.
    """
    clock = ManualClock(trace.requests[0].at_s if trace.requests else 0.0)
    ranks = policy_named(policy)(blocks_max)
    index = RadixIndex(clock, lambda _: ranks, blocks_max)
    said = hints_of(trace, hints) if hints else []
    namespaces = {request.tenant: tenant_namespace(request.tenant) for request in trace.requests}
    requests, blocks, hits = Counter[str](), Counter[str](), Counter[str]()
    for number, (at_s, tenant, keys) in enumerate(trace.requests):
        clock.advance(at_s - clock.monotonic_s())
        if said and isinstance(ranks, AdvisedPolicy):
            ranks.hear(said[number].mark)
        hit, length = index.match(keys), len(keys)
        requests[tenant] += 1
        blocks[tenant] += length
        hits[tenant] += hit
        index.insert(namespaces[tenant], keys)
    index.check()
    tenants = tuple(
        TenantHits(name, requests[name], blocks[name], hits[name], hits[name] / max(1, blocks[name]))
        for name in sorted(requests)
    )
    return ReplayResult(policy, blocks_max, blocks.total(), hits.total(), tenants)


def compare(trace: Trace, policies: Sequence[str], shares: Sequence[float], hints: str | None = None) -> list[TraceRow]:
    """Replay every policy at every capacity, against LRU and Belady's bound of hits."""
    rows = []
    for share in shares:
        blocks_max = capacity_blocks(trace, share)
        lru = replay(trace, "lru", blocks_max)
        bound = ReplayResult(BELADY, blocks_max, lru.blocks, belady_hits(trace, blocks_max))
        gap = bound.hit_rate - lru.hit_rate
        for policy in (*policies, BELADY):
            known = {BELADY: bound, "lru": lru}.get(policy)
            found = known or replay(trace, policy, blocks_max, hints)
            closed = (found.hit_rate - lru.hit_rate) / gap if gap > 0 else None
            rates = (found.hit_blocks, found.hit_rate, lru.hit_rate, bound.hit_rate, closed)
            rows.append(TraceRow(policy, share, blocks_max, *rates, found.tenants))
    return rows


def trace_report(trace: Trace, rows: list[TraceRow]) -> TraceReport:
    """Return what `kvtide-lab sim trace --json` prints."""
    blocks = sum(len(request.keys) for request in trace.requests)
    return TraceReport(trace.name, trace.block_tokens, len(trace.requests), blocks, trace.unique_blocks, rows)


def standing(trace: Trace, policy: str, fixed: Sequence[str], share: float, hints: str | None = None) -> PolicyStanding:
    """Replay a policy and those that it is to be as good as; `lru` is to be one of them."""
    rows = {row.policy: row for row in compare(trace, [*fixed, policy], [share], hints=hints)}
    hit_rates = {name: row.hit_rate for name, row in rows.items()}
    best = max(fixed, key=lambda name: hit_rates[name])
    found = rows[policy]
    regret = hit_rates[best] - hit_rates[policy]
    return PolicyStanding(trace.name, share, found.capacity_blocks, hit_rates, best, regret, found.gap_closed)


def standing_report(policy: str, standings: Sequence[PolicyStanding]) -> StandingReport:
    """Return what `kvtide-lab sim trace --compare --json` prints of several traces."""
    rates = [(row.gap_closed, row.hit_rates[BELADY] - row.hit_rates["lru"]) for row in standings]
    gaps = [closed for closed, gap in rates if closed is not None and gap >= GAP_MIN]
    mean = sum(gaps) / len(gaps) if gaps else None
    return StandingReport(policy, max((each.regret for each in standings), default=0.0), mean, list(standings))
