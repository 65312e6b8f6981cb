"""An order by the report's pool of freed blocks: longest unused first, of one time the longest prefix first."""

from __future__ import annotations

import heapq
from collections.abc import Generator

from kvtide.clock import Clock
from kvtide.evict.ranking import EvictionOrder, MayGo, Rank
from kvtide.types import BlockKey, ObjectId

# Entries that hold no more may be so many beside as many as hold before the heap is rebuilt.
_STALE_SLACK = 64


class PoolOrder(EvictionOrder):
    """The report's pool of freed blocks: longest unused first, among those of one time the longest prefix first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The blocks of the prefix up to each that is here.
        self._prefix_blocks: dict[ObjectId, int] = {}
        # Last use and negative length of the prefix; none of those that `victims` passes over.
        self._ranks: dict[ObjectId, Rank] = {}
        # One entry for each rank, and some that hold no more.
        self._heap: list[tuple[Rank, ObjectId]] = []

    def __len__(self) -> int:
        return len(self._prefix_blocks)

    def note_use(self, object_id: ObjectId) -> None:
        if object_id in self._ranks:
            self._free(object_id)

    def _free(self, object_id: ObjectId) -> None:
        rank = self._ranks[object_id] = (self._clock.monotonic_s(), -self._prefix_blocks[object_id])
        heapq.heappush(self._heap, (rank, object_id))
        if len(self._heap) > 2 * len(self._ranks) + _STALE_SLACK:
            self._heap = [(rank, each) for each, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        assert object_id not in self._prefix_blocks
        self._prefix_blocks[object_id] = 1 + self._prefix_blocks.get(ObjectId(object_id.namespace, parent), 0)
        self._free(object_id)

    def leave(self, object_id: ObjectId) -> None:
        self._prefix_blocks.pop(object_id, None)
        self._ranks.pop(object_id, None)

    def victims(self, may_go: MayGo) -> Generator[ObjectId]:
        """Yield the lowest ranks; blocks that may not go come back with the time of now."""
        kept: list[ObjectId] = []
        try:
            while self._heap:
                rank, object_id = heapq.heappop(self._heap)
                if self._ranks.get(object_id) != rank:
                    continue
                del self._ranks[object_id]
                if may_go(object_id):
                    del self._prefix_blocks[object_id]
                    yield object_id
                else:
                    kept.append(object_id)
        finally:
            # Some may have left while the caller had the word, or have come back.
            for object_id in kept:
                if object_id in self._prefix_blocks and object_id not in self._ranks:
                    self._free(object_id)
