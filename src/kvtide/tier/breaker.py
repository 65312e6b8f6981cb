"""Waits for another server: until the caller's deadline, and not at all while a circuit breaker is open.

Invariant: a call that its caller's deadline ended says nothing of the server that was asked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvtide.clock import Clock

# Of the thread that calls; a stack, a flight and a pool lie in between, for which it is nothing.
_UNTIL_S: ContextVar[float] = ContextVar("until_s", default=math.inf)


class Breaker:
    """Closed (calls go through), open (none does), half open (one does). Safe to use from several threads.

    The one that tries is alone for `trial_s` unless it comes back before: a peer that hangs holds up no second caller.
    """

    def __init__(self, faults_max: int, open_s: float, clock: Clock, trial_s: float = 0.0) -> None:
        self._trial_s = trial_s
        self._faults_max = faults_max
        self._open_s = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._opened_s: float | None = None

    @property
    def is_open(self) -> bool:
        """True if calls are held back now."""
        return self._opened_s is not None

    def allows(self) -> bool:
        """Tell whether a call may go through. One that may while the breaker is open is its trial."""
        with self._lock:
            if self._opened_s is None:
                return True
            now_s = self._clock.monotonic_s()
            if now_s - self._opened_s < self._open_s:
                return False
            self._opened_s = now_s + self._trial_s
            return True

    def note_success(self) -> None:
        """A call came back: everything goes through again."""
        with self._lock:
            self._faults = 0
            self._opened_s = None

    def note_fault(self) -> None:
        """A call failed."""
        with self._lock:
            self._faults += 1
            if self._faults >= self._faults_max:
                self._opened_s = self._clock.monotonic_s()


@contextmanager
def until(deadline_s: float) -> Iterator[None]:
    """Let no call of this thread wait longer, by the monotonic clock, for the time of the `with`."""
    before = _UNTIL_S.set(deadline_s)
    try:
        yield
    finally:
        _UNTIL_S.reset(before)


def caller_deadline_s() -> float:
    """Return until when the caller waits: infinity if it did not say."""
    return _UNTIL_S.get()
