"""Codes whole numbers of any spread: the high part by an entropy coder, the low bits as they are.

A distribution belongs to a run (a channel). Its `shift` says how many low bits go beside the coder, so that the high
part fits its 31 symbols; what does not fit all the same is an escape. Format: docs/codec.md, "Whole numbers".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.codec.base import ByteReader
from kvtide.codec.entropy import ESCAPE, SYMBOLS, EntropyTables, Escapes, RansTables, Runs, Streams
from kvtide.errors import CorruptPayload

SHIFT_MAX = 6
# Values below this in magnitude may have symbols; all others are escapes, whatever the shift.
VALUE_MAX = 511
# Bits of the longest prefix code.
LENGTH_MAX = 10
_CENTRE = 15
_ESCAPE_BITS = 16
_HEADER = struct.Struct("<BBHII")
_STREAM = struct.Struct("<II")

Integers = NDArray[np.int16]


class PrefixTables(EntropyTables):
    """Lengths of prefix codes, at most 10 or 0 for none (docs/codec.md, "prefix"). ValueError unless complete.

    A symbol always has the same bits, so anyone decodes it. Larger than rANS: about 3 % at 2 to 3 bits a symbol, and
    never below one bit.
    """

    name, dtype, table_bits_min, native = "prefix", np.uint8, 18, _native.PrefixTables
    fit, read, write = _native.prefix_lengths, _native.prefix_read_tables, _native.prefix_write_tables

    @property
    def weights(self) -> NDArray[np.uint64]:
        return np.where(self.rows > 0, np.uint64(1 << LENGTH_MAX) >> self.rows.astype(np.uint64), np.uint64(0))


# What a payload may name; the position is stored.
CODERS: tuple[type[EntropyTables], ...] = (RansTables, PrefixTables)


def coder_named(name: str) -> int:
    """Position of a coder. ValueError for an unknown name."""
    names = [coder.name for coder in CODERS]
    if name not in names:
        raise ValueError(f"expected a coder of {', '.join(names)}, got {name!r}")
    return names.index(name)


@dataclass(frozen=True, slots=True)
class IntegerRuns:
    """The order of numbers: (streams, runs, symbols); each run of a stream has a distribution of its own."""

    streams: int
    runs: int
    symbols: int

    @property
    def distributions(self) -> int:
        """Return how many distributions there are: one for each run of each stream."""
        return self.streams * self.runs

    def entropy_runs(self, pieces: int = 1) -> Runs:
        """Return the coder's view of so many pieces: in each, stream s, run r takes table s * runs + r."""
        tables = np.tile(np.arange(self.distributions, dtype=np.uint16).reshape(self.streams, self.runs), (pieces, 1))
        return Runs(tables if self.symbols else tables[:, :0].copy(), max(self.symbols, 1))


@dataclass(frozen=True)
class Distribution:
    """Tables of the high part and the number of low bits, one each for every run. Immutable."""

    coder: int
    tables: EntropyTables
    shifts: NDArray[np.uint8]

    @cached_property
    def symbol_values(self) -> NDArray[np.uint16]:
        """Return (runs, 32): the number that each symbol stands for, as bits, without the low ones."""
        steps = np.arange(SYMBOLS, dtype=np.int32) - _CENTRE
        return (steps << self.shifts.astype(np.int32)[:, None]).astype(np.uint16)

    @classmethod
    def join(cls, parts: Sequence[Distribution], coder: int) -> Distribution:
        """Return the distributions of all parts, in order, for a coder that need not be theirs."""
        weights = np.concatenate([part.tables.weights for part in parts])
        shifts = np.concatenate([part.shifts for part in parts])
        return cls(coder, CODERS[coder].build(weights), shifts)

    def to_bytes(self) -> bytes:
        """Return the shifts, a byte each, then the tables."""
        return self.shifts.tobytes() + self.tables.to_bytes()

    @classmethod
    def parse(cls, coder: int, data: memoryview, count: int) -> Distribution:
        """Return the distributions of `count` runs that `to_bytes` wrote. CorruptPayload if `data` is not that."""
        reader = ByteReader(data)
        shifts = np.frombuffer(reader.take(count), dtype=np.uint8)
        if count and int(shifts.max()) > SHIFT_MAX:
            raise CorruptPayload(f"a distribution has at most {SHIFT_MAX} low bits, got {int(shifts.max())}")
        return cls(coder, CODERS[coder].parse(reader.left, count), shifts.copy())


def value_counts(values: Integers) -> NDArray[np.uint64]:
    """Return (runs, 2 * VALUE_MAX + 1): how often each value, clipped to ±VALUE_MAX, occurs in each row."""
    width = 2 * VALUE_MAX + 1
    flat = np.clip(values, -VALUE_MAX, VALUE_MAX).astype(np.int64) + VALUE_MAX
    flat += np.arange(len(values), dtype=np.int64)[:, None] * width
    counts = np.bincount(flat.reshape(-1), minlength=len(values) * width)
    return counts.reshape(len(values), width).view(np.uint64)


def fit_distribution(counts: NDArray[np.uint64], coder: int, is_open: bool) -> Distribution:
    """Return the distributions that code such counts best. is_open: every symbol gets a code, for other data."""
    shifts, symbol_counts = _best_shifts(counts)
    symbol_counts += np.uint64(is_open)
    # A run without samples still needs a table.
    symbol_counts[symbol_counts.sum(axis=1) == 0, _CENTRE] = 1
    return Distribution(coder, CODERS[coder].build(symbol_counts), shifts)


def _symbols(values: Integers, shifts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    high = (values >> shifts.astype(np.int16)[:, None]) + np.int16(_CENTRE)
    has_symbol = (high >= 0) & (high < ESCAPE) & (values > -VALUE_MAX) & (values < VALUE_MAX)
    return np.where(has_symbol, high, ESCAPE).astype(np.uint8)


def _best_shifts(counts: NDArray[np.uint64]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return the cheapest shift of each run, and the counts of its symbols: (runs, 32)."""
    total = np.maximum(counts.sum(axis=1), 1).astype(np.float64)[:, None]
    best_bits, best = np.full(len(counts), np.inf), np.zeros(len(counts), dtype=np.uint8)
    best_counts = np.zeros((len(counts), SYMBOLS), dtype=np.uint64)
    values = np.arange(-VALUE_MAX, VALUE_MAX + 1, dtype=np.int16)[None]
    for shift in range(SHIFT_MAX + 1):
        symbols = _symbols(values, np.full(1, shift, dtype=np.uint8))[0]
        starts = np.flatnonzero(np.diff(symbols, prepend=255))
        by_symbol = np.zeros((len(counts), SYMBOLS), dtype=np.uint64)
        for symbol, column in zip(symbols[starts], np.add.reduceat(counts, starts, axis=1).T, strict=True):
            by_symbol[:, symbol] += column
        shares = by_symbol / total
        bits = -(shares * np.log2(np.maximum(shares, 1e-12))).sum(axis=1) + shift + shares[:, ESCAPE] * _ESCAPE_BITS
        is_better = bits < best_bits - 1e-9
        best[is_better], best_bits[is_better] = shift, bits[is_better]
        best_counts[is_better] = by_symbol[is_better]
        if not by_symbol[:, ESCAPE].any():
            break
    return best, best_counts


class WrittenIntegers(NamedTuple):
    """Coded numbers in pieces: the streams, the escapes that each takes, and the planes of low bits, back to back."""

    streams: Streams
    escape_counts: Sequence[int]
    escapes: Integers
    planes: bytes


def encode_integers(values: Integers, runs: IntegerRuns, distribution: Distribution, is_shared: bool) -> bytes:
    """Return the coded form of `values`: (streams, runs, symbols), contiguous; see `join_integers`."""
    assert values.shape == (runs.streams, runs.runs, runs.symbols)
    by_run = values.reshape(runs.distributions, runs.symbols)
    symbols = _symbols(by_run, distribution.shifts).reshape(runs.streams, runs.runs * runs.symbols)
    is_escape, coded = symbols == ESCAPE, distribution.tables.encode(symbols, runs.entropy_runs())
    escapes, shifts, planes = values.reshape(runs.streams, -1)[is_escape], distribution.shifts, []
    # Bit 0 of all runs that have one, then bit 1, …, each packed with its first value in the lowest bit.
    for bit in range(int(shifts.max(initial=0))):
        bits = (by_run[shifts > bit] >> np.int16(bit)) & np.int16(1)
        planes.append(np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes())
    written = WrittenIntegers(coded, is_escape.sum(axis=1).tolist(), escapes, b"".join(planes))
    return join_integers(written, distribution, is_shared)


def join_integers(written: WrittenIntegers, distribution: Distribution, is_shared: bool) -> bytes:
    """Return the pieces as one payload. With `is_shared` the distributions are left out: the reader has them."""
    tables, sizes = b"" if is_shared else distribution.to_bytes(), written.streams.sizes
    parts = [_HEADER.pack(distribution.coder, not is_shared, 0, len(tables), len(sizes))]
    parts += [_STREAM.pack(*pair) for pair in zip(sizes, written.escape_counts, strict=True)]
    parts += [tables, bytes(written.streams.data), written.escapes.astype("<i2").tobytes(), written.planes]
    return b"".join(parts)


def plane_bits(shifts: NDArray[np.uint8], symbols: int) -> list[int]:
    """Return how many low bits each plane has; each begins with a byte of its own."""
    return [int((shifts > bit).sum()) * symbols for bit in range(int(shifts.max(initial=0)))]


def decode_alike(pieces: Sequence[CodedIntegers], runs: IntegerRuns, distribution: Distribution) -> Integers:
    """Return the numbers of several pieces with the same runs and distributions: (pieces, streams, runs, symbols).

    Side by side they meet each table once, which is faster than one after the other.
    """
    streams = Streams(b"".join(piece.streams for piece in pieces), [size for p in pieces for size in p.sizes])
    elements = np.frombuffer(b"".join(piece.escapes for piece in pieces), dtype="<u2").astype(np.uint16)
    escapes = Escapes(elements, np.array([count for p in pieces for count in p.escape_counts], dtype=np.uint64))
    out = np.empty((len(pieces) * runs.streams, runs.runs * runs.symbols), dtype=np.uint16)
    distribution.tables.decode(streams, runs.entropy_runs(len(pieces)), distribution.symbol_values, out, escapes)
    for piece, by_run in zip(pieces, out.reshape(len(pieces), runs.distributions, runs.symbols), strict=True):
        for bit, plane in enumerate(piece.planes(distribution.shifts, runs.symbols)):
            rows = distribution.shifts > bit
            bits = np.unpackbits(np.frombuffer(plane, np.uint8), count=by_run[rows].size, bitorder="little")
            by_run[rows] |= (bits.astype(np.uint16) << np.uint16(bit)).reshape(by_run[rows].shape)
    return out.view(np.int16).reshape(len(pieces), runs.streams, runs.runs, runs.symbols)


class CodedIntegers(NamedTuple):
    """Coded numbers cut into their parts; `low` has what comes after the escapes."""

    coder: int
    tables: memoryview | None
    sizes: tuple[int, ...]
    escape_counts: tuple[int, ...]
    streams: memoryview
    escapes: memoryview
    low: memoryview

    @classmethod
    def parse(cls, data: memoryview, streams: int) -> CodedIntegers:
        """Cut up what `join_integers` joined. CorruptPayload if it can't be that."""
        reader = ByteReader(data)
        coder, has_tables, zero, tables_bytes, stream_count = _HEADER.unpack(reader.take(_HEADER.size))
        if coder >= len(CODERS) or has_tables > 1 or zero or stream_count != streams or tables_bytes * (not has_tables):
            found = f"coder {coder}, tables {has_tables}, {stream_count} streams"
            raise CorruptPayload(f"coded numbers: {found} are not ours")
        sizes, counts = zip(*_STREAM.iter_unpack(reader.take(streams * _STREAM.size)), strict=True)
        tables, streams_of, escapes = map(reader.take, (tables_bytes, sum(sizes), 2 * sum(counts)))
        return cls(coder, tables if has_tables else None, sizes, counts, streams_of, escapes, reader.left)

    def distribution(self, runs: IntegerRuns, shared: Distribution | None) -> Distribution:
        """Return the numbers' own tables, else the shared. CorruptPayload if damaged, missing or of another coder."""
        if self.tables is not None:
            return Distribution.parse(self.coder, self.tables, runs.distributions)
        if shared is None or self.coder != shared.coder:
            raise CorruptPayload("coded numbers need distributions that are not here")
        return shared

    def planes(self, shifts: NDArray[np.uint8], symbols: int) -> list[memoryview]:
        """Return the planes of low bits. CorruptPayload unless they end the numbers, with no bit set after a plane."""
        reader, planes = ByteReader(self.low), list[memoryview]()
        for bits in plane_bits(shifts, symbols):
            planes.append(reader.take(-(-bits // 8)))
            if bits % 8 and planes[-1][-1] >> bits % 8:
                raise CorruptPayload("coded numbers: bits behind the last one are set")
        if reader.left:
            raise CorruptPayload(f"{len(reader.left)} bytes too many")
        return planes
