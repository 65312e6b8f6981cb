"""Replays a trace, advised or not, through the real index and a real policy, on the trace's clock; beside the bound."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from kvtide.clock import ManualClock
from kvtide.evict import Hint
from kvtide.evict.policies.reuse import AdvisedPolicy
from kvtide.index import RadixIndex
from kvtide.types import BlockKey
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
    clock = ManualClock(trace.requests[0].at_s)
    ranks = policy_named(policy)(blocks_max)
    index = RadixIndex(clock, lambda _: ranks, blocks_max)
    said = hints_of(trace, hints) if hints else []
    namespaces = {request.tenant: tenant_namespace(request.tenant) for request in trace.requests}
    requests, blocks, hits = Counter[str](), Counter[str](), Counter[str]()
    for number, (at_s, tenant, keys) in enumerate(trace.requests):
        clock.advance(max(0.0, at_s - clock.monotonic_s()))
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


_NEVER = 1 << 60


def belady_hits(trace: Trace, blocks_max: int) -> int:
    """Return the number of blocks, leading ones of their requests, that a cache which knows the future would hit.

    Belady's rule on blocks of one size: evict what is used again latest. A request uses all blocks before any that it
    uses, so that a block's next use is never later than that of one after it; with ties evicted deepest first the rule
    never breaks a prefix, and no policy, prefix-closed or not, hits more. Blocks of a request that are used again later
    than all that is held are not kept at all: the bound covers admission too.
    """
    next_uses = _next_uses(trace)
    held: dict[BlockKey, tuple[int, int]] = {}
    latest: list[tuple[int, int, BlockKey]] = []
    hits = 0
    for request, uses in zip(trace.requests, next_uses, strict=True):
        keys = request.keys
        hits += next((position for position, key in enumerate(keys) if key not in held), len(keys))
        for position, (key, use) in enumerate(zip(keys, uses, strict=True)):
            held[key] = (-use, -position)
            heapq.heappush(latest, (-use, -position, key))
        while len(held) > blocks_max:
            use, position, key = heapq.heappop(latest)
            if held.get(key) == (use, position):
                del held[key]
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    next_use: dict[BlockKey, int] = {}
    uses = []
    for number in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[number].keys
        uses.append([next_use.get(key, _NEVER) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    uses.reverse()
    return uses


# Advice that clients could add to requests. `ends`: each says which request is its session's last; it knows its own
# plans, so that this looks ahead in the trace. `retain`: the time within which nine of ten sessions of that turn have
# gone on so far; the past alone. `lies`: `ends` turned round. `turncoat`: true in the first half, then turned round.
HINTS = ("ends", "retain", "lies", "turncoat")
_GAPS_MIN = 10
_RETAINED_SHARE = 0.9


def hints_of(trace: Trace, kind: str) -> list[Hint]:
    """Return each request's advice. ValueError for an unknown kind."""
    if kind not in HINTS:
        raise ValueError(f"unknown kind of hints {kind!r}, expected one of {', '.join(HINTS)}")
    before = _turns_before(trace)
    if kind == "retain":
        return _retained(trace, before)
    goes_on = {at for at in before if at is not None}
    half = len(before) // 2
    turned = [kind == "lies" or (kind == "turncoat" and at >= half) for at in range(len(before))]
    return [Hint(is_last=(at in goes_on) == turned[at]) for at in range(len(before))]


def _turns_before(trace: Trace) -> list[int | None]:
    """Return, for each request, the number of the request that it goes on from.

    A session's next turn is the first later request of its tenant that has all of its blocks but perhaps the last, and
    is longer.
    """
    ends: dict[BlockKey, int] = {}
    before: list[int | None] = []
    for number, request in enumerate(trace.requests):
        before.append(_taken(ends, request.keys))
        # The next turn may lack the last block, which this one may have filled in part.
        ends[request.keys[max(0, len(request.keys) - 2)]] = number
    return before


def _taken(ends: dict[BlockKey, int], keys: Sequence[BlockKey]) -> int | None:
    for key in reversed(keys[:-2]):
        if key in ends:
            return ends.pop(key)
    return None


def _retained(trace: Trace, before: Sequence[int | None]) -> list[Hint]:
    gaps_s: defaultdict[int, list[float]] = defaultdict(list)
    turns: list[int] = []
    hints = []
    for number, earlier in enumerate(before):
        turn = 0
        if earlier is not None:
            turn = turns[earlier] + 1
            insort(gaps_s[turn], trace.requests[number].at_s - trace.requests[earlier].at_s)
        turns.append(turn)
        known = gaps_s[turn + 1]
        retain_s = known[int(_RETAINED_SHARE * len(known))] if len(known) >= _GAPS_MIN else None
        hints.append(Hint(retain_s=retain_s))
    return hints
