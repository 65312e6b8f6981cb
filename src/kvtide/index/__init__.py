"""The index: which blocks are known and which are in use. It knows keys, never bytes."""

from kvtide.index.base import Index, IndexStats, ListedBlock, Match, RestoreReport
from kvtide.index.ledger import Rules
from kvtide.index.policy import EvictionPolicy, HeapPolicy, LruPolicy, Use
from kvtide.index.radix import RadixIndex
from kvtide.index.run import Run
from kvtide.index.tree import TIERS_MAX

__all__ = [
    "TIERS_MAX",
    "EvictionPolicy",
    "HeapPolicy",
    "Index",
    "IndexStats",
    "ListedBlock",
    "LruPolicy",
    "Match",
    "RadixIndex",
    "RestoreReport",
    "Rules",
    "Run",
    "Use",
]
