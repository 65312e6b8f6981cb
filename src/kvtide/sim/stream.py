"""Plays a request over a link with the real planner, and what no planner can beat.

Time is counted, not measured. The link carries one fetch after the other without gaps, as several in flight make it; a
cancelled one stops at once. The engine computes one chunk after the other and can be stopped between two layers. Text,
requests and decoding take no time.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from kvtide.sim.links import Link
from kvtide.stream.bandwidth import Estimator
from kvtide.stream.plan import Fetch, Plan, Policy, Progress, Request, is_ready, mean_kl

__all__ = ["Outcome", "play"]


class Outcome(NamedTuple):
    """How a request went: when the context was ready, at which loss, how much of it was computed or sent in vain."""

    ready_s: float
    kl: float
    computed_tokens: int
    wasted_bytes: int


class _Flight(NamedTuple):
    fetch: Fetch
    start_s: float
    stop_s: float


class _Player:
    """One request: what is under way on the link and in the engine, and the moments at which something ends."""

    def __init__(self, policy: Policy, request: Request, link: Link, start_s: float, estimator: Estimator) -> None:
        self._policy = policy
        self._request = request
        self._link = link
        self._start_s = start_s
        self._estimator = estimator
        self.progress = Progress.start(request)
        self._queue: deque[Fetch] = deque()
        self._flight: _Flight | None = None
        self._given: deque[int] = deque()
        self._engine_stop_s: float | None = None
        self.wasted_bytes = 0

    def run(self, latency_s: float) -> Progress:
        """Play until the engine starts. The first byte comes after `latency_s`."""
        link_free_s = latency_s
        self._replan()
        while not is_ready(self._request, self.progress):
            if not self._queue and self._flight is None:
                self._replan()
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
        self.progress = self.progress.at(now_s, self._estimator.bytes_per_s())

    def _replan(self) -> None:
        plan: Plan = self._policy.plan(self._request, self.progress)
        self._queue = deque(plan.fetches)
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
            chunk = self._request.chunks[self._given[0]]
            self._engine_stop_s = self.progress.now_s + self._request.prefill.seconds(chunk.start, chunk.stop)

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
        self.progress = self.progress.computing_done(self._given.popleft())
        self._replan()

    def _cancel(self, now_s: float) -> None:
        if self._flight:
            start_s = self._start_s + self._flight.start_s
            self.wasted_bytes += max(0, round(self._link.carried(self._start_s + now_s) - self._link.carried(start_s)))
            self._flight = None


def play(
    policy: Policy, request: Request, link: Link, start_s: float, estimator: Estimator, latency_s: float = 0.0
) -> Outcome:
    """Play one request from `start_s` of the link on, until the engine starts."""
    player = _Player(policy, request, link, start_s, estimator)
    progress = player.run(latency_s)
    computed = sum(request.chunks[chunk].tokens for chunk in progress.computed)
    return Outcome(progress.now_s, mean_kl(request, progress), computed, player.wasted_bytes)
