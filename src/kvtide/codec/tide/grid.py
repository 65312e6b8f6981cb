"""Steps, scales and loudness on one grid of whole numbers, the tables that follow, and a list of items for each.

A unit is a twelfth of an octave; 19 of them are a factor of three, but for 0.1 %. Only the choice of tables goes by
units, so that every machine chooses alike; steps themselves are exact thirds of each other. An item is a top value or a
digit; all lists are one array of entropy-coded symbols in two streams, each filled up to whole runs with zeros, so that
every run has one table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy import ESCAPE, SYMBOLS, Escapes, RansTables, Runs, Streams, count_values
from kvtide.errors import CorruptPayload

UNITS = 12
THIRD = 19
# Tokens sorted by loudness are cut into so many parts.
PARTS = 4

# Classes are a quarter of an octave wide. A top value's class goes by scale over step, here from 2^-5 to 2^3; a digit's
# by scale over the step that it refines to, from 2^-3 on.
CLASS_UNITS = 3
TOPS, TOP_UNITS_MIN = 32, -60
DIGITS, DIGIT_UNITS_MIN = 24, -36
# For each class of digits, a table for values of magnitude 0, of 1, of more, and one that does not ask.
CONTEXTS = 4
ANY = 3
TABLES = TOPS + CONTEXTS * DIGITS
# Along a trellis these are of the thirds of levels. Behind them come those of the levels themselves, for quantiser 0
# and so many further for 1: top values by class, digits by class and context.
STATE_CONTEXTS = 3
TOPS_TWIN, DIGITS_TWIN = TOPS, STATE_CONTEXTS * DIGITS
STATE_TOPS, STATE_DIGITS = TABLES, TABLES + 2 * TOPS_TWIN
TRELLIS_TABLES = STATE_DIGITS + 2 * DIGITS_TWIN
_FIRSTS = np.concatenate([STATE_TOPS + np.arange(TOPS_TWIN), STATE_DIGITS + np.arange(DIGITS_TWIN)])
# The tables of quantiser 0 and 1: (pairs, 2).
STATE_PAIRS = np.stack([_FIRSTS, _FIRSTS + np.repeat([TOPS_TWIN, DIGITS_TWIN], [TOPS_TWIN, DIGITS_TWIN])], axis=1)

# A component is coded from the step on at which its scale is an eighth of the step; what lies below is all but zero.
ENTER_UNITS = -37
# A scale of more than four steps does not fit the alphabet: such a component begins three times coarser, or nine, …
WIDE_UNITS = 24

Units = NDArray[np.int64]
# Row numbers.
Which = NDArray[np.uint32]
Items = NDArray[np.int16]

RUN_SYMBOLS = 32
STREAMS = 2
TOP_CENTRE = 15


class Mode:
    """The way a plane's rows are coded; the numbers are the native kernels'."""

    TOP = 0
    DIGIT = 1
    CONTEXT = 2


class Plane(NamedTuple):
    """Rows that get a digit, and rows that get a top value, at a step of `units`; and the scales of each."""

    units: int
    mode: int
    digits: Which
    tops: Which
    digit_scales: Units
    top_scales: Units


def step_of(units: int, thirds: int) -> float:
    """Return the step: 2^(units / 12), times three as often as `thirds` says."""
    return float(2.0 ** (units / UNITS) * 3.0**thirds)


def entering(scales: Units, units: int) -> int:
    """Return how many components are coded at a step. scales: in units."""
    return int(np.count_nonzero(scales - units >= ENTER_UNITS))


def planes(scales: Units, base_units: int, refinement: int) -> list[Plane]:
    """Return what a section holds of components of these scales, coarsest first."""
    units = base_units - THIRD * refinement
    enters = scales - units >= ENTER_UNITS
    if refinement:
        before = scales - units - THIRD >= ENTER_UNITS
        return [_plane(units, Mode.CONTEXT, scales, before, enters & ~before)]
    thirds = np.where(enters, np.maximum(0, -((base_units + WIDE_UNITS - scales) // THIRD)), -1)
    return [
        _plane(base_units + THIRD * third, Mode.DIGIT, scales, thirds > third, thirds == third)
        for third in range(int(thirds.max(initial=0)), -1, -1)
    ]


def _plane(units: int, mode: int, scales: Units, digits: NDArray[np.bool_], tops: NDArray[np.bool_]) -> Plane:
    which: list[Which] = [np.flatnonzero(mask).astype(np.uint32) for mask in (digits, tops)]
    return Plane(units, mode, which[0], which[1], scales[digits], scales[tops])


def top_tables(scales: Units, gains: Units, units: int) -> NDArray[np.uint16]:
    """Return the table of each component's top values in each part of the tokens: (components, PARTS)."""
    return _by_units(scales, gains, units, _TOP_TABLES)


def digit_tables(scales: Units, gains: Units, units: int, mode: int) -> NDArray[np.uint16]:
    """Return the table of digits that do not ask, or else the first of the three that do: (components, PARTS)."""
    return _by_units(scales, gains, units, _DIGIT_TABLES if mode == Mode.CONTEXT else _ANY_TABLES)


def state_top_tables(scales: Units, gains: Units, units: int) -> NDArray[np.uint16]:
    """Return the table of each component's top values along a trellis in quantiser 0: (components, PARTS)."""
    return _by_units(scales, gains, units, _TOP_TABLES + np.uint16(STATE_TOPS))


def state_digit_tables(scales: Units, gains: Units, units: int) -> NDArray[np.uint16]:
    """Return the first of the three tables of digits along a trellis in quantiser 0: (components, PARTS)."""
    return _by_units(scales, gains, units, _STATE_DIGIT_TABLES)


def _by_units(scales: Units, gains: Units, units: int, tables: NDArray[np.uint16]) -> NDArray[np.uint16]:
    # All parts of a row at once, as one number: rows are many, differences to the step few.
    parts: NDArray[np.uint16] = tables.take(_REACHED + (gains + _TABLE_UNITS), mode="clip")
    found = parts.view(np.uint64).reshape(-1).take(scales - (units - _REACH), mode="clip")
    return found.view(np.uint16).reshape(-1, PARTS)


# Tables by units over the step, from -_TABLE_UNITS on: beyond, they are all alike.
_TABLE_UNITS = 64
# Beyond, no gain leads back to where they differ.
_REACH = 128
_REACHED = np.arange(-_REACH, _REACH + 1)[:, None]
_OVER = np.arange(-_TABLE_UNITS, _TABLE_UNITS + 1)
_TOP_TABLES = np.clip((_OVER - TOP_UNITS_MIN) // CLASS_UNITS, 0, TOPS - 1).astype(np.uint16)
_DIGIT_TABLES = (TOPS + CONTEXTS * np.clip((_OVER - DIGIT_UNITS_MIN) // CLASS_UNITS, 0, DIGITS - 1)).astype(np.uint16)
_ANY_TABLES = _DIGIT_TABLES + np.uint16(ANY)
_STATE_DIGIT_TABLES = (_DIGIT_TABLES - TOPS) // CONTEXTS * np.uint16(STATE_CONTEXTS) + np.uint16(STATE_DIGITS)


def part_bounds(tokens: int) -> NDArray[np.int64]:
    """Return where the parts begin, and the end: (PARTS + 1)."""
    return np.arange(PARTS + 1, dtype=np.int64) * tokens // PARTS


def part_sizes(tokens: int) -> NDArray[Any]:
    """Return the tokens of each part."""
    return np.diff(part_bounds(tokens))


class Rows(NamedTuple):
    """Some rows of values, by number, and the table of each one's parts. `Lists.take` fills them."""

    values: Items
    which: Which
    tables: NDArray[np.uint16]
    mode: int

    def count_into(self, counts: NDArray[np.int64], path: str) -> None:
        """Add what these rows take from each table's list. Digits that ask do so by the values as they are."""
        _native.tide_count(path, *self, counts)


class StateRows(NamedTuple):
    """All rows of a section's values in the order of a trellis' path, by mode; see `Mode`.

    DIGIT here: the level is there already. tables: those of quantiser 0, (rows, PARTS).
    """

    values: Items
    modes: NDArray[np.uint8]
    tables: NDArray[np.uint16]

    def count_into(self, parents: Items, counts: NDArray[np.int64], path: str) -> None:
        """Add what these levels put into each table's list, after `parents`."""
        _native.tide_count_states(path, self.values, parents, self.modes, self.tables, _TWINS, counts)


_TWINS = (TOPS_TWIN, DIGITS_TWIN)


class CodedLists(NamedTuple):
    """Two streams, and the top values that have no symbol, of each stream in order."""

    streams: Streams
    escapes: Items
    escape_counts: tuple[int, ...]


class Lists:
    """Lists of known lengths, being filled or being read."""

    def __init__(self, counts: NDArray[np.int64], path: str) -> None:
        """counts: items of each table; along a trellis it has more of them."""
        assert counts.shape in {(TABLES,), (TRELLIS_TABLES,)}
        self._path = path
        self._counts = counts
        self._runs = -(-counts // RUN_SYMBOLS)
        if int(self._runs.sum()) % STREAMS:
            self._runs[np.flatnonzero(self._runs)[-1]] += 1
        stops = np.cumsum(self._runs) * RUN_SYMBOLS
        self._cursors: NDArray[np.int64] = stops - self._runs * RUN_SYMBOLS
        self._stops: NDArray[np.int64] = self._cursors + counts
        self._size = int(stops[-1])
        # Where top values end, digits, and top values of a trellis.
        self._kinds = [0, *(int(stops[last - 1]) for last in (TOPS, TABLES, STATE_DIGITS) if last < len(stops))]
        self._kinds.append(self._size)
        # Vector code reads beyond what it takes.
        self._items: Items = np.empty(self._size + _native.TIDE_SLACK, dtype=np.int16)

    def _entropy_runs(self) -> Runs:
        tables = np.repeat(np.arange(len(self._runs), dtype=np.uint16), self._runs)
        return Runs(tables.reshape(STREAMS, -1), RUN_SYMBOLS)

    def put(self, rows: Rows, parents: Items) -> None:
        """Append what takes `parents` to the values of `rows`."""
        fits = _native.tide_put(self._path, *rows, parents, self._items, self._cursors, self._stops)
        assert fits, "counts are those of these rows"

    def take(self, rows: Rows) -> None:
        """Take the next items of each list into the values of `rows`. CorruptPayload if there are too few."""
        if not _native.tide_take(self._path, *rows, self._items, self._cursors, self._stops):
            raise CorruptPayload("tide: lists are shorter than what they are of")

    def put_states(self, rows: StateRows, parents: Items) -> None:
        """Append what takes `parents` to the levels of `rows` along a trellis."""
        lists = (self._items, self._cursors, self._stops)
        fits = _native.tide_put_states(self._path, rows.values, parents, rows.modes, rows.tables, _TWINS, *lists)
        assert fits, "counts are those of these rows"

    def take_states(self, rows: StateRows) -> None:
        """Take levels along a trellis into `rows`, in half steps then. CorruptPayload if a list is too short."""
        lists = (self._items, self._cursors, self._stops)
        if not _native.tide_take_states(self._path, *rows, _TWINS, *lists):
            raise CorruptPayload("tide: lists of a trellis are shorter than what its states ask for")

    def _symbols(self) -> NDArray[np.uint8]:
        """Return the symbols of lists that are full, and fill these up to whole runs."""
        stops = np.cumsum(self._runs) * RUN_SYMBOLS
        for table in np.flatnonzero(self._stops != stops):
            self._items[self._stops[table] : stops[table]] = 0
        symbols = np.empty(self._size, dtype=np.uint8)
        for first, middle, last in zip(self._kinds[:-1:2], self._kinds[1::2], self._kinds[2::2], strict=True):
            _native.tide_symbols(self._path, self._items[first:last], middle - first, symbols[first:last])
        return symbols.reshape(STREAMS, -1)

    def symbol_counts(self) -> NDArray[np.uint64]:
        """Return how often each table codes each symbol, fillings left out: (tables, 32). The lists must be full."""
        tables = np.arange(len(self._counts))
        counts = count_values(self._symbols(), self._entropy_runs(), len(tables))[:, :SYMBOLS]
        counts[tables, _ZEROS[tables]] -= (self._runs * RUN_SYMBOLS - self._counts).astype(np.uint64)
        return counts

    def encode(self, tables: RansTables) -> CodedLists:
        """Return the coded form of lists that are full."""
        by_stream = self._symbols()
        coded = tables.encode(by_stream, self._entropy_runs())
        places = np.flatnonzero(by_stream.reshape(-1) == ESCAPE)
        first = int(np.searchsorted(places, by_stream.shape[1]))
        return CodedLists(coded, self._items[places], (first, len(places) - first))

    def decode(self, tables: RansTables, coded: CodedLists) -> None:
        """Fill the lists. CorruptPayload if `coded` is not of lists of these lengths."""
        out = self._items[: self._size].view(np.uint16).reshape(STREAMS, -1)
        counts = np.array(coded.escape_counts, dtype=np.uint64)
        values = _VALUES[: len(self._counts)]
        tables.decode(coded.streams, self._entropy_runs(), values, out, Escapes(coded.escapes.view(np.uint16), counts))


def _is_top() -> NDArray[np.bool_]:
    """Tell of each table whether it is one of top values."""
    tables = np.arange(TRELLIS_TABLES)
    return (tables < TOPS) | ((tables >= STATE_TOPS) & (tables < STATE_DIGITS))


# The symbol of a zero.
_ZEROS = np.where(_is_top(), TOP_CENTRE, 1)
# What each symbol of each table stands for, as bit patterns of int16.
_VALUES = (np.arange(SYMBOLS) - _ZEROS[:, None]).astype(np.int16).view(np.uint16)
