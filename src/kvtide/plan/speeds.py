"""The link's rate, from what arrived and when by the receiver's own clock, and the engine's speed.

Transfers may overlap, as with several requests in flight: each counts from where the one before it stopped, so that
bytes and busy seconds add up whatever the overlap, and idle time between transfers counts for nobody.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Transfers that end closer together than this are one: a clock's step says nothing of a link.
RESOLUTION_S = 1e-6


class HarmonicRate:
    """The harmonic mean of the last rates, weighted by bytes. One sample: the last rate alone, as CacheGen goes by."""

    def __init__(self, samples: int = 5) -> None:
        assert samples > 0
        self._busy_until_s = -math.inf
        self._pending_bytes = 0
        # Bytes and seconds.
        self._samples: deque[tuple[int, float]] = deque(maxlen=samples)

    def add(self, size: int, start_s: float, stop_s: float) -> None:
        """Take `size` bytes received in [start_s, stop_s)."""
        assert size >= 0
        assert -math.inf < start_s <= stop_s < math.inf
        self._pending_bytes += size
        seconds = stop_s - max(start_s, self._busy_until_s)
        if seconds >= RESOLUTION_S and self._pending_bytes:
            self._samples.append((self._pending_bytes, seconds))
            self._busy_until_s, self._pending_bytes = stop_s, 0

    def bytes_per_s(self) -> float | None:
        """Return the rate to expect, None before the first transfer."""
        # At once: other loads add theirs meanwhile.
        samples = [*self._samples]
        return sum(size for size, _ in samples) / sum(seconds for _, seconds in samples) if samples else None


# What a sample weighs once a newer one has come.
_OLDER_SHARE = 0.8
# Samples whose middles differ by less than this say nothing of growth.
_SPREAD_TOKENS_MIN = 512.0


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """A token at position p takes (1 + p / double_at) / tokens_per_s seconds. ValueError unless both are positive.

    double_at: where attention over what came before takes as long as all the rest; may be infinite.
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
