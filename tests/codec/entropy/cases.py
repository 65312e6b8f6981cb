"""Tables and symbols that entropy coders are tried on."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtide.codec.entropy import Runs

COUNT_ROWS: dict[str, list[int]] = {
    "one symbol": [0] * 7 + [5] + [0] * 24,
    "first symbol": [9] + [0] * 31,
    "last symbol": [0] * 31 + [1],
    "two, one rare": [1, 10**9] + [0] * 30,
    "all equal": [1] * 32,
    "all at 1/4096 but one": [10**9] + [1] * 31,
    "all at 1/4096 but the last": [1] * 31 + [10**9],
    "halves": [2**31 >> symbol for symbol in range(32)],
    "bell": [round(10**6 * 2.0 ** -abs(symbol - 15.2)) for symbol in range(32)],
    "odd ones": [symbol % 2 * (symbol + 1) for symbol in range(32)],
}

count_rows = st.one_of(
    st.sampled_from(list(COUNT_ROWS.values())),
    st.lists(st.integers(0, 5), min_size=32, max_size=32).filter(any),
    st.lists(st.one_of(st.just(0), st.integers(1, 2**40)), min_size=32, max_size=32).filter(any),
)


def counts_of(rows: list[list[int]]) -> NDArray[np.uint64]:
    """Return rows as (tables, 32)."""
    return np.array(rows, dtype=np.uint64).reshape(-1, 32)


def draw_symbols(
    rng: np.random.Generator, counts: NDArray[np.uint64], run_tables: NDArray[np.uint16], run_symbols: int, count: int
) -> NDArray[np.uint8]:
    """Return (streams, count) symbols as probable as the counts of their tables."""
    shares = counts / counts.sum(axis=1, keepdims=True, dtype=np.float64)
    rows = [
        [rng.choice(32, size=min(run_symbols, count - run * run_symbols), p=shares[t]) for run, t in enumerate(tables)]
        for tables in run_tables
    ]
    empty = np.zeros(0, np.int64)
    return np.array([np.concatenate([empty, *row]) for row in rows], dtype=np.uint8).reshape(len(run_tables), count)


def runs_for(rng: np.random.Generator, streams: int, count: int, run_symbols: int, tables: int) -> NDArray[np.uint16]:
    """Return a random table for each run of each stream."""
    return rng.integers(0, tables, size=(streams, -(-count // run_symbols)), dtype=np.uint16)


def one_table(streams: int, count: int) -> Runs:
    """Return the runs of `streams` streams of `count` symbols that all take table 0."""
    return Runs(np.zeros((streams, 1), dtype=np.uint16), count)
