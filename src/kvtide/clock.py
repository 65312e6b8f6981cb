"""Time, passed in: the engine gets the system's clock, tests and the simulator one that they move."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time. `monotonic_s` is for waits and ages, `wall_s` for what people read."""

    def monotonic_s(self) -> float:
        """Return seconds that never go back."""

    def wall_s(self) -> float:
        """Return seconds since the Unix epoch."""


class SystemClock(Clock):
    """The machine's own clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class ManualClock(Clock):
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"a clock moves forward only, got {seconds} s")
        self._now_s += seconds
