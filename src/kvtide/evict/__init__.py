"""Eviction orders of everything that holds bytes: by policies over prefixes or by rankings of single objects."""

from kvtide.evict.ranking import (
    DEFAULT_POLICY,
    EvictionOrder,
    RankedOrder,
    Ranking,
    RecencyRanking,
    ScoreRanking,
    order_named,
)

__all__ = [
    "DEFAULT_POLICY",
    "EvictionOrder",
    "RankedOrder",
    "Ranking",
    "RecencyRanking",
    "ScoreRanking",
    "order_named",
]
