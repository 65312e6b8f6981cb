"""A circuit breaker: after so many faults in a row nobody asks a peer for a while, then one call tries it."""

from __future__ import annotations

import threading

from kvtide.clock import Clock


class Breaker:
    """Closed (calls go through), open (none does), half open (one does). Safe to use from several threads.

    The one that tries is alone for `trial_s` unless it comes back before: a peer that hangs holds up no second caller.
    """

    def __init__(self, faults_max: int, open_s: float, clock: Clock, trial_s: float = 0.0) -> None:
        if faults_max <= 0 or open_s <= 0:
            raise ValueError(f"a breaker needs positive bounds, got {faults_max} faults and {open_s} s")
        self._trial_s = trial_s
        self._faults_max = faults_max
        self._open_s = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._opened_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls are held back now."""
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
