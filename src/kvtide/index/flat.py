"""A flat index: a set of chained keys. Since a key names its whole prefix, no tree is needed to match."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtide.index.base import Match
from kvtide.types import BlockKey

__all__ = ["FlatIndex"]


class FlatIndex:
    """Known keys and pin counts behind one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[BlockKey] = set()
        self._pins: dict[BlockKey, int] = {}

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Find the longest leading run of known blocks."""
        with self._lock:
            count = next((i for i, key in enumerate(keys) if key not in self._known), len(keys))
        return Match(tuple(keys[:count]))

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """Make blocks known."""
        with self._lock:
            self._known.update(keys)

    def remove(self, key: BlockKey) -> None:
        """Forget a block."""
        with self._lock:
            self._known.discard(key)

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Protect blocks from eviction."""
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Take one pin of each block back."""
        with self._lock:
            for key in keys:
                count = self._pins.pop(key, 0)
                assert count > 0, f"unpin of a block that is not pinned: {key.hex()}"
                if count > 1:
                    self._pins[key] = count - 1

    def is_pinned(self, key: BlockKey) -> bool:
        """Tell whether a block is protected from eviction."""
        with self._lock:
            return key in self._pins

    def check(self) -> None:
        """AssertionError if the index contradicts itself."""
        with self._lock:
            assert all(count > 0 for count in self._pins.values())
