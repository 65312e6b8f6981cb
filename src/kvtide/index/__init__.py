"""The index: which blocks are known and which are in use. It knows keys, never bytes."""

from kvtide.index.base import EvictionPolicy, HeapPolicy, ListedBlock, LruPolicy, RestoreReport, Use
from kvtide.index.radix import RadixIndex
from kvtide.index.tree import TIERS_MAX, Run

__all__ = [
    "TIERS_MAX",
    "EvictionPolicy",
    "HeapPolicy",
    "ListedBlock",
    "LruPolicy",
    "RadixIndex",
    "RestoreReport",
    "Run",
    "Use",
]
