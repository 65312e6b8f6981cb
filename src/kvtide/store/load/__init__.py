"""Ways to load a matched run: whole blocks, or by layer. `streamed` and `sparse` are apart, for who takes them."""

from kvtide.store.load.access import (
    QUALITY_SLACK,
    BlockSink,
    Guarded,
    LoadAccess,
    LoadReport,
    LoadWorkers,
    MissReason,
    Strategy,
    level_meta,
)
from kvtide.store.load.backfill import Backfill
from kvtide.store.load.whole import LayerSink, SectionSink, Whole

__all__ = [
    "QUALITY_SLACK",
    "Backfill",
    "BlockSink",
    "Guarded",
    "LayerSink",
    "LoadAccess",
    "LoadReport",
    "LoadWorkers",
    "MissReason",
    "SectionSink",
    "Strategy",
    "Whole",
    "level_meta",
]
