"""Adaptive replacement: recency against frequency, the balance learned from what was evicted too early."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.index import EvictionPolicy, HeapPolicy, LruPolicy, Run, Use

# `tag` of a run: the list it is in, or was in when its blocks were evicted.
_ONCE, _AGAIN = 1, 2


class ArcPolicy(EvictionPolicy):
    """Two LRU lists, runs used once and runs used again; a remembered run that comes back moves the target."""

    def __init__(self, blocks_max: int) -> None:
        self.ghost_blocks_max = blocks_max
        self._blocks_max = blocks_max
        self._once_target = 0.0
        self._lists: dict[int, HeapPolicy] = {_ONCE: LruPolicy(), _AGAIN: LruPolicy()}
        self._held = {_ONCE: 0, _AGAIN: 0}
        self._ghosts = {_ONCE: 0, _AGAIN: 0}

    def adopt(self, run: Run, count: int) -> None:
        """Put the blocks on the list of their run."""
        if len(run.keys) == count:
            run.tag = _ONCE
        self._ghosts[run.tag] += count

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Move used runs to the list of those used again; adapt to those that were remembered only."""
        for run in path:
            if run.uses == 1:
                continue
            missing = len(run.keys) - run.held
            if missing:
                self._adapt(run.tag, missing)
            if run.tag == _ONCE:
                self._count(run, -1)
                run.tag = _AGAIN
                self._count(run, 1)

    def _count(self, run: Run, sign: int) -> None:
        self._held[run.tag] += sign * run.held
        self._ghosts[run.tag] += sign * (len(run.keys) - run.held)

    def _adapt(self, tag: int, blocks: int) -> None:
        other = _AGAIN if tag == _ONCE else _ONCE
        step = blocks * max(1.0, self._ghosts[other] / max(1, self._ghosts[tag]))
        target = self._once_target + (step if tag == _ONCE else -step)
        self._once_target = min(max(target, 0.0), float(self._blocks_max))

    def resize(self, run: Run, delta: int) -> None:
        """Keep the counts: blocks move between held and remembered."""
        self._held[run.tag] += delta
        self._ghosts[run.tag] -= delta

    def split(self, upper: Run, lower: Run) -> None:
        """Put the upper part where the lower one is."""
        upper.tag = lower.tag

    def enter(self, run: Run) -> None:
        """Rank the run in its list."""
        self._lists[run.tag].enter(run)

    def leave(self, run: Run) -> None:
        """Take the run out of its list."""
        self._lists[run.tag].leave(run)

    def victim(self) -> Run | None:
        """Return the oldest of the list that is over its target, or of the other one if that has none."""
        first = _ONCE if self._held[_ONCE] > self._once_target else _AGAIN
        return self._lists[first].victim() or self._lists[_ONCE + _AGAIN - first].victim()

    def forget(self, run: Run, count: int) -> None:
        """Drop the blocks from the counts."""
        self._ghosts[run.tag] -= count
