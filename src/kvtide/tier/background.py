"""Threads for what a tier does behind its callers' backs.

Invariant: work that was taken and has not ended is known, so that it can be waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

CLOSE_S_MAX = 30.0


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


class Repeater:
    """A thread that does something over and over between `open` and `close`.

    `action` handles its own faults and returns for how many seconds to wait then; closing ends the wait.
    """

    def __init__(self, action: Callable[[], float], name: str) -> None:
        self._action = action
        self._name = name
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin at once. RuntimeError if there is no thread to be had."""
        self._closing.clear()
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Begin nothing more. Does not wait."""
        self._closing.set()

    def close(self) -> None:
        """Stop after what is under way, for which it waits CLOSE_S_MAX. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
            self._thread = None

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._action())


class LastingFault:
    """Logs a fault that comes again and again as a warning once, then for debugging, until it has gone."""

    def __init__(self, log: logging.Logger, consequence: str) -> None:
        self._log = log
        self._consequence = consequence
        self._is_known = False

    @contextmanager
    def caught(self, *kinds: type[Exception]) -> Iterator[None]:
        """Go on behind the `with` after an exception of these kinds; one that ends well ends the fault."""
        try:
            yield
        except kinds as error:
            level = logging.DEBUG if self._is_known else logging.WARNING
            self._log.log(level, "%s: %s", self._consequence, error)
            self._is_known = True
        else:
            self._is_known = False
