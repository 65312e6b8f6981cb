"""The index: which blocks are known and which are in use. It knows keys, never bytes."""

from kvtide.index.base import Index, IndexStats, Match, Record, RestoreReport
from kvtide.index.ledger import Rules
from kvtide.index.policies import POLICIES, PolicyOf, policy_named
from kvtide.index.pool import FreePool
from kvtide.index.radix import RadixIndex
from kvtide.index.tree import TIERS_MAX

__all__ = [
    "POLICIES",
    "TIERS_MAX",
    "FreePool",
    "Index",
    "IndexStats",
    "Match",
    "PolicyOf",
    "RadixIndex",
    "Record",
    "RestoreReport",
    "Rules",
    "policy_named",
]
