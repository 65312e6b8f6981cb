"""Threads for what a tier does behind its callers' backs.

Invariant: work that was taken and has not ended is known, so that it can be waited for; nobody waits for room.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

CLOSE_S_MAX = 30.0
# How long a repeater waits after an error that its action did not expect.
_ERROR_WAIT_S = 5.0

_log = logging.getLogger(__name__)


def started(target: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread and return it; None where the process may have no more."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Background:
    """A pool of threads between `open` and `close`. Work may hold bytes, `bytes_max` in sum, reserved before."""

    def __init__(self, threads: int, name: str, bytes_max: int = 0) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._threads = threads
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._unfinished: set[Future[object]] = set()

    def open(self) -> None:
        """Take work from now on."""
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)

    def close(self) -> None:
        """Take no more work and forget what has not begun. Idempotent; does not wait."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    def reserve(self, size: int) -> bool:
        """Hold bytes for work that is submitted next. False if closed, or others hold too many."""
        with self._lock:
            has_room = self._pool is not None and self._held_bytes + size <= self._bytes_max
            self._held_bytes += size if has_room else 0
        return has_room

    def release(self, size: int) -> None:
        """Give reserved bytes back that no work will use."""
        with self._lock:
            self._held_bytes -= size

    def submit(self, action: Callable[[], object], reserved_bytes: int = 0) -> bool:
        """Do it later, then release what was reserved for it. False, and released, if closed."""
        pool = self._pool
        try:
            future = pool.submit(action) if pool is not None else None
        except RuntimeError:  # closed meanwhile
            future = None
        if future is None:
            self.release(reserved_bytes)
            return False
        with self._lock:
            self._unfinished.add(future)
        future.add_done_callback(partial(self._end, reserved_bytes))
        return True

    def _end(self, reserved_bytes: int, future: Future[object]) -> None:
        with self._lock:
            self._unfinished.discard(future)
            self._held_bytes -= reserved_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was submitted before this call has ended. False if that took longer."""
        with self._lock:
            pending = set(self._unfinished)
        return not wait(pending, timeout_s).not_done

    def check(self) -> None:
        """AssertionError if the accounting is off. Call it while nothing waits."""
        with self._lock:
            assert not self._unfinished
            assert self._held_bytes == 0


class Repeater:
    """A thread that does something over and over between `open` and `close`.

    `action` handles its own faults and returns for how many seconds to wait then; closing ends the wait. An error that
    it does not handle is logged, and the action is done again after five seconds.
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
            wait_s = _ERROR_WAIT_S
            try:
                wait_s = self._action()
            except Exception:  # noqa: BLE001
                _log.exception("%s goes on after an error that it did not expect", self._name)
            self._closing.wait(wait_s)


class LastingFault:
    """Logs a fault that comes again and again as a warning once, then for debugging, until it has gone."""

    def __init__(self, log: logging.Logger, consequence: str) -> None:
        self._log = log
        self._consequence = consequence
        self._is_known = False

    @contextmanager
    def caught(self, *kinds: type[Exception]) -> Iterator[None]:
        """Go on after the `with` when it raises an exception of these kinds; one that ends well ends the fault."""
        try:
            yield
        except kinds as error:
            level = logging.DEBUG if self._is_known else logging.WARNING
            self._log.log(level, "%s: %s", self._consequence, error)
            self._is_known = True
        else:
            self._is_known = False
