"""A range's components as rows, and which of them a section codes under which tables.

What is here encoder and decoder must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import Mode, Plane, Units, digit_tables, entering, planes, top_tables
from kvtide.codec.tide.lists import Items, Rows
from kvtide.codec.tide.model import Group, TideModel

__all__ = ["Place", "RangeRows", "digit_rows", "place_groups", "top_rows"]


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


@dataclass(frozen=True, slots=True)
class RangeRows:
    """Where each group's components stand, and the scale of each row."""

    places: list[Place]
    scales: Units
    # By base step and refinement: blocks of one store ask for the same again and again.
    _planes: dict[tuple[int, int], list[Plane]] = field(default_factory=dict)

    def planes(self, base_units: int, refinement: int) -> list[Plane]:
        """Return what a section holds of these rows, coarsest first."""
        key = (base_units, refinement)
        if key not in self._planes:
            self._planes[key] = planes(self.scales, base_units, refinement)
        return self._planes[key]


def place_groups(model: TideModel, layer_start: int, units: int) -> RangeRows:
    """Return the rows of all components of a section's layers that are coded at a step."""
    return model.remembered((layer_start, units), lambda: _placed(model.groups_of(layer_start), units))


def _placed(groups: Sequence[Group], units: int) -> RangeRows:
    places, start = [], 0
    for group in groups:
        stop = start + entering(group.scales, units)
        places.append(Place(group, start, stop))
        start = stop
    return RangeRows(places, np.concatenate([group.scales[: stop - start] for group, start, stop in places]))


def digit_rows(rows: RangeRows, gains: Units, plane: Plane, items: Items) -> Rows:
    """Return the rows that get a digit. items: (components, tokens), tokens by loudness."""
    tables = digit_tables(rows.scales[plane.digits], gains, plane.units, plane.mode)
    return Rows(items, plane.digits, tables, plane.mode)


def top_rows(rows: RangeRows, gains: Units, plane: Plane, items: Items) -> Rows:
    """Return the rows that get a top value."""
    return Rows(items, plane.tops, top_tables(rows.scales[plane.tops], gains, plane.units), Mode.TOP)
