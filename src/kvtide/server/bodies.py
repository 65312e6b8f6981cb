"""Page-aligned buffers for bodies on their way in, of many sizes under one cap, kept for the next body.

Invariant: free + lent <= bytes_max, in whole buffers; a buffer is lent to one holder at a time.
"""

from __future__ import annotations

import threading

from kvtide.tier.buffers import aligned_buffer

__all__ = ["BodyBuffers"]

_SIZE_MIN = 64 << 10
# Sizes of buffers are these parts of a power of two, so that at most a fifth of one is empty.
_STEPS = 4


def _buffer_bytes(size: int) -> int:
    """Return the size of the buffer that a body of `size` bytes gets."""
    if size <= _SIZE_MIN:
        return _SIZE_MIN
    step = 1 << max((size - 1).bit_length() - _STEPS.bit_length(), 0)
    return -(-size // step) * step


class BodyBuffers:
    """Lends buffers of at most `bytes_max` in sum. Thread-safe; never waits."""

    def __init__(self, bytes_max: int) -> None:
        if bytes_max <= 0:
            raise ValueError(f"bytes_max of the body buffers must be positive, got {bytes_max}")
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        self._lent_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Return the bytes that are lent now."""
        return self._lent_bytes

    def take(self, size: int) -> memoryview | None:
        """Return a buffer of at least `size` bytes, its content whatever was left in it; None if the cap is reached."""
        wanted = _buffer_bytes(size)
        with self._lock:
            free = self._free.get(wanted)
            if free:
                self._free_bytes -= wanted
                self._lent_bytes += wanted
                return free.pop()
            if self._lent_bytes + wanted > self._bytes_max:
                return None
            self._make_room(wanted)
            self._lent_bytes += wanted
        return aligned_buffer(wanted)

    def _make_room(self, wanted: int) -> None:
        """Let go of free buffers until `wanted` more bytes fit."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._lent_bytes + self._free_bytes + wanted > self._bytes_max:
                self._free[size].pop()
                self._free_bytes -= size

    def give_back(self, buffer: memoryview) -> None:
        """Take a buffer back, as `take` returned it."""
        with self._lock:
            self._lent_bytes -= len(buffer)
            self._free_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        with self._lock:
            assert self._free_bytes == sum(size * len(buffers) for size, buffers in self._free.items())
            assert all(len(buffer) == size for size, buffers in self._free.items() for buffer in buffers)
            assert self._lent_bytes >= 0
            assert self._free_bytes + self._lent_bytes <= self._bytes_max
