"""The native quantisers against their twins: the same arithmetic, in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtide import _native

GROUP = 10
Floats = NDArray[np.float32]


def as_elements(values: Floats, code: int) -> tuple[NDArray[np.uint8], Floats]:
    """The values as bytes of an element type, and what they are worth once they are."""
    if code == 1:
        return values.reshape(-1).view(np.uint8), values
    if code == 2:
        half = values.astype(np.float16)
        return half.reshape(-1).view(np.uint8), half.astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    return words.reshape(-1).view(np.uint8), (words.astype(np.uint32) << 16).view(np.float32)


def from_elements(data: NDArray[np.uint8], code: int, shape: tuple[int, ...]) -> Floats:
    if code == 3:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return data.view(np.float32 if code == 1 else np.float16).astype(np.float32).reshape(shape)


def scale_up(largest: Any) -> tuple[Any, Any]:
    bits = ((largest.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def twin_cachegen(values: Floats, step: np.float32) -> tuple[Any, Any, Any]:
    tokens = len(values)
    anchors_at = np.arange(0, tokens, GROUP)
    bits, scales = scale_up(np.abs(values[anchors_at]).max(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.float32(127) / scales
    factor = np.where(np.isfinite(factor), factor, np.float32(0)).astype(np.float32)
    anchors = np.rint(np.clip(values[anchors_at] * factor[:, None], -127, 127)).astype(np.int16)
    decoded = anchors.astype(np.float32) * (scales / np.float32(127))[:, None]
    deltas = (values - np.repeat(decoded, GROUP, axis=0)[:tokens]) * (np.float32(1) / step)
    rest = np.arange(tokens) % GROUP != 0
    return anchors.T, bits, np.rint(np.clip(deltas[rest], -32767, 32767)).astype(np.int16).T


def quantised(values: Floats, code: int, step: float) -> tuple[Any, Any, Any]:
    tokens, channels = values.shape
    groups = -(-tokens // GROUP)
    anchors, scales = np.empty((channels, groups), np.int16), np.empty(groups, np.uint16)
    deltas = np.empty((channels, tokens - groups), np.int16)
    data, _ = as_elements(values, code)
    assert _native.quantise_groups(data, code, GROUP, 127, step, anchors, scales, deltas)
    return anchors, scales, deltas


@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 45),
    channels=st.integers(1, 20),
    code=st.integers(1, 3),
    spread=st.sampled_from([1e-20, 1e-4, 1.0, 300.0]),
)
@settings(max_examples=150, deadline=None)
def test_cachegen_is_its_twin(seed: int, tokens: int, channels: int, code: int, spread: float) -> None:
    values = (np.random.default_rng(seed).normal(size=(tokens, channels)) * spread).astype(np.float32)
    _, exact = as_elements(values, code)
    step = np.float32(max(0.1 * spread, 1e-30))
    for native, twin in zip(quantised(values, code, float(step)), twin_cachegen(exact, step), strict=True):
        assert np.array_equal(native, twin)


@given(seed=st.integers(0, 2**32), tokens=st.integers(2, 45), code=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_cachegen_is_off_by_half_a_step_at_most(seed: int, tokens: int, code: int) -> None:
    values = np.random.default_rng(seed).normal(size=(tokens, 8)).astype(np.float32)
    data, exact = as_elements(values, code)
    out = np.empty_like(data)
    _native.restore_groups(*quantised(values, code, 0.25), GROUP, 127, 0.25, code, out)
    error = np.abs(from_elements(out, code, values.shape) - exact)
    is_anchor = np.arange(tokens) % GROUP == 0
    # Beside the step: the rounding of the output's own type.
    rounding = {1: 1e-6, 2: 2e-3, 3: 2e-2}[code]
    assert error[~is_anchor].max(initial=0) <= 0.125 + rounding
    anchor_step = np.abs(exact[is_anchor]).max(axis=1) * 1.01 / 127
    assert (error[is_anchor].max(axis=1) <= anchor_step / 2 + rounding).all()


@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 30), code=st.integers(1, 3), half=st.sampled_from([7, 15, 63]))
@settings(max_examples=100, deadline=None)
def test_chunkwise_is_its_twin_and_in_its_bound(seed: int, tokens: int, code: int, half: int) -> None:
    values = np.random.default_rng(seed).normal(size=(tokens, 6)).astype(np.float32)
    values[0] = 0
    data, exact = as_elements(values, code)
    symbols, scales, out = np.empty((6, tokens), np.int16), np.empty(tokens, np.uint16), np.empty_like(data)
    none = np.empty((6, 0), np.int16)
    assert _native.quantise_groups(data, code, 1, half, 1.0, symbols, scales, none)
    bits, scale = scale_up(np.abs(exact).max(axis=1))
    with np.errstate(divide="ignore"):
        factor = np.where(scale > 0, np.float32(half) / scale, np.float32(0)).astype(np.float32)
    assert np.array_equal(scales, bits)
    assert np.array_equal(symbols, np.rint(np.clip(exact * factor[:, None], -half, half)).astype(np.int16).T)
    _native.restore_groups(symbols, scales, none, 1, half, 1.0, code, out)
    restored = from_elements(out, code, values.shape)
    assert not restored[0].any()
    assert (np.abs(restored - exact).max(axis=1) <= scale / half / 2 + 2e-2).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("code", [1, 2, 3])
@pytest.mark.parametrize("token", [0, 7])
def test_values_that_are_not_finite_are_refused(bad: float, code: int, token: int) -> None:
    values = np.ones((12, 4), dtype=np.float32)
    values[token, 2] = bad
    data, _ = as_elements(values, code)
    anchors, scales, deltas = np.empty((4, 2), np.int16), np.empty(2, np.uint16), np.empty((4, 10), np.int16)
    assert not _native.quantise_groups(data, code, GROUP, 127, 0.1, anchors, scales, deltas)


def test_float16_is_rounded_as_numpy_rounds_it_up_to_its_largest_value() -> None:
    """Symbol 15 of 15 is the scale itself: every positive bfloat16, so that denormals and overflow are met."""
    scales = np.arange(1, 0x7F80, dtype=np.uint16)
    out = np.empty(2 * scales.size, np.uint8)
    symbols, none = np.full((1, scales.size), 15, np.int16), np.empty((1, 0), np.int16)
    _native.restore_groups(symbols, scales, none, 1, 15, 1.0, 2, out)
    values = (scales.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.minimum(np.float32(15) * (values / np.float32(15)), np.float32(65504)).astype(np.float16)
    assert np.array_equal(out.view(np.float16), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": 0}, "element type"),
        ({"code": 4}, "element type"),
        ({"group": 0}, "group"),
        ({"half": 0}, "half"),
        ({"step": 0.0}, "step"),
        ({"step": -1.0}, "step"),
        ({"step": float("nan")}, "step"),
        ({"tokens": 11}, "elements"),
        ({"anchors": (4, 3)}, "groups"),
        ({"deltas": (3, 10)}, "channels"),
    ],
)
def test_sizes_that_do_not_fit_are_value_errors(arguments: dict[str, Any], message: str) -> None:
    given_: dict[str, Any] = {"code": 1, "group": 10, "half": 127, "step": 0.1, "tokens": 12}
    given_ |= {"anchors": (4, 2), "deltas": (4, 10)}
    given_ |= arguments
    with pytest.raises(ValueError, match=message):
        _native.quantise_groups(
            np.zeros(given_["tokens"] * 4 * 4, np.uint8),
            given_["code"],
            given_["group"],
            given_["half"],
            given_["step"],
            np.zeros(given_["anchors"], np.int16),
            np.zeros(given_["anchors"][1], np.uint16),
            np.zeros(given_["deltas"], np.int16),
        )
