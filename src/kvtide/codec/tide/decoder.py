"""An unbroken run of a range's sections to its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide import _native
from kvtide.codec.tide.grid import TABLES, THIRD, CodedLists, Items, Lists, step_of, top_tables
from kvtide.codec.tide.model import ONE, SIXTEENTHS, TideModel
from kvtide.codec.tide.rows import RangeRows, digit_rows, place_groups, top_rows
from kvtide.codec.tide.section import Apart, Loudness, Steps, split_base, split_refinement
from kvtide.codec.tide.values import StoredLayers
from kvtide.errors import CorruptPayload


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
    refine(model, path, work, steps, 0, section.lists)
    for refinement, data in enumerate(run[1:], 1):
        found = split_refinement(data)
        if found.steps != steps:
            raise CorruptPayload(f"tide: refinement {refinement} has {found.steps}, its base {steps}")
        refine(model, path, work, steps, refinement, found.lists)
    restore(model, path, work, (steps.final_units, missing), base.apart, target)


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
    for plane in rows.planes(steps.final_units + THIRD * steps.refinements, refinement):
        jobs += [digit_rows(gains, plane, items), top_rows(gains, plane, items)]
    for job in jobs:
        job.count_into(counts, path)
    lists = Lists(counts, path)
    lists.decode(model.tables, coded)
    for job in jobs:
        lists.take(job)


def restore(
    model: TideModel, path: str, work: Decoding, step: tuple[int, int], apart: Apart, target: StoredLayers
) -> None:
    """Write the layers of all groups. step: the final one in units, and how many thirds coarser it is."""
    units, thirds = step
    rows, loudness, items = work
    classes = top_tables(rows.scales, loudness.gains, units + THIRD * thirds)
    places = loudness.places
    start_layer, stop_layer = target.layer_start, target.layer_start + len(target.bits)
    weights = model.weight[start_layer:stop_layer].astype(np.float64)
    scales = (step_of(units, thirds) / (SIXTEENTHS * ONE) / weights).astype(np.float32)
    for layers, start, stop, panels, shape, order in rows.restored():
        here = slice(layers.start - start_layer, layers.stop - start_layer)
        to = target.of(layers)
        _native.tide_restore(
            path,
            items[start:stop],
            classes[start:stop],
            model.pulls,
            places,
            model.mean[layers].reshape(-1),
            scales[here].reshape(-1),
            panels,
            shape,
            order,
            apart.of(here),
            to.native_turns,
            to.as_bytes,
            to.bits.shape,
            to.dtype.code,
        )
