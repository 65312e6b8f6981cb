"""Faults of the tiers of a stack: what one of them can't do is a miss, counted, and logged once for each verb.

Tiers are told apart as objects: two of one class have counts and labels of their own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Tier

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# What a tier says itself, and what it meets where memory or descriptors are short.
TIER_FAULTS = (TierUnavailable, OSError, MemoryError)


def labels_of(tiers: Sequence[Tier]) -> list[str]:
    """Return a name for each tier that no other has: `memory`, `http-1`, `http-2` for one of memory and two servers."""
    names = [tier.name for tier in tiers]
    return [
        f"{name}-{names[: position + 1].count(name)}" if names.count(name) > 1 else name
        for position, name in enumerate(names)
    ]


class TierFaults:
    """Counts by tier. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._lock = threading.Lock()
        self._labels = dict(zip(map(id, tiers), labels_of(tiers), strict=True))
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def label(self, tier: Tier) -> str:
        """Return the name that tells a tier from the others."""
        return self._labels[id(tier)]

    def count(self, tier: Tier) -> int:
        """Return how many faults a tier had."""
        return self._counts[self.label(tier)]

    def ask(self, tier: Tier, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run an action of a tier; `fallback` if it is unavailable."""
        try:
            return action()
        except TIER_FAULTS as error:
            self.note(tier, verb, error)
            return fallback

    def note(self, tier: Tier, verb: str, error: Exception) -> None:
        """Count a fault."""
        kind = (self.label(tier), "full" if isinstance(error, TierFull) else verb)
        with self._lock:
            self._counts[kind[0]] += 1
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            _log.warning("%s tier: %s; served as misses, further faults of this kind are only counted", kind[0], error)
