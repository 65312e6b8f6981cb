"""A range of layers to its base and refinements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockMeta
from kvtide.codec.tide.grid import (
    PARTS,
    STATE_PAIRS,
    TABLES,
    THIRD,
    TRELLIS_TABLES,
    UNITS,
    Items,
    Lists,
    Mode,
    Plane,
    Rows,
    StateRows,
    Units,
    Which,
    digit_tables,
    part_bounds,
    state_digit_tables,
    state_top_tables,
    step_of,
    top_tables,
)
from kvtide.codec.tide.model import ONE, SIXTEENTHS, Place, RangeRows, Stage, TideModel, place_groups
from kvtide.codec.tide.promise import Promise, Seen, promise_of
from kvtide.codec.tide.section import (
    GAIN_UNITS_MAX,
    Apart,
    Base,
    Loudness,
    SectionBytes,
    Steps,
    StoredLayers,
    join_base,
    join_refinement,
    join_state_counts,
    keep_apart,
    load_values,
    split_base,
    split_refinement,
    split_state_counts,
)
from kvtide.errors import CorruptPayload, UnencodableBlock

# The first tokens of a prompt take a share of all later attention, and their keys and values are unlike all others.
APART_TOKENS = 4
# Behind the first one, a token whose values have no more than so many times the variance of others is like them.
_USUAL_ENERGY_MAX = 4.0

# Loudness is measured on components of at least a step's scale, or on the so many largest: others are all zeros.
_LOUD_COMPONENTS_MIN = 8
# Of coefficients that a trellis takes: they are 16ths of a step.
_FRACTION_BITS = 4
# What a component's magnitude over its scale is in the mean.
_USUAL_MAGNITUDE = 0.75


Floats = NDArray[np.float32]


# What is promised of each group of a range or a block, and what was found; see `check_promise`.
Fit = list[tuple[Promise, Seen]]


class Levels(NamedTuple):
    """A range's coefficients at each step, the base's first: (components, tokens), tokens by loudness."""

    rows: RangeRows
    loudness: Loudness
    values: list[Items]
    fit: Fit


class EncodedRange(NamedTuple):
    """The base and the refinements of some layers, and how well the profile fits them."""

    sections: list[bytes]
    fit: Fit


def encode_range(model: TideModel, path: str, steps: Steps, meta: BlockMeta, stored: StoredLayers) -> EncodedRange:
    """Encode some layers, whether the profile fits or not. UnencodableBlock if a value is not finite."""
    apart = tokens_apart(model, meta, stored) if steps.is_trellis else first_apart(meta)
    levels = levels_of(model, steps, stored, apart, path)
    sections = []
    for refinement in range(steps.refinements + 1):
        lists, state_counts = list_section(levels, steps, refinement, path)
        sections.append(SectionBytes(steps, lists.encode(model.tables_of(steps)), state_counts))
    kept = keep_apart(stored, np.flatnonzero(apart).astype(np.uint16), model.octaves_of(stored.layers))
    joined = [join_base(sections[0], Base(levels.loudness, kept)), *map(join_refinement, sections[1:])]
    return EncodedRange(joined, levels.fit)


def first_apart(meta: BlockMeta) -> NDArray[np.uint8]:
    """Return 1 for each token of a block that is kept apart whatever its values."""
    apart = np.zeros(meta.layout.tokens, dtype=np.uint8)
    if meta.start == 0:
        apart[:APART_TOKENS] = 1
    return apart


def tokens_apart(model: TideModel, meta: BlockMeta, stored: StoredLayers) -> NDArray[np.uint8]:
    """Return 1 for each token of some layers that is kept apart along a trellis, before any is found too loud.

    Of the first ones behind the very first those that are like others are not. UnencodableBlock as of `levels_of`.
    """
    apart = first_apart(meta)
    apart[_usual_tokens(model, stored, np.flatnonzero(apart)[1:])] = 0
    return apart


def _usual_tokens(model: TideModel, stored: StoredLayers, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of some tokens that are no louder than the profile's, in any group of layers.

    UnencodableBlock if a value is not finite.
    """
    if not len(tokens):
        return tokens
    here = stored.at(tokens)
    here.bits[:] = stored.bits[:, :, tokens]
    # A finite value may be too large for its square.
    values, usual = load_values(here).astype(np.float64), np.ones(len(tokens), dtype=bool)
    for group in model.groups_of(stored.layer_start):
        mean, weight = model.mean_and_weight(group)
        mine = values[group.layer_start - stored.layer_start : group.layer_stop - stored.layer_start]
        rows = mine.transpose(2, 0, 1, 3, 4).reshape(len(tokens), -1)
        energy = np.square((rows - mean) * weight).sum(axis=1)
        usual &= energy <= _USUAL_ENERGY_MAX * float(np.exp2(group.scales / (UNITS / 2)).sum())
    return tokens[usual]


def coded_tokens(meta: BlockMeta) -> int:
    """Return how many tokens of a block are coded unless they are too loud."""
    return meta.layout.tokens - int(first_apart(meta).sum())


def levels_of(model: TideModel, steps: Steps, stored: StoredLayers, apart: NDArray[np.uint8], path: str) -> Levels:
    """Return the levels of some layers. `apart` is added to where a token is too loud.

    UnencodableBlock if a value is not finite.
    """
    rows = place_groups(model, stored.layer_start, steps.final_units)
    coded = _coded(model, stored.layer_start, steps.final_units)
    projected, fit = [], []
    fraction_bits = _FRACTION_BITS if steps.is_trellis else 0
    for each in coded:
        found, seen = _projected(each, stored, apart, (path, fraction_bits))
        projected.append(found)
        fit.append((each.promise, seen))
    loud = np.zeros(stored.bits.shape[2], dtype=np.float32)
    for found, each in zip(projected, coded, strict=True):
        # A token that only a later group was too loud for.
        found[apart == 1] = 0
        _native.tide_loudness(path, found, each.weights, loud)
    loudness = _parts(loud / np.float32(1 << fraction_bits))
    items, places = np.empty((len(rows.scales), len(loud)), dtype=np.int16), loudness.places
    for found, each in zip(projected, coded, strict=True):
        _native.tide_arrange(path, found, places, each.row_of, items[each.rows])
    levels = items
    if steps.is_trellis:
        assert model.trellis is not None, "steps are of a profile that has one"
        levels = np.empty_like(items)
        classes = top_tables(rows.scales, loudness.gains, steps.final_units)
        _native.tide_find_path(path, items, classes, model.trellis.rates, levels)
    return Levels(rows, loudness, _thirds(levels, steps.refinements, path), fit)


class _Coded(NamedTuple):
    """Tables shared by all blocks where a group is coded at a step; columns are components, or else values."""

    layers: slice
    rows: slice
    mean: Floats
    scale: Floats
    matrix: tuple[Items, tuple[int, int], Stage]
    columns: int
    # 1 for each value that is coded; empty if columns are components.
    is_coded: NDArray[np.uint8]
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
    columns = group.shape[1] if group.order.size else stop - start
    numbers, ones = np.arange(stop - start, dtype=np.uint16), np.ones(stop - start, dtype=np.uint8)
    return _Coded(
        layers=slice(group.layer_start, group.layer_stop),
        rows=slice(start, stop),
        mean=mean,
        scale=(weight * (SIXTEENTHS / step_of(final_units, 0))).astype(np.float32),
        matrix=(group.to_components, group.matrix_shape[::-1], group.stage(stop - start, is_back=False)),
        columns=columns,
        is_coded=place.by_column(ones, columns) if group.order.size else np.empty(0, dtype=np.uint8),
        weights=place.by_column(weights, columns),
        row_of=place.by_column(numbers, columns, np.iinfo(np.uint16).max),
        promise=promise_of(place, final_units),
    )


def _projected(
    coded: _Coded, stored: StoredLayers, apart: NDArray[np.uint8], how: tuple[str, int]
) -> tuple[Items, Seen]:
    """Return a group's coefficients in final steps, (tokens, columns), and what was found of them.

    how: the instruction set, and 4 for 16ths of steps.

    UnencodableBlock if a value is not finite.
    """
    here = stored.of(coded.layers)
    out = np.empty((len(apart), coded.columns), dtype=np.int16)
    path, fraction_bits = how
    block = (here.as_bytes, here.bits.shape, here.dtype.code, here.native_turns)
    seen = _native.tide_project(
        path, *block, coded.mean, coded.scale, *coded.matrix, coded.is_coded, apart, out, fraction_bits
    )
    if seen is None:
        raise UnencodableBlock("a value is not finite")
    return out, Seen._make(seen)


def loudness_weights(scales: Units, final_units: int) -> Floats:
    """Return what each component's magnitude counts: large ones have a say, beside what is usual for them."""
    over = final_units - scales
    usual_max = int(np.sort(over)[min(_LOUD_COMPONENTS_MIN, len(over)) - 1 :][:1].max(initial=0))
    is_used = over <= usual_max
    usual = np.exp2(over / UNITS) / (max(int(np.count_nonzero(is_used)), 1) * _USUAL_MAGNITUDE)
    weights: Floats = np.where(is_used, usual, 0).astype(np.float32)
    return weights


def _parts(loud: Floats) -> Loudness:
    """Sort tokens by how large their components are beside what is usual, and cut them into parts."""
    order, bounds = np.argsort(loud, kind="stable"), part_bounds(len(loud))
    parts = np.empty(len(loud), dtype=np.uint8)
    gains = np.zeros(len(bounds) - 1, dtype=np.int64)
    for part, (start, stop) in enumerate(pairwise(bounds)):
        parts[order[start:stop]] = part
        mean = float(loud[order[start:stop]].mean()) if stop > start else 1.0
        gains[part] = max(-GAIN_UNITS_MAX, min(round(UNITS * np.log2(max(mean, 1e-9))), GAIN_UNITS_MAX))
    return Loudness(parts, gains)


def _thirds(items: Items, count: int, path: str) -> list[Items]:
    """Return the values at each step, the coarsest first; a value is three times the one before it, or one off."""
    levels = [items]
    for _ in range(count):
        levels.append(np.empty_like(items))
        _native.tide_third(path, levels[-2], levels[-1])
    return levels[::-1]


def _third_of(items: Items, which: Which, path: str) -> Items:
    """Return these rows at the next coarser step, in their places; which: rising. Other rows are any."""
    out = np.empty_like(items)
    breaks = np.flatnonzero(np.diff(which.astype(np.int64)) > 1) + 1
    for run in np.split(which, breaks) if len(which) else ():
        rows = slice(int(run[0]), int(run[-1]) + 1)
        _native.tide_third(path, items[rows], out[rows])
    return out


def list_section(levels: Levels, steps: Steps, refinement: int, path: str) -> tuple[Lists, bytes]:
    """Return the lists of a section, filled, and how a trellis shares them out; nothing without one."""
    rows, (_, gains), values, _ = levels
    found = rows.planes(steps.final_units + THIRD * steps.refinements, refinement)
    after = [values[refinement]]
    for plane in found[:0:-1]:
        after.insert(0, _third_of(after[0], plane.digits, path))
    before = [values[refinement - 1] if refinement else after[0], *after]
    has_states = is_last(steps, refinement)
    counts = np.zeros(TRELLIS_TABLES if steps.is_trellis else TABLES, dtype=np.int64)
    jobs = []
    for plane, parents, items in zip(found, before, after, strict=False):
        digits, tops = digit_rows(gains, plane, items), top_rows(gains, plane, items)
        is_state_plane = has_states and plane is found[-1]
        if not (is_state_plane and plane.mode == Mode.CONTEXT):
            digits._replace(values=parents).count_into(counts, path)
            jobs.append((digits, parents))
        if not is_state_plane:
            tops.count_into(counts, path)
            jobs.append((tops, items))
    states, state_counts = None, b""
    if has_states:
        states, _ = state_lists(rows, gains, found[-1], after[-1])
        states.count_into(before[-2], counts, path)
        state_counts = join_state_counts(counts[STATE_PAIRS])
    lists = Lists(counts, path)
    for job, parents in jobs:
        lists.put(job, parents)
    if states is not None:
        lists.put_states(states, before[-2])
    return lists, state_counts


# Half steps stand for themselves.
_NO_PULLS = np.empty((0, 4), dtype=np.int8)


def digit_rows(gains: Units, plane: Plane, items: Items) -> Rows:
    """Return the rows that get a digit. items: (components, tokens), tokens by loudness."""
    tables = digit_tables(plane.digit_scales, gains, plane.units, plane.mode)
    return Rows(items, plane.digits, tables, plane.mode)


def top_rows(gains: Units, plane: Plane, items: Items) -> Rows:
    """Return the rows that get a top value."""
    return Rows(items, plane.tops, top_tables(plane.top_scales, gains, plane.units), Mode.TOP)


def is_last(steps: Steps, refinement: int) -> bool:
    """Tell whether a section's levels lie on a trellis, and not those of a coarser step."""
    return steps.is_trellis and refinement == steps.refinements


def state_lists(rows: RangeRows, gains: Units, plane: Plane, items: Items) -> tuple[StateRows, list[Rows]]:
    """Return all rows along a trellis, of which a section's last plane says something; and those, to be counted.

    Rows whose digits ask for no context have their level from plain lists.
    """
    modes = np.full(len(rows.scales), Mode.DIGIT, dtype=np.uint8)
    tables = np.zeros((len(modes), PARTS), dtype=np.uint16)
    modes[plane.tops] = Mode.TOP
    counted = [Rows(items, plane.tops, state_top_tables(plane.top_scales, gains, plane.units), Mode.TOP)]
    if plane.mode == Mode.CONTEXT:
        modes[plane.digits] = Mode.CONTEXT
        digits = state_digit_tables(plane.digit_scales, gains, plane.units)
        counted.append(Rows(items, plane.digits, digits, Mode.CONTEXT))
    for each in counted:
        tables[each.which] = each.tables
    return StateRows(items, modes, tables), counted


def decode_range(model: TideModel, path: str, tokens: int, run: Sequence[memoryview], target: StoredLayers) -> None:
    """Write the layers that a base and the refinements after it hold. CorruptPayload if they do not fit each other."""
    section, base = split_base(run[0], target.bits.shape)
    steps = section.steps
    if len(run) > steps.refinements + 1:
        raise CorruptPayload(f"tide: a refinement {len(run) - 1} where there are {steps.refinements}")
    missing = steps.refinements + 1 - len(run)
    rows = place_groups(model, target.layer_start, steps.final_units + THIRD * missing)
    # Every row gets a top value before anything reads it.
    items = np.empty((len(rows.scales), tokens), dtype=np.int16)
    work = Decoding(rows, base.loudness, items)
    refine(model, path, work, 0, section)
    for refinement, data in enumerate(run[1:], 1):
        found = split_refinement(data)
        if found.steps != steps:
            raise CorruptPayload(f"tide: refinement {refinement} has {found.steps}, its base {steps}")
        refine(model, path, work, refinement, found)
    restore(model, path, work, (steps, missing), base.apart, target)


class Decoding(NamedTuple):
    """A range's rows at the finest step that is here: (components, tokens), tokens by loudness.

    With all refinements of a trellis here they are half steps.
    """

    rows: RangeRows
    loudness: Loudness
    items: Items


def refine(model: TideModel, path: str, work: Decoding, refinement: int, section: SectionBytes) -> None:
    """Add what a section says. CorruptPayload if it does not fit what is here."""
    rows, (_, gains), items = work
    steps, coded, state_counts = section
    planes_here = rows.planes(steps.final_units + THIRD * steps.refinements, refinement)
    tables, states = model.tables_of(steps), None
    counts = np.zeros(tables.count, dtype=np.int64)
    if is_last(steps, refinement):
        states, counted = state_lists(rows, gains, planes_here[-1], items)
        for each in counted:
            each.count_into(counts, path)
        # Counts so far are of both quantisers.
        counts[STATE_PAIRS] = split_state_counts(state_counts, counts[STATE_PAIRS[:, 0]])
    elif state_counts:
        raise CorruptPayload(f"tide: {len(state_counts)} bytes too many in a section of thirds")
    jobs = _plain_jobs(gains, planes_here, items, states is not None)
    for job in jobs:
        job.count_into(counts, path)
    lists = Lists(counts, path)
    lists.decode(tables, coded)
    for job in jobs:
        lists.take(job)
    if states is not None:
        lists.take_states(states)


def _plain_jobs(gains: Units, planes_here: Sequence[Plane], items: Items, has_states: bool) -> list[Rows]:
    """Return what no trellis' state has a say in."""
    jobs = []
    for plane in planes_here:
        is_state_plane = has_states and plane is planes_here[-1]
        if not (is_state_plane and plane.mode == Mode.CONTEXT):
            jobs.append(digit_rows(gains, plane, items))
        if not is_state_plane:
            jobs.append(top_rows(gains, plane, items))
    return jobs


def restore(
    model: TideModel, path: str, work: Decoding, step: tuple[Steps, int], apart: Apart, target: StoredLayers
) -> None:
    """Write the layers of all groups. step: the final one, and how many thirds coarser what is here is."""
    steps, thirds = step
    units = steps.final_units
    pulls = _NO_PULLS if steps.is_trellis and not thirds else model.pulls
    rows, loudness, items = work
    classes = top_tables(rows.scales, loudness.gains, units + THIRD * thirds)
    places = loudness.places
    start_layer, stop_layer = target.layer_start, target.layer_start + len(target.bits)
    weights = model.weight[start_layer:stop_layer].astype(np.float64)
    scales = (step_of(units, thirds) / (SIXTEENTHS * ONE) / weights).astype(np.float32)
    octaves = model.octaves_of(target.layers)
    if octaves is not None:
        apart = apart.with_octaves(octaves)
    for layers, start, stop, panels, shape, order, stage in rows.restored():
        here = slice(layers.start - start_layer, layers.stop - start_layer)
        to = target.of(layers)
        _native.tide_restore(
            path,
            items[start:stop],
            classes[start:stop],
            pulls,
            places,
            model.mean[layers].reshape(-1),
            scales[here].reshape(-1),
            panels,
            shape,
            order,
            stage,
            apart.of(here),
            to.native_turns,
            to.as_bytes,
            to.bits.shape,
            to.dtype.code,
        )
