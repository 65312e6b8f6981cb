"""Tiers: where bytes live. They know object ids and bytes, not codecs. Houses are imported when a URL names them."""

from kvtide.evict import Ranking, ScoreRanking
from kvtide.tier.background import LastingFault, Repeater
from kvtide.tier.base import ObjectInfo, Tier, TierStats
from kvtide.tier.breaker import Breaker
from kvtide.tier.deadline import until
from kvtide.tier.files import FileInfo, Files
from kvtide.tier.record import PAGE_BYTES
from kvtide.tier.source import Source, Take, TierSource, read_heads
from kvtide.tier.url import disk_path, open_tier, stack_of, tiers_of
from kvtide.tier.wrap import WrappedTier

__all__ = [
    "PAGE_BYTES",
    "Breaker",
    "FileInfo",
    "Files",
    "LastingFault",
    "ObjectInfo",
    "Ranking",
    "Repeater",
    "ScoreRanking",
    "Source",
    "Take",
    "Tier",
    "TierSource",
    "TierStats",
    "WrappedTier",
    "disk_path",
    "open_tier",
    "read_heads",
    "stack_of",
    "tiers_of",
    "until",
]
