"""Eviction orders of everything that holds bytes: by policies over prefixes or by rankings of single objects."""

from __future__ import annotations

from kvtide.clock import Clock
from kvtide.evict.hint import Advice, Hint
from kvtide.evict.ranking import EvictionOrder, RankedOrder, Ranking, RecencyRanking, Recent, ScoreRanking, States

__all__ = [
    "Advice",
    "EvictionOrder",
    "Hint",
    "RankedOrder",
    "Ranking",
    "RecencyRanking",
    "Recent",
    "ScoreRanking",
    "States",
    "order_named",
]

# The order of memory whose URL names none.
_DEFAULT = "mix"


def order_named(name: str | None, clock: Clock, bytes_max: int) -> EvictionOrder:
    """Make an order by its name: `lru`, `s3fifo`, `mix`, also for None, or `pool`. ValueError for an unknown one."""
    from kvtide.evict.policies import PolicyOrder, PoolOrder, policy_named

    return PoolOrder(clock) if name == "pool" else PolicyOrder(policy_named(name or _DEFAULT), clock, bytes_max)
