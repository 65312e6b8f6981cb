"""Eviction policies: one interface, a module each. `testing.policy_suite` checks what all of them promise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtide.evict.policies.mix import FULL_BLOCKS_MAX, MixPolicy, SampledMixPolicy
from kvtide.evict.policies.order import PolicyOf, PolicyOrder
from kvtide.evict.policies.pool import PoolOrder
from kvtide.evict.policies.published import (
    ArcPolicy,
    FadingPolicy,
    GdsfPolicy,
    LfuPolicy,
    S3FifoPolicy,
    ScorePolicy,
    SievePolicy,
    SlruPolicy,
)
from kvtide.evict.policies.reuse import ReusePolicy
from kvtide.index import LruPolicy

__all__ = ["PolicyOf", "PolicyOrder", "PoolOrder", "policy_named"]

# What `mix` chooses from, beside `reuse`.
MIXED = ("lru", "s3fifo", "arc", "fading")

POLICIES: Mapping[str, PolicyOf] = MappingProxyType(
    {
        "lru": lambda blocks_max: LruPolicy(),
        "lfu": lambda blocks_max: LfuPolicy(),
        "slru": SlruPolicy,
        "arc": ArcPolicy,
        "s3fifo": S3FifoPolicy,
        "sieve": lambda blocks_max: SievePolicy(),
        "gdsf": lambda blocks_max: GdsfPolicy(),
        "fading": FadingPolicy,
        "score": lambda blocks_max: ScorePolicy(),
        "reuse": ReusePolicy,
        "mix": lambda blocks_max: (MixPolicy if blocks_max <= FULL_BLOCKS_MAX else SampledMixPolicy)(
            {name: POLICIES[name] for name in MIXED}, blocks_max
        ),
    }
)


def policy_named(name: str) -> PolicyOf:
    """Return the maker of a policy. ValueError for an unknown name; the message lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}") from None
