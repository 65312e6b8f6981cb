"""Segment files that are open for reading, so that a read need not open one.

Invariant: a descriptor is closed only while nobody reads from it, and at most OPEN_MAX that nobody reads from are open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.tier.files import Files

OPEN_MAX = 64


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A file and how many read from it now. One that is dropped is closed by the last of them."""

    number: int
    descriptor: int
    users: int = 1
    is_dropped: bool = False


class OpenSegments:
    """Opens files at first use and keeps them; those opened first go first. Safe to use from several threads."""

    def __init__(self, files: Files, path: Callable[[int], str]) -> None:
        self._files = files
        self._path = path
        self._lock = threading.Lock()
        self._held: dict[int, OpenSegment] = {}

    def take(self, number: int) -> OpenSegment:
        """Return the segment's file, open around the page cache, until it is given back. OSError as opening has."""
        with self._lock:
            held = self._held.get(number)
            if held is not None:
                held.users += 1
        if held is not None:
            # A store that was removed, or made again under the same name, is not the one that we have open.
            if not self._files.is_unlinked(held.descriptor):
                return held
            self.drop(number)
            self.give_back(held)
        opened = OpenSegment(number, self._files.open_direct(self._path(number), os.O_RDONLY))
        with self._lock:
            closable = [self._drop(number), self._drop(next(iter(self._held))) if len(self._held) >= OPEN_MAX else -1]
            self._held[number] = opened
        self._close(closable)
        return opened

    def give_back(self, segment: OpenSegment) -> None:
        """End the use of a file that `take` returned."""
        with self._lock:
            segment.users -= 1
            is_last = segment.is_dropped and not segment.users
        if is_last:
            self._files.close(segment.descriptor)

    def drop(self, number: int) -> None:
        """Close a segment's file if it is open, once nobody reads from it."""
        with self._lock:
            closable = [self._drop(number)]
        self._close(closable)

    def close(self) -> None:
        """Drop all files."""
        with self._lock:
            closable = [self._drop(number) for number in list(self._held)]
        self._close(closable)

    def _drop(self, number: int) -> int:
        """Forget a file. Return its descriptor if it is to be closed now, else -1."""
        held = self._held.pop(number, None)
        if held is None:
            return -1
        held.is_dropped = True
        return -1 if held.users else held.descriptor

    def _close(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            if descriptor >= 0:
                self._files.close(descriptor)
