"""Launching kernels: one interface, so that the code around them runs on a GPU and on the tests' twin of one.

Everything is queued on a stream; nothing waits but `Kernels.finish` and what says so.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.codec.entropy import SYMBOLS, RansTables
from kvtide.config import cache_home
from kvtide.engines.paged.device import DeviceStream
from kvtide.errors import DeviceFault
from kvtide_gpu.program import kept_kernels

# 64 registers a thread and 256 threads a block: so many blocks fill a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 4
# What device memory is aligned to inside one upload: streams are read by words, tables by vectors.
ALIGNMENT = 16

# Bytes to be sent, of any shape.
Part = NDArray[Any] | bytes | memoryview


class Opened(ABC):
    """Opens at the `with` and closes after it."""

    @abstractmethod
    def open(self) -> None:
        """Take the resources."""

    @abstractmethod
    def close(self) -> None:
        """Give them back. Idempotent."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor begins, on its device."""
    return int(tensor.data_ptr())


@contextmanager
def device_faults() -> Iterator[None]:
    """Make DeviceFault of what torch says of a device: it has no class for that that all its releases share."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFault(f"{type(error).__name__}: {error}") from error


class Budget(NamedTuple):
    """The share of the device that kernels may take: blocks that run at a time, of 256 threads or 128.

    Kernels walk their jobs in a loop, so that any number is right; fewer blocks leave more to the engine.
    """

    blocks: int

    @classmethod
    def of_multiprocessors(cls, count: int) -> Self:
        """Return what so many multiprocessors hold at a time. The device spreads it over all that it has."""
        return cls(count * BLOCKS_PER_MULTIPROCESSOR).checked()

    def checked(self) -> Self:
        """Return itself. ValueError unless there is a block at least."""
        if self.blocks < 1:
            raise ValueError(f"a budget is at least one block, got {self.blocks}")
        return self


class Kernels(Protocol):
    """A device with the kernels on it. `args` are the fields of the kernel's struct, each of 8 bytes."""

    device: torch.device

    def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
        """Queue a kernel on as many blocks as the budget lets, at most `blocks`. No blocks: nothing."""

    def queue(self) -> AbstractContextManager[Any]:
        """Return a context in which torch queues on the kernels' stream too."""

    def follow(self) -> None:
        """Put what is queued from now on after what torch's current stream has queued so far: the engine's work."""

    def finish(self) -> None:
        """Wait for all that is queued."""

    def mark(self) -> Any:
        """Return an event after all that is queued, None where nothing has to be waited for."""

    def wait_for(self, event: Any) -> None:
        """Put what is queued from now on after an event."""

    def copies(self) -> DeviceStream:
        """Return a new stream for copies to or from the device."""

    def at_current(self) -> Kernels:
        """Return the same kernels on torch's current stream: the engine's work waits for them, and they for it."""

    def beside(self, parts: int) -> Kernels:
        """Return the same kernels on a new stream, with one of so many parts of the budget."""


class Staging:
    """Arrays gathered on the host, to go to the device in one copy. What is added may change until `send`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._parts: list[tuple[int, Part]] = []
        self._size = 0
        self._room: torch.Tensor | None = None

    def add(self, array: Part) -> int:
        """Return where the array will lie, after `base`. Contiguous arrays are not copied before `send`."""
        assert self._room is None, "add before base"
        start = self._size
        self._parts.append((start, array))
        self._size += _room_for(array.nbytes if isinstance(array, np.ndarray) else len(array))
        return start

    def add_all(self, parts: Sequence[Part], sizes: Sequence[int]) -> NDArray[np.uint64]:
        """Return where each of many parts of so many bytes will lie, after `base`."""
        assert self._room is None, "add before base"
        rooms = _room_for(np.array(sizes, dtype=np.int64))
        starts: NDArray[np.int64] = self._size + np.cumsum(rooms) - rooms
        self._parts += zip(starts.tolist(), parts, strict=True)
        self._size += int(rooms.sum())
        return starts.astype(np.uint64)

    @property
    def base(self) -> int:
        """Return the address on the device; nothing can be added from now on."""
        if self._room is None:
            with self._kernels.queue():
                self._room = torch.empty(max(self._size, ALIGNMENT), dtype=torch.uint8, device=self._kernels.device)
        return address(self._room)

    def send(self) -> torch.Tensor:
        """Queue the copy and return it."""
        _ = self.base
        assert self._room is not None
        is_cuda = self._kernels.device.type == "cuda"
        host = torch.empty(len(self._room), dtype=torch.uint8, pin_memory=True) if is_cuda else self._room
        view = host.numpy()
        for start, part in self._parts:
            flat = _bytes_of(part) if isinstance(part, np.ndarray) else np.frombuffer(part, dtype=np.uint8)
            view[start : start + len(flat)] = flat
        if is_cuda:
            with self._kernels.queue():
                self._room.copy_(host, non_blocking=True)
        return self._room


def _room_for(size: Any) -> Any:
    # Something is always readable after an array.
    return (size + ALIGNMENT) // ALIGNMENT * ALIGNMENT


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class CudaKernels(Opened, DeviceStream):
    """Kernels compiled for and loaded on a CUDA device. Use it with `with`."""

    def __init__(self, device: torch.device, budget: Budget, priority: int = 0) -> None:
        """priority: the stream's, as CUDA counts: 0 is the lowest there is, engines that want to go first take -1.

        ValueError for a budget of nothing.
        """
        super().__init__(None)
        self.device = device
        self._budget = budget.checked()
        self._priority = priority
        self._module: Any = None
        self._context: Any = None
        self._functions: dict[str, Any] = {}

    def open(self) -> None:
        """Compile, or read what was compiled before, and load.

        ImportError without cuda-bindings; DeviceFault if the device does not take them.
        """
        from cuda.bindings import driver

        # Makes the context that torch uses the current one.
        torch.zeros(1, device=self.device)
        major, minor = torch.cuda.get_device_capability(self.device)
        machine_code = kept_kernels(f"sm_{major}{minor}", cache_home() / "kernels")
        self._stream = torch.cuda.Stream(self.device, priority=self._priority)
        self._context = _checked(driver.cuCtxGetCurrent())
        self._module = _checked(driver.cuModuleLoadData(machine_code))

    def close(self) -> None:
        """Wait for what is queued and unload. Idempotent."""
        if self._module is None:
            return
        from cuda.bindings import driver

        self.finish()
        _checked(driver.cuCtxSetCurrent(self._context))
        _checked(driver.cuModuleUnload(self._module))
        self._module, self._stream, self._functions = None, None, {}

    def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
        """Queue a kernel; see Kernels."""
        if blocks < 1:
            return
        from cuda.bindings import driver

        assert self._module is not None, "launch before open"
        assert self._stream is not None
        if name not in self._functions:
            self._functions[name] = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        fields = np.array([field % (1 << 64) for field in args], dtype=np.uint64)
        pointers = np.array([fields.ctypes.data], dtype=np.uint64)
        grid = (min(blocks, self._budget.blocks), 1, 1)
        stream, function = self._stream.cuda_stream, self._functions[name]
        # Threads that have not used the device yet have no context of their own.
        _checked(driver.cuCtxSetCurrent(self._context))
        _checked(driver.cuLaunchKernel(function, *grid, threads, 1, 1, 0, stream, pointers.ctypes.data, 0))

    def follow(self) -> None:
        """Go after torch's current stream; see Kernels."""
        assert self._stream is not None, "follow before open"
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copies(self) -> DeviceStream:
        """Return a new stream for copies."""
        return DeviceStream.new(self.device)

    def at_current(self) -> CudaKernels:
        """Return the same kernels on torch's current stream; see Kernels. Only this one is to be closed."""
        found = copy.copy(self)
        found._stream = torch.cuda.current_stream(self.device)
        return found

    def beside(self, parts: int) -> CudaKernels:
        """Return the same kernels on a new stream; see Kernels. Only this one is to be closed."""
        found = copy.copy(self)
        found._stream = torch.cuda.Stream(self.device, priority=self._priority)
        found._budget = Budget(max(1, self._budget.blocks // parts))
        return found


def _checked(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise DeviceFault(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None


STATES_BYTES = 128
THREADS = 256
WARPS = THREADS // 32
# Of a table: RansLane and RansCode of each lane.
LANES_BYTES, CODES_BYTES = 8 * SYMBOLS, 12 * SYMBOLS

# RansStream of kernels/rans.cuh.
STREAM = np.dtype(
    [(name, "<u8") for name in ("stream", "runs", "symbols", "escapes", "tables", "values", "status")]
    + [(name, "<u4") for name in ("stream_bytes", "count", "run_symbols", "escape_count")]
)


def warp_blocks(jobs: int) -> int:
    """Return the blocks that have a warp for each job."""
    return -(-jobs // WARPS)


class DeviceRans:
    """A set of tables on a device, made there when first asked for."""

    def __init__(self, kernels: Kernels, tables: RansTables) -> None:
        self._kernels = kernels
        self._tables = tables
        self._room: torch.Tensor | None = None

    @property
    def lanes(self) -> int:
        """Return the address of the tables for decoding."""
        if self._room is None:
            staging, count = Staging(self._kernels), len(self._tables.rows)
            staging.add(self._tables.rows.astype(np.uint16))
            with self._kernels.queue():
                room = torch.empty(count * (LANES_BYTES + CODES_BYTES), dtype=torch.uint8, device=self._kernels.device)
            # Queued memory is reused after what uses it on the same stream.
            sent = staging.send()
            args = (address(sent), address(room), address(room) + count * LANES_BYTES, count)
            self._kernels.launch("rans_tables", args, warp_blocks(count), THREADS)
            self._room = room
        return address(self._room)

    @property
    def codes(self) -> int:
        """Return the address of the tables for encoding."""
        return self.lanes + len(self._tables.rows) * LANES_BYTES


class Packed(NamedTuple):
    """The ends of rooms put side by side, and where each ends; queued."""

    data: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


def pack(kernels: Kernels, rooms: int, sizes: torch.Tensor, bytes_max: int) -> Packed:
    """Queue moving what lies at the ends of rooms side by side. rooms: address of these ends; sizes: of uint32."""
    with kernels.queue():
        each = sizes.view(torch.int32).to(torch.int64)
        ends = torch.cumsum(each, 0)
        packed = Packed(torch.empty(max(bytes_max, 1), dtype=torch.uint8, device=kernels.device), ends - each, ends)
    args = (rooms, address(sizes), address(packed.starts), len(each), address(packed.data))
    kernels.launch("pack", args, warp_blocks(len(each)), THREADS)
    return packed
