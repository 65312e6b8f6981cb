"""The cache that engines use: match, load, store."""

from kvtide.store.cache import Cache, cache_for
from kvtide.store.load import BlockSource
from kvtide.store.notes import NOTES
from kvtide.store.storing import Move, Moves, PendingBlock

__all__ = [
    "NOTES",
    "BlockSource",
    "Cache",
    "Move",
    "Moves",
    "PendingBlock",
    "cache_for",
]
