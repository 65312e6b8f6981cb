"""A range's components as rows, and which of them a section codes under which tables.

What is here encoder and decoder must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.codec.tide.grid import Mode, Plane, Units, digit_tables, entering, top_tables
from kvtide.codec.tide.lists import Items, Rows
from kvtide.codec.tide.model import Group

__all__ = ["Place", "RangeRows", "digit_rows", "place_groups", "top_rows"]


class Place(NamedTuple):
    """The rows [start, stop) of one group."""

    group: Group
    start: int
    stop: int


class RangeRows(NamedTuple):
    """Where each group's components stand, and the scale of each row."""

    places: list[Place]
    scales: Units


def place_groups(groups: Sequence[Group], units: int) -> RangeRows:
    """Return the rows of all components that are coded at a step."""
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
