"""Policies that rank by one number: uses, uses times importance, uses times cost with ageing."""

from __future__ import annotations

from kvtide.index import HeapPolicy, Run

# Uses count in whole steps, recency below them: more requests than this would round off.
_USES_PER_STEP = float(1 << 40)


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
