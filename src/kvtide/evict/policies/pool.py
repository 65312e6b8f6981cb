"""The report's pool of freed blocks, and an order by it: longest unused first, of one time the longest prefix first."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.evict.ranking import EvictionOrder, MayGo
from kvtide.types import BlockKey, Namespace, ObjectId

# Passed-over entries may make up this share of the heaps' before they are rebuilt.
_STALE_SHARE_MAX = 0.5
_STALE_SLACK = 64


class _Entry(NamedTuple):
    last_use_s: float
    prefix_blocks: int


class FreePool:
    """Blocks with reference count 0. `add`, `take_back` and the eviction that `add` may cause are O(log n)."""

    def __init__(self, blocks_max: int) -> None:
        if blocks_max < 0:
            raise ValueError(f"blocks_max must not be negative, got {blocks_max}")
        self.blocks_max = blocks_max
        self._entries: dict[BlockKey, _Entry] = {}
        self._times_s: list[float] = []
        self._blocks: dict[float, list[tuple[int, BlockKey]]] = {}
        self._queued = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def add(self, key: BlockKey, last_use_s: float, prefix_blocks: int) -> BlockKey | None:
        """Free a block; return the one that has to go for it, which may be itself. ValueError if it is here already."""
        if key in self._entries:
            raise ValueError(f"block {key.hex()[:16]} is in the pool already")
        self._entries[key] = _Entry(last_use_s, prefix_blocks)
        blocks = self._blocks.get(last_use_s)
        if blocks is None:
            blocks = self._blocks[last_use_s] = []
            heapq.heappush(self._times_s, last_use_s)
        heapq.heappush(blocks, (-prefix_blocks, key))
        self._queued += 1
        return self.evict() if len(self._entries) > self.blocks_max else None

    def take_back(self, key: BlockKey) -> bool:
        """Remove a block that comes back into use. False if it is not here."""
        if self._entries.pop(key, None) is None:
            return False
        if self._queued > _STALE_SLACK + len(self._entries) / (1 - _STALE_SHARE_MAX):
            self._rebuild()
        return True

    def evict(self) -> BlockKey | None:
        """Remove the block that goes first and return it; None if the pool is empty."""
        while self._times_s:
            last_use_s = self._times_s[0]
            blocks = self._blocks[last_use_s]
            while blocks:
                prefix_blocks, key = heapq.heappop(blocks)
                self._queued -= 1
                if self._entries.get(key) == (last_use_s, -prefix_blocks):
                    del self._entries[key]
                    return key
            heapq.heappop(self._times_s)
            del self._blocks[last_use_s]
        return None

    def _rebuild(self) -> None:
        self._blocks = {}
        for key, (last_use_s, prefix_blocks) in self._entries.items():
            self._blocks.setdefault(last_use_s, []).append((-prefix_blocks, key))
        for blocks in self._blocks.values():
            heapq.heapify(blocks)
        self._times_s = sorted(self._blocks)
        self._queued = len(self._entries)

    def check(self) -> None:
        """AssertionError if the pool contradicts itself."""
        assert len(self._entries) <= self.blocks_max
        queued = {(time_s, depth, key) for time_s, blocks in self._blocks.items() for depth, key in blocks}
        assert sorted(self._times_s) == sorted(self._blocks)
        assert sum(map(len, self._blocks.values())) == self._queued
        assert all((entry.last_use_s, -entry.prefix_blocks, key) in queued for key, entry in self._entries.items())


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
        """Take a block out of the pool and free it again, now."""
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
