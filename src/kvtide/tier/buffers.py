"""Page-aligned memory, new or from the last holders, so that nothing is allocated for each object."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvtide.tier.base import Buffer

# Buffers, records and direct reads are aligned to this; every disk that we know takes it.
ALIGN_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
# Memory that nobody holds and that waits for the next holder, all sizes together.
RECYCLED_BYTES_MAX = 128 << 20
# Recycled sizes are rounded up to this, so that objects which differ by some bytes have each other's memory.
_ROOM_BYTES = 1 << 20
# Linux's MADV_POPULATE_WRITE, of 5.14 and later.
_POPULATE_WRITE = 23


def aligned_buffer(size: int) -> memoryview:
    """Return zeroed memory that begins at a page; its pages are taken at first touch.

    As much of it as fills huge pages asks the kernel for them. It lives as long as the view or a part of it.
    """
    if size < _HUGE_PAGE_BYTES:
        return memoryview(_private(max(size, 1)))[:size]
    memory = _private(size + _HUGE_PAGE_BYTES)
    view = memoryview(memory)
    start = -_address(view) % _HUGE_PAGE_BYTES
    # A kernel without huge pages has small ones, which do.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return view[start : start + size]


class Recycler:
    """Memory of the last holders for the next ones of the same size, at most `bytes_max` of it. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        # A holder's end may come while this thread has the lock: wherever the interpreter collects garbage.
        self._lock = threading.RLock()
        self._free: list[memoryview] = []

    def take(self, size: int) -> memoryview:
        """Return memory that begins at a page, with whatever was left in it."""
        with self._lock:
            found = next((place for place, room in enumerate(self._free) if len(room) == size), None)
            room = aligned_buffer(size) if found is None else self._free.pop(found)
        holder = (ctypes.c_char * size).from_buffer(room)
        weakref.finalize(holder, self._give_back, room).atexit = False
        return memoryview(holder).cast("B")

    def _give_back(self, room: memoryview) -> None:
        with self._lock:
            self._free.append(room)
            # The oldest goes first, so that sizes that nobody wants any more make room.
            while sum(map(len, self._free)) > self._bytes_max:
                self._free.pop(0)


_recycler = Recycler(RECYCLED_BYTES_MAX)


def recycled_buffer(size: int) -> memoryview:
    """Return memory that begins at a page, with whatever was left in it; unheld, it waits for the next holder.

    The system clears new memory: for a block that costs as much as two copies of it, and ten where the machine is a
    virtual one whose host has to find the memory first. Less than 2 MiB comes from the heap and begins anywhere: to map
    256 KiB takes eight times as long as to clear them.
    """
    if size < _HUGE_PAGE_BYTES:
        return memoryview(bytearray(size))
    return _recycler.take(-(-size // _ROOM_BYTES) * _ROOM_BYTES)[:size]


def touch(memory: memoryview, is_wanted: Callable[[], bool]) -> None:
    """Have the system give this memory now and not at first use, while `is_wanted`; what it holds stays.

    Nothing happens where the system can't. The interpreter's lock is free meanwhile.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    first, end = _address(memory) // mmap.PAGESIZE * mmap.PAGESIZE, _address(memory) + len(memory)
    for start in range(first, end, _HUGE_PAGE_BYTES):
        size = min(_HUGE_PAGE_BYTES, end - start)
        if not is_wanted() or madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE):
            return


def _private(size: int) -> mmap.mmap:
    # Python's default is shared memory, which gets no huge pages where /sys/kernel/mm/.../shmem_enabled says never.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(buffer: Buffer) -> int:
    if memoryview(buffer).readonly:
        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    # Asked for every read: a sixth of the time that numpy takes.
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def is_aligned(buffer: Buffer) -> bool:
    """Tell whether a buffer begins at a page, as direct I/O wants it."""
    return not len(buffer) or _address(buffer) % mmap.PAGESIZE == 0


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy between buffers of one size without the GIL."""
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
