"""Completes in the background what a load has left unfinished, so that the next one finds all of it nearby.

Invariant: only whole objects are kept, whose every section has passed its checksum; a running load has the link alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvtide.clock import Clock
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.tier import started
from kvtide.tier.breaker import until
from kvtide.tier.faults import FaultGuard
from kvtide.tier.source import RangeSource
from kvtide.types import ObjectId

if TYPE_CHECKING:
    from kvtide.wire.receiver import Receiver

_log = logging.getLogger(__name__)

# Of the objects of loads that wait to be completed.
BYTES_MAX = 512 << 20
# One range.
READ_S_MAX = 30.0
CLOSE_S_MAX = 5.0
# Stores a whole object, and tells whether somebody took it; called in the keeper's thread.
Put = Callable[[ObjectId, bytes], bool]


class PartialLoad(NamedTuple):
    """The objects of a load as far as they came, and the numbers of those that the engine has from there."""

    receivers: Sequence[Receiver]
    blocks: Sequence[int]

    @property
    def object_bytes(self) -> int:
        """Return what the objects take once they are whole."""
        return sum(receiver.stored.object_bytes for receiver in self.receivers)


class Backfill:
    """Owns a thread from the first offer until `close`. Safe to use from several threads."""

    def __init__(self, source: RangeSource, put: Put, clock: Clock, guarded: FaultGuard) -> None:
        self._source = source
        self._put = put
        self._clock = clock
        self._guarded = guarded
        self._changed = threading.Condition()
        self._waiting: deque[PartialLoad] = deque()
        self._loads = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def offer(self, left: PartialLoad) -> bool:
        """Complete a load's objects later; the receivers are the keeper's then. False without room, or a thread."""
        with self._changed:
            if self._is_closing or sum(each.object_bytes for each in [*self._waiting, left]) > BYTES_MAX:
                return False
            self._thread = self._thread or started(self._keep_until_closed, "kvtide-keep")
            if self._thread is None:
                return False
            self._waiting.append(left)
            self._changed.notify_all()
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the link to a load meanwhile."""
        with self._changed:
            self._loads += 1
        try:
            yield
        finally:
            with self._changed:
                self._loads -= 1
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be completed. False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Stop, for at most CLOSE_S_MAX; what waits is dropped. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)

    def _keep_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                left = self._waiting[0]
            for block in left.blocks:
                self._guarded("keep", partial(self._keep, left.receivers[block]), None)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _keep(self, receiver: Receiver) -> None:
        if all(self._bring(receiver, *missing) for missing in receiver.missing_ranges()):
            if (data := receiver.whole()) is not None:
                self._put(receiver.stored.meta.id, data)
            else:
                _log.debug("%s came damaged and is not kept", receiver.stored.meta.id)

    def _bring(self, receiver: Receiver, start: int, stop: int) -> bool:
        """Fetch a range, from where it stopped as long as a read brings anything."""
        position, has_moved = start, True

        def take(part: memoryview) -> bool:
            nonlocal position
            # What comes damaged is missing when all has come.
            with suppress(CorruptPayload):
                receiver.offer_bytes(position, part)
            position += len(part)
            return not (self._loads or self._is_closing)

        while position < stop and has_moved:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or not self._loads)
                if self._is_closing:
                    return False
            before = position
            try:
                with until(self._clock.monotonic_s() + READ_S_MAX):
                    self._source.read_range(receiver.stored.meta.id, position, stop, take)
            except TierUnavailable as error:
                _log.debug("%s", error)
            # Who was stopped for a load is asked again.
            has_moved = position > before or bool(self._loads)
        return position == stop

    def check(self) -> None:
        """AssertionError if more waits than may."""
        with self._changed:
            assert sum(left.object_bytes for left in self._waiting) <= BYTES_MAX
