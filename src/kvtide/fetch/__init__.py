"""Runs streaming plans for real: ranges of objects from sources, computing beside loading, resumed where it was cut."""

from kvtide.fetch.bring import Brought, LoadedBlock, bring
from kvtide.fetch.context import ContextLoader, ContextReport, LoaderStats
from kvtide.fetch.job import Job, Piece, Wish, layered_job, level_job
from kvtide.fetch.keep import Keeper, KeepLimits, KeepStats, Left
from kvtide.fetch.run import Engine, FetchLimits, FetchReport, LinkState, run
from kvtide.tier.source import Source, Take, TierSource, read_heads

__all__ = [
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
    "Source",
    "Take",
    "TierSource",
    "Wish",
    "bring",
    "layered_job",
    "level_job",
    "read_heads",
    "run",
]
