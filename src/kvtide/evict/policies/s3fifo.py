"""S3-FIFO: a small queue that most new runs leave unused, a main queue, and a memory of what left the small one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtide.index import EvictionPolicy, Run, Use

_SMALL_SHARE = 0.1
_FREQUENCY_MAX = 3
# `tag` of a run: its queue.
_SMALL, _MAIN = 1, 2


class S3FifoPolicy(EvictionPolicy):
    """Two queues of candidates in order of arrival; `state` counts a run's uses since it was queued, up to three."""

    def __init__(self, blocks_max: int) -> None:
        self.ghost_blocks_max = blocks_max
        self._small_max = max(1, int(_SMALL_SHARE * blocks_max))
        self._queues: dict[int, OrderedDict[Run, None]] = {_SMALL: OrderedDict(), _MAIN: OrderedDict()}
        self._small_blocks = 0

    def adopt(self, run: Run, count: int) -> None:
        """Put a new run into the small queue."""
        if len(run.keys) == count:
            run.tag, run.state = _SMALL, 0

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Count the uses; what is remembered only comes back into the main queue."""
        for run in path:
            if run.uses == 1:
                continue
            if run.held < len(run.keys):
                self._to_main(run)
                run.state = 0
            else:
                run.state = min(_FREQUENCY_MAX, run.state + 1)

    def _to_main(self, run: Run) -> None:
        if run.tag == _SMALL:
            self._small_blocks -= run.held
            run.tag = _MAIN

    def resize(self, run: Run, delta: int) -> None:
        """Keep the count of blocks in the small queue."""
        if run.tag == _SMALL:
            self._small_blocks += delta

    def split(self, upper: Run, lower: Run) -> None:
        """Put the upper part where the lower one is."""
        upper.tag, upper.state = lower.tag, lower.state

    def enter(self, run: Run) -> None:
        """Queue the run."""
        self._queues[run.tag][run] = None

    def leave(self, run: Run) -> None:
        """Take the run out of its queue."""
        del self._queues[run.tag][run]

    def victim(self) -> Run | None:
        """Return the first unused run of the small queue if that is over its share, else of the main one."""
        small, main = self._queues[_SMALL], self._queues[_MAIN]
        while small and (self._small_blocks >= self._small_max or not main):
            run = next(iter(small))
            if not run.state:
                return run
            del small[run]
            self._to_main(run)
            run.state = 0
            main[run] = None
        while main:
            run = next(iter(main))
            if not run.state:
                return run
            run.state -= 1
            main.move_to_end(run)
        return None
