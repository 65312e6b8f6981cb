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
from kvtide.codec.tide.curve import check_quality, units_of_quality
from kvtide.codec.tide.decoder import Decoding, refine
from kvtide.codec.tide.encoder import Levels, first_apart, levels_of, list_section
from kvtide.codec.tide.grid import THIRD, part_bounds, step_of, top_tables
from kvtide.codec.tide.lists import Items
from kvtide.codec.tide.model import ONE, SIXTEENTHS, TideModel
from kvtide.codec.tide.rows import RangeRows, place_groups
from kvtide.codec.tide.section import (
    Base,
    Loudness,
    SectionBytes,
    Steps,
    join_base,
    join_refinement,
    split_base,
    split_refinement,
)
from kvtide.codec.tide.values import Floats, Turns, keep_apart, load_values, put_apart, store_values
from kvtide.errors import CorruptPayload
from kvtide.importance.reorder import CHUNK_TOKENS, chunks_of, packing_orders

__all__ = ["ChunkedRange", "ChunkedTide", "decode_chunked", "encode_chunked"]

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
        turns, found = Turns(meta, self._model.rotary, is_back=True), list[tuple[ChunkedRange, Chunks]]()
        for start, stop in self.ranges:
            order = packing_orders(scores[start:stop].mean(axis=0)[None])[0].astype(np.int64)
            chunks = [order[first:last] for first, last in chunks_of(len(order), self._chunk_tokens)]
            coded = encode_chunked(self._model, self._path, self._steps, meta, bits[start:stop], start, turns, chunks)
            found.append((coded, chunks))
        return found

    def decode(self, meta: BlockMeta, ranges: Sequence[tuple[ChunkedRange, Chunks]], out: BlockBits) -> None:
        """Write the block, each chunk at what is here of it. CorruptPayload as of `decode_chunked`."""
        turns = Turns(meta, self._model.rotary, is_back=False)
        for (start, stop), (found, chunks) in zip(self.ranges, ranges, strict=True):
            decode_chunked(self._model, self._path, meta, found, start, turns, chunks, out[start:stop])


def encode_chunked(
    model: TideModel,
    path: str,
    steps: Steps,
    meta: BlockMeta,
    bits: BlockBits,
    layer_start: int,
    turns: Turns,
    chunks: Chunks,
) -> ChunkedRange:
    """Return base and refinements of the layers in `bits`. UnencodableBlock if a value is not finite."""
    values = load_values(bits, meta.layout.dtype, layer_start, turns)
    apart = first_apart(meta)
    levels = levels_of(model, steps, values, layer_start, apart, path)
    base = SectionBytes(steps, list_section(levels, steps, 0, path).encode(model.tables))
    kept = keep_apart(values, np.flatnonzero(apart).astype(np.uint16))
    refined = {}
    for number, tokens in enumerate(chunks):
        columns = _columns(levels.loudness, tokens)
        part = Levels(
            levels.rows,
            _loudness_of(levels.loudness, columns),
            [np.ascontiguousarray(items[:, columns]) for items in levels.values],
        )
        lists = [list_section(part, steps, refinement, path) for refinement in range(1, steps.refinements + 1)]
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
    rows: RangeRows
    gains: NDArray[np.int64]
    items: Items
    thirds: int


def decode_chunked(
    model: TideModel,
    path: str,
    meta: BlockMeta,
    found: ChunkedRange,
    layer_start: int,
    turns: Turns,
    chunks: Chunks,
    out: BlockBits,
) -> None:
    """Write the layers: each chunk at what is here of it. CorruptPayload if sections do not fit each other."""
    section, base = split_base(memoryview(found.base), out.shape)
    steps = section.steps
    groups = model.groups_of(layer_start, len(out))
    rows = place_groups(groups, steps.final_units + THIRD * steps.refinements)
    items = np.zeros((len(rows.scales), meta.layout.tokens), dtype=np.int16)
    refine(model, path, Decoding(rows, base.loudness, items), steps, 0, section.lists)
    coarse = _Refined(base.loudness.places.astype(np.int64), rows, base.loudness.gains, items, steps.refinements)
    refined = [
        _refined(model, path, steps, base.loudness, coarse, chunks[number], run, (layer_start, len(out)))
        for number, run in found.chunks.items()
        if run
    ]
    is_all = sum(len(each.tokens) for each in refined) == meta.layout.tokens
    pieces = refined if is_all else [coarse, *refined]
    for at, place in enumerate(rows.places):
        group = place.group
        layers = slice(group.layer_start - layer_start, group.layer_stop - layer_start)
        values = np.empty(out[layers].shape, dtype=np.float32)
        for piece in pieces:
            _restore(model, path, steps, piece, at, values)
        put_apart(base.apart.of(layers), values)
        store_values(values, meta.layout.dtype, group.layer_start, turns, out[layers])


def _refined(
    model: TideModel,
    path: str,
    steps: Steps,
    loudness: Loudness,
    coarse: _Refined,
    tokens: NDArray[np.int64],
    run: Sequence[bytes | memoryview],
    layers: tuple[int, int],
) -> _Refined:
    if len(run) > steps.refinements:
        raise CorruptPayload(f"tide: {len(run)} refinements of a chunk where there are {steps.refinements}")
    thirds = steps.refinements - len(run)
    rows = place_groups(model.groups_of(*layers), steps.final_units + THIRD * thirds)
    columns = _columns(loudness, tokens)
    items = np.zeros((len(rows.scales), len(columns)), dtype=np.int16)
    for (_, start, _), (_, before, stop) in zip(rows.places, coarse.rows.places, strict=True):
        items[start : start + stop - before] = coarse.items[before:stop, columns]
    own = _loudness_of(loudness, columns)
    for refinement, data in enumerate(run, 1):
        said = split_refinement(memoryview(data))
        if said.steps != steps:
            raise CorruptPayload(f"tide: a chunk's refinement has {said.steps}, its base {steps}")
        refine(model, path, Decoding(rows, own, items), steps, refinement, said.lists)
    return _Refined(coarse.tokens[columns], rows, own.gains, items, thirds)


def _restore(model: TideModel, path: str, steps: Steps, piece: _Refined, at: int, values: Floats) -> None:
    """Write one group's values of a piece's tokens. values: (layers, 2, tokens, kv_heads, head_dim)."""
    group, start, stop = piece.rows.places[at]
    units = steps.final_units
    mean, weight = model.mean_and_weight(group)
    scale = (step_of(units, piece.thirds) / (SIXTEENTHS * ONE) / weight.astype(np.float64)).astype(np.float32)
    classes = top_tables(piece.rows.scales[start:stop], piece.gains, units + THIRD * piece.thirds)
    layers, _, _, kv_heads, head_dim = values.shape
    count = len(piece.tokens)
    restored = np.empty((2 * layers, count, kv_heads * head_dim), dtype=np.float32)
    places = np.arange(count, dtype=np.uint16)
    matrix = (group.to_values, group.shape, group.order)
    args = (piece.items[start:stop], classes, model.pulls, places, mean, scale, *matrix, restored)
    _native.tide_restore(path, *args)
    values[:, :, piece.tokens] = restored.reshape(layers, 2, count, kv_heads, head_dim)
