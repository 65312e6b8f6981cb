"""Tide's native kernels against their twin, on every path; profiles of several groups joined."""

from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec import tide_twin as twin
from tests.codec.tide_profiles import alike_bits, out_of_line_bits
from tests.suites import block_meta
from tests.suites.codec_suite import decoded_by

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, KVDtype, values_of
from kvtide.codec import Profile
from kvtide.codec.rotary import Frequencies, Pairs, Rotary, RotaryTables
from kvtide.codec.tide import COSTS, AllRows, Moments, Steps, TideCodec, draft_profiles, fit, joined_draft
from kvtide.codec.tide.model import NO_STAGE
from kvtide.codec.tide.model import _packed as packed
from kvtide.group import ALL_ROWS

PATHS = _native.tide_paths()
NO_ORDER, NO_PANELS = np.empty(0, dtype=np.uint16), np.empty(0, dtype=np.int16)
NO_CODED = np.empty(0, dtype=np.uint8)


def block_of(values: np.ndarray) -> tuple[np.ndarray, tuple[int, ...], int]:
    """(2, tokens, channels) float32 as a layer of one head, as kernels take it."""
    return values.reshape(-1).view(np.uint8), (1, *values.shape[:2], 1, values.shape[2]), 1


def no_turns(tokens: int) -> tuple[Any, ...]:
    nothing = np.empty((1, tokens, 0), dtype=np.float32)
    return nothing, nothing, np.zeros(1, dtype=np.uint8), 0, False


def no_apart(channels: int) -> tuple[Any, ...]:
    shape = (1, 2, 0, 1)
    return np.empty(0, np.uint16), np.empty(shape, np.uint16), np.empty((*shape, channels), np.int8)


def restored(path: str, tokens: int, channels: int, *coded: Any) -> np.ndarray:
    """What comes back of coded components, as rows of tokens: keys and then values."""
    back = np.empty((2, tokens, channels), dtype=np.float32)
    _native.tide_restore(*(path, *coded, no_apart(channels), no_turns(tokens), *block_of(back)))
    return back.transpose(1, 0, 2).reshape(tokens, -1)


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
    _native.tide_count(path, parents, which, tables, mode, counts)
    assert [len(expected.get(table, [])) for table in range(15)] == counts.tolist()
    stops = np.cumsum(counts)
    items, cursors = np.zeros(int(stops[-1]) + _native.TIDE_SLACK, dtype=np.int16), stops - counts
    assert _native.tide_put(path, values, which, tables, mode, parents, items, cursors, stops)
    assert np.array_equal(cursors, stops)
    assert items[: stops[-1]].tolist() == [item for table in range(15) for item in expected.get(table, [])]
    taken = parents.copy()
    assert _native.tide_take(path, taken, which, tables, mode, items, stops - counts, stops)
    assert np.array_equal(taken[which], values[which])


@pytest.mark.parametrize("path", PATHS)
def test_lowest_value_takes_digits_as_others_do(path: str) -> None:
    parents = np.full((1, 40), -32768, dtype=np.int16)
    which, tables = np.zeros(1, dtype=np.uint32), np.zeros((1, 4), dtype=np.uint16)
    cursors, stops = np.zeros(3, dtype=np.int64), np.array([0, 0, 40], dtype=np.int64)
    items = np.ones(40 + _native.TIDE_SLACK, dtype=np.int16)
    assert _native.tide_take(path, parents, which, tables, 2, items, cursors, stops)
    assert set(parents[0].tolist()) == {32767}  # three times it and one less, in 16 bits


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
    steps, apart = np.empty((tokens, used), dtype=np.int16), np.zeros(tokens, dtype=np.uint8)
    transposed, block = packed(matrix.T), (*block_of(values), no_turns(tokens))
    seen = _native.tide_project(path, *block, mean, scale, transposed, (count, count), NO_STAGE, NO_CODED, apart, steps)
    assert not apart.any()
    expected, energy = twin.seen(values, mean, scale, matrix[:used])
    assert seen == pytest.approx(expected, rel=1e-4, abs=1e-5 * energy)
    out = np.ascontiguousarray(steps.T)
    assert np.array_equal(out, twin.project(values, mean, scale, matrix[:used]))

    # Mostly zeros, as at a coarse step: whole pairs of components are zero in neighbouring tokens.
    out[rng.random(out.shape) < 0.8] = 0
    classes = rng.integers(0, 3, (used, 4)).astype(np.uint16)
    pulls = rng.integers(0, 4, (3 * rng.integers(0, 2), 4)).astype(np.int8)
    pulls[:, 0] = 0
    places = rng.permutation(tokens).astype(np.uint16)
    factor = (1 / scale / 8192).astype(np.float32)
    coded = (out, classes, pulls, places, mean, factor)
    found = restored(path, tokens, channels, *coded, packed(matrix), (count, count), NO_ORDER, NO_STAGE)
    assert np.array_equal(found, twin.restore(*coded, matrix))


def orthonormal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.rint(8192 * np.linalg.qr(rng.normal(size=shape))[0]).astype(np.int16)


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32), tokens=st.integers(1, 140), block=st.sampled_from([2, 6, 16]), heads=st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_transforms_in_two_stages_are_the_twins(path: str, seed: int, tokens: int, block: int, heads: int) -> None:
    rng = np.random.default_rng(seed)
    channels, blocks = block * heads, 2 * heads
    count, mixed = 2 * channels, int(rng.integers(0, 2 * channels + 1))
    matrices, mix = orthonormal(rng, blocks, block, block), orthonormal(rng, mixed, mixed)
    strongest = rng.permutation(count)[:mixed].astype(np.uint16)
    rest = np.setdiff1d(np.arange(count), strongest)
    # Coded order is any, but for what is mixed; the last ones are not coded.
    places = np.concatenate([np.arange(mixed) + count, rng.permutation(rest)])
    places = places[np.sort(rng.permutation(count)[: rng.integers(1, count + 1)])].astype(np.uint16)
    places[places >= count] = np.arange(count, count + np.count_nonzero(places >= count))
    stages = twin.Stages(matrices, mix, strongest, places)
    values = rng.normal(size=(2, tokens, channels)).astype(np.float32)
    mean, scale = rng.normal(size=count).astype(np.float32), rng.uniform(20, 60, count).astype(np.float32)
    steps, apart = np.empty((tokens, len(places)), dtype=np.int16), np.zeros(tokens, dtype=np.uint8)
    there = np.concatenate([packed(each.T) for each in matrices])
    stage = (there, block, strongest, places)
    panels = packed(mix.T) if mixed else NO_PANELS
    rest_of: tuple[Any, ...] = (panels, (mixed, mixed), stage, NO_CODED, apart, steps)
    assert _native.tide_project(path, *block_of(values), no_turns(tokens), mean, scale, *rest_of)
    assert not apart.any()
    assert np.array_equal(steps.T, twin.project_stages(values, mean, scale, stages))

    out = np.ascontiguousarray(steps.T)
    out[rng.random(out.shape) < 0.5] = 0
    classes = rng.integers(0, 3, (len(places), 4)).astype(np.uint16)
    pulls = rng.integers(0, 4, (3 * rng.integers(0, 2), 4)).astype(np.int8)
    pulls[:, 0] = 0
    order, here = rng.permutation(tokens).astype(np.uint16), np.concatenate([packed(each) for each in matrices])
    panels = packed(mix) if mixed else NO_PANELS
    coded = (out, classes, pulls, order, mean, (1 / scale / 8192).astype(np.float32))
    rest_of = (panels, (mixed, mixed), NO_ORDER, (here, block, *stage[2:]))
    assert np.array_equal(restored(path, tokens, channels, *coded, *rest_of), twin.restore_stages(*coded, stages))


NEEDS_AMX = pytest.mark.skipif("amx" not in PATHS, reason="needs a processor with AMX")
OTHERS = [path for path in PATHS if path != "amx"]


@pytest.mark.parametrize("path", [pytest.param("amx", marks=NEEDS_AMX), *OTHERS])
@pytest.mark.parametrize("most", [1, 8, 2039, 2047, 32767])
# Runs of 768 rows and of 256 columns and tokens, and sizes that are no multiples of anything.
@pytest.mark.parametrize(("used", "tokens", "channels"), [(65, 33, 1), (129, 65, 35), (770, 300, 193), (1600, 257, 9)])
def test_products_of_any_numbers_are_sums_modulo_two_to_the_32(
    path: str, most: int, used: int, tokens: int, channels: int
) -> None:
    rng = np.random.default_rng(most + used)
    matrix = rng.integers(-32768, 32768, (used, 2 * channels)).astype(np.int16)
    coded = rng.integers(-most - 1, most + 1, (used, tokens)).astype(np.int16)
    # Numbers on both sides of where a byte is signed, or a carry goes too far, and rows and tokens without any.
    edges = np.array([-2048, -9, -8, -1, 0, 7, 8, 2039, 2040, 2047])
    coded[:2] = rng.choice(edges[np.abs(edges) <= most], (2, tokens))
    coded[rng.random(used) < 0.4] = 0
    coded[used // 2 : used // 2 + 64, : tokens // 2] = 0
    matrix[rng.random(matrix.shape) < 0.1] = rng.choice([-32768, -32640, 32639, 32640, 32767, 0, 127, 128, -129])
    classes, pulls = np.zeros((used, 4), dtype=np.uint16), np.array([[0, 3, -5, -7]], dtype=np.int8)
    places = np.arange(tokens, dtype=np.uint16)
    zero, one = np.zeros(2 * channels, dtype=np.float32), np.ones(2 * channels, dtype=np.float32)
    args = (coded, classes, pulls, places, zero, one, packed(matrix), (used, 2 * channels), NO_ORDER, NO_STAGE)
    found = restored(path, tokens, channels, *args)
    pull = pulls[0, np.clip(np.abs(coded), 0, 3)].astype(np.int16) * (coded != -32768)
    sixteenths = coded * np.int16(16) - np.where(coded < 0, -pull, pull)
    # Whole numbers below 2^53: exact.
    sums = sixteenths.T.astype(np.float64) @ matrix.astype(np.float64)
    assert np.array_equal(found, sums.astype(np.int64).astype(np.int32).astype(np.float32))


@pytest.mark.parametrize("path", PATHS)
def test_without_a_matrix_components_are_values_in_order(path: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 50, 20)).astype(np.float32)
    order = rng.permutation(40)[:33].astype(np.uint16)
    mean, scale = np.zeros(40, dtype=np.float32), np.full(40, 160, dtype=np.float32)
    steps, apart = np.empty((50, 40), dtype=np.int16), np.zeros(50, dtype=np.uint8)
    is_coded = np.isin(np.arange(40), order).astype(np.uint8)
    block = (*block_of(values), no_turns(50))
    seen = _native.tide_project(path, *block, mean, scale, NO_PANELS, (40, 33), NO_STAGE, is_coded, apart, steps)
    in_steps = 10 * values.transpose(1, 0, 2).reshape(50, 40)
    error, spread = ((in_steps - steps * is_coded) ** 2).sum(), (steps * is_coded).var(axis=0).sum() * 50
    assert seen == pytest.approx((error, spread, 50), rel=1e-2)
    places, row_of = np.arange(50, dtype=np.uint16), np.full(40, 65535, dtype=np.uint16)
    row_of[order] = np.arange(33)
    out = np.empty((33, 50), dtype=np.int16)
    _native.tide_arrange(path, steps, places, row_of, out)
    by_value = values.transpose(0, 2, 1).reshape(40, 50)
    assert np.abs(out - 10 * by_value[order]).max() <= 0.54
    classes, pulls = np.zeros((33, 4), dtype=np.uint16), np.zeros((1, 4), dtype=np.int8)
    factor = np.full(40, 0.1 / 131072, dtype=np.float32)
    coded = (out, classes, pulls, places, mean, factor, NO_PANELS, (33, 40), order, NO_STAGE)
    found = restored(path, 50, 20, *coded).T
    assert np.abs(found - by_value)[order].max() <= 0.054
    assert not np.delete(found, order, axis=0).any()


@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 70), columns=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_arranging_sorts_tokens_and_turns_columns_into_rows(path: str, seed: int, tokens: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.integers(-999, 999, (tokens, columns)).astype(np.int16)
    places, rows = (rng.permutation(count).astype(np.uint16) for count in (tokens, columns))
    out = np.empty((columns, tokens), dtype=np.int16)
    _native.tide_arrange(path, steps, places, rows, out)
    assert np.array_equal(out[rows], steps[places].T)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("code", [1, 2, 3])
@pytest.mark.parametrize("is_scaled_by_value", [False, True])
def test_turning_and_storing_are_those_of_rope(
    path: str, neighbours: bool, code: int, is_scaled_by_value: bool
) -> None:
    rng = np.random.default_rng(4)
    tokens, heads, head_dim, pairs = 21, 3, 10, 4
    cos, sin = rng.normal(size=(2, 2, tokens, pairs)).astype(np.float32)
    turns = (cos, sin, np.ones(1, dtype=np.uint8), 1, neighbours)
    count, item = 2 * heads * head_dim, 4 if code == 1 else 2
    coded = rng.integers(-9, 9, (count, tokens)).astype(np.int16)
    mean, scale = rng.normal(size=(2, count)).astype(np.float32) * np.float32(1e-4)
    places, order = rng.permutation(tokens).astype(np.uint16), np.arange(count, dtype=np.uint16)
    args = (coded, np.zeros((count, 4), np.uint16), np.zeros((1, 4), np.int8), places, mean, scale, NO_PANELS)
    # bfloat16 patterns of 1 for each head, or of .5, 1, 2 for values in turns.
    scales = np.full((1, 2, 1, heads), 0x3F80, np.uint16)
    if is_scaled_by_value:
        scales = np.resize(np.array([0x3F00, 0x3F80, 0x4000], np.uint16), (1, 2, 1, heads * head_dim))
    kept = (np.array([5], np.uint16), scales, rng.integers(-127, 127, (1, 2, 1, heads, head_dim)).astype(np.int8))
    out = np.empty(2 * tokens * heads * head_dim * item, dtype=np.uint8)
    shape = (1, 2, tokens, heads, head_dim)
    _native.tide_restore(path, *args, (count, count), order, NO_STAGE, kept, turns, out, shape, code)

    values = np.empty((tokens, count), dtype=np.float32)
    values[places] = (16 * coded.T).astype(np.float32) * (scale * np.float32(8192)) + mean
    values[5] = kept[2].reshape(-1) * (np.resize([0.5, 1, 2], count) if is_scaled_by_value else 1)
    half = np.ascontiguousarray(values.reshape(tokens, 2, heads, head_dim).transpose(1, 0, 2, 3))
    rotary = Rotary(Pairs(neighbours), 1, 1 + 2 * pairs, (Frequencies((1.0,) * pairs, 1.0, 0),))
    half[0] = twin.turned(half[0], rotary, RotaryTables(cos[1], sin[1]))
    assert np.array_equal(out, twin.as_bits(half, KVDtype.from_code(code)).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("path", PATHS)
def test_thirds_symbols_and_loudness_are_numpys(path: str) -> None:
    every = np.arange(-32768, 32768, dtype=np.int16).reshape(4, -1)
    out = np.zeros_like(every)
    _native.tide_third(path, every, np.array([0, 1, 3], dtype=np.uint32), out)
    assert np.array_equal(out[[0, 1, 3]], (every[[0, 1, 3]].astype(np.int32) + 1) // 3)
    assert not out[2].any()
    items = np.array([-16, -15, 0, 15, 16, 30000, -30000, -1, 0, 1], dtype=np.int16)
    symbols = np.empty(10, dtype=np.uint8)
    assert _native.tide_symbols(path, items, 7, symbols).tolist() == [0, 4, 5, 6]
    assert symbols.tolist() == [31, 0, 15, 30, 31, 31, 31, 0, 1, 2]
    steps = np.random.default_rng(5).integers(-50, 50, (7, 37)).astype(np.int16)
    weights, loud = np.arange(37, dtype=np.float32), np.ones(7, dtype=np.float32)
    _native.tide_loudness(path, steps, weights, loud)
    assert np.array_equal(loud, 1 + np.abs(steps) @ weights)  # whole numbers: exact in any order


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(KVDtype))
def test_squares_are_those_of_each_layers_values(path: str, dtype: KVDtype) -> None:
    shape, out = (3, 2, 9, 5, 7), np.empty((3, 9), dtype=np.float32)
    # Values around one in each type.
    bits = np.random.default_rng(6).integers(0x3E00, 0x4000, shape).astype(f"<u{dtype.item_bytes}")
    bits <<= 8 * dtype.item_bytes - 16
    _native.tide_squares(path, bits.reshape(-1).view(np.uint8), shape, dtype.code, out)
    assert np.allclose(out, np.square(values_of(bits[:, 1], dtype), dtype=np.float64).sum(axis=(2, 3)), rtol=1e-6)
    with pytest.raises(ValueError, match="tide"):
        _native.tide_squares(path, bits.reshape(-1).view(np.uint8), shape, dtype.code, out[:, 1:].copy())


@pytest.mark.parametrize("path", PATHS)
def test_tokens_that_are_too_loud_are_put_apart(path: str) -> None:
    values = np.zeros((2, 9, 4), dtype=np.float32)
    values[0, 5, 2], values[1, 7, 0] = 1e20, 150.0
    matrix = np.eye(8, dtype=np.int16) * np.int16(8192)
    mean, scale = np.zeros(8, dtype=np.float32), np.full(8, 1600, dtype=np.float32)
    out, apart = np.ones((9, 8), dtype=np.int16), np.zeros(9, dtype=np.uint8)
    rest: tuple[Any, ...] = (no_turns(9), mean, scale, packed(matrix), (8, 8), NO_STAGE, NO_CODED, apart, out)
    assert _native.tide_project(path, *block_of(values), *rest)
    assert np.flatnonzero(apart).tolist() == [5, 7]
    assert not out.any()
    values[1, 3, 1] = np.inf
    assert not _native.tide_project(path, *block_of(values), *rest)


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


def test_projections_that_would_read_elsewhere_are_refused() -> None:
    block, ones = block_of(np.zeros((2, 4, 8), np.float32)), np.ones(16, np.float32)
    angles = np.ones((1, 4, 1), np.float32)
    out, apart, coded = np.zeros((4, 16), np.int16), np.zeros(4, np.uint8), np.ones(16, np.uint8)
    rest: tuple[Any, Any, Any, Any] = (ones, ones, NO_PANELS, (0, 16))
    with pytest.raises(ValueError, match="pairs"):
        turns = (angles, angles, np.zeros(1, np.uint8), 2**64 - 2, False)
        _native.tide_project("portable", *block, turns, *rest, NO_STAGE, coded, apart, out)
    stage = (np.zeros(256, np.int16), 2, np.zeros(1, np.uint16), np.append(np.arange(15), 16).astype(np.uint16))
    with pytest.raises(ValueError, match="matrix"):
        _native.tide_project("portable", *block, no_turns(4), *rest, stage, coded, apart, out)


@pytest.mark.parametrize("pairs", [32, 64, 5])
@pytest.mark.parametrize("path", PATHS)
def test_long_parts_of_all_magnitudes_are_pulled_and_turned_alike(path: str, pairs: int) -> None:
    rng = np.random.default_rng(5)
    tokens, count, item = 300, 4 * pairs, 4
    coded = rng.integers(-5, 6, (count, tokens)).astype(np.int16)
    coded[:, ::7] = rng.choice([-32768, -32767, 32767, -2049, 2048], coded[:, ::7].shape)
    classes, pulls = rng.integers(0, 3, (count, 4)).astype(np.uint16), rng.integers(-99, 99, (3, 4)).astype(np.int8)
    cos, sin = rng.normal(size=(2, 1, tokens, pairs)).astype(np.float32)
    mean, scale = rng.normal(size=(2, count)).astype(np.float32) * np.float32(1e-4)
    places, order = rng.permutation(tokens).astype(np.uint16), rng.permutation(count).astype(np.uint16)
    turns = (cos, sin, np.zeros(1, dtype=np.uint8), 0, False)
    out = np.empty(tokens * count * item, dtype=np.uint8)
    shape = (1, 2, tokens, 1, 2 * pairs)
    args = (coded, classes, pulls, places, mean, scale, NO_PANELS, (count, count), order, NO_STAGE)
    _native.tide_restore(path, *args, no_apart(2 * pairs), turns, out, shape, 1)

    part = np.searchsorted(np.arange(1, 5) * tokens // 4, np.arange(tokens), side="right")
    # As kernels do: the magnitude of the least value is itself, below all others.
    magnitudes = np.abs(coded)
    pull = pulls[classes[:, part], np.clip(magnitudes, 0, 3)].astype(np.int16) * (magnitudes > 0)
    sixteenths = coded * np.int16(16) - np.where(coded < 0, -pull, pull).astype(np.int16)
    values = np.empty((tokens, count), dtype=np.float32)
    values[np.ix_(places, order)] = sixteenths.T
    values = values * (scale * np.float32(8192)) + mean
    keys, stored = values[:, : 2 * pairs], out.view(np.float32).reshape(2, tokens, 2 * pairs)
    a, b = keys[:, :pairs], keys[:, pairs:]
    assert np.array_equal(stored[0], np.hstack([a * cos[0] - b * sin[0], b * cos[0] + a * sin[0]]))
    assert np.array_equal(stored[1], values[:, 2 * pairs :])


# One profile of several groups' rows: what it makes of a block is what the groups' own make of its layers.

WHOLE = BlockLayout(layers=5, tokens=32, kv_heads=4, head_dim=8, dtype=KVDtype.FLOAT32)
# A layer of full attention after every two windows.
PLACES = ((0, 1, 3, 4), (2,))
STEPS = Steps(-20, 1)


def part_of(bits: BlockBits, group: int) -> BlockBits:
    part: Any = np.ascontiguousarray(bits[list(PLACES[group])])
    return cast(BlockBits, part)


def layout_of(group: int) -> BlockLayout:
    return BlockLayout(len(PLACES[group]), WHOLE.tokens, WHOLE.kv_heads, WHOLE.head_dim, WHOLE.dtype)


def made(seed: int, is_loud: bool) -> BlockBits:
    bits = alike_bits(WHOLE, seed)
    if is_loud:
        bits[2] = out_of_line_bits(WHOLE, seed)[2]
    return bits


def drafts_of(cost: str, is_loud: bool, is_split: bool) -> tuple[AllRows, list[Profile]]:
    """Drafts of two groups, of which one may have loud channels, or second moments by block alone."""
    pairs: list[Any] = []
    for group in range(len(PLACES)):
        with patch.object(fit, "has_full_moments", lambda layout: not (is_split and layout.layers == 4)):
            moments = Moments(layout_of(group), COSTS[cost])
        for seed in range(12):
            moments.add(block_meta(layout_of(group), 0, 1), part_of(made(seed, is_loud), group), None)
        shape = (layout_of(group).layers, 2, 32)
        loud = np.tile(np.array([1, 64, 1, 1, 1, 64, 1, 1 / 16]), 4) ** -2.0
        felt = np.stack([loud, np.ones(32)]) if is_loud and group else np.ones(shape)
        moments.add_text(felt * np.ones(shape))
        pairs.append((layout_of(group), moments.state))
    rows = AllRows(WHOLE, PLACES, None)
    return rows, draft_profiles("m", cost, pairs, [None] * len(PLACES), rows)


@pytest.mark.parametrize("is_loud", [False, True], ids=["in line", "loud"])
@pytest.mark.parametrize("way", ["light", "layer", "staged", "split"])
def test_joined_profile_codes_layers_as_their_own_does(way: str, is_loud: bool) -> None:
    cost = "light" if way == "light" else "layer"
    with patch.object(fit, "DENSE_VALUES_MAX", 0) if way in ("staged", "split") else nullcontext():
        rows, drafts = drafts_of(cost, is_loud, way == "split")
        joined = joined_draft(rows, drafts)
    assert joined is not None and (joined.layers, joined.group) == (5, ALL_ROWS)
    assert ("octaves" in joined.arrays) == is_loud
    assert ("place" in joined.arrays) == (way in ("staged", "split"))
    bits = made(77, is_loud)
    found = decoded(joined, WHOLE, bits)
    own = np.empty_like(bits)
    for group, draft in enumerate(drafts):
        own[list(PLACES[group])] = decoded(draft, layout_of(group), part_of(bits, group))
    # Tokens' loudness is taken from all layers of a section.
    exact = bits.view(np.float32)
    errors = [np.square(each.view(np.float32) - exact).mean((1, 2, 3, 4)) for each in (found, own)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=0.1)
    assert errors[0].max() > 0


def decoded(profile: Profile, layout: BlockLayout, bits: BlockBits) -> BlockBits:
    codec, meta = TideCodec(profile).with_steps(STEPS), block_meta(layout, 0, 1)
    return decoded_by(codec, meta, codec.encode(meta, bits))


def test_transforms_that_span_layers_are_not_joined() -> None:
    rows, drafts = drafts_of("layer", False, False)
    spanning = [each.with_arrays({"span": np.array([2, 2], dtype=np.uint32)}) for each in drafts]
    assert joined_draft(rows, spanning) is None
