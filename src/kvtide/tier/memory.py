"""Objects in frames of one page-aligned arena, lowest rank out first, under a hard byte cap.

Invariant: frames that somebody reads or writes are never given to another object before they are done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from kvtide.clock import Clock
from kvtide.errors import TierFull
from kvtide.tier.arena import Arena, Run, frame_bytes_for
from kvtide.tier.base import Buffer, IsPinned, ObjectInfo, OnRemoved, TierStats
from kvtide.tier.buffers import copy_bytes
from kvtide.tier.demote import Offer
from kvtide.tier.lend import LentObject, joined
from kvtide.tier.ranking import RankHeap, Ranking, RecencyRanking
from kvtide.tier.record import PAGE_BYTES
from kvtide.tier.removals import Removals
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES

__all__ = ["MemoryTier", "Pin"]

_log = logging.getLogger(__name__)

# Locks memory for fast transfers to a GPU and returns what takes that back. OSError if it can't be locked.
Pin = Callable[[memoryview], Callable[[], None]]


@dataclass(slots=True, eq=False)
class _Resident:
    runs: list[Run]
    size: int
    last_use_s: float
    leases: int = 0
    is_dropped: bool = False


class MemoryTier:
    """Keeps copies of objects in at most `bytes_max`. Without a ranking the least recently used goes first.

    A ranking that is passed in is fed by its owner (the stack); this tier's own is fed by this tier's reads. Objects
    take whole frames of `frame_bytes`, a multiple of a page; by default a size that suits `bytes_max`. `pin` is given
    all of the memory once at `open`; what it can't lock serves as ordinary memory.
    """

    name = "memory"

    def __init__(
        self,
        bytes_max: int,
        clock: Clock,
        is_pinned: IsPinned,
        ranking: Ranking | None = None,
        frame_bytes: int | None = None,
        pin: Pin | None = None,
    ) -> None:
        if bytes_max <= 0:
            raise ValueError(f"bytes_max of the memory tier must be positive, got {bytes_max}")
        if frame_bytes is not None and (frame_bytes <= 0 or frame_bytes % PAGE_BYTES):
            raise ValueError(f"frame_bytes must be a multiple of {PAGE_BYTES}, got {frame_bytes}")
        self._frame_bytes = frame_bytes or frame_bytes_for(bytes_max)
        self._bytes_max = bytes_max
        self._clock = clock
        self._is_pinned = is_pinned
        self._ranking = ranking or RecencyRanking()
        self._is_ranking_mine = ranking is None
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._residents: dict[ObjectId, _Resident] = {}
        self._heap = RankHeap(self._ranking)
        # Dropped, but somebody reads them; and being written, so not yet to be found.
        self._unlisted: list[_Resident] = []
        self._removed = Removals()
        self._used_bytes = 0
        self._hits = self._misses = self._evictions = 0
        self._on_removed: OnRemoved = lambda object_ids: None
        self._offer: Offer = lambda object_id, size, fill: None

    def offer_to(self, offer: Offer) -> None:
        """Call this from now on before an object is evicted."""
        self._offer = offer

    def report_to(self, on_removed: OnRemoved) -> None:
        """Tell of evictions and deletions."""
        self._on_removed = on_removed

    def open(self) -> None:
        """Reserve the memory; the system gives it as it is first used, or at once if it is pinned."""
        with self._lock:
            if self._arena is not None:
                return
            self._arena = Arena(self._bytes_max, self._frame_bytes)
            if self._pin is not None:
                try:
                    self._unpin = self._pin(self._arena.memory)
                except OSError as error:
                    _log.warning("memory tier: %s; its memory is not pinned", error)

    def close(self) -> None:
        """Drop everything; then nothing is found and nothing stored. Memory that is lent stays until it is back."""
        with self._lock:
            if self._unpin is not None:
                self._unpin()
            self._arena = self._unpin = None
            self._residents.clear()
            self._unlisted.clear()
            self._heap = RankHeap(self._ranking)
            self._used_bytes = 0

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether the object is here now."""
        with self._lock:
            return object_id in self._residents

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Copy the object's bytes from `offset` on into `buffer`."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        with self.lease(object_id) as views:
            if views is None:
                return None
            done = 0
            for view in views:
                part = view[offset : offset + len(buffer) - done]
                offset = max(0, offset - len(view))
                copy_bytes(buffer[done : done + len(part)], part)
                done += len(part)
            return done

    @contextmanager
    def lease(self, object_id: ObjectId) -> Iterator[list[memoryview] | None]:
        """Lend the object's memory, piece by piece, for the time of the `with`; None if it is not here.

        It is not reused meanwhile, even if the object is removed or evicted. Read it only.
        """
        with self._lock:
            resident, arena = self._residents.get(object_id), self._arena
            if resident is None or arena is None:
                self._misses += 1
                views = None
            else:
                self._hits += 1
                resident.leases += 1
                resident.last_use_s = self._clock.wall_s()
                views = [view.toreadonly() for view in arena.views(resident.runs, resident.size)]
                if self._is_ranking_mine:
                    self._ranking.note_use(object_id)
        try:
            yield views
        finally:
            if resident is not None and arena is not None:
                self._end_lease(resident, arena)

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object's memory until it is released."""
        with ExitStack() as lease:
            views = lease.enter_context(self.lease(object_id))
            if views is None:
                return None
            return LentObject(sum(map(len, views)), joined(views, HEADER_BYTES), views, None, lease.pop_all().close)

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object's memory if it is here."""
        return self.lend(object_id) if object_id in self._residents else None

    def _end_lease(self, resident: _Resident, arena: Arena) -> None:
        with self._lock:
            resident.leases -= 1
            if resident.is_dropped and resident.leases == 0 and arena is self._arena:
                self._unlisted.remove(resident)
                arena.give_back(resident.runs)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Copy an object in, evicting those of lower rank first. False after `close`."""
        size = len(buffer)
        if size > self._bytes_max:
            raise TierFull(f"{object_id} has {size} bytes, the memory tier may hold {self._bytes_max}")
        with self._lock:
            arena = self._arena
            if object_id in self._residents or arena is None:
                return arena is not None
            resident = _Resident(self._make_room(arena, size), size, self._clock.wall_s())
            self._unlisted.append(resident)
        rest = memoryview(buffer)
        for view in arena.views(resident.runs, size):
            copy_bytes(view, rest[: len(view)])
            rest = rest[len(view) :]
        with self._lock:
            if arena is not self._arena:
                return False
            self._unlisted.remove(resident)
            if object_id in self._residents:
                arena.give_back(resident.runs)
                return True
            if self._is_ranking_mine:
                self._ranking.note_use(object_id)
            self._residents[object_id] = resident
            self._heap.add(object_id)
            self._used_bytes += size
            assert self._used_bytes <= self._bytes_max
        return True

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Put another form of the object in its place; see `Replacing`."""
        return self.delete(object_id, "replaced") and self.put_from(object_id, buffer)

    def _make_room(self, arena: Arena, size: int) -> list[Run]:
        excess = arena.frames_of(size) - arena.free_frames
        victims: list[ObjectId] = []
        for object_id in self._heap.ascending() if excess > 0 else ():
            resident = self._residents[object_id]
            if not resident.leases and not self._is_pinned(object_id.key):
                victims.append(object_id)
                excess -= arena.frames_of(resident.size)
            if excess <= 0:
                break
        if excess > 0:
            raise TierFull(f"no room for {size} bytes in the memory tier: what it holds is in use")
        for object_id in victims:
            resident = self._residents[object_id]
            self._offer(object_id, resident.size, partial(_copy_out, arena.views(resident.runs, resident.size)))
            self._drop(arena, object_id, "evicted")
            self._evictions += 1
        runs = arena.take(size)
        assert runs is not None
        return runs

    def would_admit(self, object_id: ObjectId, size: int) -> bool:
        """Tell whether an object deserves a place: there is room, or a resident that may go has a lower rank."""
        with self._lock:
            arena = self._arena
            if arena is None or arena.frames_of(size) > arena.frames:
                return False
            if arena.frames_of(size) <= arena.free_frames:
                return True
            lowest = next((each for each in self._heap.ascending() if not self._is_pinned(each.key)), None)
            return lowest is not None and self._ranking.rank(lowest) < self._ranking.rank(object_id)

    def _drop(self, arena: Arena, object_id: ObjectId, reason: str) -> None:
        resident = self._residents.pop(object_id)
        self._heap.discard(object_id)
        self._used_bytes -= resident.size
        if resident.leases:
            resident.is_dropped = True
            self._unlisted.append(resident)
        else:
            arena.give_back(resident.runs)
        self._on_removed([object_id])
        self._removed.note(object_id, reason)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove an object."""
        with self._lock:
            if object_id not in self._residents or self._arena is None:
                return False
            self._drop(self._arena, object_id, reason)
            return True

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return why the object was removed last."""
        return self._removed.reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is here."""
        with self._lock:
            infos = [ObjectInfo(oid, each.size, each.last_use_s) for oid, each in self._residents.items()]
        yield from infos

    def stats(self) -> TierStats:
        """Return the counters."""
        with self._lock:
            counts = (self._hits, self._misses, self._evictions, 0)
            return TierStats(self.name, len(self._residents), self._used_bytes, self._bytes_max, *counts)

    def check(self) -> None:
        """AssertionError if the accounting is off. Call it while nobody writes."""
        with self._lock:
            assert self._used_bytes == sum(each.size for each in self._residents.values())
            assert len(self._heap) == len(self._residents)
            if self._arena is not None:
                held = [*self._residents.values(), *self._unlisted]
                self._arena.check([run for each in held for run in each.runs])


def _copy_out(views: Sequence[memoryview], buffer: memoryview) -> bool:
    for view in views:
        copy_bytes(buffer[: len(view)], view)
        buffer = buffer[len(view) :]
    return True
