"""Memory cut into frames of one size, which objects are laid into: the frames, and one piece of page-aligned memory.

Invariant: free + taken == total, and no frame is in two places. Nothing is allocated for an object but its frames.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.record import PAGE_BYTES

_FRAME_BYTES_MAX = 64 << 10
_FRAMES_WANTED = 4096


class Span(NamedTuple):
    """Frames `[start, stop)`."""

    start: int
    stop: int


def frame_bytes_for(bytes_max: int) -> int:
    """Return a frame size: a page, more where there are so many that the last, half-empty frame does not matter."""
    size = PAGE_BYTES
    while size < _FRAME_BYTES_MAX and bytes_max // (2 * size) >= _FRAMES_WANTED:
        size *= 2
    return size


class Frames:
    """Which frames of at most `bytes_max` are whose, wherever they lie. Not thread-safe: its owner locks."""

    def __init__(self, bytes_max: int, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.frames = bytes_max // self.frame_bytes
        # Ordered, with a gap between any two: neighbours are one run.
        self._free = [Span(0, self.frames)] if self.frames else []
        self._free_frames = self.frames

    def frames_of(self, size: int) -> int:
        """Return how many frames an object of this size takes."""
        return -(-size // self.frame_bytes)

    @property
    def free_frames(self) -> int:
        """Return how many frames are free."""
        return self._free_frames

    def take(self, size: int) -> list[Span] | None:
        """Take frames for an object: one run if there is one, else the longest ones. None if too few are free."""
        wanted = self.frames_of(size)
        if wanted > self._free_frames:
            return None
        self._free_frames -= wanted
        taken = []
        while wanted:
            position = next((i for i, run in enumerate(self._free) if run.stop - run.start >= wanted), None)
            if position is None:
                position = max(range(len(self._free)), key=lambda i: self._free[i].stop - self._free[i].start)
            run = self._free[position]
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
            self._free_frames += run.stop - run.start
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
        assert self._free_frames == sum(run.stop - run.start for run in self._free)
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
