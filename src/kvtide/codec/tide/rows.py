"""A range's components as rows, and which of them a section codes under which tables.

What is here encoder and decoder must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.tide.grid import (
    PARTS,
    STATE_PAIRS,
    THIRD,
    Items,
    Lists,
    Mode,
    Plane,
    Rows,
    StateRows,
    Units,
    digit_tables,
    entering,
    planes,
    state_digit_tables,
    state_top_tables,
    step_of,
    top_tables,
)
from kvtide.codec.tide.model import NO_STAGE, ONE, SIXTEENTHS, Group, Stage, TideModel
from kvtide.codec.tide.section import (
    Apart,
    Loudness,
    SectionBytes,
    Steps,
    StoredLayers,
    split_base,
    split_refinement,
    split_state_counts,
)
from kvtide.errors import CorruptPayload

# Half steps stand for themselves.
_NO_PULLS = np.empty((0, 4), dtype=np.int8)


class Place(NamedTuple):
    """The rows [start, stop) of one group."""

    group: Group
    start: int
    stop: int

    def by_column(self, each: NDArray[Any], columns: int, fill: int = 0) -> NDArray[Any]:
        """Return what belongs to each of the group's rows by column of a projection.

        Columns are the rows, or else the group's values; then those that are not coded get `fill`.
        """
        if not self.group.order.size:
            return each
        found = np.full(columns, fill, dtype=each.dtype)
        found[self.group.order[: len(each)]] = each
        return found


class Restored(NamedTuple):
    """Rows [start, stop) of some layers that go back to values at once, and how values follow from them.

    As the native kernel takes it: a matrix of `shape` in panels, or the value that each row is; and its other stage.
    """

    layers: slice
    start: int
    stop: int
    panels: NDArray[np.int16]
    shape: tuple[int, int]
    order: NDArray[np.uint16]
    stage: Stage


@dataclass(frozen=True, slots=True)
class RangeRows:
    """The place of each group's components, and the scale of each row."""

    places: list[Place]
    scales: Units
    # By base step and refinement: blocks of one store ask for the same again and again.
    _planes: dict[tuple[int, int], list[Plane]] = field(default_factory=dict)
    _restored: list[Restored] = field(default_factory=list)

    def planes(self, base_units: int, refinement: int) -> list[Plane]:
        """Return what a section holds of these rows, coarsest first."""
        key = (base_units, refinement)
        if key not in self._planes:
            self._planes[key] = planes(self.scales, base_units, refinement)
        return self._planes[key]

    def restored(self) -> list[Restored]:
        """Return what goes back to values: group by group, or all at once where components are values."""
        if not self._restored:
            self._restored.extend(_restored(self.places))
        return self._restored


def _restored(places: Sequence[Place]) -> list[Restored]:
    count, values = len(places), places[0].group.shape[1]
    if places[0].group.order.size and count * values <= np.iinfo(np.uint16).max + 1:
        orders = [group.order[: stop - start] + i * values for i, (group, start, stop) in enumerate(places)]
        layers = slice(places[0].group.layer_start, places[-1].group.layer_stop)
        rows, order = places[-1].stop, np.concatenate(orders).astype(np.uint16)
        return [Restored(layers, 0, rows, places[0].group.to_values, (rows, count * values), order, NO_STAGE)]
    return [_restored_group(*place) for place in places]


def _restored_group(group: Group, start: int, stop: int) -> Restored:
    layers, stage = slice(group.layer_start, group.layer_stop), group.stage(stop - start, is_back=True)
    return Restored(layers, start, stop, group.to_values, group.matrix_shape, group.order, stage)


def place_groups(model: TideModel, layer_start: int, units: int) -> RangeRows:
    """Return the rows of all components of a section's layers that are coded at a step."""
    return model.remembered(("rows", layer_start, units), lambda: _placed(model.groups_of(layer_start), units))


def _placed(groups: Sequence[Group], units: int) -> RangeRows:
    places, start = [], 0
    for group in groups:
        stop = start + entering(group.scales, units)
        places.append(Place(group, start, stop))
        start = stop
    return RangeRows(places, np.concatenate([group.scales[: stop - start] for group, start, stop in places]))


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
