"""How many requests each owner may make: a token bucket each.

Invariant: a bucket that is full again is forgotten, so that names made up cost nothing for longer than they are used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvtide.errors import RequestRefused

# So few are kept without a look at whether they are full again.
_KNOWN_MIN = 64


class Rates:
    """Lets an owner make `requests_s()` requests a second, as it is now, with a burst of one second's."""

    def __init__(self, requests_s: Callable[[], float], owners_max: int = 16384) -> None:
        if owners_max <= 0:
            raise ValueError(f"owners_max must be positive, got {owners_max}")
        self._requests_s = requests_s
        self._owners_max = owners_max
        # What is left of the burst, and when that was; below 0 what others wait for. Last used last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def _burst(self) -> float:
        return max(1.0, self._requests_s())

    def __len__(self) -> int:
        """Return how many buckets are not full, as far as anybody looked."""
        return len(self._left)

    def take(self, owner: str, now_s: float) -> None:
        """Count one request. RequestRefused (429) if the owner has none left."""
        left = self._refilled(owner, now_s)
        self._note(owner, left - 1 if left >= 1 else left, now_s)
        if left < 1:
            raise RequestRefused(429, "too many requests", retry_after_s=(1 - left) / self._requests_s())

    def owe(self, owner: str, now_s: float, count: int) -> None:
        """Count requests that were not asked for one by one, as a debt of one burst at most."""
        self._note(owner, max(-self._burst, self._refilled(owner, now_s) - count), now_s)

    def wait_s(self, owner: str, now_s: float, wait_s_max: float) -> float:
        """Count one request and return how long it has to wait. RequestRefused (429) if that is longer than this."""
        left = self._refilled(owner, now_s) - 1
        if -left / self._requests_s() > wait_s_max:
            raise RequestRefused(429, "too many requests", retry_after_s=-left / self._requests_s())
        self._note(owner, left, now_s)
        return max(0.0, -left / self._requests_s())

    def _refilled(self, owner: str, now_s: float) -> float:
        left, then_s = self._left.get(owner, (self._burst, now_s))
        return min(self._burst, left + (now_s - then_s) * self._requests_s())

    def _note(self, owner: str, left: float, now_s: float) -> None:
        self._left[owner] = (left, now_s)
        self._left.move_to_end(owner)
        while len(self._left) > _KNOWN_MIN:
            oldest = next(iter(self._left))
            if len(self._left) <= self._owners_max and self._refilled(oldest, now_s) < self._burst:
                return
            del self._left[oldest]
