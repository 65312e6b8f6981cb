"""Native entropy coders against their twins: every path, table and size gives the same bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.entropy import prefix_twin, rans_twin
from tests.codec.entropy.cases import COUNT_ROWS, count_rows, counts_of, draw_symbols, one_table, runs_for

from kvtide.codec.entropy import EntropyTables, RansTables, Runs, Streams, rans_paths
from kvtide.codec.published.integers import PrefixTables
from kvtide.errors import CorruptPayload

IDENTITY = np.arange(32, dtype=np.uint8)


class Twin(NamedTuple):
    """A coder and its twin: what it makes of counts, what streams are coded with, and the streams of rows."""

    coder: type[EntropyTables]
    quantise: Callable[[list[int]], list[int]]
    tables: Callable[[list[int]], Any]
    encode: Callable[..., bytes]
    decode: Callable[..., list[int] | None]
    write_tables: Callable[..., bytes]
    read_tables: Callable[..., list[list[int]] | None]


TWINS = [
    Twin(
        RansTables,
        rans_twin.quantise,
        rans_twin.slot_map,
        rans_twin.encode,
        rans_twin.decode,
        rans_twin.write_tables,
        rans_twin.read_tables,
    ),
    Twin(
        PrefixTables,
        prefix_twin.lengths,
        lambda row: row,
        prefix_twin.encode,
        prefix_twin.decode,
        prefix_twin.write_tables,
        prefix_twin.read_tables,
    ),
]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["rans", "prefix"])


def check_identity(twin: Twin, rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int) -> None:
    rng, counts = np.random.default_rng(seed), counts_of(rows)
    runs = Runs(runs_for(rng, streams, count, run_symbols, len(rows)), run_symbols)
    symbols = draw_symbols(rng, counts, runs.tables, run_symbols, count)
    tables = [twin.tables(row) for row in rows_of(twin.coder.build(counts))]
    pairs = zip(symbols.tolist(), runs.tables.tolist(), strict=True)
    truth = [twin.encode(row, tables, run_tables, run_symbols) for row, run_tables in pairs]
    for path in rans_paths():
        native = twin.coder.build(counts, path)
        coded = native.encode(symbols, runs)
        assert bytes(coded.data) == b"".join(truth), path
        assert list(coded.sizes) == [len(stream) for stream in truth]
        out = np.empty_like(symbols)
        native.decode(coded, runs, np.tile(IDENTITY, (native.count, 1)), out)
        assert np.array_equal(out, symbols), path


def rows_of(tables: EntropyTables) -> list[list[int]]:
    return tables.rows.tolist()


@each_twin
@given(row=count_rows)
def test_tables_are_those_of_the_twin(twin: Twin, row: list[int]) -> None:
    assert rows_of(twin.coder.build(counts_of([row])))[0] == twin.quantise(row)


@given(row=count_rows)
def test_frequencies_add_up_and_code_what_was_counted(row: list[int]) -> None:
    frequencies = rans_twin.quantise(row)
    assert sum(frequencies) == 4096 and max(frequencies) < 4096
    assert all(frequency for frequency, count in zip(frequencies, row, strict=True) if count)
    slots = rans_twin.slot_map(frequencies)
    for symbol, ranks in enumerate(slots.slots):
        assert [slots.symbols[slot] for slot in ranks] == [symbol] * slots.frequencies[symbol]
        assert [slots.ranks[slot] for slot in ranks] == list(range(slots.frequencies[symbol]))
    assert all(len(set(slots.symbols[bucket * 128 : bucket * 128 + 128])) <= 2 for bucket in range(32))


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
def test_foreign_bytes_fail_or_decode_as_the_twin_does(
    twin: Twin, data: bytes, count: int, rows: list[list[int]]
) -> None:
    runs = Runs(runs_for(np.random.default_rng(len(data)), 1, count, 32, len(rows)), 32)
    built = twin.coder.build(counts_of(rows))
    truth = twin.decode(data, count, [twin.tables(row) for row in rows_of(built)], runs.tables[0].tolist(), 32)
    truth = truth if count else (None if data else [])
    for path in rans_paths():
        out = np.zeros((1, count), dtype=np.uint8)
        native = type(built)(np.array(rows_of(built)), path)
        try:
            native.decode(Streams(data, [len(data)]), runs, np.tile(IDENTITY, (len(rows), 1)), out)
        except CorruptPayload:
            assert truth is None
        else:
            assert out[0].tolist() == truth


@each_twin
@given(rows=st.lists(count_rows, min_size=0, max_size=6))
def test_tables_survive_their_compact_form(twin: Twin, rows: list[list[int]]) -> None:
    tables = twin.coder.build(counts_of(rows))
    data = tables.to_bytes()
    assert data == twin.write_tables(rows_of(tables))
    assert rows_of(twin.coder.parse(data, len(rows))) == rows_of(tables)


@each_twin
@settings(max_examples=300)
@given(data=st.binary(min_size=2, max_size=60), count=st.integers(1, 3))
def test_foreign_tables_are_read_as_the_twin_reads_them(twin: Twin, data: bytes, count: int) -> None:
    truth = twin.read_tables(data, count)
    try:
        assert rows_of(twin.coder.parse(data, count)) == truth
    except CorruptPayload:
        assert truth is None


@pytest.mark.parametrize("row", [[4096] + [0] * 31, [4095] + [0] * 31, [128] * 31 + [129]])
def test_frequencies_that_are_no_table_are_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="sum to 4096"):
        RansTables(np.array([row], dtype=np.uint16))


@pytest.mark.parametrize("row", [[0] * 32, [1] + [0] * 31, [1, 1, 1] + [0] * 29, [1, 2] + [0] * 30, [11] + [5] * 31])
def test_lengths_that_are_no_complete_code_are_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="complete code"):
        PrefixTables(np.array([row], dtype=np.uint8))


def test_unknown_path_is_refused() -> None:
    tables = RansTables(np.full((1, 32), 128, np.uint16), path="abacus")
    with pytest.raises(ValueError, match="no such path"):
        tables.encode(np.zeros((1, 32), np.uint8), one_table(1, 32))


def test_prefix_is_at_most_four_percent_larger_than_rans_on_bells() -> None:
    rng = np.random.default_rng(4)
    deviations = np.linspace(0.8, 4.0, 16)
    bells = np.exp(-np.abs(np.arange(32) - 16)[None] / deviations[:, None] * 1.4)
    counts = (bells * 1e6).astype(np.uint64) + np.uint64(1)
    runs = Runs((np.arange(512) % 16).astype(np.uint16)[None], 256)
    symbols = draw_symbols(rng, counts, runs.tables, 256, 512 * 256)
    sizes = [coder.build(counts).encode(symbols, runs).sizes[0] for coder in (RansTables, PrefixTables)]
    assert sizes[0] < sizes[1] <= 1.04 * sizes[0]
