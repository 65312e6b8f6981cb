"""An unbroken run of a range's sections to its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.tide.grid import TABLES, THIRD, entering, planes, step_of, top_tables
from kvtide.codec.tide.lists import CodedLists, Items, Lists
from kvtide.codec.tide.model import ONE, SIXTEENTHS, Group, TideModel
from kvtide.codec.tide.rows import digit_rows, top_rows
from kvtide.codec.tide.section import Base, Loudness, Steps, split_base, split_refinement
from kvtide.codec.tide.values import Floats, put_apart, store_values
from kvtide.errors import CorruptPayload

__all__ = ["decode_range"]


class _Decoding(NamedTuple):
    """A group, its tokens' loudness, and room for its components at the finest step that is here."""

    group: Group
    loudness: Loudness
    values: Items


def decode_range(
    model: TideModel, path: str, meta: BlockMeta, run: Sequence[memoryview], layer_start: int, out: BlockBits
) -> None:
    """Write the layers that a base and the refinements behind it hold. CorruptPayload if they do not fit each other."""
    tokens, layers = meta.layout.tokens, len(out)
    section, base = split_base(run[0], out.shape)
    steps = section.steps
    if len(run) > steps.refinements + 1:
        raise CorruptPayload(f"tide: a refinement {len(run) - 1} where there are {steps.refinements}")
    groups = [g for g in model.groups if layer_start <= g.layer_start < layer_start + layers]
    units = steps.final_units + THIRD * (steps.refinements + 1 - len(run))
    work = [
        _Decoding(group, base.loudness, np.zeros((entering(group.scales, units), tokens), dtype=np.int16))
        for group in groups
    ]
    _refine(model, path, work, steps, 0, section.lists)
    for refinement, data in enumerate(run[1:], 1):
        found = split_refinement(data)
        if found.steps != steps:
            raise CorruptPayload(f"tide: refinement {refinement} has {found.steps}, its base {steps}")
        _refine(model, path, work, steps, refinement, found.lists)
    values = _restored(model, path, work, (units, steps.refinements + 1 - len(run)), base, out.shape)
    store_values(meta, values, layer_start, model.rotary, out)


def _refine(
    model: TideModel, path: str, work: Sequence[_Decoding], steps: Steps, refinement: int, coded: CodedLists
) -> None:
    """Add what a section says."""
    base_units = steps.final_units + THIRD * steps.refinements
    counts = np.zeros(TABLES, dtype=np.int64)
    jobs = []
    for group, loudness, values in work:
        for plane in planes(group.scales, base_units, refinement):
            digits = digit_rows(group, loudness, plane, values)
            tops = top_rows(group, loudness, plane, values)
            digits.count_into(counts)
            tops.count_into(counts)
            jobs += [digits, tops]
    lists = Lists(counts, path)
    lists.decode(model.tables, coded)
    for rows in jobs:
        lists.take(rows)


def _restored(
    model: TideModel,
    path: str,
    work: Sequence[_Decoding],
    step: tuple[int, int],
    base: Base,
    shape: tuple[int, ...],
) -> Floats:
    """Return the values of all groups, tokens that stand apart put in their places. step: units for tables, thirds."""
    units, thirds = step
    values = np.empty(shape, dtype=np.float32)
    _, _, tokens, kv_heads, head_dim = shape
    first_layer = work[0].group.layer_start
    for group, loudness, items in work:
        mean, weight = model.mean_and_weight(group, kv_heads * head_dim)
        exact = step_of(units - THIRD * thirds, thirds)
        scale = (exact / (SIXTEENTHS * ONE) / weight.astype(np.float64)).astype(np.float32)
        classes = top_tables(group.scales[: len(items)], loudness.gains, units)
        layers = slice(group.layer_start - first_layer, group.layer_stop - first_layer)
        out = values[layers].reshape(-1, tokens, kv_heads * head_dim)
        args = (group.to_values, group.shape, group.order, out)
        _native.tide_restore(path, items, classes, model.pulls, loudness.places, mean, scale, *args)
    put_apart(base.apart, values)
    return values
