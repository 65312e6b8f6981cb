"""Transforms behind tide's own: components of several groups of layers mixed, or what the tokens' embeddings predict.

Each is fitted on blocks of other texts, and turns a block's coefficients into ones that take fewer bits, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import UNITS
from kvtide_lab.bench.levers_levels import BlockCoefficients

_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]
# Of the mean square of an embedding's values, added to each: few texts know few of them.
_RIDGE = 3e-3
_POWER_MIN = 1e-12


class TokenBlock(NamedTuple):
    """A block's coefficients, and its tokens' embeddings over their root mean square, (dims, tokens), by loudness."""

    coefficients: BlockCoefficients
    embeddings: _Floats


class Transform(Protocol):
    """Coefficients turned `forth`, and `back` again. `mflop`: a decoder's products of a token, in millions."""

    mflop: float

    def add(self, block: TokenBlock) -> None:
        """Take a block to fit on."""
        ...

    def fit(self) -> None:
        """Take from what was added all that follows from it."""
        ...

    def forth(self, block: TokenBlock) -> BlockCoefficients:
        """Return the block's coefficients turned, with their scales."""
        ...

    def back(self, block: TokenBlock, values: _Floats) -> _Floats:
        """Return values of turned coefficients as those of tide's transform."""
        ...


class Mixed:
    """The strongest components of each so many neighbouring groups, turned to what they have in common."""

    def __init__(self, span: int, strongest: int) -> None:
        """span: how many groups, 0 for all; strongest: components of each."""
        self._span, self._strongest = span, strongest
        self._squares: list[_Doubles] = []
        self._tokens = 0
        self._turns: list[_Floats] = []
        self._scales: list[NDArray[np.int64]] = []
        self.mflop = 0.0

    def add(self, block: TokenBlock) -> None:
        """Take a block to fit on."""
        for i, values in enumerate(self._spans(block.coefficients.values)):
            if i == len(self._squares):
                self._squares.append(np.zeros((len(values), len(values))))
            self._squares[i] += values @ values.T
        self._tokens += int((~block.coefficients.is_apart).sum())

    def _spans(self, values: _Floats) -> list[_Floats]:
        """Return (span · strongest, tokens) of each run of groups."""
        strongest = values[:, : self._strongest]
        span = self._span or len(values)
        return [strongest[start : start + span].reshape(-1, values.shape[2]) for start in range(0, len(values), span)]

    def fit(self) -> None:
        """Take the principal components of what was added."""
        for square in self._squares:
            turn, scales = principal(square / self._tokens)
            self._turns.append(turn)
            self._scales.append(scales.reshape(-1, self._strongest))
        self.mflop = 2 * sum(turn.size for turn in self._turns) / 1e6

    def forth(self, block: TokenBlock) -> BlockCoefficients:
        """Return the block with mixed components in the places of the strongest."""
        found = block.coefficients
        scales = found.scales.copy()
        scales[:, : self._strongest] = np.concatenate(self._scales)
        return found._replace(scales=scales, values=self._turned(found.values, lambda turn, values: turn @ values))

    def back(self, block: TokenBlock, values: _Floats) -> _Floats:
        """Return values with the strongest components in their places again."""
        return self._turned(values, lambda turn, mixed: turn.T @ mixed)

    def _turned(self, values: _Floats, turned: Callable[[_Floats, _Floats], _Floats]) -> _Floats:
        out = values.copy()
        span = self._span or len(values)
        for i, (turn, run) in enumerate(zip(self._turns, self._spans(values), strict=True)):
            here = slice(i * span, (i + 1) * span)
            out[here, : self._strongest] = turned(turn, run).reshape(-1, self._strongest, values.shape[2])
        return out


class Predicted:
    """A linear prediction of the first so many groups from embeddings, taken away; what is left has its own turn."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._sums: dict[str, _Doubles] = {}
        self._tokens = 0
        self._weights: list[_Floats] = []
        self._turns: list[_Floats] = []
        self._scales: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.mflop = 0.0

    def add(self, block: TokenBlock) -> None:
        """Take a block to fit on."""
        values, coded = block.coefficients.values[: self._groups], self._coded(block)
        sums = {"known": coded @ coded.T, "crossed": coded @ values.transpose(0, 2, 1)}
        sums["square"] = values @ values.transpose(0, 2, 1)
        for name, square in sums.items():
            self._sums[name] = self._sums.get(name, 0) + square.astype(np.float64)
        self._tokens += int((~block.coefficients.is_apart).sum())

    def _coded(self, block: TokenBlock) -> _Floats:
        """Return embeddings, zeros for tokens that are kept apart."""
        found = block.coefficients
        return block.embeddings * ~found.is_apart[found.order]

    def fit(self) -> None:
        """Take the ridge regression, and the principal components of what it leaves."""
        known = self._sums["known"]
        known += np.eye(len(known)) * _RIDGE * np.trace(known) / len(known)
        scales = []
        for crossed, square in zip(self._sums["crossed"], self._sums["square"], strict=True):
            weights = np.linalg.solve(known, crossed)
            turn, units = principal((square - weights.T @ crossed) / self._tokens)
            self._weights.append(weights.T.astype(np.float32))
            self._turns.append(turn)
            scales.append(units)
        self._scales = np.stack(scales)
        self.mflop = 2 * sum(weights.size for weights in self._weights) / 1e6

    def forth(self, block: TokenBlock) -> BlockCoefficients:
        """Return the block with what is not predicted in the places of the first groups."""
        found, known = block.coefficients, self._coded(block)
        values, scales = found.values.copy(), found.scales.copy()
        scales[: self._groups] = self._scales
        for group, (turn, weights) in enumerate(zip(self._turns, self._weights, strict=True)):
            values[group] = turn @ (values[group] - weights @ known)
        return found._replace(values=values, scales=scales)

    def back(self, block: TokenBlock, values: _Floats) -> _Floats:
        """Return values with the prediction added again."""
        out, known = values.copy(), self._coded(block)
        for group, (turn, weights) in enumerate(zip(self._turns, self._weights, strict=True)):
            out[group] = turn.T @ values[group] + weights @ known
        return out


def principal(square: _Doubles) -> tuple[_Floats, NDArray[np.int64]]:
    """Return the principal components of a covariance, one a row, the strongest first, and their scales in units."""
    powers, basis = np.linalg.eigh((square + square.T) / 2)
    scales = np.rint(UNITS / 2 * np.log2(np.maximum(powers[::-1], _POWER_MIN))).astype(np.int64)
    return np.ascontiguousarray(basis.T[::-1]).astype(np.float32), scales
