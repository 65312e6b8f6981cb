"""Trellis-coded levels: two quantisers with interleaved values, and a state that says which of them comes next.

Quantiser 0 has the even multiples of half a step, quantiser 1 zero and the odd ones. The parity of a level moves the
state. The encoder chooses the path of least squared error plus `price` times bits, along the tokens of a component.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import step_of
from kvtide_lab.bench.levers_levels import CLASSES, MAGNITUDES, BlockCoefficients, LevelChoice, Quantised, lengths_of

_Floats = NDArray[np.float32]
_FITTED = 3
_SEEN_MIN = 50
# By state: the next one after an even and an odd level, and the quantiser. Four as in VVC, eight as in JPEG 2000.
STATES = {
    4: (((0, 2), (2, 0), (1, 3), (3, 1)), (0, 0, 1, 1)),
    8: (((0, 1), (3, 2), (5, 4), (6, 7), (1, 0), (2, 3), (4, 5), (7, 6)), (0, 1, 0, 1, 0, 1, 0, 1)),
}
# In half steps squared: what a bit is worth at the error of this quantiser at many bits, 2 ln 2 times that.
PRICE = 0.35
# A step of so many units more has about the error of plain rounding.
_WIDER_UNITS = 4


class _Path(NamedTuple):
    """Levels (components, tokens), and the state that each was coded in."""

    levels: _Floats
    states: NDArray[np.int8]


class TrellisLevels:
    """Levels along a trellis, with code lengths of each class in each state."""

    def __init__(self, states: int, price: float = PRICE) -> None:
        """states: 4 or 8. price: of a bit, in half steps squared."""
        self._price = price
        nexts, quantisers = STATES[states]
        self._count = states
        self._quantiser = np.array(quantisers)
        arrivals = [[(a, p) for a in range(states) for p in (0, 1) if nexts[a][p] == b] for b in range(states)]
        self._from = np.array([[a for a, _ in pairs] for pairs in arrivals])
        self._parity = np.array([[p for _, p in pairs] for pairs in arrivals])
        self._lengths: _Floats = np.zeros((CLASSES, 2, MAGNITUDES), dtype=np.float32)
        self._state_lengths: _Floats = np.zeros((CLASSES, states, MAGNITUDES), dtype=np.float32)
        self._pulls: _Floats = np.zeros((CLASSES, 2, _FITTED + 1), dtype=np.float32)

    def fit(self, blocks: Sequence[BlockCoefficients], units: Sequence[int], rounds: int = 4) -> TrellisLevels:
        """Take lengths and pulls from blocks at some steps; paths follow from them: several rounds."""
        known = LevelChoice(0.12).fit(blocks, [each + _WIDER_UNITS for each in units], 2).lengths
        self._lengths = np.repeat(known[:, None], 2, axis=1)
        for _ in range(rounds):
            self._fit_once(blocks, units)
        return self

    def _fit_once(self, blocks: Sequence[BlockCoefficients], units: Sequence[int]) -> None:
        by_state = np.zeros(CLASSES * self._count * MAGNITUDES)
        pulled, seen = np.zeros(self._pulls.shape), np.zeros(self._pulls.shape)
        for block in blocks:
            for step in units:
                exact, classes, _ = self._exact(block, step)
                path = self.path(exact, classes)
                magnitudes, quantiser = _magnitudes(path.levels), self._quantiser[path.states]
                place = (classes * self._count + path.states) * MAGNITUDES + magnitudes
                by_state += np.bincount(place.reshape(-1), minlength=len(by_state))
                place = (classes * 2 + quantiser) * (_FITTED + 1) + np.minimum(magnitudes, _FITTED)
                pull = (_half_steps(np.abs(path.levels), quantiser) - np.abs(exact)) * (magnitudes > 0)
                pulled += np.bincount(place.reshape(-1), pull.reshape(-1), pulled.size).reshape(pulled.shape)
                seen += np.bincount(place.reshape(-1), minlength=seen.size).reshape(seen.shape)
        counts = by_state.reshape(CLASSES, self._count, MAGNITUDES)
        by_quantiser = [counts[:, self._quantiser == quantiser].sum(axis=1) for quantiser in (0, 1)]
        self._lengths, self._state_lengths = lengths_of(np.stack(by_quantiser, axis=1)), lengths_of(counts)
        self._pulls = np.where(seen >= _SEEN_MIN, pulled / np.maximum(seen, 1), 0).astype(np.float32)

    def _exact(self, block: BlockCoefficients, units: int) -> tuple[_Floats, NDArray[np.int64], NDArray[np.bool_]]:
        """Return what is coded, in half steps, its classes, (components, tokens) both, and which components it is."""
        coded = block.coded(units + _WIDER_UNITS)
        exact = block.values[coded] / np.float32(step_of(units + _WIDER_UNITS, 0) / 2)
        return exact, block.classes(units + _WIDER_UNITS)[coded], coded

    def path(self, exact: _Floats, classes: NDArray[np.int64]) -> _Path:
        """Return the cheapest path of each row (Viterbi)."""
        rows, tokens = exact.shape
        costs = np.full((self._count, rows), 1e9, dtype=np.float32)
        costs[0] = 0
        second = np.zeros((tokens, self._count, rows), dtype=bool)
        choices = np.zeros((tokens, 2, 2, rows), dtype=np.int16)
        for token in range(tokens):
            magnitude, known = np.abs(exact[:, token]), classes[:, token]
            added = np.empty((2, 2, rows), dtype=np.float32)
            for quantiser in (0, 1):
                for parity in (0, 1):
                    cost, level = self._nearest(magnitude, known, quantiser, parity)
                    added[quantiser, parity], choices[token, quantiser, parity] = cost, level
            ways = costs[self._from] + added[self._quantiser[self._from], self._parity]
            second[token] = ways[:, 1] < ways[:, 0]
            costs = ways.min(axis=1)
        return self._walk_back(exact, costs, second, choices)

    def _nearest(
        self, magnitude: _Floats, classes: NDArray[np.int64], quantiser: int, parity: int
    ) -> tuple[_Floats, _Floats]:
        """Return the least cost of a level of this parity, and the level: the nearest one or the one below."""
        near = np.maximum(2 * np.rint(((magnitude + quantiser) / 2 - parity) / 2) + parity, parity)
        costs = []
        for level in (near, np.maximum(near - 2, parity)):
            at = np.minimum(level, MAGNITUDES - 1).astype(np.int64)
            pulls = self._pulls[classes, quantiser, np.minimum(at, _FITTED)]
            stands_for = _half_steps(level, quantiser) - pulls * (level > 0)
            costs.append((magnitude - stands_for) ** 2 + self._price * self._lengths[classes, quantiser, at])
        is_below = costs[1] < costs[0]
        return np.minimum(*costs), np.where(is_below, np.maximum(near - 2, parity), near)

    def _walk_back(
        self, exact: _Floats, costs: _Floats, second: NDArray[np.bool_], choices: NDArray[np.int16]
    ) -> _Path:
        rows = np.arange(len(exact))
        levels, states = np.empty_like(exact), np.empty(exact.shape, dtype=np.int8)
        state = costs.argmin(axis=0)
        for token in range(exact.shape[1] - 1, -1, -1):
            way = second[token, state, rows].astype(np.int64)
            parity, state = self._parity[state, way], self._from[state, way]
            levels[:, token], states[:, token] = choices[token, self._quantiser[state], parity, rows], state
        return _Path(np.copysign(levels, exact), states)

    def code(self, block: BlockCoefficients, units: int) -> Quantised:
        """Return what a block comes to; `units` is the step of plain rounding that it stands beside."""
        exact, classes, coded = self._exact(block, units)
        path = self.path(exact, classes)
        magnitudes, quantiser = _magnitudes(path.levels), self._quantiser[path.states]
        pulls = self._pulls[classes, quantiser, np.minimum(magnitudes, _FITTED)]
        stands_for = (_half_steps(np.abs(path.levels), quantiser) - pulls) * (magnitudes > 0)
        values = np.zeros_like(block.values)
        values[coded] = np.copysign(stands_for, path.levels) * np.float32(step_of(units + _WIDER_UNITS, 0) / 2)
        return Quantised(float(self._state_lengths[classes, path.states, magnitudes].sum()), values)


def _magnitudes(levels: _Floats) -> NDArray[np.int64]:
    return np.minimum(np.abs(levels), MAGNITUDES - 1).astype(np.int64)


def _half_steps(magnitudes: _Floats, quantiser: int | NDArray[np.int64]) -> _Floats:
    """Return the values of levels in half steps, magnitudes of both."""
    found: _Floats = (2 * magnitudes - quantiser * (magnitudes > 0)).astype(np.float32)
    return found
