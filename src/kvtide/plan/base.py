"""Inputs and outputs of plans: values that never change, and one protocol of all policies.

A context is cut into chunks; each can be had in steps over the link (`here`), or computed by the engine (`computed`).
Invariant: a policy reads its arguments and nothing else, so that the simulator and a load over a real link plan alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from kvtide.plan.speeds import PrefillSpeed

CHUNKS_MAX = 8192
# A plan names at most so many fetches: enough to keep a link busy until the next plan.
PLAN_FETCHES_MAX = 8
# Shorter passes waste the engine: SmolLM2 on two cores takes twice as long for 1,024 tokens by 64 as by 256, and by
# 256 no longer than in one pass.
PASS_TOKENS = 256
# Of the time that is left, what a pass of several chunks may take: one that the deadline cuts off is lost, and the last
# ones are short.
_PASS_SHARE = 0.8
# What comes is not judged by less than this.
_PACE_S_MIN = 0.1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) and what they can be had for.

    sizes: bytes of each step. kl: quality loss with the steps up to this one here. Steps of a layered context are base
    and refinements, which add up; otherwise they are levels, smallest first, any one of which will do.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    kl: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Return the chunk's length."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Request:
    """A context to load as a whole into the engine. ValueError for one that can't be.

    deadline_s: when the engine should start, in seconds since the request; 0 for as soon as it can, infinite if only
    `kl_goal` counts: the mean loss at which there is nothing more to wait for.
    """

    chunks: tuple[Chunk, ...]
    is_layered: bool
    prefill: PrefillSpeed
    deadline_s: float
    kl_goal: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < len(self.chunks) <= CHUNKS_MAX:
            raise ValueError(f"a context has 1 to {CHUNKS_MAX} chunks, got {len(self.chunks)}")
        if not (self.deadline_s >= 0 and self.kl_goal >= 0):
            raise ValueError(f"deadline and KL goal must not be negative, got {self.deadline_s} s, {self.kl_goal}")
        if math.isinf(self.deadline_s) and not self.kl_goal:
            raise ValueError("without a deadline a KL goal above 0 must say when to start")
        position, steps = 0, len(self.chunks[0].sizes)
        for chunk in self.chunks:
            if chunk.start != position or chunk.tokens < 1:
                raise ValueError(f"expected a chunk that starts at token {position}, got [{chunk.start}, {chunk.stop})")
            if not steps == len(chunk.sizes) == len(chunk.kl) >= 1:
                raise ValueError(f"expected {steps} steps in every chunk, got {len(chunk.sizes)} and {len(chunk.kl)}")
            if min(chunk.sizes) < 1:
                raise ValueError(f"every step has bytes, got {chunk.sizes}")
            if not (chunk.kl[-1] >= 0 and all(a >= b for a, b in pairwise(chunk.kl))):
                raise ValueError(f"each step must lose no more than the one before it, got KL {chunk.kl}")
            position = chunk.stop

    @property
    def tokens(self) -> int:
        """Return the context's length."""
        return self.chunks[-1].stop

    @property
    def steps(self) -> int:
        """Return how many steps each chunk has."""
        return len(self.chunks[0].sizes)


class Fetch(NamedTuple):
    """One thing to ask for: a refinement of a layered chunk, or a level of another."""

    chunk: int
    step: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a request: steps that are here, under way or computed.

    here, asked: for each chunk the leading steps that are here, and those that are here or asked for; with levels
    level + 1, or 0 for none. computed, assigned: the chunks that the engine has computed, and those given to it.
    coming_s: when something that is asked for will be here at its pace, infinite if nothing comes, None if there is no
    telling. early, early_here: refinements that were asked for, or came, before one that comes before them.
    """

    now_s: float
    here: tuple[int, ...]
    asked: tuple[int, ...]
    computed: frozenset[int] = frozenset()
    assigned: frozenset[int] = frozenset()
    bytes_per_s: float | None = None
    coming_s: float | None = None
    early: frozenset[Fetch] = frozenset()
    early_here: frozenset[Fetch] = frozenset()
    is_layered: bool = False

    @classmethod
    def start(cls, request: Request) -> Progress:
        """Return the state in which nothing is here."""
        nothing = (0,) * len(request.chunks)
        return cls(0.0, nothing, nothing, is_layered=request.is_layered)

    def at(self, now_s: float, bytes_per_s: float | None, coming_s: float | None = None) -> Progress:
        """Return the same at a later time."""
        assert now_s >= self.now_s
        return replace(self, now_s=now_s, bytes_per_s=bytes_per_s, coming_s=coming_s)

    def asking(self, fetch: Fetch) -> Progress:
        """Return the state once `fetch` has been asked for."""
        if self.is_layered and fetch.step > self.asked[fetch.chunk]:
            return replace(self, early=self.early | {fetch})
        return replace(self, asked=_with(self.asked, fetch, self.early))

    def arrived(self, fetch: Fetch) -> Progress:
        """Return the state once `fetch`, asked for before, is here."""
        assert self.asked[fetch.chunk] > fetch.step or fetch in self.early
        if self.is_layered and fetch.step > self.here[fetch.chunk]:
            return replace(self, early_here=self.early_here | {fetch})
        return replace(self, here=_with(self.here, fetch, self.early_here))

    def assigning(self, chunks: Sequence[int]) -> Progress:
        """Return the state once the engine has been given `chunks`."""
        return replace(self, assigned=self.assigned.union(chunks))

    def computing_done(self, chunk: int) -> Progress:
        """Return the state once the engine has computed a chunk given to it."""
        assert chunk in self.assigned
        return replace(self, computed=self.computed | {chunk})

    def left_to_engine(self, chunks: Iterable[int]) -> Progress:
        """Return the state once the engine has computed `chunks`, unasked."""
        return replace(self, computed=self.computed.union(chunks))

    def is_usable(self, chunk: int) -> bool:
        """Tell whether the engine could run with this chunk."""
        return self.here[chunk] > 0 or chunk in self.computed


def following(fetch: Fetch, early: frozenset[Fetch]) -> Fetch:
    """Return the next step of the chunk that is not among the early ones."""
    step = fetch.step + 1
    while early and Fetch(fetch.chunk, step) in early:
        step += 1
    return Fetch(fetch.chunk, step)


def _with(counts: tuple[int, ...], fetch: Fetch, early: frozenset[Fetch]) -> tuple[int, ...]:
    return (*counts[: fetch.chunk], following(fetch, early).step, *counts[fetch.chunk + 1 :])


class Reason(Enum):
    """The reason for a plan."""

    FIRST = "no rate is known yet: a middle level"
    WAIT = "the rate of what is under way decides what comes next"
    TEXT = "recomputing the rest fits the deadline"
    LEVEL = "the best level with which the rest fits the deadline"
    SMALLEST = "nothing fits the deadline: the smallest level"
    BASE = "the base of every chunk comes first"
    DELTAS = "all would come too late: single deltas before the anchors"
    REFINE = "every base is here or asked for: the refinement with the most quality per byte"
    LATE = "the deadline has passed: only what the engine can't start without"
    COMPLETE = "nothing is left to ask for"
    LEFT = "the engine has computed the rest before anything more comes: it is left to it, in one piece"


class Plan(NamedTuple):
    """The next actions: ask for these in this order, have the engine compute these in this order."""

    fetches: tuple[Fetch, ...]
    computes: tuple[int, ...]
    reason: Reason


class StreamPolicy(Protocol):
    """Decides what to do next; holds no state that planning changes."""

    def plan(self, request: Request, progress: Progress) -> Plan:
        """Say what to do beyond what is asked for and given to the engine already; nothing: wait for a change.

        At most `PLAN_FETCHES_MAX` fetches, none twice, of a computed chunk, or of a usable one from the deadline on.
        """


def leading_pass(request: Request, given: Iterable[int]) -> tuple[int, ...]:
    """Return the leading neighbours of `given` of `PASS_TOKENS` at most, one pass; the first may be longer."""
    found: list[int] = []
    for chunk in given:
        stop = request.chunks[chunk].stop
        if found and (chunk != found[-1] + 1 or stop - request.chunks[found[0]].start > PASS_TOKENS):
            break
        found.append(chunk)
    return tuple(found)


def pass_reach(prefill: PrefillSpeed, start: int, left_s: float) -> int:
    """Return the token up to which a pass from `start` ends in time for a deadline in `left_s`, with a reserve."""
    return math.floor(min(start + PASS_TOKENS, prefill.reach(start, _PASS_SHARE * left_s)))


def expected_s(now_s: float, asked_s: float, size: int, left_bytes: float, latency_s: float) -> float | None:
    """Return when what was asked for will be here at its pace; None if too early to say, inf if nothing came."""
    elapsed_s = now_s - asked_s
    if elapsed_s < max(_PACE_S_MIN, 2 * latency_s):
        return None
    return now_s + elapsed_s * left_bytes / (size - left_bytes) if left_bytes < size else math.inf


def mean_kl(request: Request, progress: Progress) -> float:
    """Return the loss by tokens, of a mixture the mean: 0 for computed chunks, inf if a chunk is not usable."""
    return sum(_lost(request, progress)) / request.tokens if _is_usable(progress) else math.inf


def is_ready(request: Request, progress: Progress) -> bool:
    """True once every chunk is usable, and the deadline or the goal is reached, or without a deadline all is here."""
    if not _is_usable(progress):
        return False
    if progress.now_s >= request.deadline_s:
        return True
    lost_max = request.kl_goal * request.tokens
    if all(lost <= lost_max for lost in accumulate(_lost(request, progress))):
        return True
    here = (steps for chunk, steps in enumerate(progress.here) if chunk not in progress.computed)
    return request.is_layered and math.isinf(request.deadline_s) and all(steps == request.steps for steps in here)


def _is_usable(progress: Progress) -> bool:
    # Asked for at every event: the counts alone mostly tell.
    missing = progress.here.count(0)
    if missing > len(progress.computed):
        return False
    return not missing or all(map(progress.is_usable, range(len(progress.here))))


def _lost(request: Request, progress: Progress) -> Iterator[float]:
    for index, (chunk, here) in enumerate(zip(request.chunks, progress.here, strict=True)):
        if index not in progress.computed:
            yield chunk.tokens * chunk.kl[here - 1]


# CacheGen, section 5.3: 1,500 tokens; here in whole blocks.
CHUNK_TOKENS = 1536
# By so much the engine may be slower or faster than measured and still meet the link in short chunks.
_ENGINE_SPREAD = 0.2


def cut(tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """Return [start, stop) of chunks of one length, the last one what is left. ValueError unless both are positive."""
    if min(tokens, chunk_tokens) < 1:
        raise ValueError(f"a context and its chunks have at least one token, got {tokens} and {chunk_tokens}")
    return [(start, min(tokens, start + chunk_tokens)) for start in range(0, tokens, chunk_tokens)]


def cut_for_meeting(
    tokens: int, block_tokens: int, prefill: PrefillSpeed, deadline_s: float, chunk_tokens: int = CHUNK_TOKENS
) -> list[tuple[int, int]]:
    """Return chunks, each cut into blocks if the engine, computing from the start, may be there at the deadline.

    What both ends work on at once is done twice: with chunks of 1,536 tokens up to four points of misses.
    """
    if not 0 < block_tokens <= chunk_tokens:
        raise ValueError(f"a block has 1 to {chunk_tokens} tokens, got {block_tokens}")
    early = prefill.reach(0, (1 - _ENGINE_SPREAD) * deadline_s)
    late = prefill.reach(0, (1 + _ENGINE_SPREAD) * deadline_s)
    chunks = []
    for start, stop in cut(tokens, chunk_tokens):
        step = stop - start if stop <= early or start >= late else block_tokens
        chunks += [(start + a, start + b) for a, b in cut(stop - start, step)]
    return chunks
