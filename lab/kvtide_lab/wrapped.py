"""Tiers around another tier, for experiments: one is slow, one fails, one counts.

Invariant: each passes the suite of the tier that it wraps as long as it is told to do nothing.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.tier.base import Buffer, Tier, WrappedTier
from kvtide.types import ObjectId

PACE_S = 2e-3

# Waits so many seconds; `time.sleep` in earnest, a clock's `advance` in a simulation.
Sleep = Callable[[float], None]


class Slow(WrappedTier):
    """Takes `latency_s` for each verb and `bytes_s` for each second of transfer; None is as fast as the tier itself."""

    def __init__(self, tier: Tier, sleep: Sleep, latency_s: float = 0.0, bytes_s: float | None = None) -> None:
        if latency_s < 0 or (bytes_s is not None and bytes_s <= 0):
            raise ValueError(f"latency must not be negative, bandwidth positive, got {latency_s} s, {bytes_s} B/s")
        super().__init__(tier)
        self._sleep = sleep
        self._latency_s = latency_s
        self._bytes_s = bytes_s

    def before(self, verb: str, size: int) -> None:
        """Wait."""
        wait_s = self._latency_s + (size / self._bytes_s if self._bytes_s else 0.0)
        if wait_s:
            self._sleep(wait_s)


class Paced(WrappedTier):
    """Reads as a device of `bytes_s`: all callers share it, one after the other, and pay for what they got."""

    def __init__(self, tier: Tier, clock: Clock, sleep: Sleep, bytes_s: float) -> None:
        if not bytes_s > 0:
            raise ValueError(f"bandwidth must be positive, got {bytes_s} B/s")
        super().__init__(tier)
        self._lock = threading.Lock()
        self._clock = clock
        self._sleep = sleep
        self._bytes_s = bytes_s
        self._free_s = 0.0
        self.read_bytes = 0

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read, then wait until the device would have been done."""
        started_s = self._clock.monotonic_s()
        size = super().get_into(object_id, buffer, offset)
        with self._lock:
            self.read_bytes += size or 0
            done_s = self._free_s = max(self._free_s, started_s) + (size or 0) / self._bytes_s
        # Short waits take longer than they should: they are left to the next read.
        if (wait_s := done_s - self._clock.monotonic_s()) > PACE_S:
            self._sleep(wait_s)
        return size


class Faulty(WrappedTier):
    """Fails a share of its verbs with TierUnavailable, and flips a bit in a share of what is read; seeded."""

    def __init__(self, tier: Tier, rng: random.Random, fault_share: float = 0.0, flip_share: float = 0.0) -> None:
        if not (0 <= fault_share <= 1 and 0 <= flip_share <= 1):
            raise ValueError(f"shares are in [0, 1], got {fault_share} and {flip_share}")
        super().__init__(tier)
        self._lock = threading.Lock()
        self._rng = rng
        self._fault_share = fault_share
        self._flip_share = flip_share
        self.faults = self.flips = 0

    def before(self, verb: str, size: int) -> None:
        """Fail, perhaps."""
        with self._lock:
            is_faulty = self._rng.random() < self._fault_share
            self.faults += is_faulty
        if is_faulty:
            raise TierUnavailable(f"injected fault of {verb} in the {self.name} tier")

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read, and damage what was read, perhaps."""
        size = super().get_into(object_id, buffer, offset)
        with self._lock:
            is_flipped = bool(size) and self._rng.random() < self._flip_share
            position, bit = self._rng.randrange(size) if size else 0, self._rng.randrange(8)
            self.flips += is_flipped
        if is_flipped:
            buffer[position] ^= 1 << bit
        return size


class Counting(WrappedTier):
    """Counts calls and bytes by verb, failed ones included; `bytes` are those that moved."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def before(self, verb: str, size: int) -> None:
        """Count the call."""
        with self._lock:
            self.calls[verb] += 1

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read and count the bytes that came."""
        size = super().get_into(object_id, buffer, offset)
        with self._lock:
            self.bytes["get"] += size or 0
        return size

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store and count the bytes if they were stored."""
        is_stored = super().put_from(object_id, buffer)
        with self._lock:
            self.bytes["put"] += len(buffer) if is_stored else 0
        return is_stored
