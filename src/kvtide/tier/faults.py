"""Faults of the tiers of a stack: what one of them can't do is a miss, counted, and logged once for each verb."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Tier

__all__ = ["TierFaults"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class TierFaults:
    """Counts by tier. Thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)
        self._logged: set[tuple[str, str]] = set()

    def count(self, name: str) -> int:
        """Return how many faults a tier had."""
        return self._counts[name]

    def ask(self, tier: Tier, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run an action of a tier; `fallback` if it is unavailable."""
        try:
            return action()
        except TierUnavailable as error:
            self.note(tier, verb, error)
            return fallback

    def note(self, tier: Tier, verb: str, error: TierUnavailable) -> None:
        """Count a fault."""
        kind = (tier.name, "full" if isinstance(error, TierFull) else verb)
        with self._lock:
            self._counts[tier.name] += 1
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            _log.warning("%s tier: %s; served as misses, further faults of this kind are only counted", kind[0], error)
