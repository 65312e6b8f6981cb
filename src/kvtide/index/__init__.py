"""The index: which blocks are known and which are in use. It knows keys and sizes, never bytes."""

from kvtide.index.radix import RadixIndex, RestoreReport
from kvtide.index.rebuild import ListedBlock
from kvtide.index.tree import TIERS_MAX, USUAL_SIZE, EvictionPolicy, HeapPolicy, LruPolicy, Run, Use

__all__ = [
    "TIERS_MAX",
    "USUAL_SIZE",
    "EvictionPolicy",
    "HeapPolicy",
    "ListedBlock",
    "LruPolicy",
    "RadixIndex",
    "RestoreReport",
    "Run",
    "Use",
]
