"""A device's memory for the cache's fastest tier: copied through pinned memory, a stream for each direction."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvtide.errors import DeviceFault
from kvtide.tier.buffers import copy_bytes
from kvtide.tier.ram import DevicePiece
from kvtide_gpu.kernels import Kernels, device_faults

# One part is copied by the device while another is filled or emptied by the processor.
STAGE_BYTES = 4 << 20
STAGES = 2


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
    """See DeviceRoom."""

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
    """Memory of the device that kernels run on. See `kvtide.tier.DeviceMemory`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def reserve(self, size: int) -> _Room:
        """Return room for so many bytes. DeviceFault if it can't be had."""
        return _Room(self._kernels, size)


def _parts(pieces: Sequence[DevicePiece]) -> Iterator[DevicePiece]:
    for start, host in pieces:
        for offset in range(0, len(host), STAGE_BYTES):
            yield DevicePiece(start + offset, host[offset : offset + STAGE_BYTES])
