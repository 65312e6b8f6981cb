"""Reads that serve more than their caller: one for several callers at once, and reads ahead of whoever will come.

Invariant: followers get the bytes that the reader got, or read for themselves; an object that somebody has begun to
read meanwhile is not brought ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtide.tier.background import Background
from kvtide.tier.buffers import copy_bytes
from kvtide.types import NamedId, ObjectId, wants_latest

# A follower reads for itself if the leader takes longer.
FOLLOW_S_MAX = 30.0

# What a reader returns: how many bytes are in the buffer, None for a miss.
Read = Callable[[], int | None]
PREFETCH_THREADS = 2
PREFETCH_MAX = 64


@dataclass(slots=True, eq=False)
class _Follower:
    buffer: memoryview
    done: threading.Event = field(default_factory=threading.Event)
    has_left: bool = False
    was_served: bool = False
    size: int | None = None


class SingleFlight:
    """Reads that are under way, by object, generation, whether it is to be the latest, and offset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[tuple[ObjectId, int, bool, int], list[_Follower]] = {}

    def read(self, object_id: ObjectId, buffer: memoryview, offset: int, read: Read) -> int | None:
        """Run `read`, which fills `buffer`, or wait for another caller's that brings these bytes too.

        A read that fails fails for its caller alone; followers then read for themselves.
        """
        # A read of an earlier generation is no answer for a later one, nor one of any copy for the latest.
        generation = object_id.name.generation if isinstance(object_id, NamedId) else 0
        name = (object_id, generation, wants_latest(object_id), offset)
        with self._lock:
            followers = self._followers.get(name)
            if followers is None:
                followers = self._followers[name] = []
                follower = None
            else:
                follower = _Follower(buffer)
                followers.append(follower)
        if follower is not None:
            return self._follow(follower, read)
        came: int | None = None
        is_read = False
        try:
            came = read()
            is_read = True
        finally:
            with self._lock:
                del self._followers[name]
                for each in followers:
                    if is_read and not each.has_left:
                        _serve(each, buffer, came)
                    each.done.set()
        return came

    def _follow(self, follower: _Follower, read: Read) -> int | None:
        follower.done.wait(FOLLOW_S_MAX)
        with self._lock:
            follower.has_left = True
        return follower.size if follower.was_served else read()


def _serve(follower: _Follower, buffer: memoryview, came: int | None) -> None:
    if came is None:
        follower.was_served = True
        return
    wanted = len(follower.buffer)
    if came == len(buffer) and wanted > came:
        # The object may be longer than the leader's buffer.
        return
    follower.size = min(wanted, came)
    copy_bytes(follower.buffer[: follower.size], buffer[: follower.size])
    follower.was_served = True


class Prefetcher:
    """A queue of at most PREFETCH_MAX objects, and the threads that bring them."""

    def __init__(self, bring: Callable[[ObjectId, int], None]) -> None:
        self._bring = bring
        self._background = Background(PREFETCH_THREADS, "kvtide-prefetch")
        self.open, self.close, self.wait = self._background.open, self._background.close, self._background.wait
        self._lock = threading.Lock()
        self._queued: set[ObjectId] = set()

    def discard(self, object_id: ObjectId) -> None:
        """Forget an object that somebody reads now."""
        if self._queued:
            with self._lock:
                self._queued.discard(object_id)

    def queue(self, object_ids: Sequence[ObjectId], size_max: int) -> int:
        """Queue objects of at most `size_max` bytes, in order; return how many there was room for."""
        count = 0
        for object_id in object_ids:
            with self._lock:
                if len(self._queued) >= PREFETCH_MAX:
                    return count
                if object_id in self._queued:
                    continue
                self._queued.add(object_id)
                if not self._background.submit(partial(self._run, object_id, size_max)):
                    self._queued.discard(object_id)
                    return count
            count += 1
        return count

    def _run(self, object_id: ObjectId, size_max: int) -> None:
        with self._lock:
            if object_id not in self._queued:
                return
            self._queued.discard(object_id)
        self._bring(object_id, size_max)
