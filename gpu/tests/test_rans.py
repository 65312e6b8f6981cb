"""rANS kernels, run by the kernels, against the processor's coder: the same bytes both ways, and the same refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.entropy.cases import COUNT_ROWS, count_rows, counts_of, draw_symbols, one_table, runs_for

from cases import EMULATED
from kvtide.codec.entropy import ESCAPE, Escapes, RansTables, Runs, Streams
from kvtide.errors import CorruptPayload
from kvtide_gpu.kernels import Kernels
from rans_calls import prepare_decode, prepare_encode
from twin import needs_compiler

pytestmark = needs_compiler


def identity(tables: RansTables, dtype: type = np.uint8) -> np.ndarray:
    return np.tile(np.arange(32, dtype=dtype) * dtype(1), (len(tables.rows), 1))


def check(kernels: Kernels, rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = counts_of(rows)
    runs = Runs(runs_for(rng, streams, count, run_symbols, len(rows)), run_symbols)
    symbols = draw_symbols(rng, counts, runs.tables, run_symbols, count)
    tables = RansTables.build(counts)
    expected = tables.encode(symbols, runs)
    encode = prepare_encode(kernels, tables, symbols, runs)
    encode.launch()
    coded = encode.result()
    assert list(coded.sizes) == list(expected.sizes)
    assert coded.data == bytes(expected.data)
    for dtype in (np.uint8, np.uint16, np.uint32):
        decode = prepare_decode(kernels, tables, coded, runs, identity(tables, dtype), count)
        decode.launch()
        assert np.array_equal(decode.result(), symbols)


@given(
    rows=st.lists(count_rows, min_size=1, max_size=3),
    streams=st.integers(0, 5),
    count=st.integers(0, 300),
    run_symbols=st.integers(1, 130),
    seed=st.integers(0, 2**32),
)
@settings(EMULATED, max_examples=40)
def test_streams_are_those_of_the_processor(
    kernels: Kernels, rows: list[list[int]], streams: int, count: int, run_symbols: int, seed: int
) -> None:
    check(kernels, rows, streams, count, run_symbols, seed)


def test_every_kind_of_table_and_long_streams(kernels: Kernels) -> None:
    check(kernels, list(COUNT_ROWS.values()), streams=3, count=6000, run_symbols=96, seed=5)


def coded_case(count: int = 700) -> tuple[RansTables, Runs, Streams, Escapes, np.ndarray]:
    rng = np.random.default_rng(9)
    tables = RansTables.build(counts_of([COUNT_ROWS["bell"], COUNT_ROWS["all equal"]]))
    runs = Runs(runs_for(rng, 2, count, 64, 2), 64)
    symbols = draw_symbols(rng, tables.weights, runs.tables, 64, count)
    found = (symbols == ESCAPE).sum(axis=1).astype(np.uint64)
    elements = rng.integers(100, 1 << 16, int(found.sum())).astype(np.uint16)
    expected = symbols.astype(np.uint16)
    expected[symbols == ESCAPE] = elements
    return tables, runs, tables.encode(symbols, runs), Escapes(elements, found), expected


def test_escapes_take_their_places(kernels: Kernels) -> None:
    tables, runs, coded, escapes, expected = coded_case()
    assert len(escapes.elements) > 10
    call = prepare_decode(kernels, tables, coded, runs, identity(tables, np.uint16), 700, escapes)
    call.launch()
    assert np.array_equal(call.result(), expected)


@pytest.mark.parametrize("fault", ["short", "long", "word", "state", "few escapes", "many escapes", "odd"])
def test_streams_that_are_not_whole_are_refused(kernels: Kernels, fault: str) -> None:
    tables, runs, coded, escapes, _ = coded_case()
    sizes, elements, counts = list(coded.sizes), escapes.elements, escapes.counts.copy()
    data = bytearray(coded.data)
    if fault in {"short", "long", "odd"}:
        extra = {"short": -2, "long": 2, "odd": 1}[fault]
        data, sizes[1] = (data + b"\0" * extra if extra > 0 else data[:extra]), sizes[1] + extra
    elif fault == "word":
        data[300] ^= 1
    elif fault == "state":
        data[0:4] = b"\xff\xff\0\0"
    else:
        change = 1 if fault == "many escapes" else -1
        elements = np.resize(elements, len(elements) + change)  # type: ignore[assignment]
        counts[1] = int(counts[1]) + change
    call = prepare_decode(
        kernels, tables, Streams(bytes(data), sizes), runs, identity(tables, np.uint16), 700, Escapes(elements, counts)
    )
    call.launch()
    with pytest.raises(CorruptPayload, match="do not hold"):
        call.result()


def test_symbols_without_probability_are_refused(kernels: Kernels) -> None:
    tables = RansTables.build(counts_of([[1, 1] + [0] * 30]))
    call = prepare_encode(kernels, tables, np.full((1, 40), 5, dtype=np.uint8), one_table(1, 40))
    call.launch()
    with pytest.raises(ValueError, match="no probability"):
        call.result()
