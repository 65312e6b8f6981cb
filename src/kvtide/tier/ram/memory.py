"""Objects in frames of one page-aligned arena of this machine's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

from kvtide.clock import Clock
from kvtide.errors import DeviceFault, TierUnavailable
from kvtide.evict import EvictionOrder
from kvtide.tier.base import Buffer, IsPinned, LentObject
from kvtide.tier.buffers import copy_bytes, touch
from kvtide.tier.ram.framed import Arena, FramedTier, Frames, Resident
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES

_log = logging.getLogger(__name__)

# Locks memory for fast transfers to a GPU and returns what takes that back. OSError if it can't be locked.
Pin = Callable[[memoryview], Callable[[], None]]


class MemoryTier(FramedTier[Arena]):
    """Keeps copies of objects in at most `bytes_max`; see FramedTier.

    `pin` is given all of the memory once at `open`; what it can't lock serves as ordinary memory.
    """

    name = "memory"

    def __init__(
        self,
        bytes_max: int,
        clock: Clock,
        is_pinned: IsPinned,
        order: EvictionOrder | None = None,
        frame_bytes: int | None = None,
        pin: Pin | None = None,
    ) -> None:
        super().__init__(bytes_max, clock, is_pinned, order, frame_bytes)
        self._pin = pin
        self._unpin: Callable[[], None] | None = None

    def _reserve(self) -> Arena:
        # The system gives the memory as it is first used, or at once if it is pinned.
        try:
            arena = Arena(self._bytes_max, self._frame_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise TierUnavailable(f"no {self._bytes_max} bytes of memory to reserve: {error}") from error
        if self._pin is not None:
            try:
                self._unpin = self._pin(arena.memory)
            except OSError as error:
                _log.warning("memory tier: %s; its memory is not pinned", error)
        return arena

    def touch(self, bytes_max: int, is_wanted: Callable[[], bool]) -> None:
        """Have the system give up to `bytes_max` of the memory now, as long as `is_wanted`."""
        frames = self._frames
        if frames is not None:
            touch(frames.memory[:bytes_max], is_wanted)

    def _give_up(self, frames: Arena) -> None:
        if self._unpin is not None:
            self._unpin()
        self._unpin = None

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
        held = self._hold(object_id)
        if held is None:
            yield None
            return
        try:
            yield [view.toreadonly() for view in held.frames.views(held.resident.runs, held.resident.size)]
        finally:
            self._let_go(held)

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object's memory until it is released."""
        with ExitStack() as lease:
            views = lease.enter_context(self.lease(object_id))
            if views is None:
                return None
            return LentObject(sum(map(len, views)), _joined(views, HEADER_BYTES), views, None, lease.pop_all().close)

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object's memory if it is here."""
        return self.lend(object_id) if object_id in self._residents else None

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


def _joined(views: Sequence[memoryview], size: int) -> bytes:
    parts = []
    for view in views:
        if size <= 0:
            break
        parts.append(bytes(view[:size]))
        size -= len(view)
    return b"".join(parts)


class DevicePiece(NamedTuple):
    """Bytes of this machine's, and where they lie in a room."""

    start: int
    host: memoryview


class DeviceRoom(Protocol):
    """Memory of a device. Safe to use from several threads, on different bytes. DeviceFault if the device fails."""

    def write(self, pieces: Sequence[DevicePiece]) -> None:
        """Copy to the device. Done on return."""

    def read(self, pieces: Sequence[DevicePiece]) -> None:
        """Copy from the device. Done on return."""

    def close(self) -> None:
        """Give the memory back once nothing is under way. Idempotent."""


class DeviceMemory(Protocol):
    """A device that has memory to spare."""

    def reserve(self, size: int) -> DeviceRoom:
        """Return room for so many bytes. DeviceFault if it can't be had."""


class _DeviceFrames(Frames):
    def __init__(self, bytes_max: int, frame_bytes: int, device: DeviceMemory) -> None:
        super().__init__(bytes_max, frame_bytes)
        self.room = device.reserve(self.frames * self.frame_bytes)

    def pieces(self, resident: Resident, buffer: memoryview, offset: int = 0) -> list[DevicePiece]:
        """Return where the bytes of an object from `offset` on lie, as many as the buffer holds."""
        found, skip, left = [], offset, min(len(buffer), resident.size - offset)
        for run in resident.runs:
            start, stop = run.start * self.frame_bytes, run.stop * self.frame_bytes
            size = min(max(0, stop - start - skip), left)
            if size > 0:
                found.append(DevicePiece(start + skip, buffer[:size]))
                buffer, left = buffer[size:], left - size
            skip = max(0, skip - (stop - start))
        return found


class DeviceTier(FramedTier[_DeviceFrames]):
    """Keeps copies of objects in at most `bytes_max` of a device's memory; see FramedTier.

    A device that fails is TierUnavailable for what was asked of it, and the tiers behind serve.
    """

    name = "device"

    def __init__(
        self,
        bytes_max: int,
        clock: Clock,
        is_pinned: IsPinned,
        device: DeviceMemory,
        order: EvictionOrder | None = None,
        frame_bytes: int | None = None,
    ) -> None:
        super().__init__(bytes_max, clock, is_pinned, order, frame_bytes)
        self._device = device

    def _reserve(self) -> _DeviceFrames:
        try:
            return _DeviceFrames(self._bytes_max, self._frame_bytes, self._device)
        except DeviceFault as error:
            raise TierUnavailable(f"no {self._bytes_max} bytes of the device's memory: {error}") from error

    def _give_up(self, frames: _DeviceFrames) -> None:
        try:
            frames.room.close()
        except DeviceFault as error:
            _log.warning("device tier: %s; its memory goes with the process", error)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Copy the object's bytes from `offset` on into `buffer`."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        held = self._hold(object_id)
        if held is None:
            return None
        try:
            pieces = held.frames.pieces(held.resident, buffer, offset)
            held.frames.room.read(pieces)
            return sum(len(piece.host) for piece in pieces)
        except DeviceFault as error:
            raise TierUnavailable(f"{object_id} can't be read from the device: {error}") from error
        finally:
            self._let_go(held)

    def _write(self, frames: _DeviceFrames, resident: Resident, buffer: Buffer) -> None:
        try:
            frames.room.write(frames.pieces(resident, memoryview(buffer)))
        except DeviceFault as error:
            raise TierUnavailable(f"{resident.size} bytes can't be written to the device: {error}") from error

    def _copy_out(self, frames: _DeviceFrames, resident: Resident, buffer: memoryview) -> bool:
        try:
            frames.room.read(frames.pieces(resident, buffer))
        except DeviceFault:
            return False
        return True
