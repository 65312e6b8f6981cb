"""Ways to load a matched run: whole blocks, layer by layer, streamed beside an engine that computes, or sparse."""

from kvtide.store.load.backfill import Backfill
from kvtide.store.load.context import ContextLoader, ContextReport
from kvtide.store.load.job import LoadRequest
from kvtide.store.load.sparse import ChunkBits, SparseLoad
from kvtide.store.load.whole import (
    QUALITY_SLACK,
    BlockSink,
    Guarded,
    LayerSink,
    Loader,
    LoadReport,
    MissReason,
    SectionSink,
    Sinks,
)

__all__ = [
    "QUALITY_SLACK",
    "Backfill",
    "BlockSink",
    "ChunkBits",
    "ContextLoader",
    "ContextReport",
    "Guarded",
    "LayerSink",
    "LoadReport",
    "LoadRequest",
    "Loader",
    "MissReason",
    "SectionSink",
    "Sinks",
    "SparseLoad",
]
