"""A second read at a replica when the first one is late: when that is, and how the two come to one answer.

Invariant: the caller's buffer is written by the first read alone; the second one has its own, of which there are few.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.tier.http.connection import HttpAnswer, Patience
from kvtide.tier.http.peer import Call, Peer

HEDGES_MAX = 2
READS_MIN = 20
READS_KEPT = 256
LATE_S_MIN = 0.01
_PERCENTILE = 0.95
# The percentile is sorted out again after so many reads.
_REFRESH = 16


class ReadTimes:
    """Durations of recent reads, by size in powers of four. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[int, deque[float]] = {}
        self._late: dict[int, float] = {}
        self._count = 0

    def note(self, size: int, duration_s: float) -> None:
        """Note a read that came back."""
        kind = size.bit_length() // 2
        with self._lock:
            times = self._times.setdefault(kind, deque(maxlen=READS_KEPT))
            times.append(duration_s)
            self._count += 1
            if len(times) >= READS_MIN and (kind not in self._late or self._count % _REFRESH == 0):
                self._late[kind] = sorted(times)[int(_PERCENTILE * len(times))]

    def late_s(self, size: int) -> float | None:
        """Return after how many seconds a read of this size is late: the 95th percentile. None if that is unknown."""
        with self._lock:
            late_s = self._late.get(size.bit_length() // 2)
        return None if late_s is None else max(late_s, LATE_S_MIN)


class Hedges:
    """Reads from one peer, and from a replica as well where the first is late. At most HEDGES_MAX of those at once."""

    def __init__(self, clock: Clock, silence_s_max: float) -> None:
        self.times = ReadTimes()
        self._silence_s_max = silence_s_max
        self.started = self.won = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._free = [memoryview(b"")] * HEDGES_MAX
        self._workers: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Start what runs second reads."""
        self._workers = ThreadPoolExecutor(HEDGES_MAX, thread_name_prefix="kvtide-hedge")

    def close(self) -> None:
        """Wait for second reads; their calls end with the peers. Idempotent."""
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        self._workers = None

    def read(self, first: Peer, replica: Peer | None, call: Call, buffer: memoryview, deadline_s: float) -> HttpAnswer:
        """Send `call`, whose answer goes into `buffer`, to `first`; also to the replica, if there is one, once late.

        TierUnavailable if nobody answers.
        """
        started_s = self._clock.monotonic_s()
        patience, second = Patience(self._clock, deadline_s, self._silence_s_max), None
        late_s = self.times.late_s(len(buffer))
        if replica is not None and late_s is not None:
            second = _Second(call, Call(call.method, call.target, call.headers, call.body, None), replica, len(buffer))
            patience.late_s, patience.on_late = started_s + late_s, partial(self._start, second, deadline_s)
        try:
            answer = first.call(call, patience)
        except TierUnavailable:
            if second is None or second.future is None:
                raise
            answer = self._answer_of(second, buffer, deadline_s)
        finally:
            if second is not None:
                self._leave(second)
        self.times.note(len(buffer), self._clock.monotonic_s() - started_s)
        return answer

    def _answer_of(self, second: _Second, buffer: memoryview, deadline_s: float) -> HttpAnswer:
        assert second.future is not None and second.scratch is not None
        try:
            answer = second.future.result(max(0.0, deadline_s - self._clock.monotonic_s()))
        except (FutureTimeoutError, CancelledError) as error:
            raise TierUnavailable("neither the first read nor the second came in time") from error
        size = min(answer.size, len(buffer))
        copy_bytes(buffer[:size], second.scratch[:size])
        with self._lock:
            self.won += 1
        return answer

    def _start(self, second: _Second, deadline_s: float) -> None:
        with self._lock:
            if not self._free or self._workers is None:
                return
            scratch = self._free.pop()
            self.started += 1
        second.scratch = scratch if len(scratch) >= second.size else aligned_buffer(second.size)
        second.call.into = second.scratch[: second.size]
        second.future = self._workers.submit(self._run, second, deadline_s)

    def _run(self, second: _Second, deadline_s: float) -> HttpAnswer:
        try:
            answer = second.replica.call(second.call, Patience(self._clock, deadline_s, self._silence_s_max))
            # The first read ends where it is, and whoever waits for it takes our answer.
            second.first_call.abort()
            return answer
        finally:
            self._end(second, is_by_worker=True)

    def _leave(self, second: _Second) -> None:
        if second.future is not None:
            second.call.abort()
            self._end(second, is_by_worker=False)

    def _end(self, second: _Second, is_by_worker: bool) -> None:
        """Give the scratch buffer back when both its writer and its reader are done with it."""
        with self._lock:
            second.users.discard(is_by_worker)
            if not second.users and second.scratch is not None:
                self._free.append(second.scratch)
                second.scratch = None

    def check(self) -> None:
        """AssertionError if a buffer is lost. Call it while nobody reads."""
        with self._lock:
            assert len(self._free) == HEDGES_MAX


@dataclass(slots=True, eq=False)
class _Second:
    first_call: Call
    call: Call
    replica: Peer
    size: int
    scratch: memoryview | None = None
    future: Future[HttpAnswer] | None = None
    # The worker that fills the buffer, and the caller that takes it from there.
    users: set[bool] = field(default_factory=lambda: {True, False})
