"""Alias rANS (docs/codec.md, "rans"): about 0.5 % over the entropy, decoded as fast as memory on AVX-512."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.entropy.base import SYMBOLS, EntropyTables, check_counts
from kvtide.errors import CorruptPayload

TOTAL = 4096
BUCKET_SLOTS = TOTAL // SYMBOLS


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


class SlotMap(NamedTuple):
    """What each of the 4096 slots means, and back."""

    frequencies: list[int]
    symbols: list[int]  # of each slot
    ranks: list[int]  # of each slot: its number among its symbol's slots
    slots: list[list[int]]  # of each symbol, by rank


def slot_map(frequencies: Sequence[int]) -> SlotMap:
    """Return the alias table of these frequencies, slot by slot."""
    split, alias = _buckets(frequencies)
    slots: list[list[int]] = [[] for _ in range(SYMBOLS)]
    for bucket in range(SYMBOLS):
        slots[bucket] += range(bucket * BUCKET_SLOTS, bucket * BUCKET_SLOTS + split[bucket])
    for bucket in range(SYMBOLS):
        slots[alias[bucket]] += range(bucket * BUCKET_SLOTS + split[bucket], (bucket + 1) * BUCKET_SLOTS)
    symbols, ranks = [0] * TOTAL, [0] * TOTAL
    for symbol in range(SYMBOLS):
        assert len(slots[symbol]) == frequencies[symbol]
        for rank, slot in enumerate(slots[symbol]):
            symbols[slot], ranks[slot] = symbol, rank
    return SlotMap(list(frequencies), symbols, ranks, slots)


def _buckets(frequencies: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each bucket how many slots are its own symbol's, and the symbol of the others."""
    left = list(frequencies)
    alias = list(range(SYMBOLS))
    donors = iter([symbol for symbol in range(SYMBOLS) if frequencies[symbol] > BUCKET_SLOTS])
    donor = next(donors, SYMBOLS)

    def fill(bucket: int) -> None:
        alias[bucket] = donor
        left[donor] -= BUCKET_SLOTS - left[bucket]

    for bucket in range(SYMBOLS):
        if frequencies[bucket] >= BUCKET_SLOTS:
            continue
        while left[donor] == BUCKET_SLOTS:
            donor = next(donors)
        fill(bucket)
        while left[donor] < BUCKET_SLOTS:
            short = donor
            donor = next(donors)
            fill(short)
    return left, alias
