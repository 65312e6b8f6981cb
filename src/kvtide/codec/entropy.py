"""Entropy coders: symbols below 32 to bytes and back (docs/codec.md). Counts make tables, tables code streams.

The bytes depend on nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.errors import CorruptPayload

__all__ = [
    "ESCAPE",
    "SYMBOLS",
    "EntropyCoder",
    "EntropyTables",
    "EscapeMap",
    "Escapes",
    "RansCoder",
    "RansTables",
    "Runs",
    "Streams",
    "check_counts",
    "count_values",
]

SYMBOLS = 32  # alphabet of every table; symbols that never occur cost nothing
ESCAPE = SYMBOLS - 1  # stands for all values that have no symbol of their own, where Escapes are given

# What symbols decode to: indices or raw bytes, fp16 or bf16 bit patterns, fp32 bit patterns.
Elements = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


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

    def __init__(
        self, name: str, native: _native.RansTables | _native.PrefixTables, count: int, path: str | None
    ) -> None:
        """`path` chooses an instruction set, None the fastest of this CPU."""
        self._name = name
        self._native = native
        self._count = count
        self._path = _native.rans_paths()[0] if path is None else path

    @property
    def count(self) -> int:
        """Return the number of tables."""
        return self._count

    @property
    @abstractmethod
    def weights(self) -> NDArray[np.uint64]:
        """Return counts, (tables, 32), of which the coder's `build` makes these same tables."""

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
            raise CorruptPayload(f"{self._name}: {len(streams.sizes)} streams do not hold {out.shape[1]} symbols each")


class EntropyCoder(Protocol):
    """Makes tables. Holds no state."""

    @property
    def name(self) -> str:
        """Return the coder's name in payloads and reports."""

    def build(self, counts: NDArray[np.uint64]) -> EntropyTables:
        """Return a table for each row of `counts`: (tables, 32), each with a sum from 1 to 2^48 - 1.

        A symbol of count 0 gets no code: add 1 to all counts if other data will be coded.
        """

    def parse(self, data: bytes | memoryview, count: int) -> EntropyTables:
        """Return the `count` tables that `to_bytes` wrote. CorruptPayload if `data` is not exactly that."""


def check_counts(counts: NDArray[np.uint64]) -> None:
    """Raise ValueError unless `counts` is (tables, 32) of uint64."""
    if counts.dtype != np.uint64 or counts.ndim != 2 or counts.shape[1] != SYMBOLS:
        raise ValueError(f"counts must be (tables, {SYMBOLS}) of uint64, got {counts.shape} of {counts.dtype}")


def check_runs(runs: Runs, streams: int, count: int, table_count: int) -> None:
    """Raise ValueError unless `runs` names a table for each run of each stream."""
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
    check_runs(runs, symbols.shape[0], symbols.shape[1], table_count)


def check_decode(
    streams: Streams, runs: Runs, values: Elements, out: Elements, escapes: Escapes | None, table_count: int
) -> None:
    """Raise ValueError unless arrays fit each other, CorruptPayload unless sizes cover the data."""
    if out.ndim != 2 or out.dtype.kind != "u" or out.itemsize not in {1, 2, 4} or not out.flags.carray:
        raise ValueError(f"out must be (streams, count) of uint8, 16 or 32, got {out.shape} of {out.dtype}")
    if values.shape != (table_count, SYMBOLS) or values.dtype != out.dtype or not values.flags.c_contiguous:
        raise ValueError(
            f"values must be ({table_count}, {SYMBOLS}) of {out.dtype}, got {values.shape} of {values.dtype}"
        )
    if len(streams.sizes) != out.shape[0]:
        raise ValueError(f"{out.shape[0]} streams need as many sizes, got {len(streams.sizes)}")
    check_runs(runs, out.shape[0], out.shape[1], table_count)
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
    """Return (tables, 256): how often each value stands in runs of each table.

    values: (streams, count), contiguous. Of symbols, the first 32 columns are what `EntropyCoder.build` takes.
    """
    check_encode(values, runs, table_count)
    counts = np.zeros((table_count, 256), dtype=np.uint64)
    _native.count_bytes(values, runs.symbols, runs.tables, counts)
    return counts


class SplitValues(NamedTuple):
    """Symbols for a coder, and the values that ESCAPE stands for."""

    symbols: NDArray[np.uint8]
    escapes: Escapes


class EscapeMap:
    """Maps values to symbols, by table. Value 0 of a row that names fewer than 32 values fills up: it never decodes."""

    def __init__(self, values: NDArray[np.uint8]) -> None:
        """values: (tables, 32): the value of each symbol; the last column is not a value, it is ESCAPE's."""
        if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] != SYMBOLS:
            raise ValueError(f"values must be (tables, {SYMBOLS}) of uint8, got {values.shape} of {values.dtype}")
        self._values = np.ascontiguousarray(values)
        self._symbols = np.full((len(values), 256), ESCAPE, dtype=np.uint8)
        # Backwards, so that the first symbol of a value that fills up a row is the one that counts.
        rows = np.arange(len(values))
        for symbol in range(ESCAPE - 1, -1, -1):
            self._symbols[rows, values[:, symbol]] = symbol

    @classmethod
    def fit(cls, counts: NDArray[np.uint64]) -> EscapeMap:
        """Return a map that gives the commonest values symbols: the commonest 0; of equals the lower value first.

        counts: (tables, 256).
        """
        if counts.dtype != np.uint64 or counts.ndim != 2 or counts.shape[1] != 256:
            raise ValueError(f"counts must be (tables, 256) of uint64, got {counts.shape} of {counts.dtype}")
        order = np.argsort(np.uint64(2**64 - 1) - counts, axis=1, kind="stable")
        values = order[:, :SYMBOLS].astype(np.uint8)
        values[:, ESCAPE] = 0
        return cls(values)

    @property
    def values(self) -> NDArray[np.uint8]:
        """Return (tables, 32): what `EntropyTables.decode` takes to give the values back."""
        return self._values

    def symbol_counts(self, counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return (tables, 32) from (tables, 256): how often each symbol stands for values of these counts."""
        result = np.zeros((len(counts), SYMBOLS), dtype=np.uint64)
        rows = np.repeat(np.arange(len(counts)), 256)
        np.add.at(result, (rows, self._symbols.reshape(-1)), counts.reshape(-1))
        return result

    def split(self, values: NDArray[np.uint8], runs: Runs) -> SplitValues:
        """Return symbols and escapes of `values`: (streams, count), contiguous."""
        check_encode(values, runs, len(self._symbols))
        symbols = np.empty_like(values)
        _native.map_bytes(values, runs.symbols, runs.tables, self._symbols, symbols)
        is_escape = symbols == ESCAPE
        counts = np.array([np.count_nonzero(row) for row in is_escape], dtype=np.uint64)
        elements = values.reshape(-1)[np.flatnonzero(is_escape)]
        return SplitValues(symbols, Escapes(elements, counts))


def rans_paths() -> list[str]:
    """Return the instruction sets that this CPU can take, fastest first. All give and take the same bytes."""
    return _native.rans_paths()


class RansTables(EntropyTables):
    """Frequencies of a sum of 4096, and what the kernels make of them."""

    def __init__(self, frequencies: NDArray[np.uint16], path: str | None = None) -> None:
        """frequencies: (tables, 32), each row with a sum of 4096 and nothing above 4095, else ValueError.

        `path` chooses an instruction set, None the fastest.
        """
        self._frequencies = np.array(frequencies, dtype=np.uint16, order="C")
        self._frequencies.flags.writeable = False
        super().__init__("rans", _native.RansTables(self._frequencies), len(self._frequencies), path)

    @property
    def frequencies(self) -> NDArray[np.uint16]:
        """Return (tables, 32), read-only."""
        return self._frequencies

    @property
    def weights(self) -> NDArray[np.uint64]:
        """Return counts that give these tables; see EntropyTables."""
        return self._frequencies.astype(np.uint64)

    def to_bytes(self) -> bytes:
        """Return the tables in the form that `RansCoder.parse` reads."""
        return _native.rans_write_tables(self._frequencies).tobytes()


class RansCoder:
    """Makes rANS tables."""

    name = "rans"

    def __init__(self, path: str | None = None) -> None:
        """`path` chooses an instruction set for all tables, None the fastest."""
        self._path = path

    def build(self, counts: NDArray[np.uint64]) -> RansTables:
        """Return a table for each row of counts; see EntropyCoder."""
        check_counts(counts)
        frequencies = np.zeros(counts.shape, dtype=np.uint16)
        _native.rans_quantise(np.ascontiguousarray(counts), frequencies)
        return RansTables(frequencies, self._path)

    def parse(self, data: bytes | memoryview, count: int) -> RansTables:
        """Return the tables that `to_bytes` wrote; see EntropyCoder."""
        # Every table takes at least 10 bits, which bounds what a claimed count can make us allocate.
        if count < 0 or count * 10 > len(data) * 8:
            raise CorruptPayload(f"rans: {count} tables can't be in {len(data)} bytes")
        frequencies = np.zeros((count, SYMBOLS), dtype=np.uint16)
        if not _native.rans_read_tables(np.frombuffer(data, dtype=np.uint8), frequencies):
            raise CorruptPayload(f"rans: {len(data)} bytes are not {count} tables")
        return RansTables(frequencies, self._path)
