"""Entropy coders: symbols below 32 to bytes and back (docs/codec.md). Counts make tables, tables code streams.

The bytes depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

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


class EntropyTables:
    """A set of static tables, which native code encodes and decodes with. Immutable: threads may share it.

    A coder is a subclass, with its native functions: `fit` makes rows of counts, `read` and `write` are their compact
    form. `table_bits_min` bounds what a claimed count of tables can make us allocate.
    """

    name: ClassVar[str]
    dtype: ClassVar[type[np.unsignedinteger[Any]]]
    table_bits_min: ClassVar[int]
    native: ClassVar[Any]
    fit: ClassVar[Callable[[NDArray[np.uint64], Any], None]]
    read: ClassVar[Callable[[NDArray[np.uint8], Any], bool]]
    write: ClassVar[Callable[[Any], NDArray[np.uint8]]]

    def __init__(self, rows: NDArray[Any], path: str | None = None) -> None:
        """rows: (tables, 32). ValueError if they are no tables. `path`: an instruction set, None for the fastest."""
        self.rows = np.array(rows, dtype=self.dtype, order="C")
        self.rows.flags.writeable = False
        self._native = self.native(self.rows)
        self._path = rans_paths()[0] if path is None else path

    @classmethod
    def build(cls, counts: NDArray[np.uint64], path: str | None = None) -> Self:
        """Return a table for each row of `counts`: (tables, 32), each with a sum from 1 to 2^48 - 1, or ValueError.

        A symbol of count 0 gets no code: add 1 to all counts if other data will be coded.
        """
        rows = np.zeros(counts.shape, dtype=cls.dtype)
        cls.fit(np.ascontiguousarray(counts), rows)
        return cls(rows, path)

    @classmethod
    def parse(cls, data: bytes | memoryview, count: int) -> Self:
        """Return the `count` tables that `to_bytes` wrote. CorruptPayload if `data` is not exactly that."""
        if count < 0 or count * cls.table_bits_min > len(data) * 8:
            raise CorruptPayload(f"{cls.name}: {count} tables can't be in {len(data)} bytes")
        rows = np.zeros((count, SYMBOLS), dtype=cls.dtype)
        if not cls.read(np.frombuffer(data, dtype=np.uint8), rows):
            raise CorruptPayload(f"{cls.name}: {len(data)} bytes are not {count} tables")
        return cls(rows)

    def to_bytes(self) -> bytes:
        """Return the tables in the form that `parse` reads."""
        return type(self).write(self.rows).tobytes()

    @property
    def weights(self) -> NDArray[np.uint64]:
        """Counts, (tables, 32), of which `build` makes these same tables."""
        return self.rows.astype(np.uint64)

    def encode(self, symbols: NDArray[np.uint8], runs: Runs) -> Streams:
        """Return one stream for each row of `symbols`: (streams, count), contiguous.

        No symbols give no bytes. ValueError for runs that do not fit, and for a symbol that its table can't code.
        """
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
        taken = escapes or Escapes(np.empty(0, out.dtype), np.zeros(out.shape[0], np.uint64))
        sizes, size = streams.sizes, len(streams.data)
        assert values.dtype == out.dtype == taken.elements.dtype
        assert len(sizes) == len(out)
        if min(sizes, default=0) < 0 or sum(sizes) != size:
            raise CorruptPayload(f"streams of {sum(sizes)} bytes expected, got {size}")
        # Summed without wrapping: foreign counts may be anything.
        if sum(map(int, taken.counts)) != taken.elements.size:
            raise CorruptPayload(f"streams take other than the {taken.elements.size} escapes that are here")
        coded = (np.frombuffer(streams.data, dtype=np.uint8), np.array(sizes, dtype=np.uint64))
        under = (runs.symbols, runs.tables, values.view(np.uint8))
        escaped = (escapes is not None, np.ascontiguousarray(taken.elements).view(np.uint8), taken.counts)
        if not self._native.decode(self._path, *coded, *under, *escaped, out.view(np.uint8)):
            raise CorruptPayload(f"{self.name}: {len(sizes)} streams do not hold {out.shape[1]} symbols each")


class RansTables(EntropyTables):
    """Frequencies of a sum of 4096, and what the kernels make of them. ValueError for a row with more than 4095."""

    name, dtype, table_bits_min, native = "rans", np.uint16, 10, _native.RansTables
    fit, read, write = _native.rans_quantise, _native.rans_read_tables, _native.rans_write_tables
