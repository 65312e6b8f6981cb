"""A profile's promise about encoded blocks, and the check that a block keeps it.

Calibration measured quality on coefficients that have the profile's scales, coded at a step. All squares are of steps:
the unit in which the profile's weights share errors out among layers, K and V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import UNITS, Units
from kvtide.codec.tide.model import SIXTEENTHS, Place
from kvtide.errors import UnencodableBlock

# Errors of components of half a step and more follow from the step, those of smaller ones are their own variance, which
# differs by text and model: the margins are what blocks of 50 held-out texts need (docs/codec.md has the measurements).
# A transform over several layers follows the texts that it was fitted on more closely.
WIDE_UNITS_MIN = -UNITS // 2
WIDE_MARGIN, NARROW_MARGIN, NARROW_MARGIN_JOINT = 1.02, 1.5, 1.7
# An error so little above the promised one is mended by a step a unit finer, which takes a ninth off the error of
# components of half a step and more, and nothing off that of those left out.
FINER_EXCESS_MAX = 1.05
# One group of layers may differ more than the block: those texts reach 1.9.
GROUP_MARGIN = 2.5
# How many times the coded values' variance may be what the profile has, or the other way round, in a block and in a
# group: those texts have 0.69 to 1.03, and a factor of 3 at most; blocks whose values are all alike have none.
SPREAD_RATIO_MAX, GROUP_SPREAD_RATIO_MAX = 3.0, 6.0
# A block that was decoded again may have so much more: tokens that are kept apart have errors of their own.
DECODED_MARGIN = 1.25
# Tokens that are too loud to be coded, of those that could be: those texts have none.
LOUD_SHARE_MAX = 1 / 16


class Promise(NamedTuple):
    """The mean of each token of a group: a squared error of at most `error`, coded values of this variance."""

    error: float
    spread: float


class Seen(NamedTuple):
    """Measured sums of a group of a block over the tokens that were coded, and how many these are."""

    error: float
    spread: float
    tokens: float


def promise_of(place: Place, final_units: int, excess: float) -> Promise:
    """Return what is promised of a group whose rows at `place` are coded. excess: `TideModel.excess` at this step."""
    group, kept = place.group, place.stop - place.start
    over = group.scales[:kept] - final_units
    error, spread = _rounded(over)
    is_wide = over >= WIDE_UNITS_MIN
    wide, small = float(_rounded_normal(over[is_wide]).sum()), float(error[~is_wide].sum())
    left_out = np.exp2((group.scales[kept:] - final_units) / (UNITS / 2))
    # Components that the profile has not are no larger than its last one.
    unknown = (group.shape[1] - len(group.scales)) * 2.0 ** (int(group.scales[-1] - final_units) / (UNITS / 2))
    narrow = small + float(left_out.sum()) + unknown
    margin = NARROW_MARGIN if group.layer_stop - group.layer_start == 1 else NARROW_MARGIN_JOINT
    return Promise(excess * (WIDE_MARGIN * wide + margin * narrow), float(spread.sum()))


def _rounded(units: Units) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the squared error and the mean square of Laplace-distributed values of these scales, rounded to steps."""
    width = np.exp2(units / UNITS) / np.sqrt(2)
    at_half, fall = np.exp(-0.5 / width), np.exp(-1 / width)
    square = at_half * (1 + fall) / (1 - fall) ** 2
    product = at_half * ((0.5 + width) / (1 - fall) + fall / (1 - fall) ** 2)
    return 2 * width**2 - 2 * product + square, square


def _rounded_normal(units: Units) -> NDArray[np.float64]:
    """Return the same error of normally distributed values, larger for scales of half a step or more."""
    square = np.exp2(units / (UNITS / 2))
    # A twelfth of a step's square, but for the first term of a series that falls at once.
    return 1 / 12 - (1 / np.pi**2 + 4 * square) * np.exp(-2 * np.pi**2 * square)


def check_promise(groups: Sequence[tuple[Promise, Seen]], tokens: int) -> int:
    """Return how many units finer a block must be coded for its groups to keep their promise: 0, or 1.

    tokens: less those kept apart whatever their values. UnencodableBlock if the profile does not fit the block.
    """
    if min(seen.tokens for _, seen in groups) < tokens * (1 - LOUD_SHARE_MAX):
        raise UnencodableBlock("the profile does not fit: values are far larger than those it was made of")
    excess = excess_of(groups)
    if excess > FINER_EXCESS_MAX:
        raise UnencodableBlock(f"the profile does not fit: the error is {excess:.2f} times what it allows")
    worst = max(group[1].error / _allowed([group]) for group in groups)
    if worst > GROUP_MARGIN:
        raise UnencodableBlock(f"the profile does not fit: a layer's error is {worst:.2f} times what it allows")
    # A single token has no variance.
    usual = [promise.spread * max(seen.tokens - 1, 0) for promise, seen in groups]
    spread = [seen.spread for _, seen in groups]
    if not _is_near(sum(spread), sum(usual), SPREAD_RATIO_MAX):
        ratio = sum(spread) / sum(usual)
        raise UnencodableBlock(f"the profile does not fit: the variance of values is {ratio:.3g} times its own")
    if not all(_is_near(*pair, GROUP_SPREAD_RATIO_MAX) for pair in zip(spread, usual, strict=True)):
        raise UnencodableBlock("the profile does not fit: the variance of a layer's values is far from its own")
    return int(excess > 1)


def excess_of(groups: Sequence[tuple[Promise, Seen]]) -> float:
    """Return the error of all groups over what is promised of them."""
    return sum(seen.error for _, seen in groups) / _allowed(groups)


def check_decoded_error(groups: Sequence[tuple[Promise, Seen]], rounding: float) -> None:
    """UnencodableBlock if a decoded block has a larger error than promised and `rounding`, of its own type."""
    error, allowed = sum(seen.error for _, seen in groups), DECODED_MARGIN * _allowed(groups) + rounding
    if not error <= allowed:
        raise UnencodableBlock(f"decoded again, the block's error is {error / allowed:.2f} times what is promised")


def _allowed(groups: Sequence[tuple[Promise, Seen]]) -> float:
    """Return the promised error and four standard deviations of rounding, which count in small blocks."""
    error = sum(promise.error * seen.tokens for promise, seen in groups)
    energy = sum(promise.spread * seen.tokens for promise, seen in groups)
    return error + 4 * math.sqrt(error / 12 + 4 * energy / (12 * SIXTEENTHS**2)) + 1e-9


def _is_near(found: float, usual: float, ratio_max: float) -> bool:
    return usual <= found * ratio_max and found <= usual * ratio_max
