"""Tiers: where bytes live. They know object ids and bytes, not codecs."""

from kvtide.tier.base import ObjectInfo, Tier, TierStats
from kvtide.tier.disk import DiskTier
from kvtide.tier.memory import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier, stack_of

__all__ = ["DiskTier", "MemoryTier", "ObjectInfo", "Tier", "TierStack", "TierStats", "open_tier", "stack_of"]
