"""Prefix codes (docs/codec.md, "prefix"): a symbol always has the same bits, so anything can decode them by look-up.

Larger than rANS: about 3 % at 2 to 3 bits a symbol, and never below one bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy.base import SYMBOLS, EntropyTables, check_counts
from kvtide.errors import CorruptPayload

LENGTH_MAX = 10


class PrefixTables(EntropyTables):
    """Code lengths, and the codes and look-up tables that follow from them."""

    def __init__(self, lengths: NDArray[np.uint8], path: str | None = None) -> None:
        """lengths: (tables, 32), 0 for no code, at most 10, each row a complete code, else ValueError."""
        self._lengths = np.array(lengths, dtype=np.uint8, order="C")
        self._lengths.flags.writeable = False
        super().__init__("prefix", _native.PrefixTables(self._lengths), len(self._lengths), path)

    @property
    def lengths(self) -> NDArray[np.uint8]:
        """Return (tables, 32), read-only."""
        return self._lengths

    @property
    def weights(self) -> NDArray[np.uint64]:
        """Return counts that give these tables; see EntropyTables."""
        return np.where(self._lengths > 0, np.uint64(1 << LENGTH_MAX) >> self._lengths.astype(np.uint64), np.uint64(0))

    def to_bytes(self) -> bytes:
        """Return the tables in the form that `PrefixCoder.parse` reads."""
        return _native.prefix_write_tables(self._lengths).tobytes()


class PrefixCoder:
    """Makes prefix tables."""

    name = "prefix"

    def __init__(self, path: str | None = None) -> None:
        """`path` chooses an instruction set for all tables, None the fastest."""
        self._path = path

    def build(self, counts: NDArray[np.uint64]) -> PrefixTables:
        """Return a table for each row of counts; see EntropyCoder."""
        check_counts(counts)
        lengths = np.zeros(counts.shape, dtype=np.uint8)
        _native.prefix_lengths(np.ascontiguousarray(counts), lengths)
        return PrefixTables(lengths, self._path)

    def parse(self, data: bytes | memoryview, count: int) -> PrefixTables:
        """Return the tables that `to_bytes` wrote; see EntropyCoder."""
        # Every table takes at least 18 bits, which bounds what a claimed count can make us allocate.
        if count < 0 or count * 18 > len(data) * 8:
            raise CorruptPayload(f"prefix: {count} tables can't be in {len(data)} bytes")
        lengths = np.zeros((count, SYMBOLS), dtype=np.uint8)
        if not _native.prefix_read_tables(np.frombuffer(data, dtype=np.uint8), lengths):
            raise CorruptPayload(f"prefix: {len(data)} bytes are not {count} tables")
        return PrefixTables(lengths, self._path)
