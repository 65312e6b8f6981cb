"""From the quality that a user asks for to a step and back, through what calibration measured."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import CorruptPayload

# Step in units, bits an element, KL.
CURVE_COLUMNS = 3
# What the line through the last two points may not fall below.
BITS_MIN = 0.01
QUALITY_MIN, QUALITY_MAX = 1e-5, 1.0


def check_quality(quality: float) -> None:
    """ValueError unless it is a KL divergence from 1e-5 to 1."""
    if not QUALITY_MIN <= quality <= QUALITY_MAX:
        raise ValueError(f"quality is a KL divergence from {QUALITY_MIN} to {QUALITY_MAX}, got {quality!r}")


def units_of_quality(curve: NDArray[np.float32], quality: float) -> int:
    """Return the step, in units, at which the measured KL is `quality`; beyond the measured ends, by the slope there.

    ValueError as in `check_quality`. CorruptPayload for a curve that is none.
    """
    check_quality(quality)
    units, kls = _points(curve)
    # The curve is float32: a quality that it names must not fall to the unit below.
    return math.floor(_between(kls, units, math.log(quality)) + 1e-3)


def quality_of_units(curve: NDArray[np.float32], units: int) -> float:
    """Return the KL that was measured at a step, by the slope at the ends beyond them. CorruptPayload as above."""
    steps, kls = _points(curve)
    return math.exp(min(_between(steps, kls, units), 0.0))


def bits_of_units(curve: NDArray[np.float32], units: int) -> float:
    """Return the bits an element that were measured at a step, above zero. CorruptPayload as above."""
    steps, _ = _points(curve)
    return max(_between(steps, curve[:, 1].astype(np.float64), units), BITS_MIN)


def _points(curve: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return steps and logarithms of KL."""
    if curve.ndim != 2 or curve.shape[1] != CURVE_COLUMNS or len(curve) < 2 or not (curve[:, 2] > 0).all():
        raise CorruptPayload("the profile's curve must have two or more points of step, bits and a KL above zero")
    units, kls = curve[:, 0].astype(np.float64), np.log(curve[:, 2].astype(np.float64))
    if (np.diff(units) <= 0).any() or (np.diff(kls) <= 0).any():
        raise CorruptPayload("the profile's curve must rise")
    return units, kls


def _between(known: NDArray[np.float64], wanted: NDArray[np.float64], at: float) -> float:
    i = int(np.clip(np.searchsorted(known, at) - 1, 0, len(known) - 2))
    share = (at - known[i]) / (known[i + 1] - known[i])
    return float(wanted[i] + share * (wanted[i + 1] - wanted[i]))
