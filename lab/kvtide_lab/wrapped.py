"""Tiers around another tier, for experiments: one has a pace, one counts.

Invariant: each passes the suite of the tier that it wraps as long as it is told to do nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from kvtide.clock import Clock
from kvtide.tier.base import Buffer, Tier, WrappedTier
from kvtide.types import ObjectId

PACE_S = 2e-3

# Waits so many seconds; `time.sleep` in earnest, a clock's `advance` in a simulation.
Sleep = Callable[[float], None]


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


class Watched(WrappedTier):
    """Passes everything on. Subclasses see each of four verbs before it happens, in `before`."""

    def before(self, verb: str) -> None:
        """Called before a verb: `contains`, `get`, `put`, `delete`."""

    def contains(self, object_id: ObjectId) -> bool:
        self.before("contains")
        return super().contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        self.before("get")
        return super().get_into(object_id, buffer, offset)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        self.before("put")
        return super().put_from(object_id, buffer)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        self.before("delete")
        return super().delete(object_id, reason)


class Counting(Watched):
    """Counts calls and bytes by verb, failed ones included; `bytes` are those that moved."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def before(self, verb: str) -> None:
        with self._lock:
            self.calls[verb] += 1

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
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
