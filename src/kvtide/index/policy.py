"""Runs, blocks of a prefix that were always used together; policies, which choose what to evict of them; LRU."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtide.types import BlockKey

# The size of a block as large as those that an index counts its room in.
USUAL_SIZE = 1024
# Entries of candidates that left stay in the heap until they are a majority.
_HEAP_SLACK = 64


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks `[start, start + len(keys))` of a prefix, in the tree of their namespace.

    Index and policy share it: the last three fields belong to the policy. `uses` and `last_use` (a sequence number)
    tell of the latest use, set before the policy hears of it. `size` is the room that each block takes.
    """

    keys: list[BlockKey]
    parent: Run | None
    start: int
    tiers: bytearray
    children: set[Run]
    held: int = 0
    held_children: int = 0
    is_candidate: bool = False
    uses: int = 0
    last_use: int = 0
    size: int = USUAL_SIZE
    order: int = 0
    tag: int = 0
    state: Any = None

    def may_grow(self, depth: int) -> bool:
        """Tell whether blocks after `depth` share this run's history: stored one by one, used by nobody since."""
        return self.uses == 1 and self.stop == depth and self.held == len(self.keys) and not self.children

    @property
    def stop(self) -> int:
        """Return the position after the last block."""
        return self.start + len(self.keys)

    @property
    def root(self) -> Run:
        """Return the run without blocks at the beginning of the prefix, whose `state` is the namespace."""
        run = self
        while run.parent is not None:
            run = run.parent
        return run


class Use(NamedTuple):
    """One request's pass over its runs: when, how many blocks it has, how many of them were known."""

    now_s: float
    blocks: int
    known_blocks: int


class EvictionPolicy:
    """Chooses what to evict; what a subclass does not say it need not hear. Called under the index's lock alone."""

    # Evicted blocks that the index shall remember for this policy; 0 for none.
    ghost_blocks_max = 0
    # Whether the last block of a request shall be a run of its own.
    splits_tail = False

    def plan(self, blocks_max: int) -> None:
        """Note that the index holds so many blocks at most from now on, as large as they are."""

    def adopt(self, run: Run, count: int) -> None:
        """Note that `count` blocks of a run are new, none of them held; it may be a run that has others."""

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Note a use of a request's runs, first blocks first; new ones have `uses` 1. None is a candidate now."""

    def measure(self, run: Run, key: BlockKey) -> None:
        """Note that one of its blocks told the run's `size`."""

    def resize(self, run: Run, delta: int) -> None:
        """Note that `run.held` has changed by `delta`: blocks came (positive) or were evicted."""

    def split(self, upper: Run, lower: Run) -> None:
        """Note that the new run `upper` took the leading blocks of `lower`, which keeps its identity."""

    def enter(self, run: Run) -> None:
        """Note that a run may be evicted from now on."""
        raise NotImplementedError

    def leave(self, run: Run) -> None:
        """Note that a run may not be evicted any more."""
        raise NotImplementedError

    def victim(self) -> Run | None:
        """Return the candidate to shrink next; None if there is none. Changes nothing that a caller can see."""
        raise NotImplementedError

    def spared(self, run: Run) -> int:
        """Return how many leading blocks of the latest victim have to stay for now, less than it holds."""
        return 0

    def advise(self, path: Sequence[Run]) -> None:
        """Note that there is advice about the latest request that ended with the path; not a use."""

    def forget(self, run: Run, count: int) -> None:
        """Note that `count` blocks of a run, none of them held, are unknown now; with no `keys` left, so is the run."""


class HeapPolicy(EvictionPolicy):
    """Evicts the candidate of lowest priority; equal ones in the order in which they became candidates.

    A priority holds from `enter` to `leave`: every use takes the run out and puts it back.
    """

    def __init__(self) -> None:
        # (priority, number of the entry, run, the run's `order` then): another `order` now means that it left since.
        self._heap: list[tuple[float, int, Run, int]] = []
        self._entries = 0
        self._candidates = 0

    def priority(self, run: Run) -> float:
        """Return what the run is worth; lower goes first."""
        raise NotImplementedError

    def enter(self, run: Run) -> None:
        self._entries += 1
        self._candidates += 1
        run.order += 1
        heapq.heappush(self._heap, (self.priority(run), self._entries, run, run.order))

    def leave(self, run: Run) -> None:
        run.order += 1
        self._candidates -= 1
        if len(self._heap) > 2 * self._candidates + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[2].order == entry[3]]
            heapq.heapify(self._heap)

    def victim(self) -> Run | None:
        while self._heap:
            _, _, run, order = self._heap[0]
            if run.order == order:
                return run
            heapq.heappop(self._heap)
        return None


class LruPolicy(HeapPolicy):
    """Least recently used first, deepest first among those of one use: the report's two criteria.

    Deepest first follows: a run is a candidate only after those below it are gone.
    """

    def priority(self, run: Run) -> float:
        return run.last_use
