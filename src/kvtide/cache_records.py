"""What a cache is given and what it says: values, and the functions that blocks pass through."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvtide.block import BlockBits, BlockMeta
from kvtide.tier import TierStats

__all__ = ["BlockSink", "BlockSource", "CacheStats", "LoadReport", "MissReason", "PendingBlock"]

# Called with the block's position in the load and its bits, which are valid during the call only. May be called from
# several threads at once, for different blocks, in any order.
BlockSink = Callable[[int, BlockBits], None]
# Returns the block's bits; called later, from the storing thread.
BlockSource = Callable[[], BlockBits]


class MissReason(Enum):
    """Why a block was not loaded."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNKNOWN_CODEC = "unknown codec or profile"
    DEADLINE = "deadline"
    FAULT = "fault"


class LoadReport(NamedTuple):
    """The leading blocks that a load delivered, and why it ended there (None: all came)."""

    blocks: int
    stored_bytes: int
    reason: MissReason | None


class PendingBlock(NamedTuple):
    """A block to be stored in the background; `cost` as for `Index.insert`."""

    meta: BlockMeta
    source: BlockSource
    cost: float | None = None


class CacheStats(NamedTuple):
    """Counters since the cache was opened; decisions as `decisions_text` writes them.

    Damaged blocks were loaded from the sections of theirs that were good.
    """

    blocks_loaded: int
    blocks_damaged: int
    blocks_stored: int
    blocks_dropped: int
    blocks_unencodable: int
    raw_bytes_stored: int
    bytes_stored: int
    misses: dict[str, int]
    decisions: str
    tiers: list[TierStats]
