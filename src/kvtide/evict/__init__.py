"""Eviction orders of everything that holds bytes: by policies over prefixes or by rankings of single objects."""

from kvtide.evict.hint import Advice, AdvisedPolicy, Hint, Sessions
from kvtide.evict.ranking import (
    DEFAULT_POLICY,
    EvictionOrder,
    RankedOrder,
    Ranking,
    RecencyRanking,
    ScoreRanking,
    States,
    order_named,
)

__all__ = [
    "DEFAULT_POLICY",
    "Advice",
    "AdvisedPolicy",
    "EvictionOrder",
    "Hint",
    "RankedOrder",
    "Ranking",
    "RecencyRanking",
    "ScoreRanking",
    "Sessions",
    "States",
    "order_named",
]
