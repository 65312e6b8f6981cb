"""Sends what a tier evicts to a slower one in the background, instead of losing it.

Invariant: what waits never takes more than `bytes_max`; what finds no room is dropped and counted, nobody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, runtime_checkable

from kvtide.types import ObjectId

DEMOTE_BYTES_MAX = 256 << 20

# Fills a buffer of the object's size with its bytes. False if they can't be had any more.
Fill = Callable[[memoryview], bool]
# Called with an object that is about to be evicted, its size, and how to copy it.
Offer = Callable[[ObjectId, int, Fill], None]


@runtime_checkable
class Evicting(Protocol):
    """A tier that offers what it evicts."""

    def offer_to(self, offer: Offer) -> None:
        """Call this from now on before an object is evicted, under the tier's own locks: it must not call the tier."""


class Demoter:
    """A bounded queue of evicted objects and the thread that stores them elsewhere."""

    def __init__(self, put: Callable[[ObjectId, bytearray], None], bytes_max: int = DEMOTE_BYTES_MAX) -> None:
        if bytes_max <= 0:
            raise ValueError(f"bytes_max of demotion must be positive, got {bytes_max}")
        self._put = put
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: set[Future[None]] = set()
        self._waiting_bytes = 0
        self.demoted = self.dropped = 0

    def open(self) -> None:
        """Start the thread."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvtide-demote")

    def close(self, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s`, and drop the rest. Idempotent."""
        self.flush(timeout_s)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=False, cancel_futures=True)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits. False if that took too long."""
        with self._lock:
            waiting = set(self._waiting)
        return not wait(waiting, timeout_s).not_done

    def offer(self, object_id: ObjectId, size: int, fill: Fill) -> None:
        """Take an object that is about to be evicted, if there is room for it."""
        with self._lock:
            has_room = self._worker is not None and self._waiting_bytes + size <= self._bytes_max
            self._waiting_bytes += size if has_room else 0
            self.dropped += not has_room
        if not has_room:
            return
        data = bytearray(size)
        worker = self._worker
        if worker is None or not fill(memoryview(data)):
            self._end(size, None)
            return
        future = worker.submit(self._send, object_id, data)
        with self._lock:
            self._waiting.add(future)
        future.add_done_callback(lambda done: self._end(size, done))

    def _send(self, object_id: ObjectId, data: bytearray) -> None:
        self._put(object_id, data)
        with self._lock:
            self.demoted += 1

    def _end(self, size: int, future: Future[None] | None) -> None:
        with self._lock:
            self._waiting_bytes -= size
            if future is not None:
                self._waiting.discard(future)

    def check(self) -> None:
        """AssertionError if the accounting is off. Call it while nothing waits."""
        with self._lock:
            assert not self._waiting
            assert self._waiting_bytes == 0
