"""Fits alphabets of 256 values into 32 symbols: the 31 commonest values have their own, the others share ESCAPE."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy.base import ESCAPE, SYMBOLS, Escapes, Runs, check_encode


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
