"""Segmented LRU: runs used twice are protected, up to four fifths of the blocks; the others go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtide.index import HeapPolicy, Run, Use

_PROTECTED_SHARE = 0.8
# Any protected run ranks above any that is not: uses are fewer than this.
_PROTECTED = float(1 << 52)


class SlruPolicy(HeapPolicy):
    """Scans pass through the unprotected part and leave the protected one alone."""

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
