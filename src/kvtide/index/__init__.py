"""The index: which blocks are known and which are in use. It knows keys, never bytes."""

from kvtide.index.radix import ListedBlock, RadixIndex, RestoreReport
from kvtide.index.tree import TIERS_MAX, EvictionPolicy, HeapPolicy, LruPolicy, Run, Use

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
