"""Fits transforms in two stages: each block of values its own, then one for the strongest components of all blocks.

One matrix over 2 x 8 heads x 128 dims takes 2,048 products a value, blocks of 128 and 256 mixed components take 160.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockLayout
from kvtide.codec.tide.grid import UNITS

_Matrix = NDArray[np.float64]

# A profile's bytes, and products a value, with which decoding has half of the speed that it has without a transform
# (`kvtide-lab bench codec-width`).
PROFILE_BYTES_MAX = 64_000_000
PRODUCTS_MAX = 160
BLOCK_VALUES_MAX = 128
# A larger matrix does not stay in a core's own cache.
MIXED_MAX = 512
# Rows of every matrix that are kept at 16 bits, others at 8: those of large scales.
FINE_SHARE = 1 / 8
# Full second moments of all layers in float32; of wider models each block's own are taken, and nothing is mixed.
MOMENTS_BYTES_MAX = 1 << 30
# More products must save so much of the bits, counted at the step of a KL about 5e-3.
_WORTH_BITS = 0.003
_STEP_UNITS = -17
_MIXED_STEP = 16
# Layers that stages are chosen by.
_SAMPLES = 3


class Stages(NamedTuple):
    """Values of a block, and components that are mixed."""

    block: int
    mixed: int


class FirstStage(NamedTuple):
    """The first half of a transform: (blocks, components, values), and the places of the strongest in all blocks.

    scales: of all components where they stand.
    """

    bases: _Matrix
    strongest: NDArray[np.int64]
    scales: _Matrix


def block_sizes(layout: BlockLayout) -> list[int]:
    """Return the sizes that blocks may have, the largest first: even parts of a head, so long as there are any."""
    sizes = [n for n in range(2, min(layout.head_dim, BLOCK_VALUES_MAX) + 1, 2) if layout.head_dim % n == 0]
    largest = max(sizes, default=0)
    return [n for n in reversed(sizes) if 2 * n >= largest]


def has_full_moments(layout: BlockLayout) -> bool:
    """Tell whether second moments of all values of each layer are small enough to be taken."""
    values = 2 * layout.kv_heads * layout.head_dim
    return 4 * layout.layers * values**2 <= MOMENTS_BYTES_MAX


def choose_stages(layout: BlockLayout, covariance: Callable[[int], _Matrix]) -> Stages:
    """Return the stages with the fewest products among those with nearly the fewest bits, by a few layers' moments.

    covariance: of a layer's weighted values.
    """
    values = 2 * layout.kv_heads * layout.head_dim
    layers = sorted({0, layout.layers // 2, layout.layers - 1})[:_SAMPLES]
    found: list[tuple[float, float, Stages]] = []
    for block in block_sizes(layout):
        most = _mixed_max(layout.layers, values, block)
        counts = sorted({round(most * share / _MIXED_STEP) * _MIXED_STEP for share in (0, 0.25, 0.5, 0.75, 1)})
        bits = np.zeros(len(counts))
        for layer in layers:
            square = covariance(layer)
            stage = first_stage(square, Stages(block, 0))
            between = _between_components(square, stage.bases)
            bits += [_bits(between, stage.scales, count) for count in counts]
        found += [(block + n**2 / values, float(each), Stages(block, n)) for n, each in zip(counts, bits, strict=True)]
    least = min(bits for _, bits, _ in found)
    return min(each for each in found if each[1] <= least * (1 + _WORTH_BITS))[2]


def _mixed_max(layers: int, values: int, block: int) -> int:
    by_products = (max(PRODUCTS_MAX - block, 0) * values) ** 0.5
    left = PROFILE_BYTES_MAX / layers - values * (block * (1 + FINE_SHARE) + 8)
    by_bytes = (max(left, 0) / (1 + FINE_SHARE)) ** 0.5
    return int(min(by_products, by_bytes, values / 2, MIXED_MAX) / _MIXED_STEP) * _MIXED_STEP


def first_stage(square: _Matrix, stages: Stages) -> FirstStage:
    """Return the principal components of each block of weighted values with these second moments."""
    block, scales, bases = stages.block, [], []
    for start in range(0, len(square), block):
        powers, basis = np.linalg.eigh(square[start : start + block, start : start + block])
        scales.append(np.sqrt(np.maximum(powers[::-1], 1e-12)))
        bases.append(basis.T[::-1])
    flat = np.concatenate(scales)
    return FirstStage(np.stack(bases), np.argsort(-flat, kind="stable")[: stages.mixed], flat)


def _between_components(square: _Matrix, bases: _Matrix) -> _Matrix:
    """Return the second moments of all blocks' components."""
    count, block, _ = bases.shape
    rows = bases @ square.reshape(count, block, -1)
    found = bases @ rows.reshape(len(square), count, block).transpose(1, 2, 0)
    return found.reshape(square.shape)


def _bits(between: _Matrix, scales: _Matrix, mixed: int) -> float:
    strongest = np.argsort(-scales, kind="stable")[:mixed]
    powers = np.linalg.eigvalsh(between[np.ix_(strongest, strongest)]) if mixed else np.empty(0)
    rest = np.delete(scales, strongest) ** 2
    least = 2.0 ** (2 * _STEP_UNITS / UNITS) / 12
    return float(0.5 * np.log2(np.maximum(np.concatenate([powers, rest]), least) / least).sum())


def staged(groups: Iterable[_Matrix], stages: Stages, units: Callable[[_Matrix], NDArray[np.int16]]) -> dict[str, Any]:
    """Return a profile's arrays of transforms in two stages. groups: each one's second moments of weighted values."""
    found: dict[str, list[NDArray[Any]]] = {}
    for square in groups:
        stage = first_stage(square, stages)
        between = _between_components(square, stage.bases)
        powers, mix = np.linalg.eigh(between[np.ix_(stage.strongest, stage.strongest)])
        places = np.concatenate([np.arange(len(mix)) + len(square), np.delete(np.arange(len(square)), stage.strongest)])
        scales = np.sqrt(np.maximum(powers[::-1], 1e-12)).tolist()
        scale = units(np.append(scales, np.delete(stage.scales, stage.strongest)))
        order = np.argsort(-scale, kind="stable")
        parts = {"scale": scale[order], "place": places[order].astype(np.uint16)}
        parts["mixed"] = stage.strongest.astype(np.uint16)
        parts |= {f"mix_{name}": array for name, array in rounded_rows(mix.T[::-1]).items()}
        blocks = [rounded_rows(basis) for basis in stage.bases]
        parts |= {f"block_{name}": np.stack([each[name] for each in blocks]) for name in blocks[0]}
        for name, array in parts.items():
            found.setdefault(name, []).append(array)
    return {name: np.stack(arrays) for name, arrays in found.items()}


def rounded_rows(rows: _Matrix, fine: int | None = None) -> dict[str, NDArray[Any]]:
    """Return rows as whole numbers of a unit each, the first `fine` at 16 bits, the rest at 8; None for FINE_SHARE."""
    fine = round(FINE_SHARE * len(rows)) if fine is None else fine
    peaks = np.abs(rows).max(axis=1, initial=1e-9)
    unit = (peaks / np.where(np.arange(len(rows)) < fine, 32767, 127)).astype(np.float32)
    whole = np.rint(rows / unit[:, None])
    coarse = np.clip(whole[fine:], -127, 127).astype(np.int8)
    # One byte each; profiles have no signed bytes.
    return {"fine": whole[:fine].astype(np.int16), "coarse": coarse.view(np.uint8), "unit": unit}


def whole_rows(arrays: Mapping[str, NDArray[Any]], prefix: str, one: int) -> NDArray[np.int16]:
    """Return rounded rows, or those of many blocks, in units of 1 / one."""
    fine, coarse, unit = (arrays[f"{prefix}{name}"] for name in ("fine", "coarse", "unit"))
    rows = np.concatenate([fine.astype(np.float64), coarse.view(np.int8).astype(np.float64)], axis=-2)
    return np.clip(np.rint(rows * unit.astype(np.float64)[..., None] * one), -32767, 32767).astype(np.int16)


def check_places(places: Sequence[int], mixed: Sequence[int], values: int) -> bool:
    """Tell whether places are those of a transform in two stages: each component stands at one, or is mixed."""
    inner = [place for place in places if place >= values]
    outer = {place for place in places if place < values}
    is_once = len(outer) + len(inner) == len(places) and len(set(mixed)) == len(mixed)
    return is_once and inner == list(range(values, values + len(mixed))) and outer.isdisjoint(mixed)
