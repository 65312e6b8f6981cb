"""Tiers: where bytes live. They know object ids and bytes, not codecs. Houses are imported when a URL names them."""

from kvtide.tier.background import LastingFault, Repeater, started
from kvtide.tier.base import ObjectInfo, Tier
from kvtide.tier.url import disk_path, open_tier, shown_url, stack_of, tiers_of

__all__ = [
    "LastingFault",
    "ObjectInfo",
    "Repeater",
    "Tier",
    "disk_path",
    "open_tier",
    "shown_url",
    "stack_of",
    "started",
    "tiers_of",
]
