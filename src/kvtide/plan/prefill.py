"""Seconds to compute tokens: linear layers cost the same everywhere, attention grows with position."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What a sample weighs once a newer one has come.
_OLDER_SHARE = 0.8
# Samples whose middles differ by less than this say nothing of growth.
_SPREAD_TOKENS_MIN = 512.0


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """A token at position p takes (1 + p / double_at) / tokens_per_s seconds.

    tokens_per_s: speed at the start of a context. double_at: position at which a token costs twice as much, where
    attention over what came before takes as long as all the rest. ValueError for a speed or position that is not
    positive; `double_at` may be infinite.
    """

    tokens_per_s: float
    double_at: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_s < math.inf:
            raise ValueError(f"tokens_per_s must be positive and finite, got {self.tokens_per_s}")
        if not self.double_at > 0:
            raise ValueError(f"double_at must be positive, got {self.double_at}")

    def seconds(self, start: int, stop: int) -> float:
        """Return what tokens [start, stop) take once all before them are there."""
        assert 0 <= start <= stop
        growth = (stop - start) * (stop + start) / (2 * self.double_at)
        return (stop - start + growth) / self.tokens_per_s

    def reach(self, start: int, seconds: float) -> float:
        """Return the position that computing from `start` reaches after `seconds`, 0 or more; not rounded."""
        assert seconds >= 0
        if math.isinf(self.double_at):
            return start + seconds * self.tokens_per_s
        # Solves (p - start) + (p**2 - start**2) / (2 double_at) = seconds * tokens_per_s for p.
        budget = start + start * start / (2 * self.double_at) + seconds * self.tokens_per_s
        return math.sqrt(self.double_at * self.double_at + 2 * self.double_at * budget) - self.double_at


class PrefillMeter:
    """Learns an engine's speed from what it computed; newer samples weigh more. Not thread-safe."""

    def __init__(self) -> None:
        # Weight, and weighted sums of position, its square, seconds a token, and seconds a token times position.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, start: int, stop: int, seconds: float) -> None:
        """Take the duration of a pass over tokens [start, stop). ValueError for none, or for no time."""
        if not (0 <= start < stop and 0 < seconds < math.inf):
            raise ValueError(f"a pass takes time for some tokens, got [{start}, {stop}) in {seconds} s")
        x, y = (start + stop) / 2, seconds / (stop - start)
        old = (_OLDER_SHARE * each for each in self._sums)
        self._sums = tuple(a + b for a, b in zip(old, (1.0, x, x * x, y, x * y), strict=True))  # type: ignore[assignment]

    def speed(self) -> PrefillSpeed | None:
        """Return the speed that explains the samples, growing with position if they show it; None before the first."""
        weight, x, xx, y, xy = self._sums
        if not weight:
            return None
        flat = PrefillSpeed(weight / y)
        spread = xx / weight - (x / weight) ** 2
        if spread < _SPREAD_TOKENS_MIN**2:
            return flat
        slope = (xy / weight - x * y / weight**2) / spread
        at_start = y / weight - slope * x / weight
        return PrefillSpeed(1 / at_start, at_start / slope) if min(slope, at_start) > 0 else flat
