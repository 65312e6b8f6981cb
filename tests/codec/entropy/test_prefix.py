"""The prefix coder against its twin."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.entropy import prefix_twin
from tests.codec.entropy.cases import COUNT_ROWS, count_rows, counts_of, draw_symbols, runs_for

from kvtide import _native
from kvtide.codec.entropy import RansCoder, Runs, rans_paths
from kvtide.codec.published.integers import PrefixCoder, PrefixTables

IDENTITY = np.arange(32, dtype=np.uint8)


def check_identity(rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = counts_of(rows)
    runs = Runs(runs_for(rng, streams, count, run_symbols, len(rows)), run_symbols)
    symbols = draw_symbols(rng, counts, runs.tables, run_symbols, count)
    lengths = PrefixCoder().build(counts).lengths.tolist()
    pairs = zip(symbols.tolist(), runs.tables.tolist(), strict=True)
    truth = [prefix_twin.encode(row, lengths, tables, run_symbols) for row, tables in pairs]
    for path in rans_paths():
        tables = PrefixCoder(path).build(counts)
        coded = tables.encode(symbols, runs)
        assert bytes(coded.data) == b"".join(truth)
        out = np.empty_like(symbols)
        tables.decode(coded, runs, np.tile(IDENTITY, (tables.count, 1)), out)
        assert np.array_equal(out, symbols)


def huffman_bits(row: list[int]) -> int:
    """Return the bits of an optimal code without a limit."""
    heap = [count for count in row if count]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        bits += both
        heapq.heappush(heap, both)
    return bits


@given(row=count_rows)
def test_lengths_are_those_of_the_twin_and_complete(row: list[int]) -> None:
    lengths = PrefixCoder().build(counts_of([row])).lengths[0].tolist()
    assert lengths == prefix_twin.lengths(row)
    assert sum(2.0**-length for length in lengths if length) == 1


@given(row=st.lists(st.integers(1, 40), min_size=32, max_size=32))
def test_lengths_are_optimal_where_the_limit_does_not_bind(row: list[int]) -> None:
    lengths = PrefixCoder().build(counts_of([row])).lengths[0].tolist()
    assert sum(count * length for count, length in zip(row, lengths, strict=True)) == huffman_bits(row)


@pytest.mark.parametrize("name", COUNT_ROWS)
@pytest.mark.parametrize("count", [0, 1, 31, 64, 9000])
def test_adversarial_tables_give_the_bytes_of_the_twin(name: str, count: int) -> None:
    check_identity([COUNT_ROWS[name]], streams=2, count=count, run_symbols=5000, seed=count)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(count_rows, min_size=1, max_size=5),
    streams=st.integers(1, 6),
    count=st.integers(1, 400),
    run_symbols=st.sampled_from([1, 26, 64, 256]),
    seed=st.integers(0, 2**32),
)
def test_native_gives_and_takes_the_bytes_of_the_twin(
    rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int
) -> None:
    check_identity(rows, streams, count, run_symbols, seed)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60), count=st.integers(0, 90), rows=st.lists(count_rows, min_size=1, max_size=3))
def test_foreign_bytes_fail_or_decode_as_the_twin_does(data: bytes, count: int, rows: list[list[int]]) -> None:
    lengths = PrefixCoder().build(counts_of(rows)).lengths
    runs = Runs(runs_for(np.random.default_rng(len(data)), 1, count, 32, len(rows)), 32)
    truth = prefix_twin.decode(data, count, lengths.tolist(), runs.tables[0].tolist(), 32) if count else None
    out, nothing, zeros = np.zeros((1, count), np.uint8), np.zeros(0, np.uint8), np.zeros(1, np.uint64)
    values = np.tile(IDENTITY, (len(rows), 1))
    ok = _native.PrefixTables(lengths).decode(
        "portable",
        np.frombuffer(data, dtype=np.uint8),
        np.array([len(data)], np.uint64),
        32,
        runs.tables,
        values,
        False,
        nothing,
        zeros,
        out,
    )
    if count == 0:
        assert ok == (not data)
    else:
        assert ok == (truth is not None)
        assert not ok or out[0].tolist() == truth


@given(rows=st.lists(count_rows, min_size=0, max_size=6))
def test_tables_survive_their_compact_form(rows: list[list[int]]) -> None:
    tables = PrefixCoder().build(counts_of(rows))
    data = tables.to_bytes()
    assert data == prefix_twin.write_tables(tables.lengths.tolist())
    assert np.array_equal(PrefixCoder().parse(data, len(rows)).lengths, tables.lengths)


@settings(max_examples=300)
@given(data=st.binary(min_size=3, max_size=30), count=st.integers(1, 2))
def test_foreign_tables_are_read_as_the_twin_reads_them(data: bytes, count: int) -> None:
    lengths = np.zeros((count, 32), dtype=np.uint8)
    is_read = _native.prefix_read_tables(np.frombuffer(data, dtype=np.uint8), lengths)
    truth = prefix_twin.read_tables(data, count)
    assert is_read == (truth is not None)
    assert not is_read or lengths.tolist() == truth


@pytest.mark.parametrize("row", [[0] * 32, [1] + [0] * 31, [1, 1, 1] + [0] * 29, [1, 2] + [0] * 30, [11] + [5] * 31])
def test_lengths_that_are_no_complete_code_are_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="complete code"):
        PrefixTables(np.array([row], dtype=np.uint8))


def test_prefix_is_at_most_four_percent_larger_than_rans_on_bells() -> None:
    rng = np.random.default_rng(4)
    deviations = np.linspace(0.8, 4.0, 16)
    bells = np.exp(-np.abs(np.arange(32) - 16)[None] / deviations[:, None] * 1.4)
    counts = (bells * 1e6).astype(np.uint64) + np.uint64(1)
    runs = Runs((np.arange(512) % 16).astype(np.uint16)[None], 256)
    symbols = draw_symbols(rng, counts, runs.tables, 256, 512 * 256)
    sizes = [coder.build(counts).encode(symbols, runs).sizes[0] for coder in (RansCoder(), PrefixCoder())]
    assert sizes[0] < sizes[1] <= 1.04 * sizes[0]
