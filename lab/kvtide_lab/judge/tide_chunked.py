"""A range of layers whose refinements come by chunks of tokens: finer where it matters.

The base is that of `tide-1`. A chunk's refinement is a section like any other, of the chunk's tokens alone; how loud
they are follows from the base, so that nothing is said twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.profile import Profile
from kvtide.codec.tide.encoder import Levels, first_apart, levels_of, list_section
from kvtide.codec.tide.grid import THIRD, part_bounds
from kvtide.codec.tide.model import TideModel, check_quality, units_of_quality
from kvtide.codec.tide.rows import Decoding, place_groups, refine, restore
from kvtide.codec.tide.section import (
    Base,
    Floats,
    Loudness,
    SectionBytes,
    Steps,
    StoredLayers,
    join_base,
    join_refinement,
    keep_apart,
    split_base,
    split_refinement,
)
from kvtide.errors import CorruptPayload
from kvtide.importance import CHUNK_TOKENS, chunks_of, packing_orders

# Logical tokens of each chunk.
Chunks = Sequence[NDArray[np.int64]]


class ChunkedRange(NamedTuple):
    """A base, and of each chunk its refinements in order, as many as are here."""

    base: bytes | memoryview
    chunks: Mapping[int, Sequence[bytes | memoryview]]


class ChunkedTide:
    """Blocks whose refinements come by chunks, most important tokens first; one order for all layers of a range."""

    def __init__(
        self,
        profile: Profile,
        quality: float,
        refinements: int,
        chunk_tokens: int = CHUNK_TOKENS,
        path: str | None = None,
    ) -> None:
        """quality, refinements, path: as of `TideCodec`, of a block with all refinements of all chunks."""
        check_quality(quality)
        self._model = TideModel(profile)
        self._path = _native.tide_paths()[0] if path is None else path
        self._steps = Steps(units_of_quality(self._model.curve, quality), refinements)
        self._chunk_tokens = chunk_tokens

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of layers."""
        step = self._model.section_layers
        return [(start, start + step) for start in range(0, self._model.profile.layers, step)]

    def encode(self, meta: BlockMeta, bits: BlockBits, scores: Floats) -> list[tuple[ChunkedRange, Chunks]]:
        """Return each range and its chunks' tokens. scores: (layers, tokens)."""
        turns, found = self._model.turns(meta, is_back=True), list[tuple[ChunkedRange, Chunks]]()
        for start, stop in self.ranges:
            order = packing_orders(scores[start:stop].mean(axis=0)[None])[0].astype(np.int64)
            chunks = [order[first:last] for first, last in chunks_of(len(order), self._chunk_tokens)]
            stored = StoredLayers(bits[start:stop], meta.layout.dtype, start, turns)
            found.append((encode_chunked(self._model, self._path, self._steps, meta, stored, chunks), chunks))
        return found

    def decode(self, meta: BlockMeta, ranges: Sequence[tuple[ChunkedRange, Chunks]], out: BlockBits) -> None:
        """Write the block, each chunk at what is here of it. CorruptPayload as of `decode_chunked`."""
        turns = self._model.turns(meta, is_back=False)
        for (start, stop), (found, chunks) in zip(self.ranges, ranges, strict=True):
            target = StoredLayers(out[start:stop], meta.layout.dtype, start, turns)
            decode_chunked(self._model, self._path, found, chunks, target)


def encode_chunked(
    model: TideModel, path: str, steps: Steps, meta: BlockMeta, stored: StoredLayers, chunks: Chunks
) -> ChunkedRange:
    """Return base and refinements of some layers. UnencodableBlock if a value is not finite."""
    apart = first_apart(meta)
    levels = levels_of(model, steps, stored, apart, path)
    base = SectionBytes(steps, list_section(levels, steps, 0, path)[0].encode(model.tables))
    kept = keep_apart(stored, np.flatnonzero(apart).astype(np.uint16), model.octaves_of(stored.layers))
    refined = {}
    for number, tokens in enumerate(chunks):
        columns = _columns(levels.loudness, tokens)
        part = Levels(
            levels.rows,
            _loudness_of(levels.loudness, columns),
            [np.ascontiguousarray(items[:, columns]) for items in levels.values],
            levels.fit,
        )
        lists = [list_section(part, steps, refinement, path)[0] for refinement in range(1, steps.refinements + 1)]
        refined[number] = [join_refinement(SectionBytes(steps, each.encode(model.tables))) for each in lists]
    return ChunkedRange(join_base(base, Base(levels.loudness, kept)), refined)


def _columns(loudness: Loudness, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where tokens stand in the base's order, ascending."""
    places = np.argsort(loudness.places, kind="stable")
    return np.sort(places[tokens])


def _loudness_of(loudness: Loudness, columns: NDArray[np.int64]) -> Loudness:
    """Return the loudness of some columns, cut into parts of their own: what the base says in the mean."""
    of_column = loudness.gains[loudness.parts[loudness.places[columns]]]
    bounds = part_bounds(len(columns))
    sizes = np.diff(bounds)
    sums = np.add.reduceat(np.append(of_column, 0), np.minimum(bounds[:-1], len(columns)))
    gains = np.where(sizes > 0, np.floor_divide(2 * sums + sizes, np.maximum(2 * sizes, 1)), 0)
    return Loudness(np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes), gains.astype(np.int64))


class _Refined(NamedTuple):
    """Some tokens at a step of their own."""

    tokens: NDArray[np.int64]
    work: Decoding
    thirds: int


def decode_chunked(model: TideModel, path: str, found: ChunkedRange, chunks: Chunks, target: StoredLayers) -> None:
    """Write the layers: each chunk at what is here of it. CorruptPayload if sections do not fit each other."""
    section, base = split_base(memoryview(found.base), target.bits.shape)
    steps = section.steps
    rows = place_groups(model, target.layer_start, steps.final_units + THIRD * steps.refinements)
    # Every row gets a top value before anything reads it.
    coarse = Decoding(rows, base.loudness, np.empty((len(rows.scales), target.bits.shape[2]), dtype=np.int16))
    refine(model, path, coarse, 0, section)
    refined = [
        _refined(model, path, steps, coarse, chunks[number], run, target.layer_start)
        for number, run in found.chunks.items()
        if run
    ]
    if sum(len(each.tokens) for each in refined) < target.bits.shape[2]:
        restore(model, path, coarse, (steps, steps.refinements), base.apart, target)
    for tokens, work, thirds in refined:
        piece = target.at(tokens)
        restore(model, path, work, (steps, thirds), base.apart.at(tokens), piece)
        target.bits[:, :, tokens] = piece.bits


def _refined(
    model: TideModel,
    path: str,
    steps: Steps,
    coarse: Decoding,
    tokens: NDArray[np.int64],
    run: Sequence[bytes | memoryview],
    layer_start: int,
) -> _Refined:
    if len(run) > steps.refinements:
        raise CorruptPayload(f"tide: {len(run)} refinements of a chunk where there are {steps.refinements}")
    thirds = steps.refinements - len(run)
    rows = place_groups(model, layer_start, steps.final_units + THIRD * thirds)
    columns = _columns(coarse.loudness, tokens)
    items = np.zeros((len(rows.scales), len(columns)), dtype=np.int16)
    for (_, start, _), (_, before, stop) in zip(rows.places, coarse.rows.places, strict=True):
        items[start : start + stop - before] = coarse.items[before:stop, columns]
    work = Decoding(rows, _loudness_of(coarse.loudness, columns), items)
    for refinement, data in enumerate(run, 1):
        said = split_refinement(memoryview(data))
        if said.steps != steps:
            raise CorruptPayload(f"tide: a chunk's refinement has {said.steps}, its base {steps}")
        refine(model, path, work, refinement, said)
    return _Refined(coarse.loudness.places[columns].astype(np.int64), work, thirds)
