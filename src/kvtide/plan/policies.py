"""Streaming policies by the names that users give."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter
from types import MappingProxyType

from kvtide.plan.base import (
    PASS_TOKENS,
    PLAN_FETCHES_MAX,
    Fetch,
    Plan,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    following,
    leading_pass,
    pass_reach,
)

# Of the time that is left, what the engine is counted on to use as its measured speed says. Bases are fetched for
# what it may then not reach; as the deadline comes nearer the rest shrinks to nothing.
_ENGINE_SHARE = 0.95


class _BaseFirst(StreamPolicy):
    """All bases, then refinements in the order of `_rank`. Nothing is computed. ValueError for levels."""

    def plan(self, request: Request, progress: Progress) -> Plan:
        _check_layered(request)
        chunks = range(len(request.chunks))
        return _bases(request, progress, chunks) or self._refinements(request, progress, chunks)

    @abstractmethod
    def _rank(self, request: Request, fetch: Fetch) -> tuple[float, ...]:
        """Return a key: what is to be asked for first has the smallest."""

    def _refinements(self, request: Request, progress: Progress, chunks: Iterable[int]) -> Plan:
        steps, asked = request.steps, progress.asked
        started = (Fetch(at, asked[at]) for at in chunks if 0 < asked[at] < steps and at not in progress.computed)
        waiting = [(self._rank(request, fetch), fetch) for fetch in started]
        heapq.heapify(waiting)
        fetches: list[Fetch] = []
        while waiting and len(fetches) < PLAN_FETCHES_MAX:
            fetch = waiting[0][1]
            fetches.append(fetch)
            after = following(fetch, progress.early)
            if after.step < steps:
                heapq.heapreplace(waiting, (self._rank(request, after), after))
            else:
                heapq.heappop(waiting)
        return Plan(tuple(fetches), (), Reason.REFINE if fetches else Reason.COMPLETE)


class Layered(_BaseFirst):
    """Refinements by quality gained for a byte; of equals the earlier step, then the chunk nearest the end."""

    def _rank(self, request: Request, fetch: Fetch) -> tuple[float, ...]:
        chunk = request.chunks[fetch.chunk]
        gain = chunk.tokens * _gains_per_byte(chunk.sizes, chunk.kl)[fetch.step]
        return (-gain, fetch.step, -fetch.chunk)


class AnchorFirst(_BaseFirst):
    """The order of the CacheGen experiment log: anchors of all chunks, then single deltas, chunk after chunk."""

    def _rank(self, request: Request, fetch: Fetch) -> tuple[float, ...]:
        return (fetch.chunk, fetch.step)


class DeltasFirstWhenSlow(AnchorFirst):
    """The second order of that log: while what is missing would come too late, single deltas, and then the anchors."""

    def plan(self, request: Request, progress: Progress) -> Plan:
        _check_layered(request)
        missing = {
            fetch: chunk.sizes[fetch.step]
            for index, chunk in enumerate(request.chunks)
            if index not in progress.computed
            for fetch in (Fetch(index, step) for step in range(progress.asked[index], request.steps))
            if fetch not in progress.early
        }
        left_s, rate = request.deadline_s - progress.now_s, progress.bytes_per_s
        deltas = [fetch for fetch in missing if fetch.step > 0]
        if deltas and left_s > 0 and rate is not None and sum(missing.values()) > left_s * rate:
            return Plan(tuple(deltas[:PLAN_FETCHES_MAX]), (), Reason.DELTAS)
        return super().plan(request, progress)


class TwoEnded(Layered):
    """Layered from the end of the context, while the engine computes from its start: they meet. Chunks by owner:

        [0, front)        computed: exact
        [front, floor)    the engine gets there by the deadline: loaded last, in case that it doesn't
        [floor, chunks)   loaded: bases from the end on, then refinements

    Before the deadline the engine goes on over what is loaded, since what it computes is exact. After it, or with a
    goal that ends the wait, floor is front and whoever gets to a chunk first has it; the engine's last pass is left to
    it once nothing can come before it ends. A chunk that never comes is computed in the end.
    """

    def plan(self, request: Request, progress: Progress) -> Plan:
        _check_layered(request)
        chunks = len(request.chunks)
        front = next((chunk for chunk in range(chunks) if chunk not in progress.computed), chunks)
        chunk = self._next_to_compute(request, progress, front)
        if chunk is not None and chunk not in progress.assigned and _is_left(chunk, request, progress):
            return Plan((), (), Reason.LEFT)
        computes = () if chunk is None or chunk in progress.assigned else _pass_from(chunk, request, progress)
        for first in (_floor(request, progress, front), front):
            backwards = range(chunks - 1, first - 1, -1)
            plan = _bases(request, progress, backwards) or self._refinements(request, progress, backwards)
            if plan.fetches:
                break
        return plan._replace(computes=computes)

    @staticmethod
    def _next_to_compute(request: Request, progress: Progress, front: int) -> int | None:
        if front == len(request.chunks):
            return None
        chunk = request.chunks[front]
        stop_s = progress.now_s + request.prefill.seconds(chunk.start, chunk.stop)
        if not progress.here[front] or stop_s <= request.deadline_s:
            return front
        return next((chunk for chunk in range(front, len(request.chunks)) if not progress.is_usable(chunk)), None)


def _is_left(chunk: int, request: Request, progress: Progress) -> bool:
    """Tell whether all from `chunk` on is the engine's last pass; never before half of the context is there."""
    start = request.chunks[chunk].start
    is_last = request.tokens - start <= min(start, PASS_TOKENS)
    return is_last and not any(progress.here[chunk:]) and _undisturbed(start, request, progress) == request.tokens


def _undisturbed(start: int, request: Request, progress: Progress) -> int:
    """Return the end of a whole pass from `start` on if nothing comes before it, else `start`: where both ends race."""
    stop = min(request.tokens, start + PASS_TOKENS)
    is_race = request.kl_goal > 0 or progress.now_s >= request.deadline_s
    if not is_race or progress.coming_s is None:
        return start
    return stop if progress.now_s + request.prefill.seconds(start, stop) <= progress.coming_s else start


def _pass_from(chunk: int, request: Request, progress: Progress) -> tuple[int, ...]:
    """Return `chunk` and those after it to compute with it: until the deadline all that ends in time.

    Where both ends race, half of what nobody has begun with, or more if nothing comes meanwhile.
    """
    start, left = request.chunks[chunk].start, range(chunk, len(request.chunks))
    reach = _undisturbed(start, request, progress)
    left_s = request.deadline_s - progress.now_s
    in_time = pass_reach(request.prefill, start, left_s) if 0 < left_s < math.inf else request.tokens
    if not request.kl_goal and progress.now_s < request.deadline_s:
        reach = in_time
    begun = (request.chunks[other].start for other in left if progress.asked[other] or progress.is_usable(other))
    untouched = next(begun, request.tokens) - start
    # What the deadline cuts off is lost, whatever else may end the wait before.
    stop = min(max(reach, start + untouched // 2), in_time)
    fits = takewhile(lambda other: other == chunk or request.chunks[other].stop <= stop, left)
    return leading_pass(request, takewhile(lambda other: other not in progress.assigned, fits))


def _check_layered(request: Request) -> None:
    if not request.is_layered:
        raise ValueError("expected a layered context, got one stored in levels")


def _bases(request: Request, progress: Progress, chunks: Iterable[int]) -> Plan | None:
    """Return a plan for the missing bases, the plan to ask for nothing if it is late, else None."""
    missing = [Fetch(chunk, 0) for chunk in chunks if not progress.asked[chunk] and chunk not in progress.computed]
    is_late = progress.now_s >= request.deadline_s
    if missing:
        return Plan(tuple(missing[:PLAN_FETCHES_MAX]), (), Reason.LATE if is_late else Reason.BASE)
    return Plan((), (), Reason.LATE) if is_late else None


def _floor(request: Request, progress: Progress, front: int) -> int:
    """Return the first chunk that the engine will not have computed by the deadline."""
    left_s = request.deadline_s - progress.now_s
    if request.kl_goal > 0 or left_s <= 0 or front == len(request.chunks):
        return front
    reach = request.prefill.reach(request.chunks[front].start, _ENGINE_SHARE * left_s)
    return bisect_right(request.chunks, reach, lo=front, key=attrgetter("stop"))


@lru_cache(maxsize=4096)
def _gains_per_byte(sizes: tuple[int, ...], kl: tuple[float, ...]) -> tuple[float, ...]:
    """Return for each step what a byte gains, or a byte of it and those after it that make it worthwhile."""
    gains = [0.0]
    for step in range(1, len(sizes)):
        runs = range(step, len(sizes))
        gains.append(max((kl[step - 1] - kl[last]) / sum(sizes[step : last + 1]) for last in runs))
    return tuple(gains)


class CachegenRule(StreamPolicy):
    """The rule of CacheGen (SIGCOMM'24, section 5.3), as published. ValueError for a layered context.

    For each chunk, once the one before is here: text, to be recomputed, if that fits the time for all that remains;
    else the best level with which it fits at the last chunk's rate; else the smallest. A middle one without a rate.
    """

    def plan(self, request: Request, progress: Progress) -> Plan:
        if request.is_layered:
            raise ValueError("expected a context stored in levels, got a layered one")
        waiting = (each for each, asked in enumerate(progress.asked) if not asked and each not in progress.assigned)
        chunk = next(waiting, None)
        if chunk is None:
            return Plan((), (), Reason.COMPLETE)
        if progress.here != progress.asked:
            return Plan((), (), Reason.WAIT)
        left_s = request.deadline_s - progress.now_s
        # All that the engine has been given before comes first.
        given = [*(request.chunks[each] for each in progress.assigned - progress.computed), *request.chunks[chunk:]]
        if sum(request.prefill.seconds(each.start, each.stop) for each in given) <= left_s:
            return Plan((), tuple(range(chunk, len(request.chunks))), Reason.TEXT)
        level, reason = _best_level(request, chunk, left_s, progress.bytes_per_s)
        return Plan((Fetch(chunk, level),), (), reason)


def _best_level(request: Request, chunk: int, left_s: float, bytes_per_s: float | None) -> tuple[int, Reason]:
    if bytes_per_s is None:
        return (request.steps - 1) // 2, Reason.FIRST
    for level in range(request.steps - 1, -1, -1):
        if sum(other.sizes[level] for other in request.chunks[chunk:]) <= left_s * bytes_per_s:
            return level, Reason.LEVEL
    return 0, Reason.SMALLEST


POLICIES: Mapping[str, Callable[[], StreamPolicy]] = MappingProxyType(
    {
        "two-ended": TwoEnded,
        "layered": Layered,
        "cachegen": CachegenRule,
        "anchor-first": AnchorFirst,
        "deltas-first-when-slow": DeltasFirstWhenSlow,
    }
)


def is_by_level(policy: StreamPolicy) -> bool:
    """Tell whether a policy picks levels, and not refinements."""
    return isinstance(policy, CachegenRule)


def policy_named(name: str | None) -> StreamPolicy:
    """Return a policy; None is `two-ended`. ValueError for an unknown name; the message lists the known ones."""
    try:
        return POLICIES[name or "two-ended"]()
    except KeyError:
        raise ValueError(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}") from None
