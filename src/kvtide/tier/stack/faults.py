"""Faults of the tiers of a stack: what one of them can't do is a miss, counted, and logged once for each verb.

Tiers are told apart as objects: two of one class have counts and labels of their own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Batched, Tier
from kvtide.types import ObjectId

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# What a tier says itself, and what it meets where memory or descriptors are short.
TIER_FAULTS = (TierUnavailable, OSError, MemoryError)
# A prompt that is new costs one look-up; one that is known costs one for every so many blocks.
LOOK_UPS_MAX = 256


def run_places(
    object_ids: Sequence[ObjectId],
    places: Callable[[ObjectId, int | None], Iterator[int]],
    tiers: Sequence[Tier],
    ask: Callable[[Tier, str, Callable[[], int], int], int],
) -> list[int]:
    """Return the fastest tier of each object of the longest leading run that is in some tier.

    `places` yields the numbers of an object's tiers, the fastest first, of those before a number; `ask` runs an action
    on a tier, or gives its last argument if that fails.
    """
    batched = {number: tier for number, tier in enumerate(tiers) if isinstance(tier, Batched)}
    found: list[int] = []
    while len(found) < len(object_ids):
        number = next(places(object_ids[len(found)], None), None)
        if number is None:
            break
        found.append(number)
        if number in batched:
            following = object_ids[len(found) : len(found) + LOOK_UPS_MAX]
            count = ask(tiers[number], "contains", partial(batched[number].count_leading, following), 0)
            found += [next(places(object_id, number), number) for object_id in following[:count]]
    return found


def contained(object_ids: Sequence[ObjectId], tiers: Sequence[Tier], faults: TierFaults) -> list[bool]:
    """Tell of each object whether one of the tiers has it now; each tier is asked for what none before it has."""
    present = [False] * len(object_ids)
    for tier in tiers:
        numbers = [number for number, is_here in enumerate(present) if not is_here]
        asked = [object_ids[number] for number in numbers]
        if not asked:
            break
        if isinstance(tier, Batched):
            found = faults.ask(tier, "contains", partial(tier.contains_each, asked), [False] * len(asked))
        else:
            found = [faults.ask(tier, "contains", partial(tier.contains, each), False) for each in asked]
        for number, is_here in zip(numbers, found, strict=True):
            present[number] = is_here
    return present


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
