"""The prefix coder again, one symbol at a time: slow, readable, and the truth that the native coder is tested against.

Follows docs/codec.md word by word and shares no code with the native coder. Arguments are not checked.
"""

from collections import Counter
from collections.abc import Sequence

from tests.codec.entropy.rans_twin import BitReader, field_bits, to_bits, to_bytes

SYMBOLS = 32
LENGTH_MAX = 10


def lengths(counts: Sequence[int]) -> list[int]:
    """Return optimal code lengths of at most 10 bits: package-merge."""
    leaves = sorted((counts[symbol], symbol) for symbol in range(SYMBOLS) if counts[symbol])
    items = [(count, Counter([symbol])) for count, symbol in leaves]
    if len(items) == 1:
        only = leaves[0][1]
        return [1 if symbol in (only, 1 if only == 0 else 0) else 0 for symbol in range(SYMBOLS)]
    merged = items
    for _ in range(LENGTH_MAX - 1):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(merged[::2], merged[1::2], strict=False)]
        merged = sorted(items + pairs, key=lambda item: item[0])
    held: Counter[int] = Counter()
    for _, symbols in merged[: 2 * len(items) - 2]:
        held += symbols
    return [held[symbol] for symbol in range(SYMBOLS)]


def codes(row: Sequence[int]) -> list[str]:
    """Return the canonical code of each symbol, first bit first."""
    result = [""] * SYMBOLS
    code = 0
    for length in range(1, LENGTH_MAX + 1):
        code *= 2
        for symbol in range(SYMBOLS):
            if row[symbol] == length:
                result[symbol] = format(code, f"0{length}b")
                code += 1
    return result


def encode(
    symbols: Sequence[int], tables: Sequence[Sequence[int]], run_tables: Sequence[int], run_symbols: int
) -> bytes:
    """Return the stream of `symbols`; tables are lengths."""
    made = [codes(row) for row in tables]
    return to_bytes("".join(made[run_tables[at // run_symbols]][symbol] for at, symbol in enumerate(symbols)))


def decode(
    stream: bytes, count: int, tables: Sequence[Sequence[int]], run_tables: Sequence[int], run_symbols: int
) -> list[int] | None:
    """Return the `count` symbols of a stream, or None if it does not hold exactly these."""
    found = [{code: symbol for symbol, code in enumerate(codes(row)) if code} for row in tables]
    bits = to_bits(stream)
    symbols: list[int] = []
    start = stop = 0
    while len(symbols) < count:
        table = found[run_tables[len(symbols) // run_symbols]]
        stop = start + 1
        while bits[start:stop] not in table:
            stop += 1
            if stop > len(bits):
                return None
        symbols.append(table[bits[start:stop]])
        start = stop
    return symbols if len(bits) - stop < 8 and "1" not in bits[stop:] else None


def write_tables(tables: Sequence[Sequence[int]]) -> bytes:
    """Return the compact form of length tables."""
    bits = ""
    for row in tables:
        used = [symbol for symbol in range(SYMBOLS) if row[symbol]]
        fields = [(used[0], 5), (used[-1], 5), *((length, 4) for length in row[used[0] : used[-1] + 1])]
        bits += field_bits(fields)
    return to_bytes(bits)


def read_tables(data: bytes, count: int) -> list[list[int]] | None:
    """Return what `write_tables` wrote, or None if `data` is not exactly that."""
    reader = BitReader(data)
    tables = []
    for _ in range(count):
        first, last = reader.take(5), reader.take(5)
        row = [0] * SYMBOLS
        row[first : last + 1] = [reader.take(4) for _ in range(first, last + 1)]
        if reader.has_overrun or first >= last or not row[first] or not row[last] or max(row) > LENGTH_MAX:
            return None
        if sum(2.0**-length for length in row if length) != 1:
            return None
        tables.append(row)
    return tables if reader.is_at_end else None
