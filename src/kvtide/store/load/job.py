"""The subject of a load: the objects of a run of blocks, cut into chunks and steps that a plan can name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec import Codec, EmbeddedCodec
from kvtide.errors import CorruptPayload
from kvtide.plan import PrefillSpeed
from kvtide.plan.base import Chunk, Request
from kvtide.wire import StoredObject

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
    """A request with its bytes: `pieces[chunk][step]` of `objects`."""

    request: Request
    objects: tuple[StoredObject, ...]
    pieces: tuple[tuple[tuple[ObjectRange, ...], ...], ...]

    def asked(self, prefill: PrefillSpeed, deadline_s: float) -> FetchJob:
        """Return the same with another deadline, for an engine of another speed."""
        return replace(self, request=replace(self.request, prefill=prefill, deadline_s=deadline_s))

    def weighed(self, by_block: NDArray[np.float64]) -> FetchJob:
        """Return the same with each chunk's weight, the mean of its blocks'."""
        block_tokens = self.request.tokens // len(by_block)
        chunks = [
            replace(chunk, weight=float(by_block[chunk.start // block_tokens : chunk.stop // block_tokens].mean()))
            for chunk in self.request.chunks
        ]
        return replace(self, request=replace(self.request, chunks=tuple(chunks)))


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
    steps = [_steps(stored, len(kl)) for stored in objects]
    if not steps or any(len(each) != len(steps[0]) for each in steps):
        raise CorruptPayload(f"expected objects with the same refinements, got {[len(each) for each in steps]}")
    job = _job(objects, steps, len(objects), spans, kl, is_layered=True, wish=wish)
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
    return _job(every, steps, blocks, spans, kl, is_layered=False, wish=wish)


def _steps(stored: StoredObject, steps: int) -> list[ObjectRange]:
    """Return the bytes of each refinement: sections stand in that order. The blocks' numbers are filled in later."""
    if steps == 1:
        return [_body(0, stored)]
    pieces = []
    for _, run in groupby(stored.entries, key=lambda entry: entry.id.refinement):
        entries = list(run)
        pieces.append(ObjectRange(0, entries[0].offset, entries[-1].offset + entries[-1].size))
    return pieces


def _body(number: int, stored: StoredObject) -> ObjectRange:
    return ObjectRange(number, stored.entries[0].offset, stored.object_bytes)


def _job(
    objects: Sequence[StoredObject],
    steps: Sequence[Sequence[ObjectRange]],
    blocks: int,
    spans: _Spans,
    kl: Sequence[float],
    is_layered: bool,
    wish: LoadRequest,
) -> FetchJob:
    if len(kl) != len(steps[0]):
        raise ValueError(f"expected a loss for each of {len(steps[0])} steps, got {len(kl)}")
    starts = [stored.meta.start for stored in objects[:blocks]]
    tokens = objects[0].meta.layout.tokens
    if starts != [starts[0] + tokens * i for i in range(blocks)]:
        raise CorruptPayload(f"expected blocks of {tokens} tokens one behind the other, got blocks at {starts}")
    chunks, pieces = [], []
    for start, stop in spans:
        if start % tokens or stop % tokens or not 0 <= start < stop <= blocks * tokens:
            raise ValueError(f"a chunk is whole blocks of {tokens} tokens, got [{start}, {stop}) of {blocks} blocks")
        span = range(start // tokens, stop // tokens)
        of_steps = []
        for step in range(len(kl)):
            found = [steps[block][step] for block in span]
            numbered = [piece._replace(block=block) for block, piece in zip(span, found, strict=True)]
            of_steps.append(tuple(numbered if is_layered else found))
        sizes = tuple(max(1, sum(piece.stop - piece.start for piece in each)) for each in of_steps)
        chunks.append(Chunk(start, stop, sizes, tuple(kl)))
        pieces.append(tuple(of_steps))
    request = Request(tuple(chunks), is_layered, wish.prefill, wish.deadline_s, wish.kl_goal)
    if request.tokens != blocks * tokens:
        raise ValueError(f"the chunks end at token {request.tokens}, the blocks at {blocks * tokens}")
    return FetchJob(request, tuple(objects), tuple(pieces))
