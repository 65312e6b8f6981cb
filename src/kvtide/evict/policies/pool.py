"""The report's pool of freed blocks, and an order by it: longest unused first, of one time the longest prefix first."""

from __future__ import annotations

import heapq
from collections.abc import Generator

from kvtide.clock import Clock
from kvtide.evict.ranking import EvictionOrder, MayGo
from kvtide.types import BlockKey, Namespace, ObjectId

# Passed-over entries may make up this share of the heap's before it is rebuilt.
_STALE_SHARE_MAX = 0.5
_STALE_SLACK = 64


class FreePool:
    """Blocks with reference count 0. `add`, `take_back` and the eviction that `add` may cause are O(log n)."""

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max >= 0
        self.blocks_max = blocks_max
        # Of each block its last use and the negative length of its prefix: what is least goes first.
        self._ranks: dict[BlockKey, tuple[float, int]] = {}
        # One entry for each block, and some of blocks that were taken back.
        self._heap: list[tuple[tuple[float, int], BlockKey]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._ranks

    def add(self, key: BlockKey, last_use_s: float, prefix_blocks: int) -> BlockKey | None:
        """Free a block that is not here; return the one that has to go for it, which may be itself."""
        assert key not in self._ranks
        rank = self._ranks[key] = (last_use_s, -prefix_blocks)
        heapq.heappush(self._heap, (rank, key))
        return self.evict() if len(self._ranks) > self.blocks_max else None

    def take_back(self, key: BlockKey) -> bool:
        """Remove a block that comes back into use. False if it is not here."""
        if self._ranks.pop(key, None) is None:
            return False
        if len(self._heap) > _STALE_SLACK + len(self._ranks) / (1 - _STALE_SHARE_MAX):
            self._heap = [(rank, each) for each, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        return True

    def evict(self) -> BlockKey | None:
        """Remove the block that goes first and return it; None if the pool is empty."""
        while self._heap:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) == rank:
                del self._ranks[key]
                return key
        return None

    def check(self) -> None:
        """AssertionError if the pool contradicts itself."""
        assert len(self._ranks) <= self.blocks_max
        assert {(rank, key) for key, rank in self._ranks.items()} <= set(self._heap)


class PoolOrder(EvictionOrder):
    """The report's pool of freed blocks: longest unused first, among those of one time the longest prefix first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pool = FreePool(1 << 62)
        # By `_name`, with the blocks of the prefix up to each.
        self._members: dict[BlockKey, tuple[ObjectId, int]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def note_use(self, object_id: ObjectId) -> None:
        name = _name(*object_id)
        if self._pool.take_back(name):
            self._free(name)

    def _free(self, name: BlockKey) -> None:
        self._pool.add(name, self._clock.monotonic_s(), self._members[name][1])

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        name, before = _name(*object_id), self._members.get(_name(object_id.namespace, parent))
        self._members[name] = (object_id, 1 if before is None else before[1] + 1)
        self._free(name)

    def leave(self, object_id: ObjectId) -> None:
        name = _name(*object_id)
        if self._members.pop(name, None) is not None:
            self._pool.take_back(name)

    def victims(self, may_go: MayGo) -> Generator[ObjectId]:
        """Yield the pool's first; blocks that may not go come back with the time of now."""
        kept: list[BlockKey] = []
        try:
            while (name := self._pool.evict()) is not None:
                object_id, _ = self._members[name]
                if may_go(object_id):
                    del self._members[name]
                    yield object_id
                else:
                    kept.append(name)
        finally:
            # Some may have left while the caller had the word, or have come back.
            for name in kept:
                if name in self._members and name not in self._pool:
                    self._free(name)


def _name(namespace: Namespace, key: BlockKey) -> BlockKey:
    """Tell blocks apart that have one key: of a namespace's generations, or of tenants who copy keys."""
    return BlockKey(namespace + key)
