"""Replays a trace through the real index and a real policy, on a clock that only the trace moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex, Rules, policy_named
from kvtide.sim.belady import belady_hits
from kvtide.sim.workload import Trace, tenant_namespace

__all__ = ["BELADY", "Comparison", "ReplayResult", "TenantResult", "capacity_blocks", "compare", "replay"]

BELADY = "belady"
_NO_RULES = Rules()


class TenantResult(NamedTuple):
    """What one tenant's requests asked for and hit."""

    tenant: str
    requests: int
    blocks: int
    hit_blocks: int

    @property
    def hit_rate(self) -> float:
        """Return the share of the blocks that were hit."""
        return self.hit_blocks / max(1, self.blocks)


class ReplayResult(NamedTuple):
    """A replay: leading held blocks of the requests, counted before each request is stored."""

    policy: str
    capacity_blocks: int
    blocks: int
    hit_blocks: int
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


def capacity_blocks(trace: Trace, share: float) -> int:
    """Return a share of the trace's unique blocks in blocks, at least one. ValueError unless 0 < share <= 1."""
    if not 0 < share <= 1:
        raise ValueError(f"a capacity is a share of the unique blocks, more than 0 and at most 1, got {share}")
    return max(1, int(share * trace.unique_blocks))


def replay(trace: Trace, policy: str, blocks_max: int, rules: Rules = _NO_RULES) -> ReplayResult:
    """Match and insert every request in order. ValueError for an unknown policy."""
    clock = ManualClock(trace.requests[0].at_s if trace.requests else 0.0)
    index = RadixIndex(clock, policy_named(policy), blocks_max, rules)
    namespaces = {request.tenant: tenant_namespace(request.tenant) for request in trace.requests}
    requests: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for at_s, tenant, keys in trace.requests:
        clock.advance(at_s - clock.monotonic_s())
        requests[tenant] += 1
        blocks[tenant] += len(keys)
        hits[tenant] += len(index.match(keys).blocks)
        index.insert(namespaces[tenant], keys)
    index.check()
    tenants = tuple(TenantResult(name, requests[name], blocks[name], hits[name]) for name in sorted(requests))
    return ReplayResult(policy, blocks_max, blocks.total(), hits.total(), tenants)


def compare(
    trace: Trace, policies: Sequence[str], shares: Sequence[float], note: Callable[[Comparison], None] | None = None
) -> list[Comparison]:
    """Replay every policy at every capacity, against LRU and Belady's bound. `note` hears of each as it is done."""
    comparisons = []
    for share in shares:
        blocks_max = capacity_blocks(trace, share)
        lru = replay(trace, "lru", blocks_max)
        best = belady_hits(trace, blocks_max)
        bound = ReplayResult(BELADY, blocks_max, lru.blocks, best, ())
        for policy in (*policies, BELADY):
            result = bound if policy == BELADY else lru if policy == "lru" else replay(trace, policy, blocks_max)
            comparison = Comparison(result, share, lru.hit_rate, bound.hit_rate)
            comparisons.append(comparison)
            if note is not None:
                note(comparison)
    return comparisons
