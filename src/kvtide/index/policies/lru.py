"""Least recently used first, deepest first among those of one use: the report's two criteria."""

from __future__ import annotations

from kvtide.index.policies.base import HeapPolicy
from kvtide.index.run import Run


class LruPolicy(HeapPolicy):
    """Ranks by the latest use. Deepest first follows: a run is a candidate only after those below it are gone."""

    def priority(self, run: Run) -> float:
        """Return the number of the latest use."""
        return run.last_use
