"""Policies that rank by one number: uses, uses times importance, uses times cost with ageing, protected last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

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
        self._protected_max = int(_PROTECTED_SHARE * blocks_max)
        self._protected: OrderedDict[Run, None] = OrderedDict()
        self._protected_blocks = 0

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
        """Keep the count of protected blocks."""
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
    """Ranks by the number of uses while known; what was evicted starts anew."""

    def priority(self, run: Run) -> float:
        """Return the number of uses, and the latest one as a fraction."""
        return run.uses + run.last_use / _USES_PER_STEP


class ScorePolicy(HeapPolicy):
    """Importance times frequency (IMPRESS): uses times the mean number of important tokens of the run's blocks."""

    def priority(self, run: Run) -> float:
        """Return the score."""
        return run.uses * run.value


class GdsfPolicy(HeapPolicy):
    """Greedy dual, size and frequency: uses times what a block costs to recompute, plus the worth of the latest victim.

    All blocks have one size; cost grows with the position: attention over what comes before is part of the price.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inflation = 0.0

    def priority(self, run: Run) -> float:
        """Return inflation plus uses times the mean cost of the run's blocks."""
        return self._inflation + run.uses * run.cost

    def victim(self) -> Run | None:
        """Return the candidate of lowest priority, and age the others by it."""
        run = super().victim()
        if run is not None:
            self._inflation = self._heap[0][0]
        return run
