"""Policies that others have published: those that rank by one number, and those that keep queues.

S3-FIFO has a small queue that most new runs leave unused, a main queue, and a memory of what left the small one. ARC
weighs recency against frequency, the balance learned from what was evicted too early.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvtide.index import EvictionPolicy, HeapPolicy, LruPolicy, Run, Use

_SMALL_SHARE = 0.1
# Evicted blocks whose uses are remembered: so many for each block held, in large caches half as many and this many.
_FADING_GHOSTS = 16
_FADING_GHOSTS_MAX = 1 << 18
_FREQUENCY_MAX = 3
# `tag` of a run: its uses since it was queued, and this if that was in the main queue.
_MAIN = 4
_SECOND_USE = 2


class FadingPolicy(HeapPolicy):
    """Uses that fade: what memory's `frequency` goes by, for prefixes.

    A use counts half after one use of each known block, evicted ones that are remembered too. New uses weigh more
    instead of old ones less, as priorities must not change by themselves.
    """

    def __init__(self, blocks_max: int) -> None:
        super().__init__()
        self.plan(blocks_max)
        self._known_blocks = 0
        self._age = 0.0
        # Logarithms of the sums of the uses' weights. A run's `state` may be that of another policy beside this one.
        self._weights: dict[Run, float] = {}

    def plan(self, blocks_max: int) -> None:
        self.ghost_blocks_max = min(_FADING_GHOSTS * blocks_max, blocks_max // 2 + _FADING_GHOSTS_MAX)

    def adopt(self, run: Run, count: int) -> None:
        self._known_blocks += count
        if len(run.keys) == count:
            self._weights[run] = -math.inf

    def touch(self, path: Sequence[Run], use: Use) -> None:
        self._age += use.blocks / self._known_blocks
        for run in path:
            low, high = sorted((self._weights[run], self._age))
            self._weights[run] = high + math.log2(1 + 2.0 ** (low - high))

    def split(self, upper: Run, lower: Run) -> None:
        self._weights[upper] = self._weights[lower]

    def priority(self, run: Run) -> float:
        return self._weights[run]

    def forget(self, run: Run, count: int) -> None:
        self._known_blocks -= count
        if not run.keys:
            del self._weights[run]


class S3FifoPolicy(EvictionPolicy):
    """Two queues of candidates in order of arrival; a run's uses since it was queued are counted, up to three."""

    def __init__(self, blocks_max: int) -> None:
        self.plan(blocks_max)
        self._small: OrderedDict[Run, None] = OrderedDict()
        self._main: OrderedDict[Run, None] = OrderedDict()
        self._small_blocks = 0

    def plan(self, blocks_max: int) -> None:
        """Remember as much as fits now, and give the small queue its share of that."""
        self.ghost_blocks_max = blocks_max
        self._small_max = max(1, int(_SMALL_SHARE * blocks_max))

    def adopt(self, run: Run, count: int) -> None:
        """Put a new run into the small queue, one of another policy that was used again into the main one."""
        if len(run.keys) == count:
            run.tag = _MAIN if run.uses > 1 else 0

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Count the uses; what is remembered only comes back into the main queue."""
        for run in path:
            if run.uses == 1:
                continue
            if run.held < len(run.keys):
                self._to_main(run)
            elif run.tag & _FREQUENCY_MAX < _FREQUENCY_MAX:
                run.tag += 1

    def _to_main(self, run: Run) -> None:
        """Count the run from now on as one of the main queue, unused."""
        if not run.tag & _MAIN:
            self._small_blocks -= run.held
        run.tag = _MAIN

    def resize(self, run: Run, delta: int) -> None:
        if not run.tag & _MAIN:
            self._small_blocks += delta

    def split(self, upper: Run, lower: Run) -> None:
        upper.tag = lower.tag

    def _queue(self, run: Run) -> OrderedDict[Run, None]:
        return self._main if run.tag & _MAIN else self._small

    def enter(self, run: Run) -> None:
        self._queue(run)[run] = None

    def leave(self, run: Run) -> None:
        del self._queue(run)[run]

    def victim(self) -> Run | None:
        """Return the first unused run of the small queue if that is over its share, else of the main one."""
        small, main = self._small, self._main
        while small and (self._small_blocks >= self._small_max or not main):
            run = next(iter(small))
            if not run.tag:
                return run
            del small[run]
            self._to_main(run)
            main[run] = None
        while main:
            run = next(iter(main))
            if run.tag == _MAIN:
                return run
            run.tag -= 1
            main.move_to_end(run)
        return None


class ArcPolicy(EvictionPolicy):
    """Two LRU lists, runs used once and runs used again; a remembered run that comes back moves the target.

    What is counted by list stands at 0 for runs used once, at 1 for others.
    """

    def __init__(self, blocks_max: int) -> None:
        self.plan(blocks_max)
        self._once_target = 0.0
        self._lists = (LruPolicy(), LruPolicy())
        self._held = [0, 0]
        self._ghosts = [0, 0]

    def plan(self, blocks_max: int) -> None:
        self.ghost_blocks_max = self._blocks_max = blocks_max

    def adopt(self, run: Run, count: int) -> None:
        self._ghosts[run.uses > 1] += count

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Move used runs to the list of those used again; adapt to those that were remembered only."""
        for run in path:
            if run.uses == 1:
                continue
            missing, was_again = len(run.keys) - run.held, run.uses > _SECOND_USE
            if missing:
                step = missing * max(1.0, self._ghosts[not was_again] / max(1, self._ghosts[was_again]))
                target = self._once_target + (-step if was_again else step)
                self._once_target = min(max(target, 0.0), float(self._blocks_max))
            if not was_again:
                for sign, again in ((-1, 0), (1, 1)):
                    self._held[again] += sign * run.held
                    self._ghosts[again] += sign * missing

    def resize(self, run: Run, delta: int) -> None:
        self._held[run.uses > 1] += delta
        self._ghosts[run.uses > 1] -= delta

    def enter(self, run: Run) -> None:
        self._lists[run.uses > 1].enter(run)

    def leave(self, run: Run) -> None:
        self._lists[run.uses > 1].leave(run)

    def victim(self) -> Run | None:
        """Return the oldest of the list that is over its target, or of the other one if that has none."""
        first = self._held[0] <= self._once_target
        return self._lists[first].victim() or self._lists[not first].victim()

    def forget(self, run: Run, count: int) -> None:
        self._ghosts[run.uses > 1] -= count
