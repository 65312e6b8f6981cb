"""The rANS coder again, one symbol at a time: slow, readable, and the truth that the native kernels are tested against.

Follows docs/codec.md word by word and shares no code with the native coder. Arguments are not checked.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

LANES = 32
SYMBOLS = 32
TOTAL = 4096
BUCKET_SLOTS = TOTAL // SYMBOLS
STATE_MIN = 1 << 16
STATES = struct.Struct("<32I")


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


def quantise(counts: Sequence[int]) -> list[int]:
    """Return frequencies with a sum of 4096 that fit the counts."""
    total = sum(counts)
    used = [symbol for symbol in range(SYMBOLS) if counts[symbol]]
    frequencies = [0] * SYMBOLS
    if len(used) == 1:
        frequencies[used[0]] = TOTAL - 1
        frequencies[1 if used[0] == 0 else 0] = 1
        return frequencies
    for symbol in used:
        frequencies[symbol] = max(1, counts[symbol] * TOTAL // total)

    def gains_more(a: int, b: int) -> bool:
        return counts[a] * (2 * frequencies[b] + 1) > counts[b] * (2 * frequencies[a] + 1)

    def loses_less(a: int, b: int) -> bool:
        return counts[a] * (2 * frequencies[b] - 1) < counts[b] * (2 * frequencies[a] - 1)

    while sum(frequencies) < TOTAL:
        best = used[0]
        for symbol in used[1:]:
            if gains_more(symbol, best):
                best = symbol
        frequencies[best] += 1
    while sum(frequencies) > TOTAL:
        able = [symbol for symbol in used if frequencies[symbol] > 1]
        best = able[0]
        for symbol in able[1:]:
            if loses_less(symbol, best):
                best = symbol
        frequencies[best] -= 1
    return frequencies


def _places(count: int, run_symbols: int) -> Iterator[tuple[int, int]]:
    """Yield run and lane of every position: lanes begin anew with each run."""
    for position in range(count):
        yield position // run_symbols, position % run_symbols % LANES


def encode(symbols: Sequence[int], tables: Sequence[SlotMap], run_tables: Sequence[int], run_symbols: int) -> bytes:
    """Return the stream of `symbols`; the last symbol goes in first."""
    if not symbols:
        return b""
    states = [STATE_MIN] * LANES
    words: list[int] = []
    for symbol, (run, lane) in reversed(list(zip(symbols, _places(len(symbols), run_symbols), strict=True))):
        table = tables[run_tables[run]]
        frequency = table.frequencies[symbol]
        if frequency == 0:
            raise ValueError(f"symbol {symbol} has no probability in table {run_tables[run]}")
        if states[lane] >= frequency << 20:
            words.append(states[lane] & 0xFFFF)
            states[lane] >>= 16
        quotient, rank = divmod(states[lane], frequency)
        states[lane] = (quotient << 12) + table.slots[symbol][rank]
    return STATES.pack(*states) + struct.pack(f"<{len(words)}H", *reversed(words))


def decode(
    stream: bytes, count: int, tables: Sequence[SlotMap], run_tables: Sequence[int], run_symbols: int
) -> list[int] | None:
    """Return the `count` symbols of a stream, or None if it does not hold exactly these."""
    if count == 0:
        return [] if not stream else None
    if len(stream) < STATES.size or len(stream) % 2:
        return None
    states = list(STATES.unpack_from(stream))
    words = iter(struct.unpack_from(f"<{(len(stream) - STATES.size) // 2}H", stream, STATES.size))
    if min(states) < STATE_MIN:
        return None
    symbols = []
    for run, lane in _places(count, run_symbols):
        table = tables[run_tables[run]]
        slot = states[lane] % TOTAL
        symbols.append(table.symbols[slot])
        states[lane] = table.frequencies[table.symbols[slot]] * (states[lane] // TOTAL) + table.ranks[slot]
        if states[lane] < STATE_MIN:
            word = next(words, None)
            if word is None:
                return None
            states[lane] = states[lane] << 16 | word
    is_whole = next(words, None) is None and states == [STATE_MIN] * LANES
    return symbols if is_whole else None


def write_tables(tables: Sequence[Sequence[int]]) -> bytes:
    """Return the compact form of frequency tables."""
    fields: list[tuple[int, int]] = []  # value, bits
    for frequencies in tables:
        used = [symbol for symbol in range(SYMBOLS) if frequencies[symbol]]
        fields += [(used[0], 5), (used[-1], 5)]
        for frequency in frequencies[used[0] : used[-1]]:
            length = frequency.bit_length()
            fields.append((length, 4))
            if length > 1:
                fields.append((frequency - (1 << length - 1), length - 1))
    return to_bytes(field_bits(fields))


def read_tables(data: bytes, count: int) -> list[list[int]] | None:
    """Return what `write_tables` wrote, or None if `data` is not exactly that."""
    reader = BitReader(data)
    tables = []
    for _ in range(count):
        first, last = reader.take(5), reader.take(5)
        frequencies = [0] * SYMBOLS
        for symbol in range(first, last):
            length = reader.take(4)
            if length > 12:
                return None
            frequencies[symbol] = (1 << length - 1) + reader.take(length - 1) if length else 0
        frequencies[last] = TOTAL - sum(frequencies)
        if reader.has_overrun or first >= last or not frequencies[first] or not 0 < frequencies[last] < TOTAL:
            return None
        tables.append(frequencies)
    return tables if reader.is_at_end else None


# Bits as characters: the first bit of a stream is the first character.


def to_bytes(bits: str) -> bytes:
    """Return bits as bytes, the first bit lowest."""
    return bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))


def to_bits(data: bytes) -> str:
    """Return bytes as bits, the lowest bit first."""
    return "".join(format(byte, "08b")[::-1] for byte in data)


def field_bits(fields: Iterable[tuple[int, int]]) -> str:
    """Return fields of (value, width), one after the other, each lowest bit first."""
    return "".join(format(value, f"0{width}b")[::-1] for value, width in fields)


class BitReader:
    """Takes fields from the front. Behind the end it gives what is left, and `has_overrun` says so."""

    def __init__(self, data: bytes) -> None:
        self._bits = to_bits(data)
        self._at = 0

    def take(self, width: int) -> int:
        self._at += width
        field = self._bits[self._at - width : self._at]
        return int(field[::-1], 2) if field else 0

    @property
    def has_overrun(self) -> bool:
        return self._at > len(self._bits)

    @property
    def is_at_end(self) -> bool:
        """Return whether nothing but zeros that fill the last byte is left."""
        return len(self._bits) - self._at < 8 and "1" not in self._bits[self._at :]
