"""Fits a profile's loss law to measured KLs: least squares of logarithms, beside a pull towards the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.law import DEFAULT_POSITIONS, LossLaw, PositionLaw, Purpose, law_of, law_table

# Patches of mixtures are of whole pieces.
PIECE_TOKENS = 64
# Smaller losses are noise beside what anybody asks for.
KL_MIN = 2e-5
# E-folds from the default that count as much as one e-fold of a row: of a weight, and of the powers fine to coarse.
_WEIGHT_SPREAD, _POWER_SPREADS = 2.0, (0.1, 0.5, 1.0)
_STEPS = 15
_Floats = NDArray[np.float64]


class LossPoint(NamedTuple):
    """A measured KL, the mean of texts. kept: by pieces of PIECE_TOKENS; passages: pieces that were copied, or None."""

    kept: tuple[int, ...]
    passages: tuple[int, ...] | None
    kl: float

    @property
    def purpose(self) -> Purpose:
        """Return what followed."""
        return Purpose.GOES_ON if self.passages is None else Purpose.COPIES

    def predicted(self, law: LossLaw) -> float:
        """Return what a law says of it."""
        return law.kl(self.kept, PIECE_TOKENS, self.purpose, self.passages)


def fitted(law: LossLaw, points: Sequence[LossPoint]) -> LossLaw:
    """Return a law of the same losses with positions that fit the points of each purpose."""
    goes_on, copies = (
        _fitted(law, purpose, [point for point in points if point.purpose is purpose and point.kl > KL_MIN])
        for purpose in Purpose
    )
    return LossLaw((goes_on, copies), law.losses, law.sizes)


def _fitted(law: LossLaw, purpose: Purpose, points: Sequence[LossPoint]) -> PositionLaw:
    """Return the positions for one purpose, by damped Gauss-Newton steps in logarithms."""
    prior = np.log(np.maximum(law_table(DEFAULT_POSITIONS)[purpose, 1:].astype(np.float64), 1e-12))
    spread = np.array([_WEIGHT_SPREAD] * (len(prior) - 9) + 3 * list(_POWER_SPREADS))
    wanted = np.log([point.kl for point in points])

    def rest(at: _Floats) -> _Floats:
        made = LossLaw((_law(purpose, at),) * 2, law.losses, law.sizes)
        logs = np.log([point.predicted(made) for point in points]) - wanted
        # A row that is far off counts by its size, not by its square.
        robust = np.sign(logs) * np.sqrt(2 * (np.sqrt(1 + np.square(logs)) - 1))
        return np.concatenate([robust, (at - prior) / spread])

    at, damping = prior, 1.0
    value = rest(at)
    for _ in range(_STEPS if points else 0):
        slopes = np.stack([(rest(at + step) - value) / 1e-4 for step in np.eye(len(at)) * 1e-4], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ value)
        there = rest(at + step)
        is_better = there @ there < value @ value
        damping *= 0.3 if is_better else 4.0
        if is_better:
            at, value = at + step, there
    return _law(purpose, at)


def _law(purpose: Purpose, logs: _Floats) -> PositionLaw:
    sink, passage, *others = np.exp(logs).tolist()
    return law_of((sink, passage if purpose is Purpose.COPIES else 0.0, *others))
