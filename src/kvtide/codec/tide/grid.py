"""Steps, scales and loudness on one grid of whole numbers, the tables that follow, and the lists of items under them.

A unit is a twelfth of an octave; 19 of them are a factor of three within 0.1 %. Only the choice of tables goes by
units, so that every machine chooses alike; steps are exact thirds of each other. An item is a top value or a digit. All
lists are one array of symbols in two streams, each list filled up with zeros so that every run has one table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy import SYMBOLS, Escapes, RansTables, Runs, Streams
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
# With a trellis those are for thirds of levels. Tables of the levels themselves follow: top values by class, then
# digits by class and context, each for quantiser 0 and then, so many further, for quantiser 1.
STATE_CONTEXTS = 3
TOPS_TWIN, DIGITS_TWIN = TOPS, STATE_CONTEXTS * DIGITS
STATE_TOPS, STATE_DIGITS = TABLES, TABLES + 2 * TOPS_TWIN
TRELLIS_TABLES = STATE_DIGITS + 2 * DIGITS_TWIN
_TWINS = (TOPS_TWIN, DIGITS_TWIN)
_FIRSTS = np.concatenate([STATE_TOPS + np.arange(TOPS_TWIN), STATE_DIGITS + np.arange(DIGITS_TWIN)])
# The tables of quantiser 0 and 1: (pairs, 2).
STATE_PAIRS = np.stack([_FIRSTS, _FIRSTS + np.repeat(_TWINS, _TWINS)], axis=1)

# A component is coded from the step on at which its scale is an eighth of the step; below, it is all but zero.
ENTER_UNITS = -37
# A scale of more than four steps does not fit the alphabet: such a component begins three times coarser, or nine, …
WIDE_UNITS = 24
# Planes of a base, each of which takes as much memory as all rows. A component that needed more would have a scale of
# 2^25 steps, where no coefficient has more than 2,000.
PLANES_MAX = 16

Units = NDArray[np.int64]
# Row numbers.
Which = NDArray[np.uint32]
Items = NDArray[np.int16]

RUN_SYMBOLS = 32
STREAMS = 2
TOP_CENTRE = 15


def step_of(units: int, thirds: int) -> float:
    """Return the step: 2^(units / 12), times three as often as `thirds` says."""
    return float(2.0 ** (units / UNITS) * 3.0**thirds)


def part_bounds(tokens: int) -> NDArray[np.int64]:
    """Return where the parts begin, and the end: (PARTS + 1)."""
    return np.arange(PARTS + 1, dtype=np.int64) * tokens // PARTS


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

    def digit_rows(self, gains: Units, items: Items) -> Rows:
        """Return the rows that get a digit. items: (components, tokens), tokens by loudness."""
        tables = _DIGIT_TABLES if self.mode == Mode.CONTEXT else _ANY_TABLES
        return Rows(items, self.digits, _by_units(self.digit_scales, gains, self.units, tables), self.mode)

    def top_rows(self, gains: Units, items: Items) -> Rows:
        """Return the rows that get a top value."""
        return Rows(items, self.tops, top_tables(self.top_scales, gains, self.units), Mode.TOP)

    def state_rows(self, gains: Units, items: Items) -> tuple[StateRows, list[Rows]]:
        """Return all rows along a trellis, and apart those that this plane codes, under tables of quantiser 0.

        Digits without context have their levels from plain lists.
        """
        tops = _by_units(self.top_scales, gains, self.units, _TOP_TABLES + np.uint16(STATE_TOPS))
        coded = [Rows(items, self.tops, tops, Mode.TOP)]
        if self.mode == Mode.CONTEXT:
            digits = _by_units(self.digit_scales, gains, self.units, _STATE_DIGIT_TABLES)
            coded.append(Rows(items, self.digits, digits, Mode.CONTEXT))
        modes = np.full(len(items), Mode.DIGIT, dtype=np.uint8)
        tables = np.zeros((len(modes), PARTS), dtype=np.uint16)
        for rows in coded:
            modes[rows.which], tables[rows.which] = rows.mode, rows.tables
        return StateRows(items, modes, tables), coded


def planes(scales: Units, base_units: int, refinement: int) -> list[Plane]:
    """Return what a section holds of components of these scales, coarsest first. CorruptPayload for PLANES_MAX."""
    units = base_units - THIRD * refinement
    enters = scales - units >= ENTER_UNITS
    if refinement:
        before = scales - units - THIRD >= ENTER_UNITS
        return [_plane(units, Mode.CONTEXT, scales, before, enters & ~before)]
    thirds = np.where(enters, np.maximum(0, -((base_units + WIDE_UNITS - scales) // THIRD)), -1)
    if (deepest := int(thirds.max(initial=0))) >= PLANES_MAX:
        raise CorruptPayload(f"tide: a base of {deepest + 1} planes, at most {PLANES_MAX} make sense")
    return [
        _plane(base_units + THIRD * third, Mode.DIGIT, scales, thirds > third, thirds == third)
        for third in range(deepest, -1, -1)
    ]


def _plane(units: int, mode: int, scales: Units, digits: NDArray[np.bool_], tops: NDArray[np.bool_]) -> Plane:
    which: list[Which] = [np.flatnonzero(mask).astype(np.uint32) for mask in (digits, tops)]
    return Plane(units, mode, which[0], which[1], scales[digits], scales[tops])


def top_tables(scales: Units, gains: Units, units: int) -> NDArray[np.uint16]:
    """Return the table of each component's top values in each part of the tokens: (components, PARTS)."""
    return _by_units(scales, gains, units, _TOP_TABLES)


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
_DIGIT_CLASSES = np.clip((_OVER - DIGIT_UNITS_MIN) // CLASS_UNITS, 0, DIGITS - 1)
# The first of the three tables that ask, the one that does not, and the first of the three along a trellis.
_DIGIT_TABLES = (TOPS + CONTEXTS * _DIGIT_CLASSES).astype(np.uint16)
_ANY_TABLES = _DIGIT_TABLES + np.uint16(ANY)
_STATE_DIGIT_TABLES = (STATE_DIGITS + STATE_CONTEXTS * _DIGIT_CLASSES).astype(np.uint16)


class Rows(NamedTuple):
    """Some rows of values, by number, and the tables of each one's parts. `Lists.take` fills them."""

    values: Items
    which: Which
    tables: NDArray[np.uint16]
    mode: int

    def count_into(self, parents: Items, counts: NDArray[np.int64], path: str) -> None:
        """Add what these rows take from each table's list after `parents`."""
        _native.tide_count(path, parents, *self[1:], counts)


class StateRows(NamedTuple):
    """All rows in the order of a trellis' path, under tables of quantiser 0. Mode DIGIT: the level is there."""

    values: Items
    modes: NDArray[np.uint8]
    tables: NDArray[np.uint16]

    def count_into(self, parents: Items, counts: NDArray[np.int64], path: str) -> None:
        """Add what these levels put into each table's list after `parents`."""
        _native.tide_count_states(path, self.values, parents, *self[1:], _TWINS, counts)


class CodedLists(NamedTuple):
    """Two streams, and the top values that have no symbol, of each stream in order."""

    streams: Streams
    escapes: Items
    escape_counts: tuple[int, ...]


class Lists:
    """Lists of known lengths, being filled or being read."""

    def __init__(self, counts: NDArray[np.int64], path: str) -> None:
        """counts: items of each table, (TABLES,) or (TRELLIS_TABLES,)."""
        assert counts.shape in {(TABLES,), (TRELLIS_TABLES,)}
        self._path = path
        self._counts = counts
        self._runs = -(-counts // RUN_SYMBOLS)
        if int(self._runs.sum()) % STREAMS:
            self._runs[np.flatnonzero(self._runs)[-1]] += 1
        self._ends = np.cumsum(self._runs) * RUN_SYMBOLS
        self._size = int(self._ends[-1])
        # Where top values end, digits, and top values of a trellis.
        self._kinds = [0, *(int(self._ends[last - 1]) for last in (TOPS, TABLES, STATE_DIGITS) if last < len(counts))]
        self._kinds.append(self._size)
        cursors: NDArray[np.int64] = self._ends - self._runs * RUN_SYMBOLS
        # Vector code reads beyond what it takes.
        self._items: Items = np.empty(self._size + _native.TIDE_SLACK, dtype=np.int16)
        # As kernels take lists: items, where each list is at, and where it ends.
        self._lists = (self._items, cursors, cursors + counts)

    def _entropy_runs(self) -> Runs:
        tables = np.repeat(np.arange(len(self._runs), dtype=np.uint16), self._runs)
        return Runs(tables.reshape(STREAMS, -1), RUN_SYMBOLS)

    def put(self, rows: Rows | StateRows, parents: Items) -> None:
        """Append what takes `parents` to the values of `rows`, or to levels along a trellis."""
        if isinstance(rows, Rows):
            fits = _native.tide_put(self._path, *rows, parents, *self._lists)
        else:
            fits = _native.tide_put_states(
                self._path, rows.values, parents, rows.modes, rows.tables, _TWINS, *self._lists
            )
        assert fits, "counts are those of these rows"

    def take(self, rows: Rows | StateRows) -> None:
        """Take items into `rows`; levels along a trellis become half steps. CorruptPayload if a list is too short."""
        if isinstance(rows, Rows):
            fits = _native.tide_take(self._path, *rows, *self._lists)
        else:
            fits = _native.tide_take_states(self._path, *rows, _TWINS, *self._lists)
        if not fits:
            raise CorruptPayload("tide: lists are shorter than what they are of")

    def _symbols(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the symbols of lists that are full, and where they are ESCAPE; fill these up to whole runs."""
        stops = self._lists[2]
        for table in np.flatnonzero(stops != self._ends):
            self._items[stops[table] : self._ends[table]] = 0
        symbols, escapes = np.empty(self._size, dtype=np.uint8), []
        for first, middle, last in zip(self._kinds[:-1:2], self._kinds[1::2], self._kinds[2::2], strict=True):
            here = self._items[first:last]
            escapes.append(first + _native.tide_symbols(self._path, here, middle - first, symbols[first:last]))
        return symbols.reshape(STREAMS, -1), np.concatenate(escapes)

    def symbol_counts(self) -> NDArray[np.uint64]:
        """Return how often each table codes each symbol, fillings left out: (tables, 32). The lists must be full."""
        tables, runs = np.arange(len(self._counts)), self._entropy_runs()
        counts = np.zeros((len(tables), 256), dtype=np.uint64)
        _native.count_bytes(self._symbols()[0], runs.symbols, runs.tables, counts)
        counts[tables, _ZEROS[tables]] -= (self._runs * RUN_SYMBOLS - self._counts).astype(np.uint64)
        return counts[:, :SYMBOLS]

    def encode(self, tables: RansTables) -> CodedLists:
        """Return the coded form of lists that are full."""
        by_stream, places = self._symbols()
        coded = tables.encode(by_stream, self._entropy_runs())
        first = int(np.searchsorted(places, by_stream.shape[1]))
        return CodedLists(coded, self._items[places], (first, len(places) - first))

    def decode(self, tables: RansTables, coded: CodedLists) -> None:
        """Fill the lists. CorruptPayload if `coded` is not of lists of these lengths."""
        out = self._items[: self._size].view(np.uint16).reshape(STREAMS, -1)
        counts = np.array(coded.escape_counts, dtype=np.uint64)
        values = _VALUES[: len(self._counts)]
        tables.decode(coded.streams, self._entropy_runs(), values, out, Escapes(coded.escapes.view(np.uint16), counts))


_EVERY = np.arange(TRELLIS_TABLES)
_IS_TOP = (_EVERY < TOPS) | ((_EVERY >= STATE_TOPS) & (_EVERY < STATE_DIGITS))
# The symbol of a zero.
_ZEROS = np.where(_IS_TOP, TOP_CENTRE, 1)
# What each symbol of each table stands for, as bit patterns of int16.
_VALUES = (np.arange(SYMBOLS) - _ZEROS[:, None]).astype(np.int16).view(np.uint16)
