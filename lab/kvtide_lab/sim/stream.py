"""Plays a request over a link with the real planner, and what no planner can beat.

Time is counted, not measured. The link carries one fetch after the other without gaps, as several in flight make it; a
cancelled one stops at once. The engine computes one pass after the other and can be stopped between two layers. What
else takes time on a machine is in `Costs`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from kvtide.plan.base import (
    Fetch,
    Plan,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    expected_s,
    is_ready,
    leading_pass,
    mean_kl,
)
from kvtide.plan.speeds import Estimator
from kvtide_lab.sim.links import Link


class Costs(NamedTuple):
    """Time besides that of the link's bytes and the engine's tokens; nothing unless it was measured.

    latency_s: until the first byte. decode_token_s: decoding a token of which one step is here, two, and so on: by the
    thread that computes, before it computes what is behind, and at the end.
    """

    latency_s: float = 0.0
    decode_token_s: tuple[float, ...] = ()


class Outcome(NamedTuple):
    """One request's outcome: when the context was decoded, at which loss, how much was computed or sent in vain.

    kl: as the plan counts it. kept: by chunk, the last step that is there; the number of steps where it was computed.
    """

    ready_s: float
    kl: float
    computed_tokens: int
    wasted_bytes: int
    kept: tuple[int, ...] = ()


class _Flight(NamedTuple):
    fetch: Fetch
    start_s: float
    stop_s: float


class _Player:
    """One request: what is under way on the link and in the engine, and the moments at which something ends."""

    def __init__(
        self, policy: StreamPolicy, request: Request, link: Link, start_s: float, estimator: Estimator, costs: Costs
    ) -> None:
        self._policy = policy
        self._request = request
        self._link = link
        self._start_s = start_s
        self._estimator = estimator
        self._costs = costs
        self.progress = Progress.start(request)
        self._queue: deque[Fetch] = deque()
        self._flight: _Flight | None = None
        self._given: deque[int] = deque()
        self._pass: tuple[int, ...] = ()
        self._engine_stop_s: float | None = None
        self._is_left = False
        # Chunks before this one are in the engine, decoded or computed.
        self._front = 0
        self.wasted_bytes = 0

    def run(self) -> Progress:
        """Play until the engine may start; decoding what it has not yet is to follow."""
        link_free_s = self._costs.latency_s
        self._replan()
        while not is_ready(self._request, self.progress):
            if not self._queue and self._flight is None:
                self._replan()
            if self._is_left and self._engine_stop_s is None and not self._given:
                self._compute_rest()
                break
            self._start_fetch(link_free_s)
            self._start_computing()
            if not self._step():
                break
        assert all(self.progress.is_usable(chunk) for chunk in range(len(self._request.chunks)))
        self._cancel(self.progress.now_s)
        return self.progress

    def _step(self) -> bool:
        """Go to the next moment at which something ends; False if nothing is under way."""
        link_s = self._flight.stop_s if self._flight else math.inf
        engine_s = self._engine_stop_s if self._engine_stop_s is not None else math.inf
        if link_s == engine_s == math.inf:
            return False
        deadline_s = self._request.deadline_s
        next_s = min(link_s, engine_s)
        if self.progress.now_s < deadline_s < next_s:
            self._advance(deadline_s)
            self._replan()
        elif link_s <= engine_s:
            self._arrive()
        else:
            self._compute_done()
        return True

    def _advance(self, now_s: float) -> None:
        if self.progress.now_s < self._request.deadline_s <= now_s:
            # What was planned for before the deadline is no longer wanted.
            self._queue.clear()
        self.progress = self.progress.at(now_s, self._estimator.bytes_per_s(), self._coming_s(now_s))

    def _coming_s(self, now_s: float) -> float | None:
        if self._flight is None:
            return None
        fetch, start_s, _ = self._flight
        size = self._request.chunks[fetch.chunk].sizes[fetch.step]
        came = self._link.carried(self._start_s + now_s) - self._link.carried(self._start_s + start_s)
        return expected_s(now_s, start_s, size, min(size, size - came), self._costs.latency_s)

    def _compute_rest(self) -> None:
        """Have the engine compute all that is not usable, in one pass."""
        rest = [chunk for chunk in range(len(self._request.chunks)) if not self.progress.is_usable(chunk)]
        seconds = self.decode_s(rest[0]) + sum(
            self._request.prefill.seconds(self._request.chunks[chunk].start, self._request.chunks[chunk].stop)
            for chunk in rest
        )
        self._cancel(self.progress.now_s)
        self._front = len(self._request.chunks)
        self.progress = self.progress.left_to_engine(rest).at(self.progress.now_s + seconds, None)

    def _replan(self) -> None:
        plan: Plan = self._policy.plan(self._request, self.progress)
        self._queue = deque(plan.fetches)
        self._is_left = plan.reason is Reason.LEFT
        if plan.computes:
            self.progress = self.progress.assigning(plan.computes)
            self._given.extend(plan.computes)
        if self._flight and self._is_useless(self._flight.fetch):
            self._cancel(self.progress.now_s)

    def _is_useless(self, fetch: Fetch) -> bool:
        is_late = self.progress.now_s >= self._request.deadline_s
        return fetch.chunk in self.progress.computed or (is_late and self.progress.is_usable(fetch.chunk))

    def _start_fetch(self, link_free_s: float) -> None:
        if self._flight is None and self._queue:
            fetch = self._queue.popleft()
            start_s = max(self.progress.now_s, link_free_s)
            size = self._request.chunks[fetch.chunk].sizes[fetch.step]
            stop_s = self._link.arrival_s(self._start_s + start_s, size) - self._start_s
            self._flight = _Flight(fetch, start_s, max(start_s, stop_s))
            self.progress = self.progress.asking(fetch)

    def _start_computing(self) -> None:
        if self._engine_stop_s is None and self._given and self._has_all_before(self._given[0]):
            self._pass = leading_pass(self._request, self._given)
            for _ in self._pass:
                self._given.popleft()
            start, stop = self._request.chunks[self._pass[0]].start, self._request.chunks[self._pass[-1]].stop
            seconds = self.decode_s(self._pass[0]) + self._request.prefill.seconds(start, stop)
            self._front = max(self._front, self._pass[0])
            self._engine_stop_s = self.progress.now_s + seconds

    def decode_s(self, stop: int) -> float:
        """Return what it takes to decode the loaded chunks before `stop` that the engine does not have."""
        if not self._costs.decode_token_s:
            return 0.0
        return sum(
            self._request.chunks[chunk].tokens * self._costs.decode_token_s[self.progress.here[chunk] - 1]
            for chunk in range(self._front, stop)
            if self.progress.here[chunk] and chunk not in self.progress.computed
        )

    def _has_all_before(self, chunk: int) -> bool:
        return all(self.progress.is_usable(before) for before in range(chunk))

    def _arrive(self) -> None:
        assert self._flight is not None
        fetch, start_s, stop_s = self._flight
        self._flight = None
        self._estimator.add(self._request.chunks[fetch.chunk].sizes[fetch.step], start_s, stop_s)
        self._advance(stop_s)
        self.progress = self.progress.arrived(fetch)

    def _compute_done(self) -> None:
        assert self._engine_stop_s is not None
        self._advance(self._engine_stop_s)
        self._engine_stop_s = None
        for chunk in self._pass:
            self.progress = self.progress.computing_done(chunk)
        self._front = max(self._front, self._pass[-1] + 1)
        self._replan()

    def _cancel(self, now_s: float) -> None:
        if self._flight:
            start_s = self._start_s + self._flight.start_s
            self.wasted_bytes += max(0, round(self._link.carried(self._start_s + now_s) - self._link.carried(start_s)))
            self._flight = None


def play(
    policy: StreamPolicy, request: Request, link: Link, start_s: float, estimator: Estimator, costs: Costs | None = None
) -> Outcome:
    """Play one request from `start_s` of the link on, until the engine starts."""
    player = _Player(policy, request, link, start_s, estimator, costs or Costs())
    progress = player.run()
    computed = sum(request.chunks[chunk].tokens for chunk in progress.computed)
    ready_s = progress.now_s + player.decode_s(len(request.chunks))
    kept = [request.steps if i in progress.computed else here - 1 for i, here in enumerate(progress.here)]
    return Outcome(ready_s, mean_kl(request, progress), computed, player.wasted_bytes, tuple(kept))
