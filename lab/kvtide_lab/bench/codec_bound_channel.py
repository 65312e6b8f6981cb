"""An ideal quantiser of tide's transform: a Gaussian test channel in place of steps and entropy codes.

A coefficient of power P becomes a y + sqrt(a D) n, with a = 1 - D / P and n normal: its error is D, and it takes
log2(P / D) / 2 bits, which no code of finitely many values at a time reaches. D is the same for all coefficients, and a
coefficient of less power is left out (reverse water-filling). Powers are those of the judged texts, of each component
in each quarter of a block's tokens by loudness: the side information that tide's payloads have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.tide.encoder import first_apart, loudness_weights, tokens_apart
from kvtide.codec.tide.grid import PARTS, part_bounds, step_of
from kvtide.codec.tide.model import ONE, Group, TideModel
from kvtide.codec.tide.section import KeyRotation, StoredLayers, load_values

_Floats = NDArray[np.float64]
_Floats32 = NDArray[np.float32]

# Histograms of coefficients over their deviation: bins of an eighth out to eight deviations, for classes of components
# that are neighbours in power.
BINS, BIN = 128, 0.125
CLASSES = 16
# A coefficient of less power does not occur.
_POWER_MIN = 1e-12


def store_values(values: _Floats32, stored: StoredLayers) -> None:
    """Write layers of float32 with keys before RoPE: the way back of `load_values`."""
    for layer in range(len(values)):
        dim_start, neighbours, cos, sin = stored.turns.keys_of(stored.layer_start + layer)
        for which, (cosines, sines) in enumerate(((cos, sin), (cos[:, :0], sin[:, :0]))):
            turn = (dim_start, neighbours, np.ascontiguousarray(cosines), np.ascontiguousarray(sines))
            out = stored.bits[layer, which].reshape(-1).view(np.uint8)
            _native.rope_store(values[layer, which], *turn, stored.dtype.code, out)


def rate_of(powers: _Floats, error: float) -> _Floats:
    """Return the bits that a normally distributed coefficient of each power takes at a squared error."""
    found: _Floats = np.maximum(0.0, np.log2(powers / error) / 2)
    return found


def shannon_bound(powers: _Floats, error: float, entropies: _Floats) -> _Floats:
    """Return the bits below which no code is, at the channel's error: Shannon's lower bound.

    entropies: of each coefficient over its deviation, in bits (differential); log2(2 pi e) / 2 if it is normal.
    """
    left = np.minimum(error, powers)
    found: _Floats = np.maximum(0.0, entropies + np.log2(powers / left) / 2 - np.log2(2 * np.pi * np.e) / 2)
    return found


class Reproduced(NamedTuple):
    """A context's blocks out of the channel, and Shannon's lower bound in bits an element.

    The bound is by this context's own histograms at the channel's error. A context louder than the others needs more
    than their mean, so that at low rates the mean of all bounds can exceed the channel's rate by a percent or two.
    """

    blocks: list[BlockBits]
    bound_bits: float


class TestChannel:
    """The channel of one profile. Blocks of all judged texts are added first; powers are theirs."""

    __test__ = False  # A channel, no test of pytest's.

    def __init__(self, model: TideModel, loud_units: int) -> None:
        """loud_units: the step whose components say how loud a token is."""
        self._model = model
        self.groups = model.groups
        self.loud_units = loud_units
        self._squares = np.zeros((len(model.groups), PARTS, len(model.groups[0].scales)))
        self._tokens = np.zeros(PARTS)
        self._values = 0
        self._kept_bytes = 0
        self._to_components = [_matrix(group) for group in model.groups]

    def add(self, meta: BlockMeta, bits: BlockBits) -> None:
        """Take a block of the texts that are judged."""
        coefficients, is_coded = self.coefficients(meta, bits), ~self.apart(meta, bits)
        parts = self._parts(~is_coded, coefficients)
        for group, found in enumerate(coefficients):
            for part in range(PARTS):
                here = found[is_coded & (parts == part)]
                self._squares[group, part] += np.square(here).sum(axis=0, dtype=np.float64)
        self._tokens += np.bincount(parts[is_coded], minlength=PARTS)
        self._values += bits.size
        layers, two, _, heads, dims = bits.shape
        self._kept_bytes += int((~is_coded).sum()) * layers * two * heads * (2 + dims)

    @property
    def powers(self) -> _Floats:
        """Return the mean square of each component of each group in each part: (groups, PARTS, components)."""
        found: _Floats = self._squares / np.maximum(self._tokens, 1)[None, :, None]
        return np.maximum(found, _POWER_MIN)

    def ideal_bits(self, error: float) -> float:
        """Return the bits an element of the ideal quantiser, first tokens kept as tide keeps them."""
        return self._bits(rate_of(self.powers, error))

    def _bits(self, each: _Floats) -> float:
        return (float(each.sum(axis=(0, 2)) @ self._tokens) + 8 * self._kept_bytes) / max(self._values, 1)

    def through(
        self, blocks: Sequence[tuple[BlockMeta, BlockBits]], errors: Sequence[float], rng: np.random.Generator
    ) -> list[Reproduced]:
        """Return what the channel makes of a context at each squared error; first tokens are exact."""
        powers = self.powers
        shapes = np.zeros((len(powers), CLASSES, BINS + 2))
        found: list[list[BlockBits]] = [[] for _ in errors]
        for meta, bits in blocks:
            coefficients, is_coded = self.coefficients(meta, bits), ~self.apart(meta, bits)
            parts = self._parts(~is_coded, coefficients)
            for group, exact in enumerate(coefficients):
                shapes[group] += _shape_of(powers[group], exact[is_coded], parts[is_coded])
            for error, decoded in zip(errors, found, strict=True):
                out = bits.copy()
                said = [_noisy(*pair, error, parts, rng) for pair in zip(coefficients, powers, strict=True)]
                self.store(meta, said, out)
                out[:, :, ~is_coded] = bits[:, :, ~is_coded]
                decoded.append(out)
        pairs = zip(shapes, powers, strict=True)
        entropies = np.stack([_entropies(shape).take(_classes(power)) for shape, power in pairs])
        bounds = [self._bits(shannon_bound(powers, error, entropies)) for error in errors]
        return [Reproduced(*pair) for pair in zip(found, bounds, strict=True)]

    def apart(self, meta: BlockMeta, bits: BlockBits) -> NDArray[np.bool_]:
        """Tell of each token whether tide keeps it apart in all layers."""
        found: NDArray[np.bool_] = first_apart(meta) == 1
        if self._model.trellis is None:
            return found
        whole = StoredLayers(bits, meta.layout.dtype, 0, KeyRotation(meta, self._model.rotary, is_back=True))
        step = self._model.section_layers
        ranges = [slice(start, start + step) for start in range(0, meta.layout.layers, step)]
        for each in ranges:
            found &= tokens_apart(self._model, meta, whole.of(each)) == 1
        return found

    def coefficients(self, meta: BlockMeta, bits: BlockBits) -> list[_Floats32]:
        """Return the weighted components of each group: (tokens, components)."""
        back = KeyRotation(meta, self._model.rotary, is_back=True)
        found = []
        for group, matrix in zip(self._model.groups, self._to_components, strict=True):
            layers = slice(group.layer_start, group.layer_stop)
            values = load_values(StoredLayers(bits[layers], meta.layout.dtype, group.layer_start, back))
            mean, weight = self._model.mean_and_weight(group)
            rows = values.reshape(-1, *values.shape[2:]).transpose(1, 0, 2, 3).reshape(values.shape[2], -1)
            rows = (rows - mean) * weight
            found.append(rows[:, group.order] if matrix is None else rows @ matrix.T)
        return found

    def store(self, meta: BlockMeta, said: Sequence[_Floats32], out: BlockBits) -> None:
        """Write a block from weighted components, (tokens, components) of each group."""
        forth = KeyRotation(meta, self._model.rotary, is_back=False)
        for group, matrix, components in zip(self._model.groups, self._to_components, said, strict=True):
            mean, weight = self._model.mean_and_weight(group)
            if matrix is None:
                rows = np.zeros((len(components), group.shape[1]), dtype=np.float32)
                rows[:, group.order] = components
            else:
                rows = components @ matrix
            here = StoredLayers(out, meta.layout.dtype, 0, forth).of(slice(group.layer_start, group.layer_stop))
            layers, two, tokens, *heads = here.bits.shape
            values = (rows / weight + mean).reshape(tokens, layers, two, *heads).transpose(1, 2, 0, 3, 4)
            store_values(np.ascontiguousarray(values), here)

    def loudness(self, is_apart: NDArray[np.bool_], coefficients: list[_Floats32]) -> _Floats:
        """Return how loud each token of a block is, of all layers; zeros for those that are kept apart."""
        loud = np.zeros(len(is_apart))
        for group, found in zip(self._model.groups, coefficients, strict=True):
            loud += np.abs(found) @ loudness_weights(group.scales, self.loud_units)
        loud[is_apart] = 0
        return loud

    def _parts(self, is_apart: NDArray[np.bool_], coefficients: list[_Floats32]) -> NDArray[np.int64]:
        """Return the quarter of a block that each token is in by loudness, as the encoder has it of all layers."""
        loud = self.loudness(is_apart, coefficients)
        parts = np.empty(len(loud), dtype=np.int64)
        parts[np.argsort(loud, kind="stable")] = np.repeat(np.arange(PARTS), np.diff(part_bounds(len(loud))))
        return parts


def _matrix(group: Group) -> _Floats32 | None:
    return None if group.order.size else np.ascontiguousarray(group.matrix.astype(np.float32) / np.float32(ONE))


def _noisy(
    exact: _Floats32, powers: _Floats, error: float, parts: NDArray[np.int64], rng: np.random.Generator
) -> _Floats32:
    kept = np.maximum(0.0, 1 - error / powers).astype(np.float32)[parts]
    said: _Floats32 = kept * exact + np.sqrt(kept * np.float32(error)) * rng.standard_normal(exact.shape, np.float32)
    return said


def _shape_of(powers: _Floats, found: _Floats32, parts: NDArray[np.int64]) -> _Floats:
    """Count coefficients over their deviation, by class: (CLASSES, BINS + 2)."""
    bins = np.rint(found / (BIN * np.sqrt(powers)).astype(np.float32)[parts]).astype(np.int64) + BINS // 2
    flat = _classes(powers)[parts] * (BINS + 2) + np.clip(bins, -1, BINS) + 1
    return np.bincount(flat.reshape(-1), minlength=CLASSES * (BINS + 2)).reshape(CLASSES, -1).astype(np.float64)


def _classes(powers: _Floats) -> NDArray[np.int64]:
    """Return the class of each component in each part: by the rank of the component's power."""
    rank = np.argsort(np.argsort(-powers.mean(axis=0), kind="stable"), kind="stable")
    return np.broadcast_to(rank * CLASSES // len(rank), powers.shape)


def _entropies(shapes: _Floats) -> _Floats:
    """Return the differential entropy, in bits, of each class of coefficients over their deviations."""
    total = np.maximum(shapes.sum(axis=1, keepdims=True), 1)
    shares = shapes / total
    plain = -(shares * np.log2(np.maximum(shares, 1e-300))).sum(axis=1)
    # Few samples look more orderly than they are (Miller and Madow).
    bias = ((shapes > 0).sum(axis=1) - 1) / (2 * total[:, 0] * np.log(2))
    found: _Floats = plain + bias + np.log2(BIN)
    return found


def error_of(units: int) -> float:
    """Return the squared error of values that are rounded to a step, where these are wide."""
    return step_of(units, 0) ** 2 / 12
