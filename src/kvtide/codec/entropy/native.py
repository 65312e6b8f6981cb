"""What both coders do with their native table sets: check, call, and turn a failure into CorruptPayload."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy.base import Elements, Escapes, Runs, Streams, check_decode, check_encode
from kvtide.errors import CorruptPayload


class NativeTables:
    """Encodes and decodes with a native table set. Immutable."""

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

    def encode(self, symbols: NDArray[np.uint8], runs: Runs) -> Streams:
        """Return one stream for each row of `symbols`; see EntropyTables."""
        check_encode(symbols, runs, self.count)
        data, sizes = self._native.encode(self._path, symbols, runs.symbols, runs.tables)
        return Streams(data.data, sizes)

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
            raise CorruptPayload(f"{self._name}: {len(streams.sizes)} streams do not hold {out.shape[1]} symbols each")
