"""Runs a plan for real: several ranges in flight, planned again for each chunk, ended at the deadline.

The caller's thread computes what the plan gives to the engine; a few threads fetch meanwhile. Invariant: a byte that
was handed over is never asked for again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide.clock import Clock
from kvtide.codec import Codec, EmbeddedCodec
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.plan import LinkEstimate, PrefillSpeed
from kvtide.plan.base import (
    Chunk,
    Fetch,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    expected_s,
    is_ready,
    leading_pass,
    mean_kl,
)
from kvtide.tier import started
from kvtide.tier.breaker import until
from kvtide.tier.faults import FaultGuard
from kvtide.tier.source import RangeSource
from kvtide.wire import StoredObject
from kvtide.wire.receiver import Receiver

# Sums of losses may rise by so much.
_ROUNDING = 1e-6
_Spans = Sequence[tuple[int, int]]


class ObjectRange(NamedTuple):
    """Bytes [start, stop) of one of a job's objects."""

    block: int
    start: int
    stop: int


class LoadRequest(NamedTuple):
    """A start for the engine, in seconds from now, the loss at which it may start at once, and how fast it computes."""

    prefill: PrefillSpeed
    deadline_s: float
    kl_goal: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchJob:
    """A request with its bytes: `pieces[chunk][step]` of `objects`.

    At the start the engine has the `computed` chunks, and computes the `begun` ones (`FetchRun.add_computed`).
    """

    request: Request
    objects: tuple[StoredObject, ...]
    pieces: tuple[tuple[tuple[ObjectRange, ...], ...], ...]
    computed: Sequence[int] = ()
    begun: Sequence[int] = ()


def layered_job(
    objects: Sequence[StoredObject],
    spans: _Spans,
    kl: Sequence[float],
    wish: LoadRequest,
    by_block: NDArray[np.float64] | None = None,
) -> FetchJob:
    """Return the job of one layered object a block.

    spans: tokens [start, stop) of the chunks, whole blocks, counted from the first object's on. kl: loss with
    refinement 0, with 0 and 1, and so on; one figure for objects that are used whole. by_block: as in
    `EmbeddedCodec.losses_by_block`, where the place of a block counts; the purpose that loses more is the chunk's.
    ValueError for spans that are not whole blocks or a loss too few or too many; CorruptPayload for objects that are
    not a run of blocks with the same refinements.
    """
    steps = [_steps(block, stored, len(kl)) for block, stored in enumerate(objects)]
    if not steps or any(len(each) != len(steps[0]) for each in steps):
        raise CorruptPayload(f"expected objects with the same refinements, got {[len(each) for each in steps]}")
    job = _job(objects, steps, spans, kl, is_layered=True, wish=wish)
    return job if by_block is None else replace(job, request=_by_place(job.request, by_block))


def _by_place(request: Request, by_block: NDArray[np.float64]) -> Request:
    """Return the request with what each chunk adds to the loss of all, as a mean over its own tokens."""
    chunks, block_tokens = [], request.tokens // by_block.shape[1]
    for chunk in request.chunks:
        span = by_block[:, chunk.start // block_tokens : chunk.stop // block_tokens].sum(axis=1).max(axis=0)
        # Measured laws may rise by a rounding.
        falling = np.minimum.accumulate(span) * request.tokens / chunk.tokens
        chunks.append(replace(chunk, kl=tuple(falling.tolist())))
    whole = sum(chunk.tokens * chunk.kl[-1] for chunk in chunks) / request.tokens
    # Whole objects are what was stored for this goal, whatever the law says of them: nothing better is waited for.
    is_stored_for = request.kl_goal >= request.chunks[0].kl[-1] > 0
    goal = max(request.kl_goal, whole * (1 + _ROUNDING)) if is_stored_for else request.kl_goal
    return replace(request, chunks=tuple(chunks), kl_goal=goal)


def losses_of(stored: StoredObject, codec: Codec | None) -> tuple[float, ...]:
    """Return what an object's block loses with its base, with that and one refinement, and so on.

    One figure for an object that can only be used whole.
    """
    refinements = len({section.refinement for section in stored.section_ids}) - 1
    if not isinstance(codec, EmbeddedCodec):
        return (stored.quality,)
    return tuple(codec.quality_without(stored.quality, lacking) for lacking in range(refinements, -1, -1))


def level_job(
    levels: Sequence[Sequence[StoredObject]], spans: _Spans, kl: Sequence[float], wish: LoadRequest
) -> FetchJob:
    """Return the job of blocks that are stored once for each level, the smallest level first.

    levels: the run's objects at each level. `kl` and errors as for `layered_job`, with a loss for each level.
    """
    blocks = len(levels[0]) if levels else 0
    if not blocks or any(len(level) != blocks for level in levels):
        raise CorruptPayload(f"expected every block at every level, got {[len(level) for level in levels]}")
    every = [stored for level in levels for stored in level]
    steps = [
        [_body(number * blocks + block, stored) for number, stored in enumerate(stored_levels)]
        for block, stored_levels in enumerate(zip(*levels, strict=True))
    ]
    return _job(every, steps, spans, kl, is_layered=False, wish=wish)


def _steps(block: int, stored: StoredObject, steps: int) -> list[ObjectRange]:
    """Return the bytes of each refinement: sections stand in that order."""
    if steps == 1:
        return [_body(block, stored)]
    runs = [list(run) for _, run in groupby(stored.entries, key=lambda entry: entry.id.refinement)]
    return [ObjectRange(block, run[0].offset, run[-1].offset + run[-1].size) for run in runs]


def _body(number: int, stored: StoredObject) -> ObjectRange:
    return ObjectRange(number, stored.entries[0].offset, stored.object_bytes)


def _job(
    objects: Sequence[StoredObject],
    steps: Sequence[Sequence[ObjectRange]],
    spans: _Spans,
    kl: Sequence[float],
    is_layered: bool,
    wish: LoadRequest,
) -> FetchJob:
    """steps: the bytes of each block's steps; the first objects are the blocks, in order."""
    if len(kl) != len(steps[0]):
        raise ValueError(f"expected a loss for each of {len(steps[0])} steps, got {len(kl)}")
    blocks, tokens = len(steps), objects[0].meta.layout.tokens
    starts = [stored.meta.start for stored in objects[:blocks]]
    if starts != [starts[0] + tokens * i for i in range(blocks)]:
        raise CorruptPayload(f"expected blocks of {tokens} tokens one behind the other, got blocks at {starts}")
    chunks, pieces = [], []
    for start, stop in spans:
        if start % tokens or stop % tokens or not 0 <= start < stop <= blocks * tokens:
            raise ValueError(f"a chunk is whole blocks of {tokens} tokens, got [{start}, {stop}) of {blocks} blocks")
        of_steps = tuple(zip(*steps[start // tokens : stop // tokens], strict=True))
        sizes = tuple(max(1, sum(piece.stop - piece.start for piece in each)) for each in of_steps)
        chunks.append(Chunk(start, stop, sizes, tuple(kl)))
        pieces.append(of_steps)
    request = Request(tuple(chunks), is_layered, wish.prefill, wish.deadline_s, wish.kl_goal)
    if request.tokens != blocks * tokens:
        raise ValueError(f"the chunks end at token {request.tokens}, the blocks at {blocks * tokens}")
    return FetchJob(request, tuple(objects), tuple(pieces))


_log = logging.getLogger(__name__)


class Engine(Protocol):
    """Computes tokens on top of what it has; called from the caller's thread."""

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Compute tokens [start, stop) after those that it has.

        `is_wanted` is cheap: asked between two layers, so that no time is lost once the engine should start. False if
        it said no and the tokens are not computed.
        """


class FetchLimits(NamedTuple):
    """Bounds of one load."""

    # Ranges in flight at most; as many are used as the link's bandwidth-delay product needs.
    requests_max: int = 4
    # One range, all its tries included.
    read_s_max: float = 30.0
    # Between two tries.
    retry_s: float = 0.05


class FetchReport(NamedTuple):
    """The course of a load.

    kl: inf unless every chunk is usable, or left to the engine for good. faults: reads that ended early or brought
    damaged bytes. reasons: why things were asked for, or given to the engine, and how many. damaged: objects of which
    a section was not what its table says.
    """

    progress: Progress
    kl: float
    ready_s: float
    received_bytes: int
    faults: int
    reasons: dict[Reason, int]
    damaged: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Flight:
    """One fetch of `size` bytes under way, asked for at `asked_s` by the clock."""

    fetch: Fetch
    size: int
    asked_s: float
    left_bytes: int
    is_wanted: bool = True


@dataclass(eq=False, repr=False)
class FetchRun:
    """One load, from `start` on: threads that fetch, and the caller's, which computes in `until_ready`.

    Everything is read and written under `_changed`.
    """

    _job: FetchJob
    _receivers: Sequence[Receiver]
    _policy: StreamPolicy
    _source: RangeSource
    _link: LinkEstimate
    _clock: Clock
    _limits: FetchLimits
    # When nothing more is fetched, by the clock; what is under way ends then too.
    _give_up_s: float = math.inf

    def __post_init__(self) -> None:
        self._started_s = self._clock.monotonic_s()
        self._changed = threading.Condition()
        job = self._job
        self._progress = Progress.start(job.request).assigning([*job.computed, *job.begun])
        self.add_computed(job.computed)
        self._queue: deque[Fetch] = deque()
        self._reason = Reason.COMPLETE
        self._given: deque[int] = deque()
        self._flights: set[_Flight] = set()
        self._is_over = self._is_broken = False
        # What is not here is the engine's: nothing more is asked for.
        self._is_left = False
        self._received_bytes = self._faults = 0
        self._damaged: set[int] = set()
        self._reasons: Counter[Reason] = Counter()

    def start(self) -> None:
        """Begin to fetch."""
        for number in range(self._limits.requests_max):
            if started(self._fetch_until_over, f"kvtide-fetch-{number}") is None and not number:
                raise RuntimeError("can't start new thread")

    def _now_s(self) -> float:
        return self._clock.monotonic_s() - self._started_s

    def _touch(self) -> None:
        """Bring the progress up to now; what is no longer wanted is told so."""
        was_s, now_s, deadline_s = self._progress.now_s, self._now_s(), self._job.request.deadline_s
        self._progress = self._progress.at(now_s, self._link.estimator.bytes_per_s(), self._coming_s(now_s))
        if was_s < deadline_s <= now_s:
            self._queue.clear()
        for flight in self._flights:
            chunk = flight.fetch.chunk
            if chunk in self._progress.computed or (now_s >= deadline_s and self._progress.is_usable(chunk)):
                flight.is_wanted = False

    def _coming_s(self, now_s: float) -> float | None:
        clock_s, latency_s = self._started_s + now_s, self._link.latency_s
        wanted = [flight for flight in self._flights if flight.is_wanted]
        coming = [expected_s(clock_s, each.asked_s, each.size, each.left_bytes, latency_s) for each in wanted]
        told = [each - self._started_s for each in coming if each is not None]
        return min(told) if 0 < len(wanted) == len(told) else None

    def _replan(self) -> bool:
        """Plan again; tell whether that gave the engine or the link anything to do."""
        plan = self._policy.plan(self._job.request, self._progress)
        self._queue, self._reason = deque(plan.fetches), plan.reason
        if self._clock.monotonic_s() >= self._give_up_s:
            self._queue.clear()
        self._is_left = plan.reason is Reason.LEFT
        if plan.computes:
            self._progress = self._progress.assigning(plan.computes)
            self._reasons[plan.reason] += len(plan.computes)
        self._given.extend(plan.computes)
        return bool(self._queue or plan.computes)

    # The fetching threads.

    def _fetch_until_over(self) -> None:
        """Fetch what the plan says until the load is over; what nobody expects ends it."""
        if not FaultGuard()("fetch", self._fetch, False):
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()

    def _fetch(self) -> bool:
        while (flight := self._next_flight()) is not None:
            deadline_s = min(self._give_up_s, self._clock.monotonic_s() + self._limits.read_s_max)
            pieces = self._job.pieces[flight.fetch.chunk][flight.fetch.step]
            is_whole = all(self._bring(piece, flight, deadline_s) for piece in pieces)
            with self._changed:
                self._link.estimator.add(flight.size - flight.left_bytes, flight.asked_s, self._clock.monotonic_s())
                self._flights.discard(flight)
                self._touch()
                if is_whole:
                    self._arrive(flight.fetch)
                # What was planned before this came is planned again.
                self._queue.clear()
                self._changed.notify_all()
        return True

    def _next_flight(self) -> _Flight | None:
        """Wait for something to fetch; None when the load is over."""
        with self._changed:
            while not self._is_over:
                self._touch()
                if self._has_room():
                    # Only for news: threads that wake each other for nothing take the engine's time.
                    if not self._queue and self._replan():
                        self._changed.notify_all()
                    if self._queue:
                        fetch = self._queue.popleft()
                        self._reasons[self._reason] += 1
                        self._progress = self._progress.asking(fetch)
                        size = self._job.request.chunks[fetch.chunk].sizes[fetch.step]
                        flight = _Flight(fetch, size, self._clock.monotonic_s(), size)
                        self._flights.add(flight)
                        return flight
                self._changed.wait(self._limits.retry_s)
        return None

    def _has_room(self) -> bool:
        outstanding = sum(flight.left_bytes for flight in self._flights)
        return not self._flights or outstanding < self._link.in_flight_bytes

    def _bring(self, piece: ObjectRange, flight: _Flight, deadline_s: float) -> bool:
        """Read a piece to its end, after a fault from where it stopped."""
        object_id, position, asked_s = self._job.objects[piece.block].meta.id, piece.start, math.inf

        def take(part: memoryview) -> bool:
            nonlocal position, asked_s
            with self._changed:
                if part:
                    self._link.latency_s = min(self._link.latency_s, self._clock.monotonic_s() - asked_s)
                    # Further parts say nothing of the latency.
                    asked_s = -math.inf
                is_wanted = self._take(piece.block, position, part, flight)
                position += len(part)
                return is_wanted and self._clock.monotonic_s() < deadline_s

        while position < piece.stop:
            asked_s = self._clock.monotonic_s()
            try:
                with until(deadline_s):
                    is_there = self._source.read_range(object_id, position, piece.stop, take)
                fault = f"{object_id} is not all there"
            except TierUnavailable as error:
                is_there, fault = True, str(error)
            if position < piece.stop and not self._may_go_on(flight, is_there, fault, deadline_s):
                return False
        return flight.is_wanted

    def _may_go_on(self, flight: _Flight, is_there: bool, fault: str, deadline_s: float) -> bool:
        """Tell whether to try again after a read that ended early; waits before that."""
        with self._changed:
            if not flight.is_wanted or self._is_over or self._clock.monotonic_s() >= deadline_s:
                return False
            self._faults += 1
            if self._faults == 1:
                _log.warning("%s; further faults are only counted", fault)
            self._changed.wait_for(lambda: self._is_over, self._limits.retry_s)
            return is_there and not self._is_over

    def _take(self, block: int, position: int, part: memoryview, flight: _Flight) -> bool:
        """Hand bytes to their receiver; False when the flight is no longer wanted."""
        self._received_bytes += len(part)
        flight.left_bytes -= len(part)
        self._touch()
        if part and flight.is_wanted:
            try:
                self._receivers[block].offer_bytes(position, part)
            except CorruptPayload:
                self._damaged.add(block)
        if self._has_room():
            self._changed.notify_all()
        return flight.is_wanted and not self._is_over

    def _arrive(self, fetch: Fetch) -> None:
        """Count a fetch whose bytes are all here, if their checksums hold."""
        for piece in self._job.pieces[fetch.chunk][fetch.step]:
            if not self._receivers[piece.block].has_range(piece.start, piece.stop):
                self._faults += 1
                return
        self._progress = self._progress.arrived(fetch)

    # The caller's thread.

    def add_computed(self, chunks: Sequence[int]) -> None:
        """Take that the engine has chunks which it was given."""
        with self._changed:
            for chunk in chunks:
                self._progress = self._progress.computing_done(chunk)

    def until_ready(self, engine: Engine) -> FetchReport:
        """Have the engine compute what it is given; return when it should start or nothing more can come.

        What then has not arrived is left, and the receivers are the caller's alone.
        """
        try:
            self._compute_until_ready(engine)
        finally:
            self.stop()
        with self._changed:
            rest = [chunk for chunk in range(len(self._progress.here)) if not self._progress.is_usable(chunk)]
            whole = self._progress.left_to_engine(rest) if self._is_left else self._progress
            return FetchReport(
                progress=self._progress,
                kl=mean_kl(self._job.request, whole),
                ready_s=self._now_s(),
                received_bytes=self._received_bytes,
                faults=self._faults,
                reasons=dict(self._reasons),
                damaged=frozenset(self._damaged),
            )

    def _compute_until_ready(self, engine: Engine) -> None:
        while True:
            with self._changed:
                self._touch()
                if self._is_broken or is_ready(self._job.request, self._progress):
                    return
                if not (self._flights or self._queue or self._given or self._replan()):
                    return
                chunks = self._next_pass()
                if not chunks:
                    if self._is_left:
                        return
                    left_s = self._job.request.deadline_s - self._progress.now_s
                    self._changed.wait(min(self._limits.retry_s, left_s) if left_s > 0 else self._limits.retry_s)
                    continue
            first, last = (self._job.request.chunks[chunk] for chunk in (chunks[0], chunks[-1]))
            if engine.compute(first.start, last.stop, lambda: not self.is_ready()):
                self.add_computed(chunks)
                with self._changed:
                    self._touch()
                    self._replan()
                    self._changed.notify_all()

    def is_ready(self) -> bool:
        """Tell whether the engine should start now."""
        with self._changed:
            self._touch()
            return is_ready(self._job.request, self._progress)

    def _next_pass(self) -> tuple[int, ...]:
        if not self._given:
            self._replan()
        if not self._given or not all(self._progress.is_usable(before) for before in range(self._given[0])):
            return ()
        chunks = leading_pass(self._job.request, self._given)
        for _ in chunks:
            self._given.popleft()
        return chunks

    def stop(self) -> None:
        """Let the fetching threads go: none takes a byte after this."""
        with self._changed:
            self._is_over = True
            for flight in self._flights:
                flight.is_wanted = False
            self._changed.notify_all()
