"""Alias rANS (docs/codec.md, "rans"): about 0.5 % over the entropy, decoded as fast as memory on AVX-512."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy.base import SYMBOLS, EntropyTables, check_counts
from kvtide.errors import CorruptPayload


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
