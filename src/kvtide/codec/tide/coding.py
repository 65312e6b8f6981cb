"""A range of layers to its base and refinements, and back.

Encoder and decoder list the same rows under the same tables in the same order: `_plain_rows`, then `Plane.state_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.entropy import RansTables
from kvtide.codec.tide import grid
from kvtide.codec.tide.model import ONE, SIXTEENTHS, Place, RangeRows, Stage, TideModel, place_groups
from kvtide.codec.tide.promise import Promise, Seen, promise_of
from kvtide.codec.tide.section import (
    GAIN_UNITS_MAX,
    Apart,
    Base,
    Floats,
    Loudness,
    SectionBytes,
    Steps,
    StoredLayers,
    join_base,
    join_refinement,
    join_state_counts,
    keep_apart,
    split_base,
    split_refinement,
    split_state_counts,
)
from kvtide.errors import CorruptPayload, UnencodableBlock

# The first tokens of a prompt take a share of all later attention, and their keys and values are unlike all others.
APART_TOKENS = 4
# So do other sinks, as in runs of one word, where they may be most of a block: their values are shorter than those of
# its long tokens by 1.55 to 2.3 octaves, on the mean of all layers; those of tokens that are none by 1.28 at most
# (SmolLM2, 33,704 tokens of 22 texts).
_SINK_OCTAVES, _LONG_SHARE = 1.4, 0.9
# Loudness is measured on components of at least a step's scale, or on the so many largest: others are all zeros.
_LOUD_COMPONENTS_MIN = 8
# Coefficients that a trellis takes are 16ths of a step.
_FRACTION_BITS = 4
# The mean of a component's magnitude over its scale.
_USUAL_MAGNITUDE = 0.75
# Half steps stand for themselves.
_NO_PULLS = np.empty((0, 4), dtype=np.int8)

# What is promised of each group of a range or a block, and what was found; see `check_promise`.
Fit = list[tuple[Promise, Seen]]


class Projected(NamedTuple):
    """A range's coefficients in steps, a table for each of its groups, and what is said of its tokens.

    apart: 1 for each token that is kept apart, those that are too loud to be coded among them.
    """

    steps: Steps
    stored: StoredLayers
    apart: NDArray[np.uint8]
    tables: list[grid.Items]
    loudness: Loudness
    fit: Fit


class Levels(NamedTuple):
    """A range's coefficients at each step, the base's first: (components, tokens), tokens by loudness."""

    rows: RangeRows
    loudness: Loudness
    values: list[grid.Items]


def encode_range(model: TideModel, path: str, projected: Projected) -> list[bytes]:
    """Return base and refinements of some layers."""
    levels, (steps, stored, apart, *_) = levels_of(model, projected, path), projected
    sections = []
    for refinement in range(steps.refinements + 1):
        lists, state_counts = list_section(levels, steps, refinement, path)
        sections.append(SectionBytes(steps, lists.encode(model.tables_of(steps)), state_counts))
    kept = keep_apart(stored, np.flatnonzero(apart).astype(np.uint16), model.octaves_of(stored.layers))
    return [join_base(sections[0], Base(levels.loudness, kept)), *map(join_refinement, sections[1:])]


def first_apart(meta: BlockMeta) -> NDArray[np.uint8]:
    """Return 1 for each token of a block that is kept apart whatever its values."""
    apart = np.zeros(meta.layout.tokens, dtype=np.uint8)
    apart[: max(0, APART_TOKENS - meta.start)] = 1
    return apart


def apart_tokens(meta: BlockMeta, bits: BlockBits) -> NDArray[np.uint8]:
    """Return 1 for each token of a block that is kept apart: first ones, and attention sinks wherever they are.

    A sink is found by its values: attention goes there that has nowhere else to go, so that they are next to nothing.
    """
    layout = meta.layout
    squares = np.empty((layout.layers, layout.tokens), dtype=np.float32)
    as_bytes = bits.reshape(-1).view(np.uint8)
    _native.tide_squares(_native.tide_paths()[0], as_bytes, layout.shape, layout.dtype.code, squares)
    rank, share = divmod(_LONG_SHARE * (layout.tokens - 1), 1)
    # The quantile as numpy has it, in a tenth of the time.
    long, longer = np.sort(squares, axis=1)[:, int(rank) : int(rank) + 2].T[[0, -1]]
    with np.errstate(all="ignore"):
        octaves = np.log2(squares / (long + (longer - long) * share)[:, None]).mean(axis=0) / 2
    apart = first_apart(meta)
    apart[octaves < -_SINK_OCTAVES] = 1
    return apart


def project(model: TideModel, steps: Steps, stored: StoredLayers, apart: NDArray[np.uint8], path: str) -> Projected:
    """Return the coefficients of some layers at a step. UnencodableBlock if a value is not finite.

    apart: 1 for each token that is kept apart whatever its coefficients; it stays as it is.
    """
    coded = _coded(model, stored.layer_start, steps.final_units)
    fraction_bits = _FRACTION_BITS if steps.is_trellis else 0
    layers_bits, dtype, layer_start, turns = stored
    tables, fit, apart = [], [], apart.copy()
    for each in coded:
        bits = layers_bits[each.layers.start - layer_start : each.layers.stop - layer_start]
        out = np.empty((len(apart), len(each.row_of)), dtype=np.int16)
        block = (bits.reshape(-1).view(np.uint8), bits.shape, dtype.code, turns.of(each.layers))
        seen = _native.tide_project(path, *block, each.mean, each.scale, *each.matrix, apart, out, fraction_bits)
        if seen is None:
            raise UnencodableBlock("a value is not finite")
        tables.append(out)
        fit.append((each.promise, Seen._make(seen)))
    loud, none = np.zeros(len(apart), dtype=np.float32), np.flatnonzero(apart)
    for found, each in zip(tables, coded, strict=True):
        # A token that only a later group was too loud for.
        found[none] = 0
        _native.tide_loudness(path, found, each.weights, loud)
    return Projected(steps, stored, apart, tables, _parts(loud / np.float32(1 << fraction_bits)), fit)


def levels_of(model: TideModel, projected: Projected, path: str) -> Levels:
    """Return the levels of projected layers."""
    steps, stored, _, tables, loudness, _ = projected
    rows = place_groups(model, stored.layer_start, steps.final_units)
    items, places = np.empty((len(rows.scales), len(loudness.parts)), dtype=np.int16), loudness.places
    for found, each in zip(tables, _coded(model, stored.layer_start, steps.final_units), strict=True):
        _native.tide_arrange(path, found, places, each.row_of, items[each.rows])
    levels = [items]
    if steps.is_trellis:
        assert model.trellis is not None, "steps are of a profile that has one"
        levels = [np.empty_like(items)]
        classes = grid.top_tables(rows.scales, loudness.gains, steps.final_units)
        _native.tide_find_path(path, items, classes, model.trellis.rates, levels[0])
    # The coarsest first; a level is three times the one before it, or one off.
    for _ in range(steps.refinements):
        levels.insert(0, _third_of(levels[0], np.arange(len(items), dtype=np.uint32), path))
    return Levels(rows, loudness, levels)


class _Coded(NamedTuple):
    """Tables shared by all blocks where a group is coded at a step; columns are components, or else values."""

    layers: slice
    rows: slice
    mean: Floats
    scale: Floats
    # As kernels take it. The last part has 1 for each value that is coded; it is empty if columns are components.
    matrix: tuple[grid.Items, tuple[int, int], Stage, NDArray[np.uint8]]
    # By column: its say in how loud a token is, and its row.
    weights: Floats
    row_of: NDArray[np.uint16]
    promise: Promise


def _coded(model: TideModel, layer_start: int, final_units: int) -> list[_Coded]:
    def make() -> list[_Coded]:
        rows = place_groups(model, layer_start, final_units)
        weights = loudness_weights(rows.scales, final_units)
        return [_coded_group(model, place, final_units, weights[place.start : place.stop]) for place in rows.places]

    return model.remembered(("coded", layer_start, final_units), make)


def _coded_group(model: TideModel, place: Place, final_units: int, weights: Floats) -> _Coded:
    group, start, stop = place
    mean, weight = model.mean_and_weight(group)
    count = stop - start
    numbers, ones = np.arange(count, dtype=np.uint16), np.ones(count, dtype=np.uint8)
    is_coded = place.by_column(ones) if group.order.size else np.empty(0, dtype=np.uint8)
    return _Coded(
        layers=group.layers,
        rows=slice(start, stop),
        mean=mean,
        scale=(weight * (SIXTEENTHS / grid.step_of(final_units, 0))).astype(np.float32),
        matrix=(group.to_components, group.matrix_shape[::-1], group.stage(count, is_back=False), is_coded),
        weights=place.by_column(weights),
        row_of=place.by_column(numbers, np.iinfo(np.uint16).max),
        promise=promise_of(place, final_units, model.excess(final_units)),
    )


def loudness_weights(scales: grid.Units, final_units: int) -> Floats:
    """Return what each component's magnitude counts: large ones have a say, beside what is usual for them."""
    over = final_units - scales
    usual_max = int(np.sort(over)[min(_LOUD_COMPONENTS_MIN, len(over)) - 1 :][:1].max(initial=0))
    is_used = over <= usual_max
    usual = np.exp2(over / grid.UNITS) / (max(int(np.count_nonzero(is_used)), 1) * _USUAL_MAGNITUDE)
    return np.where(is_used, usual, 0).astype(np.float32)


def _parts(loud: Floats) -> Loudness:
    """Sort tokens by how large their components are beside what is usual, and cut them into parts."""
    order, bounds = np.argsort(loud, kind="stable"), grid.part_bounds(len(loud))
    parts, gains = np.empty(len(loud), dtype=np.uint8), np.zeros(len(bounds) - 1, dtype=np.int64)
    for part, (start, stop) in enumerate(pairwise(bounds)):
        parts[order[start:stop]] = part
        mean = float(loud[order[start:stop]].mean()) if stop > start else 1.0
        gains[part] = max(-GAIN_UNITS_MAX, min(round(grid.UNITS * np.log2(max(mean, 1e-9))), GAIN_UNITS_MAX))
    return Loudness(parts, gains)


def _third_of(items: grid.Items, which: grid.Which, path: str) -> grid.Items:
    """Return these rows at the next coarser step, in their places. Other rows are any."""
    out = np.empty_like(items)
    _native.tide_third(path, items, which, out)
    return out


def _plain_rows(
    planes: Sequence[grid.Plane], gains: grid.Units, items: Sequence[grid.Items], has_states: bool
) -> Iterator[tuple[int, grid.Rows]]:
    """Yield rows that no trellis' state has a say in, each with the number of its plane. items: of each plane."""
    for number, (plane, here) in enumerate(zip(planes, items, strict=True)):
        is_state_plane = has_states and plane is planes[-1]
        if not (is_state_plane and plane.mode == grid.Mode.CONTEXT):
            yield number, plane.digit_rows(gains, here)
        if not is_state_plane:
            yield number, plane.top_rows(gains, here)


def list_section(levels: Levels, steps: Steps, refinement: int, path: str) -> tuple[grid.Lists, bytes]:
    """Return a section's lists, filled, and how a trellis shares them out; no bytes without one."""
    rows, (_, gains), values = levels
    planes, has_states = rows.planes(steps.base_units, refinement), steps.has_states(refinement)
    after = [values[refinement]]
    for plane in planes[:0:-1]:
        after.insert(0, _third_of(after[0], plane.digits, path))
    before = [values[refinement - 1] if refinement else after[0], *after]
    plain = _plain_rows(planes, gains, after, has_states)
    jobs: list[tuple[grid.Rows | grid.StateRows, grid.Items]] = [(each, before[number]) for number, each in plain]
    if has_states:
        jobs.append((planes[-1].state_rows(gains, after[-1])[0], before[-2]))
    counts = np.zeros(grid.TRELLIS_TABLES if steps.is_trellis else grid.TABLES, dtype=np.int64)
    for each, parents in jobs:
        each.count_into(parents, counts, path)
    lists = grid.Lists(counts, path)
    for each, parents in jobs:
        lists.put(each, parents)
    return lists, join_state_counts(counts[grid.STATE_PAIRS]) if has_states else b""


def decode_range(model: TideModel, path: str, tokens: int, run: Sequence[memoryview], target: StoredLayers) -> None:
    """Write the layers that a base and the refinements after it hold. CorruptPayload if they do not fit each other."""
    section, base = split_base(run[0], target.bits.shape)
    steps, (places, gains) = section.steps, (base.loudness.places, base.loudness.gains)
    missing = steps.refinements + 1 - len(run)
    if missing < 0:
        raise CorruptPayload(f"tide: a refinement {len(run) - 1} where there are {steps.refinements}")
    units, tables = steps.final_units + grid.THIRD * missing, model.tables_of(steps)
    rows = place_groups(model, target.layer_start, units)
    # Every row gets a top value before anything reads it. With all refinements of a trellis here they are half steps.
    items = np.empty((len(rows.scales), tokens), dtype=np.int16)
    for refinement, data in enumerate(run):
        found = split_refinement(data) if refinement else section
        if found.steps != steps:
            raise CorruptPayload(f"tide: refinement {refinement} has {found.steps}, its base {steps}")
        _refine(tables, path, rows, gains, items, refinement, found)
    pulls = _NO_PULLS if steps.is_trellis and not missing else model.pulls
    classes, octaves = grid.top_tables(rows.scales, gains, units), model.octaves_of(target.layers)
    apart = base.apart if octaves is None else base.apart.with_octaves(octaves)
    weights = model.weight[target.layers].astype(np.float64)
    scales = (grid.step_of(steps.final_units, missing) / (SIXTEENTHS * ONE) / weights).astype(np.float32)
    for each in rows.restored:
        here = slice(each.layers.start - target.layer_start, each.layers.stop - target.layer_start)
        coded = (items[each.rows], classes[each.rows], pulls, places)
        mean, scale = model.mean[each.layers].reshape(-1), scales[here].reshape(-1)
        kept = Apart(apart.positions, apart.scales[here], apart.values[here])
        out = (target.bits[here].reshape(-1).view(np.uint8), target.bits[here].shape, target.dtype.code)
        _native.tide_restore(path, *coded, mean, scale, *each.matrix, kept, target.turns.of(each.layers), *out)


def _refine(
    tables: RansTables,
    path: str,
    rows: RangeRows,
    gains: grid.Units,
    items: grid.Items,
    refinement: int,
    section: SectionBytes,
) -> None:
    """Add what a section says to `items`. CorruptPayload if it does not fit what is there."""
    steps, coded, state_counts = section
    planes, has_states = rows.planes(steps.base_units, refinement), steps.has_states(refinement)
    counts, jobs = np.zeros(len(tables.rows), dtype=np.int64), list[grid.Rows | grid.StateRows]()
    if has_states:
        every, under_first = planes[-1].state_rows(gains, items)
        jobs.append(every)
        for each in under_first:
            each.count_into(items, counts, path)
        # Counts so far are of both quantisers.
        counts[grid.STATE_PAIRS] = split_state_counts(state_counts, counts[grid.STATE_PAIRS[:, 0]])
    elif state_counts:
        raise CorruptPayload(f"tide: {len(state_counts)} bytes too many in a section of thirds")
    plain = [each for _, each in _plain_rows(planes, gains, [items] * len(planes), has_states)]
    for each in plain:
        each.count_into(items, counts, path)
    lists = grid.Lists(counts, path)
    lists.decode(tables, coded)
    for job in [*plain, *jobs]:
        lists.take(job)
