"""Threads for what a tier does behind its callers' backs.

Invariant: work that was taken and has not ended is known, so that it can be waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["Background"]


class Background:
    """A pool of threads between `open` and `close`. Who submits bounds how much."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._unfinished: set[Future[None]] = set()

    def open(self) -> None:
        """Take work from now on."""
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)

    def close(self) -> None:
        """Take no more work and forget what has not begun. Idempotent; does not wait."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    def submit(self, action: Callable[[], None]) -> bool:
        """Do it later. False if closed."""
        pool = self._pool
        if pool is None:
            return False
        try:
            future = pool.submit(action)
        except RuntimeError:  # closed meanwhile
            return False
        with self._lock:
            self._unfinished.add(future)
        future.add_done_callback(self._end)
        return True

    def _end(self, future: Future[None]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was submitted before this call has ended. False if that took longer."""
        with self._lock:
            pending = set(self._unfinished)
        return not wait(pending, timeout_s).not_done
