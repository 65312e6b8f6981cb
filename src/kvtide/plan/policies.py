"""Streaming policies by the names that users give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvtide.plan.base import StreamPolicy
from kvtide.plan.layered import AnchorFirst, DeltasFirstWhenSlow, ImportanceFirst, Layered, TwoEnded
from kvtide.plan.levels import CachegenRule, FixedLevel

POLICIES: Mapping[str, Callable[[], StreamPolicy]] = MappingProxyType(
    {
        "two-ended": TwoEnded,
        "layered": Layered,
        "importance-first": ImportanceFirst,
        "cachegen": CachegenRule,
        "anchor-first": AnchorFirst,
        "deltas-first-when-slow": DeltasFirstWhenSlow,
    }
)


def is_by_level(policy: StreamPolicy) -> bool:
    """Tell whether a policy picks levels, and not refinements."""
    return isinstance(policy, CachegenRule | FixedLevel)


def policy_named(name: str | None) -> StreamPolicy:
    """Return a policy; None is `two-ended`. ValueError for an unknown name; the message lists the known ones."""
    try:
        return POLICIES[name or "two-ended"]()
    except KeyError:
        raise ValueError(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}") from None
