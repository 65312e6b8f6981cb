"""Objects in this process's memory, least recently used out first, under a hard byte cap."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtide.clock import Clock
from kvtide.errors import TierFull
from kvtide.tier.base import Buffer, IsPinned, ObjectInfo, TierStats
from kvtide.types import ObjectId

__all__ = ["MemoryTier"]

REMEMBERED_MAX = 4096

_Copy = NDArray[np.uint8]


class MemoryTier:
    """Keeps copies of objects; `bytes_max` is never exceeded."""

    name = "memory"

    def __init__(self, bytes_max: int, clock: Clock, is_pinned: IsPinned) -> None:
        if bytes_max <= 0:
            raise ValueError(f"bytes_max of the memory tier must be positive, got {bytes_max}")
        self._bytes_max = bytes_max
        self._clock = clock
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._objects: OrderedDict[ObjectId, _Copy] = OrderedDict()
        self._last_use_s: dict[ObjectId, float] = {}
        self._removed: OrderedDict[ObjectId, str] = OrderedDict()
        self._used_bytes = 0
        self._hits = self._misses = self._evictions = 0

    def open(self) -> None:
        """Do nothing: memory is taken object by object."""

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._objects.clear()
            self._last_use_s.clear()
            self._used_bytes = 0

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether the object is here now."""
        with self._lock:
            return object_id in self._objects

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Copy the object's bytes from `offset` on into `buffer`."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        with self._lock:
            data = self._objects.get(object_id)
            if data is None:
                self._misses += 1
                return None
            self._hits += 1
            self._objects.move_to_end(object_id)
            self._last_use_s[object_id] = self._clock.wall_s()
        # Held here, so that eviction can't pull it away during the copy; never written once it is in the dictionary.
        part = data[offset : offset + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8, len(part)), part)
        return len(part)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Copy an object in, evicting others if it must."""
        size = len(buffer)
        if size > self._bytes_max:
            raise TierFull(f"{object_id} has {size} bytes, the memory tier may hold {self._bytes_max}")
        with self._lock:
            if object_id in self._objects:
                return True
        # numpy copies without the GIL, which the other loading threads want, and into huge pages.
        copy = np.frombuffer(buffer, np.uint8).copy()
        with self._lock:
            if object_id in self._objects:
                return True
            self._evict_for(size)
            self._objects[object_id] = copy
            self._last_use_s[object_id] = self._clock.wall_s()
            self._used_bytes += size
            assert self._used_bytes <= self._bytes_max
        return True

    def _evict_for(self, size: int) -> None:
        excess = self._used_bytes + size - self._bytes_max
        victims: list[ObjectId] = []
        for object_id, data in self._objects.items():
            if excess <= 0:
                break
            if not self._is_pinned(object_id.key):
                victims.append(object_id)
                excess -= len(data)
        if excess > 0:
            raise TierFull(f"no room for {size} bytes in the memory tier: what it holds is in use")
        for object_id in victims:
            self._drop(object_id, "evicted")
            self._evictions += 1

    def _drop(self, object_id: ObjectId, reason: str) -> None:
        self._used_bytes -= len(self._objects.pop(object_id))
        del self._last_use_s[object_id]
        self._removed[object_id] = reason
        self._removed.move_to_end(object_id)
        while len(self._removed) > REMEMBERED_MAX:
            self._removed.popitem(last=False)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove an object."""
        with self._lock:
            if object_id not in self._objects:
                return False
            self._drop(object_id, reason)
            return True

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return why the object was removed last."""
        with self._lock:
            return self._removed.get(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is here."""
        with self._lock:
            infos = [ObjectInfo(oid, len(data), self._last_use_s[oid]) for oid, data in self._objects.items()]
        yield from infos

    def stats(self) -> TierStats:
        """Return the counters."""
        with self._lock:
            counts = (self._hits, self._misses, self._evictions, 0)
            return TierStats(self.name, len(self._objects), self._used_bytes, self._bytes_max, *counts)

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        with self._lock:
            assert self._used_bytes == sum(map(len, self._objects.values()))
            assert self._used_bytes <= self._bytes_max
            assert self._objects.keys() == self._last_use_s.keys()
