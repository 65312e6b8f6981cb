"""Objects that are brought into faster tiers ahead of whoever will read them.

Invariant: an object that somebody has begun to read meanwhile is not brought.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvtide.tier.background import Background
from kvtide.types import ObjectId

PREFETCH_THREADS = 2
PREFETCH_MAX = 64


class Prefetcher:
    """A queue of at most PREFETCH_MAX objects, and the threads that bring them."""

    def __init__(self, bring: Callable[[ObjectId, int], None]) -> None:
        self._bring = bring
        self._background = Background(PREFETCH_THREADS, "kvtide-prefetch")
        self.open, self.close, self.wait = self._background.open, self._background.close, self._background.wait
        self._lock = threading.Lock()
        self._queued: set[ObjectId] = set()

    def discard(self, object_id: ObjectId) -> None:
        """Forget an object that somebody reads now."""
        if self._queued:
            with self._lock:
                self._queued.discard(object_id)

    def queue(self, object_ids: Sequence[ObjectId], size_max: int) -> int:
        """Queue objects of at most `size_max` bytes, in order; return how many there was room for."""
        count = 0
        for object_id in object_ids:
            with self._lock:
                if len(self._queued) >= PREFETCH_MAX:
                    return count
                if object_id in self._queued:
                    continue
                self._queued.add(object_id)
                if not self._background.submit(partial(self._run, object_id, size_max)):
                    self._queued.discard(object_id)
                    return count
            count += 1
        return count

    def _run(self, object_id: ObjectId, size_max: int) -> None:
        with self._lock:
            if object_id not in self._queued:
                return
            self._queued.discard(object_id)
        self._bring(object_id, size_max)
