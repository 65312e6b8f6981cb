"""A tier around another one, which is slow."""

from kvtide.tier.base import Tier, WrappedTier
from kvtide_lab.wrapped import Sleep


class Slow(WrappedTier):
    """Takes `latency_s` for each verb."""

    def __init__(self, tier: Tier, sleep: Sleep, latency_s: float) -> None:
        super().__init__(tier)
        self._sleep = sleep
        self._latency_s = latency_s

    def before(self, verb: str, size: int) -> None:
        self._sleep(self._latency_s)
