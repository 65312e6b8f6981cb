"""Runs streaming plans for real: ranges of objects from sources, computing beside loading, resumed where it was cut."""

from kvtide.fetch.job import Job, Piece, Wish, layered_job, level_job
from kvtide.fetch.run import Engine, FetchLimits, FetchReport, LinkState, run
from kvtide.fetch.source import Source, Take, TierSource, read_heads

__all__ = [
    "Engine",
    "FetchLimits",
    "FetchReport",
    "Job",
    "LinkState",
    "Piece",
    "Source",
    "Take",
    "TierSource",
    "Wish",
    "layered_job",
    "level_job",
    "read_heads",
    "run",
]
