"""A range's components as rows, and which of them a section codes under which tables.

What is here encoder and decoder must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import Items, Mode, Plane, Rows, Units, digit_tables, entering, planes, top_tables
from kvtide.codec.tide.model import Group, TideModel


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

    As the native kernel takes it: a matrix of `shape` in panels, or the value that each row is.
    """

    layers: slice
    start: int
    stop: int
    panels: NDArray[np.int16]
    shape: tuple[int, int]
    order: NDArray[np.uint16]


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
        return [Restored(layers, 0, rows, places[0].group.to_values, (rows, count * values), order)]
    return [
        Restored(slice(group.layer_start, group.layer_stop), start, stop, group.to_values, group.shape, group.order)
        for group, start, stop in places
    ]


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
