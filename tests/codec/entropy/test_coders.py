"""What every entropy coder promises, tried on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from tests.codec.entropy.cases import COUNT_ROWS, counts_of, draw_symbols, one_table, runs_for

from kvtide.codec.entropy import ESCAPE, EntropyTables, Escapes, RansTables, Runs, Streams
from kvtide.codec.published.integers import PrefixTables
from kvtide.errors import CorruptPayload

CODERS: list[type[EntropyTables]] = [RansTables, PrefixTables]
GOLDEN = Path(__file__).parents[2] / "golden" / "entropy.json"
IDENTITY = np.arange(32, dtype=np.uint8)

every_coder = pytest.mark.parametrize("coder", CODERS, ids=lambda coder: coder.name)


def bell_counts() -> NDArray[np.uint64]:
    return counts_of([COUNT_ROWS["bell"], COUNT_ROWS["halves"], COUNT_ROWS["all at 1/4096 but one"]])


def bell_runs(streams: int, count: int) -> tuple[Runs, NDArray[np.uint8]]:
    rng = np.random.default_rng(11)
    runs = Runs(runs_for(rng, streams, count, 64, 3), 64)
    return runs, draw_symbols(rng, bell_counts(), runs.tables, 64, count)


def decode(tables: EntropyTables, streams: Streams, runs: Runs, like: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out = np.empty_like(like)
    tables.decode(streams, runs, np.tile(IDENTITY, (tables.count, 1)), out)
    return out


@every_coder
@pytest.mark.parametrize("count", [1, 31, 64, 200, 5000])
def test_symbols_survive(coder: type[EntropyTables], count: int) -> None:
    runs, symbols = bell_runs(5, count)
    tables = coder.build(bell_counts())
    assert np.array_equal(decode(tables, tables.encode(symbols, runs), runs, symbols), symbols)


@every_coder
def test_weights_make_the_same_tables(coder: type[EntropyTables]) -> None:
    rows = [row for row in COUNT_ROWS.values() if sum(row)]
    tables = coder.build(counts_of(rows))
    assert coder.build(tables.weights).to_bytes() == tables.to_bytes()


@every_coder
def test_nothing_takes_no_bytes(coder: type[EntropyTables]) -> None:
    tables = coder.build(bell_counts())
    runs = Runs(np.zeros((2, 0), np.uint16), 64)
    nothing = np.zeros((2, 0), np.uint8)
    streams = tables.encode(nothing, runs)
    assert list(streams.sizes) == [0, 0]
    decode(tables, streams, runs, nothing)
    with pytest.raises(CorruptPayload):
        decode(tables, Streams(b"\0", [0, 1]), runs, nothing)


@every_coder
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_escapes_take_their_places_in_order(coder: type[EntropyTables], dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(5)
    counts = counts_of([[100] * 30 + [1, 60]])
    symbols = rng.integers(0, 31, size=(3, 500), dtype=np.uint8)
    symbols[rng.random(symbols.shape) < 0.1] = ESCAPE
    elements = rng.integers(0, 256, size=int((symbols == ESCAPE).sum())).astype(dtype)
    escapes = Escapes(elements, (symbols == ESCAPE).sum(axis=1).astype(np.uint64))
    tables = coder.build(counts)
    runs = Runs(np.zeros((3, 8), np.uint16), 64)
    values, out = IDENTITY[None].astype(dtype), np.empty(symbols.shape, dtype)
    tables.decode(tables.encode(symbols, runs), runs, values, out, escapes)
    expected = symbols.astype(dtype)
    expected[symbols == ESCAPE] = elements
    assert np.array_equal(out, expected)


@every_coder
@pytest.mark.parametrize(("elements", "counts"), [(63, [63]), (65, [65]), (2, [2**64 - 1, 3])])
def test_wrong_or_wrapping_numbers_of_escapes_are_corrupt(
    coder: type[EntropyTables], elements: int, counts: list[int]
) -> None:
    tables, symbols = coder.build(counts_of([[1] * 32])), np.full((len(counts), 64), ESCAPE, np.uint8)
    runs = one_table(len(counts), 64)
    escapes = Escapes(np.zeros(elements, np.uint8), np.array(counts, np.uint64))
    with pytest.raises(CorruptPayload):
        tables.decode(tables.encode(symbols, runs), runs, IDENTITY[None], np.empty_like(symbols), escapes)


@every_coder
def test_every_truncation_and_extension_is_corrupt(coder: type[EntropyTables]) -> None:
    runs, symbols = bell_runs(1, 300)
    tables = coder.build(bell_counts())
    data = bytes(tables.encode(symbols, runs).data)
    for wrong in (*(data[:size] for size in range(len(data))), data + b"\0\0"):
        with pytest.raises(CorruptPayload):
            decode(tables, Streams(wrong, [len(wrong)]), runs, symbols)


@every_coder
def test_flipped_bits_never_give_the_symbols_back(coder: type[EntropyTables]) -> None:
    runs, symbols = bell_runs(1, 300)
    tables = coder.build(bell_counts())
    data = bytes(tables.encode(symbols, runs).data)
    failures = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            out = decode(tables, Streams(flipped, [len(data)]), runs, symbols)
        except CorruptPayload:
            failures += 1
        else:
            assert not np.array_equal(out, symbols)
    assert failures > 0


@every_coder
def test_sizes_that_do_not_cover_the_data_are_corrupt(coder: type[EntropyTables]) -> None:
    runs, symbols = bell_runs(2, 300)
    tables = coder.build(bell_counts())
    data, sizes = tables.encode(symbols, runs)
    for wrong in ([sizes[0], sizes[1] + 1], [sizes[0] - 1, sizes[1]], [-sizes[0], sizes[1]]):
        with pytest.raises(CorruptPayload):
            decode(tables, Streams(data, wrong), runs, symbols)


@every_coder
def test_wrong_arguments_are_refused(coder: type[EntropyTables]) -> None:
    runs, symbols = bell_runs(2, 300)
    tables = coder.build(bell_counts())
    streams = tables.encode(symbols, runs)
    values, out = np.tile(IDENTITY, (3, 1)), np.empty_like(symbols)
    refused: list[Callable[[], object]] = [
        lambda: tables.encode(symbols.astype(np.int8), runs),
        lambda: tables.encode(symbols[:, ::2], runs),
        lambda: tables.encode(symbols, Runs(runs.tables, 50)),
        lambda: tables.encode(symbols, Runs(runs.tables, 0)),
        lambda: tables.encode(symbols, Runs(runs.tables + np.uint16(3), 64)),
        lambda: tables.encode(symbols + np.uint8(32), runs),
        lambda: tables.decode(streams, runs, values[:2], out),
        lambda: tables.decode(streams, runs, values.astype(np.uint16), out),
        lambda: tables.decode(Streams(streams.data, streams.sizes[:1]), runs, values, out),
        lambda: coder.build(np.zeros((1, 32), np.uint64)),
        lambda: coder.build(np.full((1, 32), 2**63, np.uint64)),
        lambda: coder.build(np.ones((1, 31), np.uint64)),
        lambda: coder.build(np.ones((1, 32), np.int64)),
    ]
    for refuse in refused:
        with pytest.raises((ValueError, TypeError, AssertionError)):
            refuse()


@every_coder
def test_symbol_without_a_code_is_refused(coder: type[EntropyTables]) -> None:
    tables = coder.build(counts_of([COUNT_ROWS["two, one rare"]]))
    symbols = np.ones((1, 100), np.uint8)
    tables.encode(symbols, one_table(1, 100))
    for position in (0, 50, 99):
        wrong = symbols.copy()
        wrong[0, position] = 2
        with pytest.raises(ValueError, match=r"no probability|no code"):
            tables.encode(wrong, one_table(1, 100))


@every_coder
def test_stream_is_hardly_larger_than_the_entropy(coder: type[EntropyTables]) -> None:
    counts = counts_of([COUNT_ROWS["bell"]])
    runs = one_table(1, 65536)
    symbols = draw_symbols(np.random.default_rng(2), counts, runs.tables, 65536, 65536)
    drawn = np.unique(symbols, return_counts=True)[1]
    entropy_bytes = float((drawn * -np.log2(drawn / 65536)).sum()) / 8
    assert entropy_bytes <= coder.build(counts).encode(symbols, runs).sizes[0] <= 1.04 * entropy_bytes + 128


@every_coder
def test_truncated_tables_are_corrupt(coder: type[EntropyTables]) -> None:
    data = coder.build(bell_counts()).to_bytes()
    for size in range(len(data)):
        with pytest.raises(CorruptPayload):
            coder.parse(data[:size], 3)
    for wrong in (data + b"\0", data + data):
        with pytest.raises(CorruptPayload):
            coder.parse(wrong, 3)
    with pytest.raises(CorruptPayload):
        coder.parse(data, 10**12)


@every_coder
def test_golden_bytes(coder: type[EntropyTables]) -> None:
    golden = json.loads(GOLDEN.read_text())[coder.name]
    tables = coder.build(bell_counts())
    assert tables.to_bytes().hex() == golden["tables"]
    # Written down here and not drawn: the generator may change, the format may not.
    symbols = np.array([[(i * i + i // 7) % 97 % 23 for i in range(700)]], dtype=np.uint8)
    runs = Runs(np.array([[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]], np.uint16), 64)
    data = bytes(tables.encode(symbols, runs).data)
    assert xxhash.xxh3_128_hexdigest(data) == golden["stream_xxh3"]
    assert data.hex().startswith(golden["stream_start"])
