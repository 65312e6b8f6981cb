"""Objects in frames of one page-aligned arena of this machine's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable
from kvtide.evict import EvictionOrder, Hint, RankedOrder, States
from kvtide.tier.base import Buffer, IsPinned, LentObject, ObjectInfo, OwnTier
from kvtide.tier.buffers import ALIGN_BYTES, aligned_buffer, copy_bytes, touch
from kvtide.types import BlockKey, ObjectId, TierStats
from kvtide.wire import HEADER_BYTES, ObjectLabel

FramesT = TypeVar("FramesT", bound="Frames")
_FRAME_BYTES_MAX = 64 << 10
_FRAMES_WANTED = 4096


class Span(NamedTuple):
    """Frames `[start, stop)`."""

    start: int
    stop: int


def frame_bytes_for(bytes_max: int) -> int:
    """Return a frame size: a page, more where there are so many that the last, half-empty frame does not matter."""
    size = ALIGN_BYTES
    while size < _FRAME_BYTES_MAX and bytes_max // (2 * size) >= _FRAMES_WANTED:
        size *= 2
    return size


class Frames:
    """Frames of at most `bytes_max` and their holders, wherever they lie. Not thread-safe: its owner locks."""

    def __init__(self, bytes_max: int, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.frames = bytes_max // self.frame_bytes
        # Ordered, with a gap between any two: neighbours are one run.
        self._free = [Span(0, self.frames)] if self.frames else []
        self.free_frames = self.frames

    def frames_of(self, size: int) -> int:
        """Return how many frames an object of this size takes."""
        return -(-size // self.frame_bytes)

    def take(self, size: int) -> list[Span] | None:
        """Take frames for an object: one run if there is one, else the longest ones. None if too few are free."""
        wanted = self.frames_of(size)
        if wanted > self.free_frames:
            return None
        self.free_frames -= wanted
        taken = []
        while wanted:
            for position, run in enumerate(self._free):  # noqa: B007 - used behind the loop
                if run.stop - run.start >= wanted:
                    break
            else:
                position, run = max(enumerate(self._free), key=lambda item: item[1].stop - item[1].start)
            cut = min(run.stop, run.start + wanted)
            taken.append(Span(run.start, cut))
            wanted -= cut - run.start
            if cut == run.stop:
                del self._free[position]
            else:
                self._free[position] = Span(cut, run.stop)
        return taken

    def give_back(self, runs: list[Span]) -> None:
        """Make frames free again. Whoever reads them still must not."""
        for run in runs:
            self.free_frames += run.stop - run.start
            position = bisect_left(self._free, run)
            start, stop = run
            if position < len(self._free) and self._free[position].start == stop:
                stop = self._free.pop(position).stop
            if position and self._free[position - 1].stop == start:
                position -= 1
                start = self._free.pop(position).start
            self._free.insert(position, Span(start, stop))

    def check(self, taken: list[Span]) -> None:
        """AssertionError unless the free frames and these are all frames, each once."""
        everything = sorted([*self._free, *taken])
        assert sum(run.stop - run.start for run in everything) == self.frames
        assert all(left.stop == right.start for left, right in pairwise(everything))
        assert self.free_frames == sum(run.stop - run.start for run in self._free)
        assert all(left.stop < right.start for left, right in pairwise(self._free))


class Arena(Frames):
    """Frames of this machine's memory, taken from the system as it is first used."""

    def __init__(self, bytes_max: int, frame_bytes: int) -> None:
        super().__init__(bytes_max, frame_bytes)
        self.memory = aligned_buffer(self.frames * self.frame_bytes)

    def views(self, runs: list[Span], size: int) -> list[memoryview]:
        """Return the memory of an object of this size."""
        views = []
        for run in runs:
            view = self.memory[run.start * self.frame_bytes : run.stop * self.frame_bytes][:size]
            views.append(view)
            size -= len(view)
        return views


@dataclass(slots=True, eq=False)
class Resident:
    """An object in its frames, `parent` the block before it. `holders` are those who read or write it, and its tier."""

    runs: list[Span]
    size: int
    parent: BlockKey
    last_use_s: float
    holders: int = 1


class FramedTier(OwnTier, ABC, Generic[FramesT]):
    """Keeps copies of objects in at most `bytes_max`; they leave in an order of this tier's, by default by last use.

    Objects take whole frames of `frame_bytes`, a multiple of a page; by default a size that suits `bytes_max`.
    """

    hears_requests = True

    def __init__(
        self,
        bytes_max: int,
        clock: Clock,
        is_pinned: IsPinned,
        order: EvictionOrder | None = None,
        frame_bytes: int | None = None,
    ) -> None:
        super().__init__(bytes_max, clock)
        if frame_bytes is not None and (frame_bytes <= 0 or frame_bytes % ALIGN_BYTES):
            raise ValueError(f"frame_bytes must be a multiple of {ALIGN_BYTES}, got {frame_bytes}")
        self._frame_bytes = frame_bytes or frame_bytes_for(bytes_max)
        self._is_pinned = is_pinned
        self.order = RankedOrder() if order is None else order
        self._frames: FramesT | None = None
        self._residents: dict[ObjectId, Resident] = {}
        # Also those that are still read though they were dropped, or being written and not yet to be found.
        self._in_frames: set[Resident] = set()
        self._used_bytes = 0

    @abstractmethod
    def _reserve(self) -> FramesT:
        """Return frames. TierUnavailable if they can't be had."""

    def _give_up(self, frames: FramesT) -> None:
        """Give the frames back, which may still be read; by default with the last who reads them."""

    @abstractmethod
    def _write(self, frames: FramesT, resident: Resident, buffer: Buffer) -> None:
        """Copy an object in. TierUnavailable if that fails."""

    @abstractmethod
    def _copy_out(self, frames: FramesT, resident: Resident, buffer: memoryview) -> bool:
        """Fill a buffer of the object's size. False if that fails."""

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        return self.order.note_request(object_ids[0].namespace, [*map(attrgetter("key"), object_ids)], hint, states)

    def open(self) -> None:
        with self._lock:
            if self._frames is None:
                self._frames = self._reserve()

    def close(self) -> None:
        """Drop everything; then nothing is found and nothing stored. Memory that is lent stays until it is back."""
        with self._lock:
            if self._frames is not None:
                self._give_up(self._frames)
            self._frames = None
            for object_id in self._residents:
                self.order.leave(object_id)
            self._residents.clear()
            self._in_frames.clear()
            self._used_bytes = 0

    def contains(self, object_id: ObjectId) -> bool:
        with self._lock:
            return object_id in self._residents

    @contextmanager
    def _held(self, object_id: ObjectId) -> Iterator[tuple[Resident, FramesT] | None]:
        """Keep an object and its frames for a reader meanwhile; a use of it. None if it is not here."""
        with self._lock:
            resident, frames = self._residents.get(object_id), self._frames
            self._hits += resident is not None
            self._misses += resident is None
            if resident is not None:
                resident.holders += 1
                resident.last_use_s = self._clock.wall_s()
                self.order.note_use(object_id)
        if resident is None or frames is None:
            yield None
            return
        try:
            yield resident, frames
        finally:
            with self._lock:
                self._let_go(frames, resident)

    def _let_go(self, frames: FramesT, resident: Resident) -> None:
        resident.holders -= 1
        if not resident.holders and frames is self._frames:
            self._in_frames.remove(resident)
            frames.give_back(resident.runs)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Copy an object in, evicting others first. False after `close`, and for one worth less than what is here."""
        size = len(buffer)
        if size > self._bytes_max:
            raise self._too_large(object_id, size)
        with self._lock:
            frames = self._frames
            if object_id in self._residents or frames is None:
                return frames is not None
            if frames.frames_of(size) > frames.free_frames and not self.order.wants(object_id):
                return False
            label = ObjectLabel.of(buffer)
            parent = BlockKey(label.parent if label.start else object_id.namespace)
            runs = frames.take(size)
            if runs is None:
                runs = self._make_room(frames, size)
            resident = Resident(runs, size, parent, self._clock.wall_s())
            self._in_frames.add(resident)
        is_written = False
        try:
            self._write(frames, resident, buffer)
            is_written = True
        finally:
            with self._lock:
                is_new = self._settle(frames, object_id, resident, is_written)
        return is_new

    def _settle(self, frames: FramesT, object_id: ObjectId, resident: Resident, is_written: bool) -> bool:
        """List an object that was written, if it is still wanted; tell whether it is here."""
        if frames is not self._frames:
            return False
        if not is_written or object_id in self._residents:
            self._let_go(frames, resident)
            return is_written
        self._residents[object_id] = resident
        self.order.enter(object_id, resident.parent, resident.size)
        self._used_bytes += resident.size
        assert self._used_bytes <= self._bytes_max
        return True

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        return self.delete(object_id, "replaced") and self.put_from(object_id, buffer)

    def _may_go(self, object_id: ObjectId) -> bool:
        return self._residents[object_id].holders == 1 and not self._is_pinned(object_id.key)

    def _make_room(self, frames: FramesT, size: int) -> list[Span]:
        victims: list[ObjectId] = []
        missing = frames.frames_of(size) - frames.free_frames
        with closing(self.order.victims(self._may_go)) as leaving:
            for object_id in leaving:
                victims.append(object_id)
                missing -= frames.frames_of(self._residents[object_id].size)
                if missing <= 0:
                    break
        if missing > 0:
            # Those in vain come back, as they came: the beginnings of prompts first.
            for object_id in reversed(victims):
                self.order.enter(object_id, self._residents[object_id].parent, self._residents[object_id].size)
            raise TierFull(f"no room for {size} bytes in the {self.name} tier: what it holds is in use")
        for object_id in victims:
            resident = self._residents[object_id]
            self._offer(object_id, resident.size, partial(self._copy_out, frames, resident))
            self._drop(frames, object_id, "evicted")
            self._evictions += 1
        runs = frames.take(size)
        assert runs is not None
        return runs

    def would_admit(self, object_id: ObjectId, size: int) -> bool:
        """Tell whether an object deserves a place: there is room, or a resident that may go has a lower rank."""
        with self._lock:
            frames = self._frames
            if frames is None or frames.frames_of(size) > frames.frames:
                return False
            if frames.frames_of(size) <= frames.free_frames:
                return True
            return self.order.admits(object_id, self._may_go)

    def _drop(self, frames: FramesT, object_id: ObjectId, reason: str) -> None:
        resident = self._residents.pop(object_id)
        self.order.leave(object_id)
        self._used_bytes -= resident.size
        self._let_go(frames, resident)
        self._on_removed([object_id])
        self._removals[object_id] = reason

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        with self._lock:
            if object_id not in self._residents or self._frames is None:
                return False
            self._drop(self._frames, object_id, reason)
            return True

    def objects(self) -> Iterator[ObjectInfo]:
        with self._lock:
            # Only this while readers wait: ten nanoseconds an object.
            object_ids = list(self._residents)
        for object_id in object_ids:
            resident = self._residents.get(object_id)
            if resident is not None:
                yield ObjectInfo(object_id, resident.size, resident.last_use_s)

    def stats(self) -> TierStats:
        with self._lock:
            return self._stats(len(self._residents), self._used_bytes)

    def check(self) -> None:
        with self._lock:
            assert self._used_bytes == sum(each.size for each in self._residents.values())
            assert len(self.order) == len(self._residents)
            if self._frames is not None:
                assert self._in_frames.issuperset(self._residents.values())
                self._frames.check([run for each in self._in_frames for run in each.runs])


class MemoryTier(FramedTier[Arena]):
    """Keeps copies of objects in at most `bytes_max`; see FramedTier."""

    name = "memory"
    can_lend = True

    def _reserve(self) -> Arena:
        # The system gives the memory as it is first used.
        try:
            return Arena(self._bytes_max, self._frame_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise TierUnavailable(f"no {self._bytes_max} bytes of memory to reserve: {error}") from error

    def touch(self, bytes_max: int, is_wanted: Callable[[], bool]) -> None:
        """Have the system give up to `bytes_max` of the memory now, as long as `is_wanted`."""
        if (frames := self._frames) is not None:
            touch(frames.memory[:bytes_max], is_wanted)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
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
        with self._held(object_id) as held:
            yield None if held is None else [*map(memoryview.toreadonly, held[1].views(held[0].runs, held[0].size))]

    def lend(self, object_id: ObjectId, can_wait: bool = True) -> LentObject | None:
        if not can_wait and object_id not in self._residents:
            return None
        with ExitStack() as lease:
            views = lease.enter_context(self.lease(object_id))
            if views is None:
                return None
            # A frame holds a whole header.
            head = bytes(views[0][:HEADER_BYTES]) if views else b""
            return LentObject(sum(map(len, views)), head, views, None, lease.pop_all().close)

    def _write(self, frames: Arena, resident: Resident, buffer: Buffer) -> None:
        rest = memoryview(buffer)
        for view in frames.views(resident.runs, resident.size):
            copy_bytes(view, rest[: len(view)])
            rest = rest[len(view) :]

    def _copy_out(self, frames: Arena, resident: Resident, buffer: memoryview) -> bool:
        for view in frames.views(resident.runs, resident.size):
            copy_bytes(buffer[: len(view)], view)
            buffer = buffer[len(view) :]
        return True
