"""The cache that engines use: match, load, store."""

from kvtide.store.cache import Cache, cache_for
from kvtide.store.loading import QUALITY_SLACK, BlockSink, Guarded, LoadReport, MissReason
from kvtide.store.storing import BlockSource, PendingBlock

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
