"""Alias rANS (docs/codec.md, "rans"): about 0.5 % over the entropy, decoded as fast as memory on AVX-512."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy.base import (
    SYMBOLS,
    Elements,
    Escapes,
    Runs,
    Streams,
    check_counts,
    check_decode,
    check_encode,
)
from kvtide.errors import CorruptPayload

__all__ = ["RansCoder", "RansTables", "rans_paths"]

TOTAL = 4096


def rans_paths() -> list[str]:
    """Return the instruction sets that this CPU can take, fastest first. All give and take the same bytes."""
    return _native.rans_paths()


class RansTables:
    """Frequencies of a sum of 4096, and what the kernels make of them."""

    def __init__(self, frequencies: NDArray[np.uint16], path: str | None = None) -> None:
        """frequencies: (tables, 32), each row with a sum of 4096 and nothing above 4095, else ValueError.

        `path` chooses an instruction set, None the fastest.
        """
        self._frequencies = np.array(frequencies, dtype=np.uint16, order="C")
        self._frequencies.flags.writeable = False
        self._native = _native.RansTables(self._frequencies)
        self._path = _native.rans_paths()[0] if path is None else path

    @property
    def count(self) -> int:
        """Return the number of tables."""
        return len(self._frequencies)

    @property
    def frequencies(self) -> NDArray[np.uint16]:
        """Return (tables, 32), read-only."""
        return self._frequencies

    def to_bytes(self) -> bytes:
        """Return the tables in the form that `RansCoder.parse` reads."""
        return _native.rans_write_tables(self._frequencies).tobytes()

    def coded_bits(self, counts: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the bits that symbols of these counts take under each table."""
        check_counts(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            costs = np.log2(TOTAL) - np.log2(self._frequencies.astype(np.float64))
            bits: NDArray[np.float64] = np.where(counts > 0, counts * costs, 0.0).sum(axis=1)
        return bits

    def encode(self, symbols: NDArray[np.uint8], runs: Runs) -> Streams:
        """Return one stream for each row of `symbols`; see EntropyTables."""
        check_encode(symbols, runs, self.count)
        data, sizes = self._native.encode(self._path, symbols, runs.symbols, runs.tables)
        return Streams(data, sizes)

    def decode(
        self, streams: Streams, runs: Runs, values: Elements, out: Elements, escapes: Escapes | None = None
    ) -> None:
        """Write the element of every symbol to `out`; see EntropyTables."""
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
            raise CorruptPayload(f"rans: {len(streams.sizes)} streams do not hold {out.shape[1]} symbols each")


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
