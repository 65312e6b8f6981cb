"""Native kernels against their twin, on every path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec import tide_twin as twin

from kvtide import _native

PATHS = _native.tide_paths()
NO_ORDER, NO_PANELS = np.empty(0, dtype=np.uint16), np.empty(0, dtype=np.int16)


def packed(matrix: np.ndarray) -> np.ndarray:
    rows, columns = matrix.shape
    panels = np.empty(-(-columns // 16) * (-(-rows // 2)) * 32, dtype=np.int16)
    _native.tide_pack(matrix, panels)
    return panels


@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9), tokens=st.integers(1, 70), mode=st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_lists_are_the_twins_and_taking_undoes_putting(path: str, seed: int, rows: int, tokens: int, mode: int) -> None:
    rng = np.random.default_rng(seed)
    parents = np.rint(rng.laplace(0, 1.2, (rows, tokens))).astype(np.int16)
    values = parents * np.int16(3) + rng.integers(-1, 2, (rows, tokens)).astype(np.int16)
    which = np.sort(rng.permutation(rows)[: rng.integers(1, rows + 1)]).astype(np.uint32)
    tables = (3 * rng.integers(0, 5, (len(which), 4))).astype(np.uint16)
    expected = twin.put(values, which, tables, mode, parents)
    counts = np.zeros(15, dtype=np.int64)
    _native.tide_count(parents, which, tables, mode, counts)
    assert [len(expected.get(table, [])) for table in range(15)] == counts.tolist()
    stops = np.cumsum(counts)
    items, cursors = np.zeros(int(stops[-1]) + 8, dtype=np.int16), stops - counts
    assert _native.tide_put(path, values, which, tables, mode, parents, items, cursors, stops)
    assert np.array_equal(cursors, stops)
    assert items[: stops[-1]].tolist() == [item for table in range(15) for item in expected.get(table, [])]
    taken = parents.copy()
    assert _native.tide_take(path, taken, which, tables, mode, items, stops - counts, stops)
    assert np.array_equal(taken[which], values[which])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_lists_that_are_too_short_are_refused(path: str, mode: int) -> None:
    values, tables = np.zeros((2, 40), dtype=np.int16), np.zeros((2, 4), dtype=np.uint16)
    which = np.arange(2, dtype=np.uint32)
    cursors, stops = np.zeros(3, dtype=np.int64), np.full(3, 79, dtype=np.int64)
    items = np.zeros(400, dtype=np.int16)
    assert not _native.tide_take(path, values, which, tables, mode, items, cursors, stops)
    cursors[:] = 0
    assert not _native.tide_put(path, values, which, tables, mode, values, items, cursors, stops)


@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 140), channels=st.integers(1, 30), used=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_transforms_are_the_twins(path: str, seed: int, tokens: int, channels: int, used: int) -> None:
    rng = np.random.default_rng(seed)
    count = 2 * channels
    used = min(used, count)
    matrix = np.rint(8192 * np.linalg.qr(rng.normal(size=(count, count)))[0]).astype(np.int16)
    values = rng.normal(size=(2, tokens, channels)).astype(np.float32)
    mean = rng.normal(size=count).astype(np.float32)
    scale = rng.uniform(20, 60, count).astype(np.float32)
    out, apart = np.empty((used, tokens), dtype=np.int16), np.zeros(tokens, dtype=np.uint8)
    transposed = packed(np.ascontiguousarray(matrix.T))
    _native.tide_project(path, values, mean, scale, transposed, (count, count), NO_ORDER, apart, out)
    assert not apart.any()
    assert np.array_equal(out, twin.project(values, mean, scale, matrix[:used]))

    # Mostly zeros, as at a coarse step: whole pairs of components are zero in neighbouring tokens.
    out[rng.random(out.shape) < 0.8] = 0
    classes = rng.integers(0, 3, (used, 4)).astype(np.uint16)
    pulls = rng.integers(0, 4, (3, 4)).astype(np.int8)
    pulls[:, 0] = 0
    places = rng.permutation(tokens).astype(np.uint16)
    back = np.empty((2, tokens, channels), dtype=np.float32)
    factor = (1 / scale / 8192).astype(np.float32)
    panels = packed(matrix)
    _native.tide_restore(path, out, classes, pulls, places, mean, factor, panels, (count, count), NO_ORDER, back)
    expected = twin.restore(out, classes, pulls, places, mean, factor, matrix)
    assert np.array_equal(back.transpose(1, 0, 2).reshape(tokens, count), expected)


@pytest.mark.parametrize("path", PATHS)
def test_without_a_matrix_components_are_values_in_order(path: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 50, 20)).astype(np.float32)
    order = rng.permutation(40)[:33].astype(np.uint16)
    mean, scale = np.zeros(40, dtype=np.float32), np.full(40, 160, dtype=np.float32)
    out, apart = np.empty((33, 50), dtype=np.int16), np.zeros(50, dtype=np.uint8)
    _native.tide_project(path, values, mean, scale, NO_PANELS, (40, 33), order, apart, out)
    by_value = values.transpose(0, 2, 1).reshape(40, 50)
    assert np.abs(out - 10 * by_value[order]).max() <= 0.54
    back = np.empty_like(values)
    classes, pulls = np.zeros((33, 4), dtype=np.uint16), np.zeros((1, 4), dtype=np.int8)
    places = np.arange(50, dtype=np.uint16)
    factor = np.full(40, 0.1 / 131072, dtype=np.float32)
    _native.tide_restore(path, out, classes, pulls, places, mean, factor, NO_PANELS, (33, 40), order, back)
    restored = back.transpose(0, 2, 1).reshape(40, 50)
    assert np.abs(restored - by_value)[order].max() <= 0.054
    assert not np.delete(restored, order, axis=0).any()


@pytest.mark.parametrize("path", PATHS)
def test_tokens_that_are_too_loud_are_put_apart(path: str) -> None:
    values = np.zeros((2, 9, 4), dtype=np.float32)
    values[0, 5, 2], values[1, 7, 0] = 1e20, 150.0
    matrix = np.eye(8, dtype=np.int16) * np.int16(8192)
    mean, scale = np.zeros(8, dtype=np.float32), np.full(8, 1600, dtype=np.float32)
    out, apart = np.ones((8, 9), dtype=np.int16), np.zeros(9, dtype=np.uint8)
    _native.tide_project(path, values, mean, scale, packed(matrix), (8, 8), NO_ORDER, apart, out)
    assert np.flatnonzero(apart).tolist() == [5, 7]
    assert not out.any()


def test_arguments_that_do_not_fit_are_refused() -> None:
    values, which = np.zeros((2, 8), dtype=np.int16), np.arange(2, dtype=np.uint32)
    tables, cursors = np.zeros((2, 4), dtype=np.uint16), np.zeros(3, dtype=np.int64)
    items = np.zeros(99, dtype=np.int16)
    for bad in (
        (values, which + np.uint32(1), tables, 0, items, cursors, cursors),
        (values, which, tables[:1], 0, items, cursors, cursors),
        (values, which, tables + np.uint16(1), 2, items, cursors, cursors),
        (values, which, tables, 3, items, cursors, cursors),
        (values, which, tables, 0, items[:4], cursors, cursors),
        (values, which, tables, 0, items, cursors, cursors[:2]),
    ):
        with pytest.raises(ValueError, match="tide"):
            _native.tide_take("portable", *bad)
    with pytest.raises(ValueError, match="path"):
        _native.tide_take("abacus", values, which, tables, 0, items, cursors, cursors)
