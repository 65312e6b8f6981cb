"""The index: which blocks are known and which are in use. It knows keys, never bytes."""

from kvtide.index.base import Index, IndexStats, Match, Record, RestoreReport
from kvtide.index.ledger import Rules
from kvtide.index.policy import HeapPolicy, LruPolicy, Policy, Use
from kvtide.index.radix import RadixIndex
from kvtide.index.run import Run
from kvtide.index.tree import TIERS_MAX

__all__ = [
    "TIERS_MAX",
    "HeapPolicy",
    "Index",
    "IndexStats",
    "LruPolicy",
    "Match",
    "Policy",
    "RadixIndex",
    "Record",
    "RestoreReport",
    "Rules",
    "Run",
    "Use",
]
