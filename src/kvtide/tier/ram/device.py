"""Objects in frames of a device's memory, the fastest tier of an engine's stack.

Objects are kept as they are stored, encoded: several times as many as their pages would be. Which device it is and how
bytes get there is the engine's affair: it hands in a DeviceMemory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtide.clock import Clock
from kvtide.errors import DeviceFault, TierUnavailable
from kvtide.evict import EvictionOrder
from kvtide.tier.base import Buffer, IsPinned
from kvtide.tier.ram.framed import FramedTier, Frames, Resident
from kvtide.types import ObjectId

__all__ = ["DeviceMemory", "DevicePiece", "DeviceTier"]

_log = logging.getLogger(__name__)


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
