"""From the quality that a user asks for to a step, through what calibration measured."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import CorruptPayload

__all__ = ["CURVE_COLUMNS", "QUALITY_MAX", "QUALITY_MIN", "units_of_quality"]

# Step in units, bits an element, KL.
CURVE_COLUMNS = 3
QUALITY_MIN, QUALITY_MAX = 1e-5, 1.0


def units_of_quality(curve: NDArray[np.float32], quality: float) -> int:
    """Return the step, in units, at which the measured KL is `quality`; beyond the measured ends, by the slope there.

    ValueError for a quality that is no KL divergence between 1e-5 and 1. CorruptPayload for a curve that is none.
    """
    if not QUALITY_MIN <= quality <= QUALITY_MAX:
        raise ValueError(f"quality is a KL divergence from {QUALITY_MIN} to {QUALITY_MAX}, got {quality!r}")
    if curve.ndim != 2 or curve.shape[1] != CURVE_COLUMNS or len(curve) < 2 or not (curve[:, 2] > 0).all():
        raise CorruptPayload("the profile's curve must have two or more points of step, bits and a KL above zero")
    units, kls = curve[:, 0].astype(np.float64), np.log(curve[:, 2].astype(np.float64))
    if (np.diff(units) <= 0).any() or (np.diff(kls) <= 0).any():
        raise CorruptPayload("the profile's curve must rise")
    wanted = math.log(quality)
    i = int(np.clip(np.searchsorted(kls, wanted) - 1, 0, len(kls) - 2))
    share = (wanted - kls[i]) / (kls[i + 1] - kls[i])
    return math.floor(units[i] + share * (units[i + 1] - units[i]))
