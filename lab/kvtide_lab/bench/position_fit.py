"""Fits a profile's loss law to measured KLs: least squares of logarithms, beside a pull towards the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide import LossLaw, PositionLaw, Purpose, Term
from kvtide.codec.tide.law import DEFAULT_POSITIONS, term_losses, tokens_by_term

# Patches of mixtures are of whole pieces.
PIECE_TOKENS = 64
# Smaller losses are noise beside what anybody asks for.
KL_MIN = 2e-5
# E-folds from the default that count as much as one e-fold of a row: of a weight, and of each power.
_SPREADS = (2.0, 0.3, 0.3, 0.3)
_STEPS = 40
_NO_PASSAGE = Term(0, 1, 1, 1)
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

    def counts(self, levels: int) -> _Floats:
        """Return how much each term of a law counts at each level: (sink, passage, ranges; levels)."""
        at_level = np.eye(levels)[list(self.kept)]
        sink, *ranges = tokens_by_term(len(self.kept), PIECE_TOKENS).T @ at_level
        return np.stack([sink, at_level[list(self.passages or ())].sum(axis=0) / len(self.passages or (0,)), *ranges])


def fitted(law: LossLaw, points: Sequence[LossPoint]) -> LossLaw:
    """Return a law of the same losses with positions that fit the points of each purpose."""
    goes_on, copies = (
        _fitted(law, purpose, [point for point in points if point.purpose is purpose and point.kl > KL_MIN])
        for purpose in Purpose
    )
    return LossLaw((goes_on, copies), law.losses, law.sizes)


def _fitted(law: LossLaw, purpose: Purpose, points: Sequence[LossPoint]) -> PositionLaw:
    """Return the positions for one purpose, by damped Gauss-Newton steps in logarithms."""
    default = DEFAULT_POSITIONS[purpose]
    if not points:
        return default
    prior = np.log(np.maximum((default.sink, default.passage, *default.by_distance), 1e-9)).reshape(-1)
    spread = np.tile(_SPREADS, len(prior) // len(_SPREADS))
    losses = np.append(law.losses, 0.0)
    counts = np.stack([point.counts(len(losses)) for point in points])
    wanted = np.log([point.kl for point in points])

    def rest(at: _Floats) -> _Floats:
        logs = np.log(np.tensordot(counts, term_losses(_terms(purpose, at), losses), 2)) - wanted
        # A row that is far off counts by its size, not by its square.
        robust = np.sign(logs) * np.sqrt(2 * (np.sqrt(1 + np.square(logs)) - 1))
        return np.concatenate([robust, (at - prior) / spread])

    at, damping = prior, 1.0
    value = rest(at)
    for _ in range(_STEPS):
        slopes = np.stack([(rest(at + step) - value) / 1e-4 for step in np.eye(len(at)) * 1e-4], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ value)
        there = rest(at + step)
        is_better = there @ there < value @ value
        damping *= 0.3 if is_better else 4.0
        if is_better:
            at, value = at + step, there
    sink, passage, *by_distance = _terms(purpose, at)
    return PositionLaw(sink, passage, tuple(by_distance))


def _terms(purpose: Purpose, logs: _Floats) -> list[Term]:
    sink, passage, *by_distance = (Term(*numbers) for numbers in np.exp(logs).reshape(-1, 4).tolist())
    return [sink, passage if purpose is Purpose.COPIES else _NO_PASSAGE, *by_distance]
