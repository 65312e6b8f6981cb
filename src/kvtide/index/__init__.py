"""The index: which blocks are known and which are in use. It knows keys and sizes, never bytes."""

from kvtide.index.policy import USUAL_SIZE, EvictionPolicy, HeapPolicy, LruPolicy, Run, Use
from kvtide.index.radix import TIERS_MAX, RadixIndex

__all__ = ["TIERS_MAX", "USUAL_SIZE", "EvictionPolicy", "HeapPolicy", "LruPolicy", "RadixIndex", "Run", "Use"]
