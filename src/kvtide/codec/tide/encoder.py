"""A range of layers to its base and refinements."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.tide.grid import TABLES, THIRD, UNITS, Units, part_bounds, planes, step_of
from kvtide.codec.tide.lists import Items, Lists
from kvtide.codec.tide.model import SIXTEENTHS, TideModel
from kvtide.codec.tide.rows import Place, RangeRows, digit_rows, place_groups, top_rows
from kvtide.codec.tide.section import (
    GAIN_UNITS_MAX,
    Base,
    Loudness,
    SectionBytes,
    Steps,
    join_base,
    join_refinement,
)
from kvtide.codec.tide.values import Floats, Turns, keep_apart, load_values

__all__ = ["APART_TOKENS", "Levels", "encode_range", "first_apart", "levels_of", "list_section", "loud_rows"]

# The first tokens of a prompt take a share of all later attention, and their keys and values are unlike all others.
APART_TOKENS = 4

# Loudness is measured on components of at least a step's scale, or on the so many largest: others are all zeros.
_LOUD_COMPONENTS_MIN = 8
# What a component's magnitude over its scale is in the mean.
_USUAL_MAGNITUDE = 0.75


class Levels(NamedTuple):
    """A range's coefficients at each step, the base's first: (components, tokens), tokens by loudness."""

    rows: RangeRows
    loudness: Loudness
    values: list[Items]


def encode_range(
    model: TideModel, path: str, steps: Steps, meta: BlockMeta, bits: BlockBits, layer_start: int, turns: Turns
) -> list[bytes]:
    """Return base and refinements of the layers in `bits`. UnencodableBlock if a value is not finite."""
    values = load_values(bits, meta.layout.dtype, layer_start, turns)
    apart = first_apart(meta)
    levels = levels_of(model, steps, values, layer_start, apart, path)
    sections = [
        SectionBytes(steps, list_section(levels, steps, refinement, path).encode(model.tables))
        for refinement in range(steps.refinements + 1)
    ]
    kept = keep_apart(values, np.flatnonzero(apart).astype(np.uint16))
    return [join_base(sections[0], Base(levels.loudness, kept)), *map(join_refinement, sections[1:])]


def first_apart(meta: BlockMeta) -> NDArray[np.uint8]:
    """Return 1 for each token of a block that is kept apart whatever its values."""
    apart = np.zeros(meta.layout.tokens, dtype=np.uint8)
    if meta.start == 0:
        apart[:APART_TOKENS] = 1
    return apart


def levels_of(
    model: TideModel, steps: Steps, values: Floats, layer_start: int, apart: NDArray[np.uint8], path: str
) -> Levels:
    """Return the levels of a range of layers. `apart` is added to where a token is too loud."""
    rows = place_groups(model.groups_of(layer_start, len(values)), steps.final_units)
    items = np.empty((len(rows.scales), values.shape[2]), dtype=np.int16)
    for place in rows.places:
        _project(model, place, steps.final_units, values, layer_start, (apart, items), path)
    # A token that only a later group was too loud for.
    items[:, apart == 1] = 0
    loudness = _measured_loudness(rows.scales, items, steps.final_units)
    return Levels(rows, loudness, _thirds(np.take(items, loudness.places, axis=1), steps.refinements))


def _project(
    model: TideModel,
    place: Place,
    final_units: int,
    values: Floats,
    layer_start: int,
    out: tuple[NDArray[np.uint8], Items],
    path: str,
) -> None:
    """Write a group's components in final steps, tokens in order. out: tokens that stand apart, and all rows."""
    group, start, stop = place
    layers, tokens = group.layer_stop - group.layer_start, values.shape[2]
    streams = values[group.layer_start - layer_start :][:layers].reshape(2 * layers, tokens, -1)
    mean, weight = model.mean_and_weight(group)
    scale = (weight * (SIXTEENTHS / step_of(final_units, 0))).astype(np.float32)
    apart, items = out
    matrix = (group.to_components, group.shape[::-1], group.order)
    _native.tide_project(path, streams, mean, scale, *matrix, apart, items[start:stop])


def loud_rows(scales: Units, final_units: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the rows that loudness is measured on, and what a step of each is beside what is usual of it."""
    over = final_units - scales
    used = np.flatnonzero(over <= np.sort(over)[min(_LOUD_COMPONENTS_MIN, len(over)) - 1 :][:1].max(initial=0))
    return used, np.exp2(over[used] / UNITS).astype(np.float32)


def _measured_loudness(scales: Units, items: Items, final_units: int) -> Loudness:
    """Sort tokens by how large their components are beside what is usual, and cut them into parts."""
    tokens = items.shape[1]
    used, usual = loud_rows(scales, final_units)
    loud = usual @ np.abs(items[used]).astype(np.float32) / np.float32(max(len(used), 1) * _USUAL_MAGNITUDE)
    order, bounds = np.argsort(loud, kind="stable"), part_bounds(tokens)
    parts = np.empty(tokens, dtype=np.uint8)
    gains = np.zeros(len(bounds) - 1, dtype=np.int64)
    for part, (start, stop) in enumerate(pairwise(bounds)):
        parts[order[start:stop]] = part
        mean = float(loud[order[start:stop]].mean()) if stop > start else 1.0
        gains[part] = np.clip(round(UNITS * np.log2(max(mean, 1e-9))), -GAIN_UNITS_MAX, GAIN_UNITS_MAX)
    return Loudness(parts, gains)


def _thirds(items: Items, count: int) -> list[Items]:
    """Return the values at each step, the coarsest first; a value is three times the one before it, or one off."""
    levels = [items]
    for _ in range(count):
        levels.append((levels[-1] + np.int16(1)) // np.int16(3))
    return levels[::-1]


def list_section(levels: Levels, steps: Steps, refinement: int, path: str) -> Lists:
    """Return the lists of a section, filled."""
    rows, (_, gains), values = levels
    found = planes(rows.scales, steps.final_units + THIRD * steps.refinements, refinement)
    after = _thirds(values[refinement], len(found) - 1)
    before = [values[refinement - 1] if refinement else after[0], *after]
    counts = np.zeros(TABLES, dtype=np.int64)
    jobs = []
    for plane, parents, items in zip(found, before, after, strict=False):
        digits, tops = digit_rows(rows, gains, plane, items), top_rows(rows, gains, plane, items)
        digits._replace(values=parents).count_into(counts)
        tops.count_into(counts)
        jobs += [(digits, parents), (tops, items)]
    lists = Lists(counts, path)
    for job, parents in jobs:
        lists.put(job, parents)
    return lists
