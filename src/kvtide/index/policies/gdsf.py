"""Greedy dual, size and frequency: uses times what a block costs to recompute, plus the worth of the latest victim.

All blocks have one size; cost grows with the position: attention over what comes before is part of the price.
"""

from __future__ import annotations

from kvtide.index.policies.base import HeapPolicy
from kvtide.index.run import Run


class GdsfPolicy(HeapPolicy):
    """Ages by inflation: candidates start at the priority of the latest victim."""

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
