"""Importance times frequency (IMPRESS): what has few important tokens or few uses goes first."""

from __future__ import annotations

from kvtide.index.policies.base import HeapPolicy
from kvtide.index.run import Run


class ScorePolicy(HeapPolicy):
    """Ranks by uses times the mean number of important tokens of the run's blocks (`value` of the insertion)."""

    def priority(self, run: Run) -> float:
        """Return the score."""
        return run.uses * run.value
