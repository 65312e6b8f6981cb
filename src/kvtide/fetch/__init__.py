"""Runs streaming plans for real: ranges of objects from sources, computing beside loading, resumed where it was cut."""

from kvtide.fetch.context import ContextLoader, ContextReport
from kvtide.fetch.job import LoadRequest
from kvtide.fetch.keep import Backfill
from kvtide.fetch.repack import Repacker, UseStore
from kvtide.fetch.selective import ChunkBits, SparseLoad

__all__ = [
    "Backfill",
    "ChunkBits",
    "ContextLoader",
    "ContextReport",
    "LoadRequest",
    "Repacker",
    "SparseLoad",
    "UseStore",
]
