"""The rANS kernels against their twin: every path, table and size gives the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.codec.entropy import rans_twin
from tests.codec.entropy.cases import COUNT_ROWS, count_rows, counts_of, draw_symbols, one_table, runs_for

from kvtide import _native
from kvtide.codec.entropy import RansCoder, RansTables, Runs, Streams, rans_paths

IDENTITY = np.arange(32, dtype=np.uint8)


def twin_streams(tables: RansTables, symbols: NDArray[np.uint8], runs: Runs) -> list[bytes]:
    maps = [rans_twin.slot_map(row) for row in tables.frequencies.tolist()]
    rows = zip(symbols.tolist(), runs.tables.tolist(), strict=True)
    return [rans_twin.encode(row, maps, run_tables, runs.symbols) for row, run_tables in rows]


def decode_symbols(tables: RansTables, streams: Streams, runs: Runs, shape: tuple[int, int]) -> NDArray[np.uint8]:
    out = np.empty(shape, dtype=np.uint8)
    tables.decode(streams, runs, np.tile(IDENTITY, (tables.count, 1)), out)
    return out


def check_identity(rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = counts_of(rows)
    runs = Runs(runs_for(rng, streams, count, run_symbols, len(rows)), run_symbols)
    symbols = draw_symbols(rng, counts, runs.tables, run_symbols, count)
    truth = twin_streams(RansCoder().build(counts), symbols, runs)
    for path in rans_paths():
        tables = RansCoder(path).build(counts)
        coded = tables.encode(symbols, runs)
        assert bytes(coded.data) == b"".join(truth), path
        assert list(coded.sizes) == [len(stream) for stream in truth]
        assert np.array_equal(decode_symbols(tables, coded, runs, symbols.shape), symbols), path


@given(row=count_rows)
def test_frequencies_are_those_of_the_twin(row: list[int]) -> None:
    frequencies = RansCoder().build(counts_of([row])).frequencies[0].tolist()
    assert frequencies == rans_twin.quantise(row)
    assert sum(frequencies) == 4096
    assert max(frequencies) < 4096
    assert all(frequency for frequency, count in zip(frequencies, row, strict=True) if count)


@given(row=count_rows)
def test_every_slot_belongs_to_the_symbol_that_claims_it(row: list[int]) -> None:
    slots = rans_twin.slot_map(rans_twin.quantise(row))
    for symbol, ranks in enumerate(slots.slots):
        assert [slots.symbols[slot] for slot in ranks] == [symbol] * slots.frequencies[symbol]
        assert [slots.ranks[slot] for slot in ranks] == list(range(slots.frequencies[symbol]))
    for bucket in range(32):
        assert len(set(slots.symbols[bucket * 128 : bucket * 128 + 128])) <= 2


@pytest.mark.parametrize("name", COUNT_ROWS)
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 4096])
def test_adversarial_tables_give_the_bytes_of_the_twin(name: str, count: int) -> None:
    check_identity([COUNT_ROWS[name]], streams=2, count=count, run_symbols=256, seed=count)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(count_rows, min_size=1, max_size=5),
    streams=st.integers(1, 5),
    count=st.integers(1, 200),
    run_symbols=st.sampled_from([1, 26, 32, 64, 100, 256]),
    seed=st.integers(0, 2**32),
)
def test_all_paths_give_and_take_the_bytes_of_the_twin(
    rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int
) -> None:
    check_identity(rows, streams, count, run_symbols, seed)


def test_large_streams_give_the_bytes_of_the_twin() -> None:
    check_identity(list(COUNT_ROWS.values()), streams=4, count=40_000, run_symbols=256, seed=7)


@pytest.mark.parametrize("path", rans_paths())
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_decoding_writes_each_tables_values(path: str, dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(3)
    counts = counts_of(list(COUNT_ROWS.values()))
    runs = Runs(runs_for(rng, 3, 1000, 96, len(counts)), 96)
    symbols = draw_symbols(rng, counts, runs.tables, 96, 1000)
    values = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), size=counts.shape, dtype=dtype)
    tables = RansCoder(path).build(counts)
    out = np.empty(symbols.shape, dtype=dtype)
    tables.decode(tables.encode(symbols, runs), runs, values, out)
    assert np.array_equal(out, values[np.repeat(runs.tables, 96, axis=1)[:, :1000], symbols])


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=0, max_size=400),
    count=st.integers(0, 120),
    rows=st.lists(count_rows, min_size=1, max_size=3),
)
def test_foreign_bytes_fail_or_decode_as_the_twin_does(data: bytes, count: int, rows: list[list[int]]) -> None:
    counts = counts_of(rows)
    runs = Runs(runs_for(np.random.default_rng(len(data)), 1, count, 32, len(rows)), 32)
    maps = [rans_twin.slot_map(rans_twin.quantise(row)) for row in rows]
    truth = rans_twin.decode(data, count, maps, runs.tables[0].tolist(), 32)
    for path in rans_paths():
        native = _native.RansTables(RansCoder().build(counts).frequencies)
        out = np.zeros((1, count), dtype=np.uint8)
        buffer, nothing = np.frombuffer(data, dtype=np.uint8), np.zeros(0, np.uint8)
        sizes, zeros = np.array([len(data)], np.uint64), np.zeros(1, np.uint64)
        values = np.tile(IDENTITY, (len(rows), 1))
        ok = native.decode(path, buffer, sizes, 32, runs.tables, values, False, nothing, zeros, out)
        assert ok == (truth is not None)
        assert not ok or out[0].tolist() == truth


@given(rows=st.lists(count_rows, min_size=0, max_size=6))
def test_tables_survive_their_compact_form(rows: list[list[int]]) -> None:
    tables = RansCoder().build(counts_of(rows))
    data = tables.to_bytes()
    assert data == rans_twin.write_tables(tables.frequencies.tolist())
    assert np.array_equal(RansCoder().parse(data, len(rows)).frequencies, tables.frequencies)


@settings(max_examples=300)
@given(data=st.binary(min_size=2, max_size=60), count=st.integers(1, 3))
def test_foreign_tables_are_read_as_the_twin_reads_them(data: bytes, count: int) -> None:
    frequencies = np.zeros((count, 32), dtype=np.uint16)
    is_read = _native.rans_read_tables(np.frombuffer(data, dtype=np.uint8), frequencies)
    truth = rans_twin.read_tables(data, count)
    assert is_read == (truth is not None)
    if is_read:
        assert frequencies.tolist() == truth
        RansTables(frequencies)


@pytest.mark.parametrize("row", [[4096] + [0] * 31, [4095] + [0] * 31, [128] * 31 + [129]])
def test_frequencies_that_are_no_table_are_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="sum to 4096"):
        RansTables(np.array([row], dtype=np.uint16))


def test_unknown_path_is_refused() -> None:
    tables = RansTables(np.full((1, 32), 128, np.uint16), path="abacus")
    with pytest.raises(ValueError, match="no such path"):
        tables.encode(np.zeros((1, 32), np.uint8), one_table(1, 32))
