"""Ways to load a matched run: whole blocks, or by layer. `streamed` and `sparse` are apart, for who takes them."""

from kvtide.store.load.access import (
    QUALITY_SLACK,
    BlockSource,
    LoadAccess,
    LoadReport,
    LoadWorkers,
    MissReason,
    Strategy,
    level_meta,
)
from kvtide.store.load.whole import Whole

__all__ = [
    "QUALITY_SLACK",
    "BlockSource",
    "LoadAccess",
    "LoadReport",
    "LoadWorkers",
    "MissReason",
    "Strategy",
    "Whole",
    "level_meta",
]
