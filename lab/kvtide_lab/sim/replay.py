"""Replays a trace through the real index and a real policy, on a clock that only the trace moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvtide.clock import ManualClock
from kvtide.evict import AdvisedPolicy
from kvtide.index import RadixIndex
from kvtide_lab.sim.belady import belady_hits
from kvtide_lab.sim.hints import LEFT_MARK, said_of
from kvtide_lab.sim.learned import LEARNED
from kvtide_lab.sim.policies import policy_named
from kvtide_lab.sim.workload import Trace, tenant_namespace

BELADY = "belady"
# Of the order of magnitude of today's models of 8 billion parameters.
TOKENS_OF_EQUAL_COST = 16_384


class TenantResult(NamedTuple):
    """One tenant's tokens: asked for and hit."""

    tenant: str
    requests: int
    blocks: int
    hit_blocks: int

    @property
    def hit_rate(self) -> float:
        """Return the share of the blocks that were hit."""
        return self.hit_blocks / max(1, self.blocks)


class ReplayResult(NamedTuple):
    """A replay: leading held blocks of the requests, counted before each request is stored.

    `saved_s_share` is the share of the time of all prefills that the hits save, attention included; None for the bound,
    which is one of hits.
    """

    policy: str
    capacity_blocks: int
    blocks: int
    hit_blocks: int
    saved_s_share: float | None
    tenants: tuple[TenantResult, ...]

    @property
    def hit_rate(self) -> float:
        """Return the share of the blocks of all requests that were hit."""
        return self.hit_blocks / max(1, self.blocks)


class Comparison(NamedTuple):
    """One policy at one capacity, between LRU and the bound; `gap_closed` is None where these two hit the same."""

    result: ReplayResult
    capacity_share: float
    lru_hit_rate: float
    belady_hit_rate: float

    @property
    def gap_closed(self) -> float | None:
        """Return (policy - lru) / (belady - lru) of the hit rates."""
        gap = self.belady_hit_rate - self.lru_hit_rate
        return (self.result.hit_rate - self.lru_hit_rate) / gap if gap > 0 else None


class PolicyStanding(msgspec.Struct, frozen=True):
    """One policy at one capacity of one trace, beside the best of the fixed ones: `regret` is what that hits more.

    `lru_room`: how many times as many blocks LRU needs for as many hits; None if it was not looked for, or has none.
    """

    trace: str
    capacity_share: float
    capacity_blocks: int
    hit_rates: dict[str, float]
    best: str
    regret: float
    gap_closed: float | None
    lru_room: float | None


def capacity_blocks(trace: Trace, share: float) -> int:
    """Return a share of the trace's unique blocks in blocks, at least one. ValueError unless 0 < share <= 1."""
    if not 0 < share <= 1:
        raise ValueError(f"a capacity is a share of the unique blocks, more than 0 and at most 1, got {share}")
    return max(1, int(share * trace.unique_blocks))


def prefill_cost(blocks: float, block_tokens: int) -> float:
    """Return the cost of prefilling a prompt's first blocks, a block without attention 1.

    A token's attention costs as much as its matrices once TOKENS_OF_EQUAL_COST come before it.
    """
    return blocks * (1 + blocks * block_tokens / (2 * TOKENS_OF_EQUAL_COST))


def replay(
    trace: Trace, policy: str, blocks_max: int, weighs_cost: bool = False, hints: str | None = None
) -> ReplayResult:
    """Match and insert every request in order; `weighs_cost` tells the policy what blocks cost to prefill.

    hints: the kind of advice that comes with the requests, for policies that take any. ValueError for an unknown
    policy or kind.
    """
    clock = ManualClock(trace.requests[0].at_s if trace.requests else 0.0)
    ranks = (LEARNED.get(policy) or policy_named(policy))(blocks_max)
    index = RadixIndex(clock, lambda _: ranks, blocks_max)
    said = said_of(trace, hints) if hints else []
    namespaces = {request.tenant: tenant_namespace(request.tenant) for request in trace.requests}
    requests: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    saved = total = 0.0
    for number, (at_s, tenant, keys, _) in enumerate(trace.requests):
        clock.advance(at_s - clock.monotonic_s())
        if said and isinstance(ranks, AdvisedPolicy):
            ranks.hear(said[number].mark)
        requests[tenant] += 1
        blocks[tenant] += len(keys)
        hit, length = len(index.match(keys).blocks), len(keys)
        hits[tenant] += hit
        saved += prefill_cost(hit, trace.block_tokens)
        total += prefill_cost(length, trace.block_tokens)
        cost = 1 + (hit + length) * trace.block_tokens / (2 * TOKENS_OF_EQUAL_COST) if weighs_cost else None
        index.insert(namespaces[tenant], keys, cost=cost)
        if said and (left := said[number].left) is not None and isinstance(ranks, AdvisedPolicy):
            ranks.hear(LEFT_MARK)
            index.advise(left)
    index.check()
    tenants = tuple(TenantResult(name, requests[name], blocks[name], hits[name]) for name in sorted(requests))
    return ReplayResult(policy, blocks_max, blocks.total(), hits.total(), saved / max(total, 1.0), tenants)


def compare(
    trace: Trace,
    policies: Sequence[str],
    shares: Sequence[float],
    weighs_cost: bool = False,
    hints: str | None = None,
) -> list[Comparison]:
    """Replay every policy at every capacity, against LRU and Belady's bound of hits."""
    comparisons = []
    for share in shares:
        blocks_max = capacity_blocks(trace, share)
        lru = replay(trace, "lru", blocks_max)
        best = belady_hits(trace, blocks_max)
        bound = ReplayResult(BELADY, blocks_max, lru.blocks, best, None, ())
        for policy in (*policies, BELADY):
            known = {BELADY: bound, "lru": lru}.get(policy)
            result = known or replay(trace, policy, blocks_max, weighs_cost, hints)
            comparisons.append(Comparison(result, share, lru.hit_rate, bound.hit_rate))
    return comparisons


def standing(
    trace: Trace, policy: str, fixed: Sequence[str], share: float, with_room: bool = False, hints: str | None = None
) -> PolicyStanding:
    """Replay a policy and those that it is to be as good as; `lru` is to be one of them."""
    rows = {row.result.policy: row for row in compare(trace, [*fixed, policy], [share], hints=hints)}
    hit_rates = {name: row.result.hit_rate for name, row in rows.items()}
    best = max(fixed, key=lambda name: hit_rates[name])
    blocks_max = capacity_blocks(trace, share)
    room = lru_room(trace, rows[policy].result.hit_blocks, blocks_max) if with_room else None
    regret = hit_rates[best] - hit_rates[policy]
    return PolicyStanding(trace.name, share, blocks_max, hit_rates, best, regret, rows[policy].gap_closed, room)


def lru_room(trace: Trace, hit_blocks: int, blocks_max: int) -> float | None:
    """Return how many times as many blocks as `blocks_max` LRU needs for so many hits, to one part in 50."""
    low, high = 0.0, trace.unique_blocks / blocks_max
    if replay(trace, "lru", trace.unique_blocks).hit_blocks < hit_blocks:
        return None
    while high - low > 0.02 * high:
        middle = (low + high) / 2 if low else high / 2
        is_enough = replay(trace, "lru", max(1, int(middle * blocks_max))).hit_blocks >= hit_blocks
        low, high = (low, middle) if is_enough else (middle, high)
    return high
