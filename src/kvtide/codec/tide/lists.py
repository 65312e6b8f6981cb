"""One list of items for each table, as one array of entropy-coded symbols in two streams.

An item is a top value or a digit. Lists are filled up to whole runs with zeros, so that every run has one table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy import ESCAPE, SYMBOLS, Escapes, RansTables, Runs, Streams, count_values
from kvtide.codec.tide.grid import TABLES, TOPS, Which
from kvtide.errors import CorruptPayload

Items = NDArray[np.int16]

RUN_SYMBOLS = 32
STREAMS = 2
TOP_CENTRE = 15


class Rows(NamedTuple):
    """Some rows of values, by number, and the table of each one's parts. `Lists.take` fills them."""

    values: Items
    which: Which
    tables: NDArray[np.uint16]
    mode: int

    def count_into(self, counts: NDArray[np.int64], path: str) -> None:
        """Add what these rows take from each table's list. Digits that ask do so by the values as they are."""
        _native.tide_count(path, *self, counts)


class CodedLists(NamedTuple):
    """Two streams, and the top values that have no symbol, of each stream in order."""

    streams: Streams
    escapes: Items
    escape_counts: tuple[int, ...]


class Lists:
    """Lists of known lengths, being filled or being read."""

    def __init__(self, counts: NDArray[np.int64], path: str) -> None:
        """counts: items of each table."""
        assert counts.shape == (TABLES,)
        self._path = path
        self._counts = counts
        self._runs = -(-counts // RUN_SYMBOLS)
        if int(self._runs.sum()) % STREAMS:
            self._runs[np.flatnonzero(self._runs)[-1]] += 1
        stops = np.cumsum(self._runs) * RUN_SYMBOLS
        self._cursors: NDArray[np.int64] = stops - self._runs * RUN_SYMBOLS
        self._stops: NDArray[np.int64] = self._cursors + counts
        self._size = int(stops[-1])
        self._tops = int(stops[TOPS - 1])
        # Vector code reads beyond what it takes.
        self._items: Items = np.empty(self._size + _native.TIDE_SLACK, dtype=np.int16)

    def _entropy_runs(self) -> Runs:
        tables = np.repeat(np.arange(TABLES, dtype=np.uint16), self._runs)
        return Runs(tables.reshape(STREAMS, -1), RUN_SYMBOLS)

    def put(self, rows: Rows, parents: Items) -> None:
        """Append what takes `parents` to the values of `rows`."""
        fits = _native.tide_put(self._path, *rows, parents, self._items, self._cursors, self._stops)
        assert fits, "counts are those of these rows"

    def take(self, rows: Rows) -> None:
        """Take the next items of each list into the values of `rows`. CorruptPayload if there are too few."""
        if not _native.tide_take(self._path, *rows, self._items, self._cursors, self._stops):
            raise CorruptPayload("tide: lists are shorter than what they are of")

    def _symbols(self) -> NDArray[np.uint8]:
        """Return the symbols of lists that are full, and fill these up to whole runs."""
        stops = np.cumsum(self._runs) * RUN_SYMBOLS
        for table in np.flatnonzero(self._stops != stops):
            self._items[self._stops[table] : stops[table]] = 0
        symbols = np.empty(self._size, dtype=np.uint8)
        _native.tide_symbols(self._path, self._items[: self._size], self._tops, symbols)
        return symbols.reshape(STREAMS, -1)

    def symbol_counts(self) -> NDArray[np.uint64]:
        """Return how often each table codes each symbol, fillings left out: (TABLES, 32). The lists must be full."""
        counts = count_values(self._symbols(), self._entropy_runs(), TABLES)[:, :SYMBOLS]
        filled = (self._runs * RUN_SYMBOLS - self._counts).astype(np.uint64)
        counts[:TOPS, TOP_CENTRE] -= filled[:TOPS]
        counts[TOPS:, 1] -= filled[TOPS:]
        return counts

    def encode(self, tables: RansTables) -> CodedLists:
        """Return the coded form of lists that are full."""
        by_stream = self._symbols()
        coded = tables.encode(by_stream, self._entropy_runs())
        places = np.flatnonzero(by_stream.reshape(-1)[: self._tops] == ESCAPE)
        first = int(np.searchsorted(places, by_stream.shape[1]))
        return CodedLists(coded, self._items[places], (first, len(places) - first))

    def decode(self, tables: RansTables, coded: CodedLists) -> None:
        """Fill the lists. CorruptPayload if `coded` is not of lists of these lengths."""
        out = self._items[: self._size].view(np.uint16).reshape(STREAMS, -1)
        counts = np.array(coded.escape_counts, dtype=np.uint64)
        tables.decode(coded.streams, self._entropy_runs(), _VALUES, out, Escapes(coded.escapes.view(np.uint16), counts))


def _values() -> NDArray[np.uint16]:
    """Return what each symbol of each table stands for, as bit patterns of int16."""
    values = np.empty((TABLES, SYMBOLS), dtype=np.int16)
    values[:TOPS] = np.arange(SYMBOLS) - TOP_CENTRE
    values[TOPS:] = np.arange(SYMBOLS) - 1
    return values.view(np.uint16)


_VALUES = _values()
