"""The cache that engines use: match, load, store."""

from kvtide.store.cache import Cache, cache_for
from kvtide.store.judging import CODEC_ID as JUDGE_CODEC
from kvtide.store.storing import BlockSource, PendingBlock

__all__ = ["JUDGE_CODEC", "BlockSource", "Cache", "PendingBlock", "cache_for"]
