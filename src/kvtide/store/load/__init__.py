"""Ways to load a matched run: whole blocks, layer by layer, streamed beside an engine that computes, or sparse."""

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
from kvtide.store.load.job import LoadRequest
from kvtide.store.load.run import FetchLimits
from kvtide.store.load.sparse import ChunkBits, Sparse, SparseLoad
from kvtide.store.load.streamed import Streamed, StreamReport
from kvtide.store.load.whole import LayerSink, SectionSink, Whole

__all__ = [
    "QUALITY_SLACK",
    "Backfill",
    "BlockSink",
    "ChunkBits",
    "FetchLimits",
    "Guarded",
    "LayerSink",
    "LoadAccess",
    "LoadReport",
    "LoadRequest",
    "LoadWorkers",
    "MissReason",
    "SectionSink",
    "Sparse",
    "SparseLoad",
    "Strategy",
    "StreamReport",
    "Streamed",
    "Whole",
    "level_meta",
]
