"""Faults become misses here, and only here: counted, and logged once for each kind and place."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TypeVar

from kvtide.errors import TierFull, TierUnavailable

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# What a tier says itself, and what it meets where memory or descriptors are short.
TIER_FAULTS = (TierUnavailable, OSError, MemoryError)


class Counts:
    """Sums by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Hashable] = Counter()

    def add(self, name: Hashable, count: int = 1) -> int:
        """Add to a sum and return it."""
        with self._lock:
            self._counts[name] += count
            return self._counts[name]

    def all(self) -> Counter[Hashable]:
        """Return all sums."""
        with self._lock:
            return self._counts.copy()


class FaultGuard:
    """Runs actions. A fault of these kinds becomes a fallback. Safe to use from several threads.

    The cache has one for everything that an engine calls; a stack of tiers has one for what tiers say.
    """

    def __init__(self, kinds: tuple[type[Exception], ...] = (Exception,)) -> None:
        self.counts = Counts()
        self._kinds = kinds

    def __call__(self, verb: str, action: Callable[[], _Result], fallback: _Result, place: str = "") -> _Result:
        """Run an action; whatever goes wrong in it becomes `fallback`. place: a tier's name, counted apart."""
        try:
            return action()
        except self._kinds as error:
            self.note(verb, error, place)
            return fallback

    def note(self, verb: str, error: Exception, place: str = "") -> None:
        """Count a fault, and log the first of its kind."""
        self.counts.add(place)
        if self.counts.add((place, "full" if isinstance(error, TierFull) else verb)) == 1:
            where = f" ({place} tier)" if place else ""
            # What no tier is expected to raise comes with its traceback.
            trace = None if isinstance(error, TIER_FAULTS if place else TierUnavailable) else error
            _log.warning("can't %s%s, served as a miss: %s", verb, where, error, exc_info=trace)
