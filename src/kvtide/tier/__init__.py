"""Tiers: where bytes live. They know object ids and bytes, not codecs."""

from kvtide.tier.base import ObjectInfo, SelectiveTier, Tier, TierStats
from kvtide.tier.disk.tier import DiskTier
from kvtide.tier.ram.device import DeviceMemory, DeviceRoom, DeviceTier, Piece
from kvtide.tier.ram.memory import MemoryTier
from kvtide.tier.ranking import FrequencyRanking, Importance, Ranking, RecencyRanking, ScoreRanking
from kvtide.tier.stack.tier import TierStack
from kvtide.tier.url import disk_path, open_tier, stack_of, tiers_of
from kvtide.tier.wrap import Counting, Faulty, Slow, WrappedTier

__all__ = [
    "Counting",
    "DeviceMemory",
    "DeviceRoom",
    "DeviceTier",
    "DiskTier",
    "Faulty",
    "FrequencyRanking",
    "Importance",
    "MemoryTier",
    "ObjectInfo",
    "Piece",
    "Ranking",
    "RecencyRanking",
    "ScoreRanking",
    "SelectiveTier",
    "Slow",
    "Tier",
    "TierStack",
    "TierStats",
    "WrappedTier",
    "disk_path",
    "open_tier",
    "stack_of",
    "tiers_of",
]
