"""What the engine takes to compute tokens: linear layers cost the same everywhere, attention grows with position."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["PrefillSpeed"]


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
