from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.codec.published.integers import (
    CODERS,
    CodedIntegers,
    Distribution,
    IntegerRuns,
    Integers,
    decode_alike,
    encode_integers,
    fit_distribution,
    value_counts,
)
from kvtide.errors import CorruptPayload

RUNS = IntegerRuns(streams=2, runs=3, symbols=40)


def numbers(seed: int, spread: float, runs: IntegerRuns = RUNS) -> Integers:
    values = np.random.default_rng(seed).normal(scale=spread, size=(runs.streams, runs.runs, runs.symbols))
    return np.clip(values, -32768, 32767).astype(np.int16)


def fitted(values: Integers, coder: int, is_open: bool = False) -> Distribution:
    rows = values.shape[0] * values.shape[1]
    return fit_distribution(value_counts(values.reshape(rows, values.shape[2])), coder, is_open)


def decode_integers(data: memoryview, runs: IntegerRuns, shared: Distribution | None) -> Integers:
    coded = CodedIntegers.parse(data, runs.streams)
    found: Integers = decode_alike([coded], runs, coded.distribution(runs, shared))[0]
    return found


@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.3, 3.0, 40.0, 400.0, 9000.0]),
    coder=st.integers(0, 1),
    is_shared=st.booleans(),
    symbols=st.integers(0, 70),
)
@settings(max_examples=150, deadline=None)
def test_any_numbers_survive(seed: int, spread: float, coder: int, is_shared: bool, symbols: int) -> None:
    runs = IntegerRuns(2, 3, symbols)
    values = numbers(seed, spread, runs)
    distribution = fitted(numbers(seed + 1, 5.0), coder, is_open=True) if is_shared else fitted(values, coder)
    data = encode_integers(values, runs, distribution, is_shared)
    assert np.array_equal(decode_integers(memoryview(data), runs, distribution if is_shared else None), values)


@pytest.mark.parametrize("extreme", [-32768, 32767, 0])
def test_extreme_numbers_survive(extreme: int) -> None:
    values = np.full((2, 3, 40), extreme, dtype=np.int16)
    data = encode_integers(values, RUNS, fitted(values, 0), False)
    assert np.array_equal(decode_integers(memoryview(data), RUNS, None), values)


@pytest.mark.parametrize(("spread", "bits"), [(0.5, 1.4), (2.0, 3.1), (8.0, 5.1), (60.0, 8.0)])
def test_size_is_near_the_entropy(spread: float, bits: float) -> None:
    runs = IntegerRuns(1, 1, 20000)
    values = np.rint(np.random.default_rng(1).normal(scale=spread, size=(1, 1, 20000))).astype(np.int16)
    data = encode_integers(values, runs, fitted(values, 0), True)
    counts = np.unique(values, return_counts=True)[1] / values.size
    entropy = float(-(counts * np.log2(counts)).sum())
    assert entropy < bits
    assert 8 * len(data) / values.size < 1.03 * entropy + 0.07


@pytest.mark.parametrize("coder", range(len(CODERS)))
def test_distribution_survives_its_own_bytes(coder: int) -> None:
    values = numbers(3, 20.0)
    distribution = fitted(values, coder)
    again = Distribution.parse(coder, memoryview(distribution.to_bytes()), RUNS.distributions)
    assert np.array_equal(again.shifts, distribution.shifts)
    assert again.tables.to_bytes() == distribution.tables.to_bytes()


def test_every_truncation_and_extension_is_refused() -> None:
    data = encode_integers(values := numbers(1, 40.0), RUNS, fitted(values, 0), False)
    for length in range(len(data)):
        with pytest.raises(CorruptPayload):
            decode_integers(memoryview(data[:length]), RUNS, None)
    with pytest.raises(CorruptPayload):
        decode_integers(memoryview(data + b"\0"), RUNS, None)


@given(data=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_hostile_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(CorruptPayload):
        decode_integers(memoryview(data), RUNS, None)


def test_shared_distributions_that_are_not_here_are_missed() -> None:
    values = numbers(1, 3.0)
    data = memoryview(encode_integers(values, RUNS, fitted(values, 0, is_open=True), True))
    for wrong in (None, fitted(values, 1, is_open=True)):
        with pytest.raises(CorruptPayload, match="not here"):
            decode_integers(data, RUNS, wrong)
