"""The cache's fastest tier, in a device's memory: copied through pinned memory, a stream for each direction."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvtide.clock import Clock
from kvtide.errors import DeviceFault, TierUnavailable
from kvtide.evict import EvictionOrder
from kvtide.tier.base import Buffer, IsPinned
from kvtide.tier.buffers import copy_bytes
from kvtide.tier.ram import FramedTier, Frames, Resident
from kvtide.types import ObjectId
from kvtide_gpu.kernels import Kernels, device_faults

_log = logging.getLogger(__name__)

# One part is copied by the device while another is filled or emptied by the processor.
STAGE_BYTES = 4 << 20
STAGES = 2


class DevicePiece(NamedTuple):
    """Bytes of this machine's, and where they lie in a room."""

    start: int
    host: memoryview


class _Part(NamedTuple):
    """Part of a piece in a stage, on its way since `event`."""

    stage: torch.Tensor
    piece: DevicePiece
    event: Any

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def empty(self) -> None:
        """Wait, and copy what came into this machine's memory."""
        self.wait()
        copy_bytes(self.piece.host, self.stage[: len(self.piece.host)].numpy().data)


class _Direction:
    """One way, for one caller at a time: the link is busy with one."""

    def __init__(self, kernels: Kernels, memory: torch.Tensor) -> None:
        self._copies = kernels.copies()
        self._memory = memory
        self._lock = threading.Lock()
        is_pinned = kernels.device.type == "cuda"
        self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(STAGES)]

    def write(self, pieces: Sequence[DevicePiece]) -> None:
        with self._lock:
            self._settled(self._write, pieces)

    def read(self, pieces: Sequence[DevicePiece]) -> None:
        with self._lock:
            self._settled(self._read, pieces)

    def _settled(self, move: Any, pieces: Sequence[DevicePiece]) -> None:
        """Move pieces; whatever happens, nothing is under way afterwards, unless the device is lost."""
        try:
            with device_faults():
                move(pieces)
        except DeviceFault:
            self.finish()
            raise

    def _write(self, pieces: Sequence[DevicePiece]) -> None:
        under_way: deque[_Part] = deque()
        for number, piece in enumerate(_parts(pieces)):
            if len(under_way) == STAGES:
                under_way.popleft().wait()
            stage, size = self._stages[number % STAGES], len(piece.host)
            copy_bytes(stage[:size].numpy().data, piece.host)
            with self._copies.queue():
                self._memory[piece.start : piece.start + size].copy_(stage[:size], non_blocking=True)
            under_way.append(_Part(stage, piece, self._copies.mark()))
        for part in under_way:
            part.wait()

    def _read(self, pieces: Sequence[DevicePiece]) -> None:
        under_way: deque[_Part] = deque()
        for number, piece in enumerate(_parts(pieces)):
            if len(under_way) == STAGES:
                under_way.popleft().empty()
            stage, size = self._stages[number % STAGES], len(piece.host)
            with self._copies.queue():
                stage[:size].copy_(self._memory[piece.start : piece.start + size], non_blocking=True)
            under_way.append(_Part(stage, piece, self._copies.mark()))
        for part in under_way:
            part.empty()

    def finish(self) -> None:
        with device_faults():
            self._copies.finish()


class _Room:
    """Memory of a device. Safe to use from several threads, on different bytes. DeviceFault if the device fails."""

    def __init__(self, kernels: Kernels, size: int) -> None:
        with device_faults():
            with kernels.queue():
                memory = torch.empty(size, dtype=torch.uint8, device=kernels.device)
            # It may lie where the kernels' stream has something under way.
            kernels.finish()
            self._ways = [_Direction(kernels, memory) for _ in range(2)]

    def write(self, pieces: Sequence[DevicePiece]) -> None:
        self._ways[0].write(pieces)

    def read(self, pieces: Sequence[DevicePiece]) -> None:
        self._ways[1].read(pieces)

    def close(self) -> None:
        for way in self._ways:
            way.finish()


class KernelMemory:
    """Memory of the device that kernels run on. See `kvtide.tier.base.DeviceMemory`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def reserve(self, size: int) -> _Room:
        """Return room for so many bytes. DeviceFault if it can't be had."""
        return _Room(self._kernels, size)

    def tier(self, bytes_max: int, clock: Clock, is_pinned: IsPinned, order: EvictionOrder) -> DeviceTier:
        """Return a tier of so many bytes, not yet opened."""
        return DeviceTier(bytes_max, clock, is_pinned, self, order)


class _DeviceFrames(Frames):
    def __init__(self, bytes_max: int, frame_bytes: int, device: KernelMemory) -> None:
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
        device: KernelMemory,
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
        with self._held(object_id) as held:
            if held is None:
                return None
            resident, frames = held
            try:
                pieces = frames.pieces(resident, buffer, offset)
                frames.room.read(pieces)
                return sum(len(piece.host) for piece in pieces)
            except DeviceFault as error:
                raise TierUnavailable(f"{object_id} can't be read from the device: {error}") from error

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


def _parts(pieces: Sequence[DevicePiece]) -> Iterator[DevicePiece]:
    for start, host in pieces:
        for offset in range(0, len(host), STAGE_BYTES):
            yield DevicePiece(start + offset, host[offset : offset + STAGE_BYTES])
