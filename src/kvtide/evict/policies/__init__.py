"""Eviction policies: one interface, a module each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtide.evict.policies.mix import FULL_BLOCKS_MAX, MixPolicy, SampledMixPolicy
from kvtide.evict.policies.order import PolicyOf, PolicyOrder
from kvtide.evict.policies.pool import PoolOrder
from kvtide.evict.policies.published import ArcPolicy, FadingPolicy, S3FifoPolicy
from kvtide.evict.policies.reuse import ReusePolicy
from kvtide.index import EvictionPolicy, LruPolicy

__all__ = ["CHOSEN", "INGREDIENTS", "PolicyOf", "PolicyOrder", "PoolOrder", "policy_named"]

# What `mix` is made of. It begins with `reuse`, and makes its own.
_LRU: Mapping[str, PolicyOf] = {"lru": lambda blocks_max: LruPolicy()}
_MIXED = {**_LRU, "s3fifo": S3FifoPolicy, "arc": ArcPolicy, "fading": FadingPolicy}
INGREDIENTS: Mapping[str, PolicyOf] = MappingProxyType({**_MIXED, "reuse": ReusePolicy})


def _mix(blocks_max: int) -> EvictionPolicy:
    return (MixPolicy if blocks_max <= FULL_BLOCKS_MAX else SampledMixPolicy)(_MIXED, blocks_max)


# What users choose from, beside `pool`.
CHOSEN: Mapping[str, PolicyOf] = MappingProxyType({**_LRU, "s3fifo": S3FifoPolicy, "mix": _mix})


def policy_named(name: str) -> PolicyOf:
    """Return the maker of a policy. ValueError for an unknown name; the message lists the known ones."""
    try:
        return CHOSEN[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}, expected one of {', '.join(CHOSEN)}, pool") from None
