"""How many requests each tenant may make: a token bucket each."""

from __future__ import annotations

from kvtide.errors import RequestRefused

__all__ = ["Rates"]


class Rates:
    """Lets a tenant make `requests_s` requests a second, with a burst of one second's. Knows one entry a tenant."""

    def __init__(self, requests_s: float) -> None:
        if requests_s <= 0:
            raise ValueError(f"a rate must be positive, got {requests_s}")
        self._requests_s = requests_s
        # What is left of the burst, and when that was.
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str, now_s: float) -> None:
        """Count one request. RequestRefused (429) if the tenant has none left."""
        burst = max(1.0, self._requests_s)
        left, then_s = self._left.get(tenant, (burst, now_s))
        left = min(burst, left + (now_s - then_s) * self._requests_s)
        self._left[tenant] = (left - 1 if left >= 1 else left, now_s)
        if left < 1:
            raise RequestRefused(429, "too many requests", retry_after_s=(1 - left) / self._requests_s)
