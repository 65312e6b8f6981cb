"""Tiers around another tier: one is slow, one fails."""

import random
import threading

from kvtide.errors import TierUnavailable
from kvtide.tier.base import Tier, WrappedTier
from kvtide.types import ObjectId
from kvtide_lab.wrapped import Sleep


class Slow(WrappedTier):
    """Takes `latency_s` for each verb."""

    def __init__(self, tier: Tier, sleep: Sleep, latency_s: float) -> None:
        super().__init__(tier)
        self._sleep = sleep
        self._latency_s = latency_s

    def before(self, verb: str, size: int) -> None:
        self._sleep(self._latency_s)


class Faulty(WrappedTier):
    """Fails a share of its verbs with TierUnavailable, and flips a bit in a share of what is read; seeded."""

    def __init__(self, tier: Tier, rng: random.Random, fault_share: float = 0.0, flip_share: float = 0.0) -> None:
        super().__init__(tier)
        self._lock = threading.Lock()
        self._rng = rng
        self._fault_share = fault_share
        self._flip_share = flip_share
        self.faults = self.flips = 0

    def before(self, verb: str, size: int) -> None:
        with self._lock:
            is_faulty = self._rng.random() < self._fault_share
            self.faults += is_faulty
        if is_faulty:
            raise TierUnavailable(f"injected fault of {verb} in the {self.name} tier")

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        size = super().get_into(object_id, buffer, offset)
        with self._lock:
            is_flipped = bool(size) and self._rng.random() < self._flip_share
            position, bit = self._rng.randrange(size) if size else 0, self._rng.randrange(8)
            self.flips += is_flipped
        if is_flipped:
            buffer[position] ^= 1 << bit
        return size
