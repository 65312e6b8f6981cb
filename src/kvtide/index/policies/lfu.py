"""Least frequently used first, the least recent one among equals."""

from __future__ import annotations

from kvtide.index.policies.base import HeapPolicy
from kvtide.index.run import Run

# Uses count in whole steps, recency below them: more requests than this would round off.
_USES_PER_STEP = float(1 << 40)


class LfuPolicy(HeapPolicy):
    """Ranks by the number of uses while known; what was evicted starts anew."""

    def priority(self, run: Run) -> float:
        """Return the number of uses, and the latest one as a fraction."""
        return run.uses + run.last_use / _USES_PER_STEP
