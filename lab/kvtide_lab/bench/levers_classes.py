"""Code lengths that follow what was coded before: how loud a token is in the components and layers before this one.

Nothing within a component is asked for, so that a decoder still has all its tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtide_lab.bench.levers_levels import (
    CLASSES,
    MAGNITUDES,
    BlockCoefficients,
    Chosen,
    LevelChoice,
    Quantised,
    lengths_of,
)

_Floats = NDArray[np.float32]
# Components before this one that are asked, and the magnitude that counts beside what was seen.
_WINDOW, _DOUBT = 32, 0.7
# Classes of loudness for each class of scale, and how much a class leans on the whole.
_LOUD_CLASSES, _LEAN = 16, 20
_ROUNDS, _NOISE = 25, 0.3


class LoudClasses(LevelChoice):
    """Levels as `LevelChoice` chooses them, with lengths by class and by how loud the token was so far."""

    def __init__(self, price: float) -> None:
        super().__init__(price)
        self._usual: _Floats = np.zeros(CLASSES, dtype=np.float32)
        self._says: NDArray[np.float64] = np.zeros(0)
        self._bounds: NDArray[np.float64] = np.zeros(0)
        self._by_loudness: _Floats = np.zeros((CLASSES, _LOUD_CLASSES, MAGNITUDES), dtype=np.float32)

    def fit(self, blocks: Sequence[BlockCoefficients], units: Sequence[int], rounds: int = 3) -> LoudClasses:
        """Fit levels, what each thing seen says, and the lengths that follow."""
        super().fit(blocks, units, rounds)
        pairs = [(self.chosen(block, step), block) for block in blocks for step in units]
        counts = np.zeros(CLASSES * MAGNITUDES)
        for (chosen, _), _ in pairs:
            counts += np.bincount(chosen.classes * MAGNITUDES + chosen.magnitudes, minlength=len(counts))
        by_class = counts.reshape(CLASSES, MAGNITUDES)
        total = np.maximum(by_class.sum(axis=1), 1)
        self._usual = ((by_class @ np.arange(MAGNITUDES)) / total + 1e-4).astype(np.float32)
        seen = [self._seen(chosen, coded, block) for (chosen, coded), block in pairs]
        usual = [self._usual[chosen.classes] for (chosen, _), _ in pairs]
        self._says = _regression(seen, usual, [chosen.magnitudes for (chosen, _), _ in pairs])
        loud = [each @ self._says for each in seen]
        self._bounds = np.quantile(np.concatenate(loud), np.linspace(0, 1, _LOUD_CLASSES + 1)[1:-1])
        counts = np.zeros(CLASSES * _LOUD_CLASSES * MAGNITUDES)
        for each, ((chosen, _), _) in zip(loud, pairs, strict=True):
            place = chosen.classes * _LOUD_CLASSES + np.searchsorted(self._bounds, each)
            counts += np.bincount(place * MAGNITUDES + chosen.magnitudes, minlength=len(counts))
        leaning = _LEAN * by_class / total[:, None]
        self._by_loudness = lengths_of(counts.reshape(CLASSES, _LOUD_CLASSES, MAGNITUDES) + leaning[:, None])
        return self

    def _seen(self, chosen: Chosen, coded: NDArray[np.bool_], block: BlockCoefficients) -> _Floats:
        """Return logarithms of magnitudes over what is usual, of what was coded before each: (items, 4).

        Of this token's last components, of those of the tokens beside it, of all its components of these layers so
        far, of all of the layers before.
        """
        found, usual = (np.zeros(block.values.shape, dtype=np.float32) for _ in range(2))
        tokens = block.values.shape[2]
        for each, values in ((found, np.abs(chosen.levels)), (usual, self._usual[chosen.classes])):
            by_row = np.zeros_like(each)
            by_row[coded] = values.reshape(-1, tokens)
            each[:, :, block.order] = by_row
        sums = [_before(each) for each in (found, usual)]
        seen = [_ratio(*(each[0] for each in sums)), _ratio(*(_beside(each[0]) for each in sums))]
        seen.append(_ratio(*(each[1] for each in sums)))
        layers = np.zeros_like(found)
        layers[1:] = _ratio(found[:-1].sum(axis=1), usual[:-1].sum(axis=1))[:, None]
        return np.stack([each[:, :, block.order][coded].reshape(-1) for each in (*seen, layers)], axis=1)

    def code(self, block: BlockCoefficients, units: int) -> Quantised:
        """Return what a block comes to at a step."""
        chosen, coded = self.chosen(block, units)
        loud = np.searchsorted(self._bounds, self._seen(chosen, coded, block) @ self._says)
        bits = float(self._by_loudness[chosen.classes, loud, chosen.magnitudes].sum())
        return super().code(block, units)._replace(bits=bits)


def _before(values: _Floats) -> tuple[_Floats, _Floats]:
    """Return the sums over the last components before each, and over all before it."""
    sums = np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)], axis=1)
    whole, first = sums[:, :-1], np.maximum(np.arange(values.shape[1]) - _WINDOW, 0)
    return whole - sums[:, first], whole


def _beside(values: _Floats) -> _Floats:
    out = np.zeros_like(values)
    out[:, :, 1:] += values[:, :, :-1]
    out[:, :, :-1] += values[:, :, 1:]
    return out


def _ratio(found: _Floats, usual: _Floats) -> _Floats:
    ratio: _Floats = np.log((found + _DOUBT) / (usual + _DOUBT))
    return ratio


def _regression(
    seen: Sequence[_Floats], usual: Sequence[_Floats], magnitudes: Sequence[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Return what to multiply with what is seen: usual · exp(seen · it) is the magnitude's mean (Newton's method)."""
    known, usually = np.concatenate(seen).astype(np.float64), np.concatenate(usual).astype(np.float64)
    wanted, says = np.concatenate(magnitudes).astype(np.float64), np.zeros(seen[0].shape[1])
    for _ in range(_ROUNDS):
        mean = usually * np.exp(np.clip(known @ says, -4, 4))
        trust = 1 / (mean + _NOISE)
        slope, bend = known.T @ ((wanted - mean) * trust), (known * (mean * trust)[:, None]).T @ known
        says += np.clip(np.linalg.solve(bend + 1e-3 * np.eye(len(says)), slope), -0.5, 0.5)
    return says
