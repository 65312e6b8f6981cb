"""Levels of coefficients, one by one: rounded, or chosen by rate and distortion, with the code lengths of classes.

A class is a table of tide: a quarter of an octave of scale and loudness over the step. Lengths, the values that levels
stand for, and what a level costs are those of the fitted texts; code lengths are ideal, without headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.tide.grid import CLASS_UNITS, ENTER_UNITS, PARTS, TOP_UNITS_MIN, UNITS, part_bounds, step_of
from kvtide_lab.bench.codec_bound_channel import TestChannel

_Floats = NDArray[np.float32]
_Whole = NDArray[np.int64]

# Magnitudes beyond the last one share its code and give 16 bits more. Classes above those of tide's top values are not
# clipped: what tide codes as digits is coded as one value here.
MAGNITUDES, _ESCAPE_BITS, CLASSES = 16, 16.0, 44
# Magnitudes whose values and thresholds are fitted.
_FITTED = 3
_SEEN_MIN = 50


class BlockCoefficients(NamedTuple):
    """A block in tide's transform, its tokens by loudness; tokens that are kept apart are zeros.

    values: (groups, components, tokens); scales: (groups, components), in units; gains: of each quarter of the tokens,
    in units; order: the token at each place; is_apart: of each token.
    """

    values: _Floats
    scales: _Whole
    gains: _Whole
    order: _Whole
    is_apart: NDArray[np.bool_]

    def classes(self, units: int) -> _Whole:
        """Return the class of each coefficient at a step: (groups, components, tokens)."""
        by_part = self.scales[:, :, None] + self.gains - units - TOP_UNITS_MIN
        found = np.clip(by_part // CLASS_UNITS, 0, CLASSES - 1)
        return np.repeat(found, np.diff(part_bounds(len(self.order))), axis=2)

    def coded(self, units: int) -> NDArray[np.bool_]:
        """Return which components are coded at a step: (groups, components)."""
        return self.scales - units >= ENTER_UNITS

    def by_token(self, values: _Floats) -> list[_Floats]:
        """Return values as (tokens, components) of each group, tokens as they stand in the block."""
        back = np.empty_like(values)
        back[:, :, self.order] = values
        return [np.ascontiguousarray(group.T) for group in back]


def coefficients_of(channel: TestChannel, meta: BlockMeta, bits: BlockBits) -> BlockCoefficients:
    """Return a block's coefficients."""
    found, is_apart = channel.coefficients(meta, bits), channel.apart(meta, bits)
    scales = np.stack([group.scales for group in channel.groups])
    loud = channel.loudness(is_apart, found) / (step_of(channel.loud_units, 0) * len(scales))
    order, bounds = np.argsort(loud, kind="stable"), part_bounds(len(loud))
    means = [loud[order[bounds[part] : bounds[part + 1]]].mean() for part in range(PARTS)]
    gains = np.rint(UNITS * np.log2(np.maximum(means, 1e-9))).astype(np.int64)
    values = np.stack([group.T for group in found])
    values[:, :, is_apart] = 0
    return BlockCoefficients(np.ascontiguousarray(values[:, :, order]), scales, gains, order, is_apart)


class Quantised(NamedTuple):
    """The bits of a block's coefficients, and what a decoder has for each."""

    bits: float
    values: _Floats


class Chosen(NamedTuple):
    """Coefficients of one class after the other, flat: exact in steps, their classes, their levels."""

    exact: _Floats
    classes: _Whole
    levels: _Floats

    @property
    def magnitudes(self) -> _Whole:
        """Return magnitudes as they are coded: the last one stands for all beyond."""
        return np.minimum(np.abs(self.levels), MAGNITUDES - 1).astype(np.int64)


def lengths_of(counts: NDArray[np.float64]) -> _Floats:
    """Return the bits of each magnitude, its sign counted. counts: (…, MAGNITUDES)."""
    seen = counts + 0.05
    bits = -np.log2(seen / seen.sum(axis=-1, keepdims=True))
    bits[..., 1:] += 1
    bits[..., -1] += _ESCAPE_BITS
    found: _Floats = bits.astype(np.float32)
    return found


class LevelChoice:
    """Rounding (`price` 0), or the level of the least squared error plus `price` times bits, in steps squared."""

    def __init__(self, price: float) -> None:
        self._price = price
        self.lengths: _Floats = np.zeros((CLASSES, MAGNITUDES), dtype=np.float32)
        self._pulls: _Floats = np.zeros((CLASSES, _FITTED + 1), dtype=np.float32)
        self._thresholds = self._rounding()

    def fit(self, blocks: Sequence[BlockCoefficients], units: Sequence[int], rounds: int = 3) -> LevelChoice:
        """Take lengths, pulls and thresholds from blocks at some steps. The levels follow from them: several rounds."""
        for _ in range(rounds if self._price else 1):
            self._fit_once(blocks, units)
        return self

    def _fit_once(self, blocks: Sequence[BlockCoefficients], units: Sequence[int]) -> None:
        counts, shape = np.zeros(CLASSES * MAGNITUDES), (CLASSES, _FITTED + 1)
        pulled, seen = np.zeros(shape), np.zeros(shape)
        for block in blocks:
            for step in units:
                chosen, _ = self.chosen(block, step)
                magnitudes = chosen.magnitudes
                counts += np.bincount(chosen.classes * MAGNITUDES + magnitudes, minlength=len(counts))
                place = chosen.classes * (_FITTED + 1) + np.minimum(magnitudes, _FITTED)
                pull = (np.abs(chosen.levels) - np.abs(chosen.exact)) * (magnitudes > 0)
                pulled += np.bincount(place, pull, pulled.size).reshape(shape)
                seen += np.bincount(place, minlength=seen.size).reshape(shape)
        self.lengths = lengths_of(counts.reshape(CLASSES, MAGNITUDES))
        self._pulls = np.where(seen >= _SEEN_MIN, pulled / np.maximum(seen, 1), 0).astype(np.float32)
        if self._price:
            self._thresholds = self._priced()

    def _rounding(self) -> _Floats:
        found: _Floats = np.tile(np.arange(_FITTED + 1, dtype=np.float32) + 0.5, (CLASSES, 1))
        return found

    def _priced(self) -> _Floats:
        """Return the magnitudes at which the next level begins to be worth its bits: (CLASSES, _FITTED + 1)."""
        known = np.arange(_FITTED + 2)
        stands_for = (known - self._pulls[:, np.minimum(known, _FITTED)]) * (known > 0)
        gaps, dearer = np.diff(stands_for, axis=1), np.diff(self.lengths[:, : _FITTED + 2], axis=1)
        middle = (stands_for[:, 1:] + stands_for[:, :-1]) / 2
        plain = self._rounding()
        found = np.clip(middle + self._price * dearer / (2 * np.maximum(gaps, 0.3)), plain - 0.1, plain + 0.45)
        return np.maximum.accumulate(found, axis=1).astype(np.float32)

    def chosen(self, block: BlockCoefficients, units: int) -> tuple[Chosen, NDArray[np.bool_]]:
        """Return the levels of what is coded at a step, and which components that are."""
        coded = block.coded(units)
        exact = (block.values[coded] / np.float32(step_of(units, 0))).reshape(-1)
        classes, magnitude = block.classes(units)[coded].reshape(-1), np.abs(exact)
        levels = np.zeros(len(exact), dtype=np.float32)
        for threshold in self._thresholds.T:
            levels += magnitude > threshold[classes]
        levels = np.where(magnitude < _FITTED + 1.4, levels, np.rint(magnitude))
        return Chosen(exact, classes, np.copysign(levels, exact)), coded

    def code(self, block: BlockCoefficients, units: int) -> Quantised:
        """Return what a block comes to at a step."""
        chosen, coded = self.chosen(block, units)
        magnitudes, levels = chosen.magnitudes, chosen.levels
        pulls = self._pulls[chosen.classes, np.minimum(magnitudes, _FITTED)]
        stands_for = np.copysign(np.maximum(np.abs(levels) - pulls, 0), levels) * (magnitudes > 0)
        values = np.zeros_like(block.values)
        values[coded] = (stands_for * np.float32(step_of(units, 0))).reshape(-1, values.shape[2])
        return Quantised(float(self.lengths[chosen.classes, magnitudes].sum()), values)
