"""Runs streaming plans for real: ranges of objects from sources, computing beside loading, resumed where it was cut."""

from kvtide.fetch.bring import Bringing, Brought, LoadedBlock
from kvtide.fetch.context import ContextLoader, ContextReport, LoaderStats
from kvtide.fetch.job import Job, Piece, Wish, layered_job, level_job
from kvtide.fetch.keep import Keeper, KeepLimits, KeepStats, Left
from kvtide.fetch.run import Engine, FetchLimits, FetchReport, LinkState, Run
from kvtide.tier.source import Source, Take, TierSource, read_heads

__all__ = [
    "Bringing",
    "Brought",
    "ContextLoader",
    "ContextReport",
    "Engine",
    "FetchLimits",
    "FetchReport",
    "Job",
    "KeepLimits",
    "KeepStats",
    "Keeper",
    "Left",
    "LinkState",
    "LoadedBlock",
    "LoaderStats",
    "Piece",
    "Run",
    "Source",
    "Take",
    "TierSource",
    "Wish",
    "layered_job",
    "level_job",
    "read_heads",
]
