"""A range of layers to its base and refinements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.tide.grid import TABLES, THIRD, UNITS, entering, part_bounds, planes, step_of
from kvtide.codec.tide.lists import Items, Lists
from kvtide.codec.tide.model import SIXTEENTHS, Group, TideModel
from kvtide.codec.tide.rows import digit_rows, top_rows
from kvtide.codec.tide.section import (
    GAIN_UNITS_MAX,
    Base,
    Loudness,
    SectionBytes,
    Steps,
    join_base,
    join_refinement,
)
from kvtide.codec.tide.values import Floats, keep_apart, load_values

__all__ = ["APART_TOKENS", "Levels", "encode_range", "first_apart", "levels_of", "list_section"]

# The first tokens of a prompt take a share of all later attention, and their keys and values are unlike all others.
APART_TOKENS = 4

# Loudness is measured on components of at least this scale over the step: others are all zeros.
_LOUD_UNITS_MIN = 0
_LOUD_COMPONENTS_MIN = 8
# What a component's magnitude over its scale is in the mean.
_USUAL_MAGNITUDE = 0.75


class Levels(NamedTuple):
    """A group's coefficients at each step, the base's first: (components, tokens), tokens by loudness."""

    group: Group
    loudness: Loudness
    values: list[Items]


def encode_range(
    model: TideModel, path: str, steps: Steps, meta: BlockMeta, bits: BlockBits, layer_start: int
) -> list[bytes]:
    """Return base and refinements of the layers in `bits`. UnencodableBlock if a value is not finite."""
    values = load_values(meta, bits, layer_start, model.rotary)
    apart = first_apart(meta)
    levels = levels_of(model, steps, values, layer_start, apart, path)
    sections = [
        SectionBytes(steps, list_section(levels, steps, refinement, path).encode(model.tables))
        for refinement in range(steps.refinements + 1)
    ]
    kept = keep_apart(values, np.flatnonzero(apart).astype(np.uint16))
    return [join_base(sections[0], Base(levels[0].loudness, kept)), *map(join_refinement, sections[1:])]


def first_apart(meta: BlockMeta) -> NDArray[np.uint8]:
    """Return 1 for each token of a block that is kept apart whatever its values."""
    apart = np.zeros(meta.layout.tokens, dtype=np.uint8)
    if meta.start == 0:
        apart[:APART_TOKENS] = 1
    return apart


def levels_of(
    model: TideModel, steps: Steps, values: Floats, layer_start: int, apart: NDArray[np.uint8], path: str
) -> list[Levels]:
    """Return the levels of all groups of a range. `apart` is added to where a token is too loud."""
    groups = [g for g in model.groups if layer_start <= g.layer_start < layer_start + len(values)]
    found = [_project(model, group, steps.final_units, values, layer_start, apart, path) for group in groups]
    for items in found:
        # A token that only a later group was too loud for.
        items[:, apart == 1] = 0
    loudness = _measured_loudness(groups, found, steps.final_units)
    return [
        Levels(group, loudness, _thirds(np.take(items, loudness.places, axis=1), steps.refinements))
        for group, items in zip(groups, found, strict=True)
    ]


def _project(
    model: TideModel,
    group: Group,
    final_units: int,
    values: Floats,
    layer_start: int,
    apart: NDArray[np.uint8],
    path: str,
) -> Items:
    """Return a group's components in final steps: (components, tokens), tokens in order."""
    layers, tokens = group.layer_stop - group.layer_start, values.shape[2]
    streams = values[group.layer_start - layer_start :][:layers].reshape(2 * layers, tokens, -1)
    mean, weight = model.mean_and_weight(group, streams.shape[2])
    scale = (weight * (SIXTEENTHS / step_of(final_units, 0))).astype(np.float32)
    out = np.empty((entering(group.scales, final_units), tokens), dtype=np.int16)
    shape = group.shape[::-1]
    _native.tide_project(path, streams, mean, scale, group.to_components, shape, group.order, apart, out)
    return out


def _measured_loudness(groups: Sequence[Group], items: Sequence[Items], final_units: int) -> Loudness:
    """Sort tokens by how large their components are beside what is usual, and cut them into parts."""
    tokens = items[0].shape[1]
    total = np.zeros(tokens, dtype=np.float32)
    count = 0
    for group, rows in zip(groups, items, strict=True):
        over = final_units - group.scales[: len(rows)]
        used = max(int(np.count_nonzero(over <= -_LOUD_UNITS_MIN)), min(_LOUD_COMPONENTS_MIN, len(rows)))
        usual = np.exp2(over[:used] / UNITS).astype(np.float32)
        total += usual @ np.abs(rows[:used]).astype(np.float32)
        count += used
    loud = total / np.float32(max(count, 1) * _USUAL_MAGNITUDE)
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


def list_section(levels: Sequence[Levels], steps: Steps, refinement: int, path: str) -> Lists:
    """Return the lists of a section, filled."""
    base_units = steps.final_units + THIRD * steps.refinements
    jobs = []
    counts = np.zeros(TABLES, dtype=np.int64)
    for group, loudness, values in levels:
        found = planes(group.scales, base_units, refinement)
        before = [values[refinement - 1]] if refinement else []
        by_plane = [*before, *_thirds(values[refinement], len(found) - 1)]
        for i, plane in enumerate(found):
            after = by_plane[len(before) + i]
            parents = by_plane[len(before) + i - 1] if plane.start else after
            digits = digit_rows(group, loudness, plane, after)
            digits._replace(values=parents[: plane.start]).count_into(counts)
            tops = top_rows(group, loudness, plane, after)
            tops.count_into(counts)
            jobs += [(digits, parents[: plane.start]), (tops, tops.values)]
    lists = Lists(counts, path)
    for rows, parents in jobs:
        lists.put(rows, parents)
    return lists
