"""Which rows of a group a plane codes, and under which tables: what encoder and decoder must agree on."""

from __future__ import annotations

from kvtide.codec.tide.grid import Mode, Plane, digit_tables, top_tables
from kvtide.codec.tide.lists import Items, Rows
from kvtide.codec.tide.model import Group
from kvtide.codec.tide.section import Loudness

__all__ = ["digit_rows", "top_rows"]


def digit_rows(group: Group, loudness: Loudness, plane: Plane, items: Items) -> Rows:
    """Return the rows that get a digit. items: (components, tokens), tokens by loudness."""
    tables = digit_tables(group.scales[: plane.start], loudness.gains, plane.units, plane.mode)
    return Rows(items[: plane.start], tables, plane.mode)


def top_rows(group: Group, loudness: Loudness, plane: Plane, items: Items) -> Rows:
    """Return the rows that get a top value."""
    tables = top_tables(group.scales[plane.start : plane.stop], loudness.gains, plane.units)
    return Rows(items[plane.start : plane.stop], tables, Mode.TOP)
