"""What leaves first, of whatever holds bytes: orders by policies over prefixes or by rankings of single objects."""

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
