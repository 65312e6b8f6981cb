"""The cache that engines use: match, load, store."""

from kvtide.store.cache import BlockSink, BlockSource, Cache, LoadReport, MissReason, PendingBlock, cache_for
from kvtide.store.loading import QUALITY_SLACK, Guarded

__all__ = [
    "QUALITY_SLACK",
    "BlockSink",
    "BlockSource",
    "Cache",
    "Guarded",
    "LoadReport",
    "MissReason",
    "PendingBlock",
    "cache_for",
]
