"""The cache that engines use: match, load, store."""

from kvtide.store.cache import LOOK_UP_S_MAX, Cache, cache_for
from kvtide.store.load import BlockSource
from kvtide.store.notes import NOTES
from kvtide.store.storing import PendingBlock

__all__ = ["LOOK_UP_S_MAX", "NOTES", "BlockSource", "Cache", "PendingBlock", "cache_for"]
