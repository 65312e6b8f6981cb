"""Single flight: callers that want the same bytes at the same time cause one read.

Invariant: a follower's buffer is written by the leader before it returns, and by nobody after the follower has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.tier.buffers import copy_bytes
from kvtide.types import NamedId, ObjectId, wants_latest

# A follower reads for itself if the leader takes longer.
FOLLOW_S_MAX = 30.0

# What a reader returns: how many bytes are in the buffer, None for a miss.
Read = Callable[[], int | None]


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
