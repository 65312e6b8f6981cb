"""Entropy coders: symbols below 32 to bytes and back (docs/codec.md). Counts make tables, tables code streams.

The bytes depend on nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.errors import CorruptPayload

SYMBOLS = 32  # alphabet of every table; symbols that never occur cost nothing
ESCAPE = SYMBOLS - 1  # stands for all values that have no symbol of their own, where Escapes are given

# What symbols decode to: indices or raw bytes, fp16 or bf16 bit patterns, fp32 bit patterns.
Elements = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
# The instruction sets that this CPU can take, fastest first. All give and take the same bytes.
rans_paths = _native.rans_paths


class Streams(NamedTuple):
    """Coded streams back to back, and the bytes of each. Neither holds its own length: the payload must."""

    data: bytes | bytearray | memoryview
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Runs:
    """Says which table each run of symbols takes.

    tables: (streams, runs), uint16, contiguous. Every run has `symbols` symbols, a stream's last one what is left.
    Runs of a multiple of 32 symbols are fastest.
    """

    tables: NDArray[np.uint16]
    symbols: int


class Escapes(NamedTuple):
    """Elements that take the places of ESCAPE, in order of stream and position, and how many each stream takes."""

    elements: Elements
    counts: NDArray[np.uint64]


class EntropyTables(ABC):
    """A set of static tables, which native code encodes and decodes with. Immutable: threads may share it."""

    name: ClassVar[str]
    dtype: ClassVar[type[np.unsignedinteger[Any]]]
    native: ClassVar[Any]

    def __init__(self, rows: NDArray[Any], path: str | None = None) -> None:
        """rows: (tables, 32). ValueError if they are no tables. `path`: an instruction set, None for the fastest."""
        self._rows = np.array(rows, dtype=self.dtype, order="C")
        self._rows.flags.writeable = False
        self._native = self.native(self._rows)
        self._path = rans_paths()[0] if path is None else path

    @property
    def count(self) -> int:
        """The number of tables."""
        return len(self._rows)

    @property
    @abstractmethod
    def weights(self) -> NDArray[np.uint64]:
        """Counts, (tables, 32), of which the coder's `build` makes these same tables."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the tables in the form that the coder's `parse` reads."""

    def encode(self, symbols: NDArray[np.uint8], runs: Runs) -> Streams:
        """Return one stream for each row of `symbols`: (streams, count), contiguous.

        No symbols give no bytes. ValueError for runs that do not fit, and for a symbol that its table can't code.
        """
        check_encode(symbols, runs, self.count)
        data, sizes = self._native.encode(self._path, symbols, runs.symbols, runs.tables)
        return Streams(data.data, sizes)

    def decode(
        self, streams: Streams, runs: Runs, values: Elements, out: Elements, escapes: Escapes | None = None
    ) -> None:
        """Write the element of every symbol to `out`: (streams, count), contiguous, the dtype of `values`.

        values: (tables, 32): what each symbol of each table stands for; rows of `numpy.arange` give the symbols.
        With `escapes`, symbol ESCAPE takes the next of them. CorruptPayload unless every stream holds exactly its
        symbols and takes exactly its escapes; `out` then holds anything. ValueError for arrays that do not fit.
        """
        check_decode(streams, runs, values, out, escapes, self.count)
        taken = escapes or Escapes(np.empty(0, out.dtype), np.zeros(out.shape[0], np.uint64))
        is_whole = self._native.decode(
            self._path,
            np.frombuffer(streams.data, dtype=np.uint8),
            np.array(streams.sizes, dtype=np.uint64),
            runs.symbols,
            runs.tables,
            values.view(np.uint8),
            escapes is not None,
            np.ascontiguousarray(taken.elements).view(np.uint8),
            taken.counts,
            out.view(np.uint8),
        )
        if not is_whole:
            raise CorruptPayload(f"{self.name}: {len(streams.sizes)} streams do not hold {out.shape[1]} symbols each")


_Tables = TypeVar("_Tables", bound=EntropyTables)


class EntropyCoder(ABC, Generic[_Tables]):
    """Makes tables. `table_bits_min` bounds what a claimed count of tables can make us allocate."""

    tables: type[_Tables]
    table_bits_min: ClassVar[int]

    def __init__(self, path: str | None = None) -> None:
        """`path` chooses an instruction set for all tables, None the fastest."""
        self._path = path

    @property
    def name(self) -> str:
        """The coder's name in payloads and reports."""
        return self.tables.name

    @abstractmethod
    def _fit(self, counts: NDArray[np.uint64], rows: NDArray[Any]) -> None: ...

    @abstractmethod
    def _read(self, data: NDArray[np.uint8], rows: NDArray[Any]) -> bool: ...

    def build(self, counts: NDArray[np.uint64]) -> _Tables:
        """Return a table for each row of `counts`: (tables, 32), each with a sum from 1 to 2^48 - 1.

        A symbol of count 0 gets no code: add 1 to all counts if other data will be coded.
        """
        if counts.dtype != np.uint64 or counts.ndim != 2 or counts.shape[1] != SYMBOLS:
            raise ValueError(f"counts must be (tables, {SYMBOLS}) of uint64, got {counts.shape} of {counts.dtype}")
        rows = np.zeros(counts.shape, dtype=self.tables.dtype)
        self._fit(np.ascontiguousarray(counts), rows)
        return self.tables(rows, self._path)

    def parse(self, data: bytes | memoryview, count: int) -> _Tables:
        """Return the `count` tables that `to_bytes` wrote. CorruptPayload if `data` is not exactly that."""
        if count < 0 or count * self.table_bits_min > len(data) * 8:
            raise CorruptPayload(f"{self.name}: {count} tables can't be in {len(data)} bytes")
        rows = np.zeros((count, SYMBOLS), dtype=self.tables.dtype)
        if not self._read(np.frombuffer(data, dtype=np.uint8), rows):
            raise CorruptPayload(f"{self.name}: {len(data)} bytes are not {count} tables")
        return self.tables(rows, self._path)


class RansTables(EntropyTables):
    """Frequencies of a sum of 4096, and what the kernels make of them. ValueError for a row with more than 4095."""

    name, dtype, native = "rans", np.uint16, _native.RansTables

    @property
    def frequencies(self) -> NDArray[np.uint16]:
        """The frequencies, (tables, 32), read-only."""
        return self._rows

    @property
    def weights(self) -> NDArray[np.uint64]:
        """Counts that give these tables; see EntropyTables."""
        return self._rows.astype(np.uint64)

    def to_bytes(self) -> bytes:
        return _native.rans_write_tables(self._rows).tobytes()


class RansCoder(EntropyCoder[RansTables]):
    """Makes rANS tables."""

    tables, table_bits_min = RansTables, 10

    def _fit(self, counts: NDArray[np.uint64], rows: NDArray[Any]) -> None:
        _native.rans_quantise(counts, rows)

    def _read(self, data: NDArray[np.uint8], rows: NDArray[Any]) -> bool:
        return _native.rans_read_tables(data, rows)


def _check_runs(runs: Runs, streams: int, count: int, table_count: int) -> None:
    if runs.symbols < 1:
        raise ValueError(f"a run must have at least one symbol, got {runs.symbols}")
    expected = (streams, -(-count // runs.symbols))
    if runs.tables.dtype != np.uint16 or runs.tables.shape != expected or not runs.tables.flags.c_contiguous:
        raise ValueError(f"run tables must be {expected} of uint16, got {runs.tables.shape} of {runs.tables.dtype}")
    if runs.tables.size and int(runs.tables.max()) >= table_count:
        raise ValueError(f"run tables name table {int(runs.tables.max())}, there are {table_count}")


def check_encode(symbols: NDArray[np.uint8], runs: Runs, table_count: int) -> None:
    """Raise ValueError unless `symbols` and `runs` fit each other."""
    if symbols.dtype != np.uint8 or symbols.ndim != 2 or not symbols.flags.c_contiguous:
        raise ValueError(f"symbols must be (streams, count) of uint8, got {symbols.shape} of {symbols.dtype}")
    _check_runs(runs, symbols.shape[0], symbols.shape[1], table_count)


def check_decode(
    streams: Streams, runs: Runs, values: Elements, out: Elements, escapes: Escapes | None, table_count: int
) -> None:
    """Raise ValueError unless arrays fit each other, CorruptPayload unless sizes cover the data."""
    if out.ndim != 2 or out.dtype.kind != "u" or out.itemsize not in {1, 2, 4} or not out.flags.carray:
        raise ValueError(f"out must be (streams, count) of uint8, 16 or 32, got {out.shape} of {out.dtype}")
    if values.shape != (table_count, SYMBOLS) or values.dtype != out.dtype or not values.flags.c_contiguous:
        expected = f"({table_count}, {SYMBOLS}) of {out.dtype}"
        raise ValueError(f"values must be {expected}, got {values.shape} of {values.dtype}")
    if len(streams.sizes) != out.shape[0]:
        raise ValueError(f"{out.shape[0]} streams need as many sizes, got {len(streams.sizes)}")
    _check_runs(runs, out.shape[0], out.shape[1], table_count)
    size = len(streams.data)
    if min(streams.sizes, default=0) < 0 or sum(streams.sizes) != size:
        raise CorruptPayload(f"streams of {sum(streams.sizes)} bytes expected, got {size}")
    if escapes is None:
        return
    if escapes.elements.dtype != out.dtype or escapes.elements.ndim != 1:
        raise ValueError(f"escapes must be a row of {out.dtype}, got {escapes.elements.dtype}")
    if escapes.counts.dtype != np.uint64 or escapes.counts.shape != (out.shape[0],):
        raise ValueError(f"escape counts must be ({out.shape[0]},) of uint64, got {escapes.counts.shape}")
    # Summed without wrapping: foreign counts may be anything.
    if sum(int(count) for count in escapes.counts) != escapes.elements.size:
        raise CorruptPayload(f"streams take other than the {escapes.elements.size} escapes that are here")


def count_values(values: NDArray[np.uint8], runs: Runs, table_count: int) -> NDArray[np.uint64]:
    """Return (tables, 256): how often each value of (streams, count) stands in runs of each table."""
    check_encode(values, runs, table_count)
    counts = np.zeros((table_count, 256), dtype=np.uint64)
    _native.count_bytes(values, runs.symbols, runs.tables, counts)
    return counts


class EscapeMap:
    """Maps values to symbols, by table. Value 0 of a row that names fewer than 32 values fills up: it never decodes."""

    def __init__(self, values: NDArray[np.uint8]) -> None:
        """values: (tables, 32): the value of each symbol; the last column is not a value, it is ESCAPE's."""
        if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] != SYMBOLS:
            raise ValueError(f"values must be (tables, {SYMBOLS}) of uint8, got {values.shape} of {values.dtype}")
        self._symbols = np.full((len(values), 256), ESCAPE, dtype=np.uint8)
        # Backwards, so that the first symbol of a value that fills up a row is the one that counts.
        rows = np.arange(len(values))
        for symbol in range(ESCAPE - 1, -1, -1):
            self._symbols[rows, values[:, symbol]] = symbol

    def symbol_counts(self, counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return (tables, 32) from (tables, 256): how often each symbol stands for values of these counts."""
        result = np.zeros((len(counts), SYMBOLS), dtype=np.uint64)
        rows = np.repeat(np.arange(len(counts)), 256)
        np.add.at(result, (rows, self._symbols.reshape(-1)), counts.reshape(-1))
        return result

    def split(self, values: NDArray[np.uint8], runs: Runs) -> tuple[NDArray[np.uint8], Escapes]:
        """Return symbols, and escapes for what has none, of `values`: (streams, count), contiguous."""
        check_encode(values, runs, len(self._symbols))
        symbols = np.empty_like(values)
        _native.map_bytes(values, runs.symbols, runs.tables, self._symbols, symbols)
        is_escape = symbols == ESCAPE
        counts = np.array([np.count_nonzero(row) for row in is_escape], dtype=np.uint64)
        return symbols, Escapes(values.reshape(-1)[np.flatnonzero(is_escape)], counts)
