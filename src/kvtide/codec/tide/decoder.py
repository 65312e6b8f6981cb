"""An unbroken run of a range's sections to its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.tide.grid import TABLES, THIRD, planes, step_of, top_tables
from kvtide.codec.tide.lists import CodedLists, Items, Lists
from kvtide.codec.tide.model import ONE, SIXTEENTHS, TideModel
from kvtide.codec.tide.rows import RangeRows, digit_rows, place_groups, top_rows
from kvtide.codec.tide.section import Apart, Loudness, Steps, split_base, split_refinement
from kvtide.codec.tide.values import Floats, Turns, put_apart, store_values
from kvtide.errors import CorruptPayload

__all__ = ["Decoding", "decode_range", "refine"]


def decode_range(
    model: TideModel,
    path: str,
    meta: BlockMeta,
    run: Sequence[memoryview],
    layer_start: int,
    turns: Turns,
    out: BlockBits,
) -> None:
    """Write the layers that a base and the refinements behind it hold. CorruptPayload if they do not fit each other."""
    section, base = split_base(run[0], out.shape)
    steps = section.steps
    if len(run) > steps.refinements + 1:
        raise CorruptPayload(f"tide: a refinement {len(run) - 1} where there are {steps.refinements}")
    missing = steps.refinements + 1 - len(run)
    rows = place_groups(model.groups_of(layer_start, len(out)), steps.final_units + THIRD * missing)
    items = np.zeros((len(rows.scales), meta.layout.tokens), dtype=np.int16)
    work = Decoding(rows, base.loudness, items)
    refine(model, path, work, steps, 0, section.lists)
    for refinement, data in enumerate(run[1:], 1):
        found = split_refinement(data)
        if found.steps != steps:
            raise CorruptPayload(f"tide: refinement {refinement} has {found.steps}, its base {steps}")
        refine(model, path, work, steps, refinement, found.lists)
    _restore(model, path, work, (steps.final_units, missing), base.apart, (meta, layer_start, turns, out))


class Decoding(NamedTuple):
    """A range's rows at the finest step that is here: (components, tokens), tokens by loudness."""

    rows: RangeRows
    loudness: Loudness
    items: Items


def refine(model: TideModel, path: str, work: Decoding, steps: Steps, refinement: int, coded: CodedLists) -> None:
    """Add what a section says."""
    rows, (_, gains), items = work
    counts = np.zeros(TABLES, dtype=np.int64)
    jobs = []
    for plane in planes(rows.scales, steps.final_units + THIRD * steps.refinements, refinement):
        jobs += [digit_rows(rows, gains, plane, items), top_rows(rows, gains, plane, items)]
    for job in jobs:
        job.count_into(counts)
    lists = Lists(counts, path)
    lists.decode(model.tables, coded)
    for job in jobs:
        lists.take(job)


def _restore(
    model: TideModel,
    path: str,
    work: Decoding,
    step: tuple[int, int],
    apart: Apart,
    target: tuple[BlockMeta, int, Turns, BlockBits],
) -> None:
    """Write the layers of all groups. step: the final one in units, and how many thirds coarser it is."""
    units, thirds = step
    rows, loudness, items = work
    meta, layer_start, turns, out = target
    classes = top_tables(rows.scales, loudness.gains, units + THIRD * thirds)
    places = loudness.places
    # One group's values at a time, always in the same place: they are still in the cache when they are stored.
    values: Floats | None = None
    for group, start, stop in rows.places:
        layers = slice(group.layer_start - layer_start, group.layer_stop - layer_start)
        if values is None:
            values = np.empty(out[layers].shape, dtype=np.float32)
        mean, weight = model.mean_and_weight(group)
        scale = (step_of(units, thirds) / (SIXTEENTHS * ONE) / weight.astype(np.float64)).astype(np.float32)
        streams = values.reshape(2 * len(values), meta.layout.tokens, -1)
        matrix = (group.to_values, group.shape, group.order)
        args = (items[start:stop], classes[start:stop], model.pulls, places, mean, scale, *matrix, streams)
        _native.tide_restore(path, *args)
        put_apart(apart.of(layers), values)
        store_values(values, meta.layout.dtype, group.layer_start, turns, out[layers])
