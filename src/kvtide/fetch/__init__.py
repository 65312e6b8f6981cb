"""Runs streaming plans for real: ranges of objects from sources, computing beside loading, resumed where it was cut."""

from kvtide.fetch.context import ContextLoader, ContextReport
from kvtide.fetch.job import Wish
from kvtide.fetch.keep import Keeper
from kvtide.fetch.repack import Repacker, UseStore
from kvtide.fetch.selective import ChunkBits, SelectiveLoad

__all__ = ["ChunkBits", "ContextLoader", "ContextReport", "Keeper", "Repacker", "SelectiveLoad", "UseStore", "Wish"]
