"""The cache that engines use: match, load, store."""

from kvtide.store.cache import Cache, cache_for
from kvtide.store.repack import Repacker, UseStore
from kvtide.store.storing import BlockSource, PendingBlock

__all__ = ["BlockSource", "Cache", "PendingBlock", "Repacker", "UseStore", "cache_for"]
