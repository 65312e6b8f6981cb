"""What every entropy coder promises, tried on all of them."""

import heapq
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.codec.entropy import prefix_twin, rans_twin
from tests.codec.entropy.cases import COUNT_ROWS, count_rows, counts_of, draw_symbols, one_table, runs_for

from kvtide.codec.entropy import ESCAPE, EntropyTables, Escapes, RansTables, Runs, Streams, rans_paths
from kvtide.codec.published.integers import PrefixTables
from kvtide.errors import CorruptPayload

CODERS: list[type[EntropyTables]] = [RansTables, PrefixTables]
GOLDEN = Path(__file__).parents[2] / "golden" / "entropy.json"
IDENTITY = np.arange(32, dtype=np.uint8)
BELLS = counts_of([COUNT_ROWS["bell"], COUNT_ROWS["halves"], COUNT_ROWS["all at 1/4096 but one"]])

every_coder = pytest.mark.parametrize("coder", CODERS, ids=lambda coder: coder.name)


def bells(coder: type[EntropyTables], streams: int) -> tuple[EntropyTables, Runs, NDArray[np.uint8]]:
    """A coder's tables, and 300 symbols a stream that they code."""
    rng = np.random.default_rng(11)
    runs = Runs(runs_for(rng, streams, 300, 64, 3), 64)
    return coder.build(BELLS), runs, draw_symbols(rng, BELLS, runs.tables, 64, 300)


def decode(tables: EntropyTables, streams: Streams, runs: Runs, like: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out = np.empty_like(like)
    tables.decode(streams, runs, np.tile(IDENTITY, (len(tables.rows), 1)), out)
    return out


@every_coder
def test_weights_make_the_same_tables(coder: type[EntropyTables]) -> None:
    tables = coder.build(counts_of(list(COUNT_ROWS.values())))
    assert coder.build(tables.weights).to_bytes() == tables.to_bytes()


@every_coder
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_escapes_take_their_places_in_order(coder: type[EntropyTables], dtype: type[np.unsignedinteger]) -> None:
    rng, tables = np.random.default_rng(5), coder.build(counts_of([[100] * 30 + [1, 60]]))
    symbols = rng.integers(0, 31, size=(3, 500), dtype=np.uint8)
    symbols[rng.random(symbols.shape) < 0.1] = ESCAPE
    elements = rng.integers(0, 256, size=int((symbols == ESCAPE).sum())).astype(dtype)
    escapes = Escapes(elements, (symbols == ESCAPE).sum(axis=1).astype(np.uint64))
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
def test_flipped_bits_never_give_the_symbols_back_and_every_truncation_and_extension_is_corrupt(
    coder: type[EntropyTables],
) -> None:
    tables, runs, symbols = bells(coder, 1)
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
    for wrong in (*(data[:size] for size in range(len(data))), data + b"\0\0"):
        with pytest.raises(CorruptPayload):
            decode(tables, Streams(wrong, [len(wrong)]), runs, symbols)


@every_coder
def test_sizes_that_do_not_cover_the_data_are_corrupt(coder: type[EntropyTables]) -> None:
    tables, runs, symbols = bells(coder, 2)
    data, sizes = tables.encode(symbols, runs)
    for wrong in ([sizes[0], sizes[1] + 1], [sizes[0] - 1, sizes[1]], [-sizes[0], sizes[1]]):
        with pytest.raises(CorruptPayload):
            decode(tables, Streams(data, wrong), runs, symbols)


@every_coder
def test_wrong_arguments_are_refused(coder: type[EntropyTables]) -> None:
    tables, runs, symbols = bells(coder, 2)
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
    data = coder.build(BELLS).to_bytes()
    cuts = [(data[:size], 3) for size in range(len(data))]
    for wrong, count in (*cuts, (data + b"\0", 3), (data + data, 3), (data, 10**12)):
        with pytest.raises(CorruptPayload):
            coder.parse(wrong, count)


@every_coder
def test_golden_bytes(coder: type[EntropyTables]) -> None:
    golden = json.loads(GOLDEN.read_text())[coder.name]
    tables = coder.build(BELLS)
    assert tables.to_bytes().hex() == golden["tables"]
    # Written down here and not drawn: the generator may change, the format may not.
    symbols = np.array([[(i * i + i // 7) % 97 % 23 for i in range(700)]], dtype=np.uint8)
    runs = Runs(np.array([[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]], np.uint16), 64)
    data = bytes(tables.encode(symbols, runs).data)
    assert xxhash.xxh3_128_hexdigest(data) == golden["stream_xxh3"]
    assert data.hex().startswith(golden["stream_start"])


# Native entropy coders against their twins: every path, table and size gives the same bytes.


class Twin(NamedTuple):
    """A coder, the module of its twin, what that makes of counts, and what it codes streams with."""

    coder: type[EntropyTables]
    module: Any
    quantise: Callable[[list[int]], list[int]]
    tables: Callable[[list[int]], Any]


TWINS = [
    Twin(RansTables, rans_twin, rans_twin.quantise, rans_twin.slot_map),
    Twin(PrefixTables, prefix_twin, prefix_twin.lengths, list),
]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["rans", "prefix"])


def check_identity(twin: Twin, rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int) -> None:
    rng, counts = np.random.default_rng(seed), counts_of(rows)
    runs = Runs(runs_for(rng, streams, count, run_symbols, len(rows)), run_symbols)
    symbols = draw_symbols(rng, counts, runs.tables, run_symbols, count)
    tables = [twin.tables(row) for row in rows_of(twin.coder.build(counts))]
    pairs = zip(symbols.tolist(), runs.tables.tolist(), strict=True)
    truth = [twin.module.encode(row, tables, run_tables, run_symbols) for row, run_tables in pairs]
    for path in rans_paths():
        native = twin.coder.build(counts, path)
        coded = native.encode(symbols, runs)
        assert bytes(coded.data) == b"".join(truth), path
        assert list(coded.sizes) == [len(stream) for stream in truth]
        assert np.array_equal(decode(native, coded, runs, symbols), symbols), path


def rows_of(tables: EntropyTables) -> list[list[int]]:
    return tables.rows.tolist()


@each_twin
@given(row=count_rows)
def test_tables_are_those_of_the_twin(twin: Twin, row: list[int]) -> None:
    assert rows_of(twin.coder.build(counts_of([row])))[0] == twin.quantise(row)


@given(row=st.lists(st.integers(1, 40), min_size=32, max_size=32))
def test_lengths_are_complete_and_optimal_where_the_limit_does_not_bind(row: list[int]) -> None:
    lengths, heap, optimal = prefix_twin.lengths(row), sorted(row), 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        optimal += both
        heapq.heappush(heap, both)
    assert sum(2.0**-length for length in lengths if length) == 1
    assert sum(count * length for count, length in zip(row, lengths, strict=True)) == optimal


@each_twin
@pytest.mark.parametrize("name", COUNT_ROWS)
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 4096])
def test_adversarial_tables_give_the_bytes_of_the_twin(twin: Twin, name: str, count: int) -> None:
    check_identity(twin, [COUNT_ROWS[name]], streams=2, count=count, run_symbols=256, seed=count)


@each_twin
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(count_rows, min_size=1, max_size=5),
    streams=st.integers(1, 6),
    count=st.integers(1, 400),
    run_symbols=st.sampled_from([1, 26, 32, 64, 100, 256]),
    seed=st.integers(0, 2**32),
)
def test_all_paths_give_and_take_the_bytes_of_the_twin(
    twin: Twin, rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int
) -> None:
    check_identity(twin, rows, streams, count, run_symbols, seed)


@each_twin
def test_large_streams_give_the_bytes_of_the_twin(twin: Twin) -> None:
    check_identity(twin, list(COUNT_ROWS.values()), streams=4, count=40_000, run_symbols=256, seed=7)


@pytest.mark.parametrize("path", rans_paths())
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_decoding_writes_each_tables_values(path: str, dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(3)
    counts = counts_of(list(COUNT_ROWS.values()))
    runs = Runs(runs_for(rng, 3, 1000, 96, len(counts)), 96)
    symbols = draw_symbols(rng, counts, runs.tables, 96, 1000)
    values = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), size=counts.shape, dtype=dtype)
    tables = RansTables.build(counts, path)
    out = np.empty(symbols.shape, dtype=dtype)
    tables.decode(tables.encode(symbols, runs), runs, values, out)
    assert np.array_equal(out, values[np.repeat(runs.tables, 96, axis=1)[:, :1000], symbols])


@each_twin
@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=60) | st.binary(max_size=400),
    count=st.integers(0, 120),
    rows=st.lists(count_rows, min_size=1, max_size=3),
)
def test_foreign_bytes_fail_or_decode_as_the_twin(twin: Twin, data: bytes, count: int, rows: list[list[int]]) -> None:
    runs = Runs(runs_for(np.random.default_rng(len(data)), 1, count, 32, len(rows)), 32)
    built = twin.coder.build(counts_of(rows))
    truth = twin.module.decode(data, count, [twin.tables(row) for row in rows_of(built)], runs.tables[0].tolist(), 32)
    truth = truth if count else (None if data else [])
    for path in rans_paths():
        native = type(built)(np.array(rows_of(built)), path)
        try:
            found = decode(native, Streams(data, [len(data)]), runs, np.empty((1, count), np.uint8))
        except CorruptPayload:
            assert truth is None
        else:
            assert found[0].tolist() == truth


@each_twin
@given(rows=st.lists(count_rows, min_size=0, max_size=6))
def test_tables_survive_their_compact_form(twin: Twin, rows: list[list[int]]) -> None:
    tables = twin.coder.build(counts_of(rows))
    data = tables.to_bytes()
    assert data == twin.module.write_tables(rows_of(tables))
    assert rows_of(twin.coder.parse(data, len(rows))) == rows_of(tables)


@each_twin
@settings(max_examples=300)
@given(data=st.binary(min_size=2, max_size=60), count=st.integers(1, 3))
def test_foreign_tables_are_read_as_the_twin_reads_them(twin: Twin, data: bytes, count: int) -> None:
    truth = twin.module.read_tables(data, count)
    try:
        assert rows_of(twin.coder.parse(data, count)) == truth
    except CorruptPayload:
        assert truth is None


@pytest.mark.parametrize(
    ("coder", "dtype", "rows", "message"),
    [
        (RansTables, np.uint16, [[4096] + [0] * 31, [4095] + [0] * 31, [128] * 31 + [129]], "sum to 4096"),
        (
            PrefixTables,
            np.uint8,
            [[0] * 32, [1] + [0] * 31, [1, 1, 1] + [0] * 29, [1, 2] + [0] * 30, [11] + [5] * 31],
            "complete code",
        ),
    ],
)
def test_rows_that_are_no_table_are_refused(coder: Any, dtype: Any, rows: list[list[int]], message: str) -> None:
    for row in rows:
        with pytest.raises(ValueError, match=message):
            coder(np.array([row], dtype=dtype))


def test_unknown_path_is_refused() -> None:
    tables = RansTables(np.full((1, 32), 128, np.uint16), path="abacus")
    with pytest.raises(ValueError, match="no such path"):
        tables.encode(np.zeros((1, 32), np.uint8), one_table(1, 32))
