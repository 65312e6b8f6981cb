"""Eviction policies by name: those that users choose, what `mix` is made of, and others that they are compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvtide.evict.policies import CHOSEN, INGREDIENTS, PolicyOf
from kvtide.index import HeapPolicy, Run, Use

# Uses count in whole steps, recency below them: more requests than this would round off.
_USES_PER_STEP = float(1 << 40)
_PROTECTED_SHARE = 0.8
# Any protected run ranks above any that is not: uses are fewer than this.
_PROTECTED = float(1 << 52)


class SlruPolicy(HeapPolicy):
    """Segmented LRU: runs used twice are protected, up to four fifths of the blocks; the others go first.

    Scans pass through the unprotected part and leave the protected one alone.
    """

    def __init__(self, blocks_max: int) -> None:
        super().__init__()
        self._protected: OrderedDict[Run, None] = OrderedDict()
        self._protected_blocks = 0
        self.plan(blocks_max)

    def plan(self, blocks_max: int) -> None:
        self._protected_max = int(_PROTECTED_SHARE * blocks_max)

    def priority(self, run: Run) -> float:
        """Return the latest use, raised for a protected run."""
        return run.last_use + (_PROTECTED if run in self._protected else 0.0)

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Protect the runs that are used again, deepest first so that deeper ones lose it first."""
        for run in reversed(path):
            if run.uses > 1 and run.held:
                if run not in self._protected:
                    self._protected_blocks += run.held
                self._protected[run] = None
                self._protected.move_to_end(run)
        while self._protected_blocks > self._protected_max:
            run, _ = self._protected.popitem(last=False)
            self._protected_blocks -= run.held
            if run.is_candidate:
                self.leave(run)
                self.enter(run)

    def resize(self, run: Run, delta: int) -> None:
        if run in self._protected:
            self._protected_blocks += delta
            if not run.held:
                del self._protected[run]

    def split(self, upper: Run, lower: Run) -> None:
        """Protect the upper part as the lower one is."""
        if lower in self._protected:
            if upper.held:
                self._protected[upper] = None
            if not lower.held:
                del self._protected[lower]


class LfuPolicy(HeapPolicy):
    """Ranks by the number of uses while known; what was evicted starts over."""

    def priority(self, run: Run) -> float:
        """Return the number of uses, and the latest one as a fraction."""
        return run.uses + run.last_use / _USES_PER_STEP


POLICIES: Mapping[str, PolicyOf] = MappingProxyType(
    {
        **INGREDIENTS,
        **CHOSEN,
        "lfu": lambda blocks_max: LfuPolicy(),
        "slru": SlruPolicy,
    }
)


def policy_named(name: str) -> PolicyOf:
    """Return the maker of a policy. ValueError for an unknown name; the message lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}") from None
