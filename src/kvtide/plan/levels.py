"""Policies for contexts that are stored once for each level: pick one for each chunk, before it is sent."""

from __future__ import annotations

from kvtide.plan.base import Fetch, Plan, Progress, Reason, Request


class FixedLevel:
    """The same level for every chunk. ValueError for a negative one."""

    def __init__(self, level: int) -> None:
        if level < 0:
            raise ValueError(f"a level is 0 or more, got {level}")
        self._level = level

    def plan(self, request: Request, progress: Progress) -> Plan:
        """Ask for the next chunk. ValueError if the request has no such level."""
        _check(request)
        if self._level >= request.steps:
            raise ValueError(f"level {self._level} of a context that has {request.steps}")
        chunk = _next_chunk(progress)
        if chunk is None:
            return Plan((), (), Reason.COMPLETE)
        return Plan((Fetch(chunk, self._level),), (), Reason.FIXED)


class CachegenRule:
    """The rule of CacheGen (SIGCOMM'24, section 5.3), as published.

    For each chunk in turn: text, to be recomputed, if recomputing all that remains fits the time that is left; else the
    best level with which all that remains fits at the last chunk's rate; else the smallest. While no rate is known, a
    middle level. A chunk's turn comes when the one before it is here, as only then its rate is known.
    """

    def plan(self, request: Request, progress: Progress) -> Plan:
        """Ask for the next chunk, or have the engine compute it and all after it.

        Text takes no time on the link, so that the chunks after one sent as text would be judged alike.
        """
        _check(request)
        chunk = _next_chunk(progress)
        if chunk is None:
            return Plan((), (), Reason.COMPLETE)
        if progress.here != progress.asked:
            return Plan((), (), Reason.WAIT)
        left_s = request.deadline_s - progress.now_s
        if _recompute_s(request, progress, chunk) <= left_s:
            return Plan((), tuple(range(chunk, len(request.chunks))), Reason.TEXT)
        level, reason = _best_level(request, chunk, left_s, progress.bytes_per_s)
        return Plan((Fetch(chunk, level),), (), reason)


def _check(request: Request) -> None:
    if request.is_layered:
        raise ValueError("expected a context stored in levels, got a layered one")


def _next_chunk(progress: Progress) -> int | None:
    chunks = (chunk for chunk, asked in enumerate(progress.asked) if not asked and chunk not in progress.assigned)
    return next(chunks, None)


def _recompute_s(request: Request, progress: Progress, chunk: int) -> float:
    """Return what the engine takes for chunk and all after it, after what it has been given before."""
    backlog = (request.chunks[other] for other in progress.assigned - progress.computed)
    waiting_s = sum(request.prefill.seconds(other.start, other.stop) for other in backlog)
    return waiting_s + request.prefill.seconds(request.chunks[chunk].start, request.tokens)


def _best_level(request: Request, chunk: int, left_s: float, bytes_per_s: float | None) -> tuple[int, Reason]:
    if bytes_per_s is None:
        return (request.steps - 1) // 2, Reason.FIRST
    for level in range(request.steps - 1, -1, -1):
        if sum(other.sizes[level] for other in request.chunks[chunk:]) <= left_s * bytes_per_s:
            return level, Reason.LEVEL
    return 0, Reason.SMALLEST
