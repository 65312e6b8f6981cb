"""Fits a tide profile from a model's caches. Pure: the caller runs the model, and keeps `state` to go on later.

Two passes over the texts: moments make means, weights and the transform; then, with these, blocks are quantised and
counted (`counts`). Memory is bounded by the groups' covariances, whatever the number of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.profile import Profile
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide.encoder import first_apart
from kvtide.codec.tide.grid import TABLES, THIRD, TOPS, UNITS
from kvtide.codec.tide.section import KeyRotation, StoredLayers, load_values
from kvtide.codec.tide.stages import (
    Stages,
    block_sizes,
    choose_stages,
    has_full_moments,
    rounded_rows,
    staged,
)
from kvtide.codec.tide.tables import rounded_tables, table_bytes


class Cost(NamedTuple):
    """The budget of a profile: the most layers that a transform spans (0: none), rows at 16 bits, share of rows.

    has_trellis: levels lie on one, looking for which takes two thirds of the time in which `light` is encoded.
    """

    layers_max: int
    fine: int
    share: float
    has_trellis: bool


# Of ten layers' components the last fifth carries nothing at any step worth asking for.
COSTS = {
    "light": Cost(0, 0, 1.0, has_trellis=False),
    "layer": Cost(1, 48, 1.0, has_trellis=True),
    "deep": Cost(10, 128, 0.78, has_trellis=True),
}
# A layer of more values than this has its transform in two stages: one matrix would take so many products a value.
DENSE_VALUES_MAX = 512
# Values of one matrix over several layers, whose products a value they are: ten layers of three heads of 64 dims.
SPANNED_VALUES_MAX = 3840

# Steps by the power of the measured sensitivity, mixed with the deviation (docs/codec.md has the other powers tried).
SENSITIVITY_POWER, DEVIATION_POWER = 0.375, -0.25
# Where no transform mixes channels, how much each one's own sensitivity counts.
CHANNEL_POWER = 0.2
# One channel so far from its stream's middle, and each gets a scale of its own where tokens are kept apart. None counts
# as further away than LINE_MAX.
OUT_OF_LINE_OCTAVES, LINE_MAX = 3, 10
SECTION_LAYERS_MAX = 10


def transform_layers(cost: Cost, layout: BlockLayout) -> int:
    """Return how many layers a transform spans: the most that divide all, fit the budget and are not too wide; or 1."""
    values = 2 * layout.kv_heads * layout.head_dim
    fitting = (n for n in range(cost.layers_max, 1, -1) if layout.layers % n == 0 and n * values <= SPANNED_VALUES_MAX)
    return next(fitting, 1)


def is_staged(cost: Cost, layout: BlockLayout) -> bool:
    """Tell whether a layer has its transform in two stages."""
    is_wide = 2 * layout.kv_heads * layout.head_dim > DENSE_VALUES_MAX
    return cost.layers_max > 0 and transform_layers(cost, layout) == 1 and is_wide and bool(block_sizes(layout))


class Moments:
    """Sums over tokens, for one cost. `state` is all there is to it."""

    def __init__(self, layout: BlockLayout, cost: Cost) -> None:
        self._layout = layout
        self._span = transform_layers(cost, layout)
        values = 2 * layout.kv_heads * layout.head_dim * self._span
        groups = layout.layers // self._span
        shape: tuple[int, ...] = (groups, values, values) if cost.layers_max else (groups, values)
        if is_staged(cost, layout) and not has_full_moments(layout):
            block = block_sizes(layout)[0]
            shape = (groups, values // block, block, block)
        self.state: dict[str, NDArray[Any]] = {
            "texts": np.zeros(1),
            "tokens": np.zeros(1),
            "sum": np.zeros((groups, values)),
            "square": np.zeros(shape, dtype=np.float32),
            "sensitivity": np.zeros((layout.layers, 2, layout.kv_heads * layout.head_dim)),
        }

    def add(self, meta: BlockMeta, bits: BlockBits, rotary: Rotary | None) -> None:
        """Take a block. The first tokens of a prompt are left out. UnencodableBlock if a value is not finite."""
        state, layout = self.state, self._layout
        is_apart = first_apart(meta) == 1
        turns = KeyRotation(meta, rotary, is_back=True)
        for group in range(len(state["sum"])):
            start = group * self._span
            values = load_values(StoredLayers(bits[start : start + self._span], layout.dtype, start, turns))
            rows = values.reshape(2 * self._span, layout.tokens, -1).transpose(1, 0, 2).reshape(layout.tokens, -1)
            rows = rows[~is_apart]
            state["sum"][group] += rows.sum(axis=0, dtype=np.float64)
            square = state["square"][group]
            if square.ndim == 3:
                blocks = rows.reshape(len(rows), len(square), -1).transpose(1, 2, 0)
                square += blocks @ blocks.transpose(0, 2, 1)
            else:
                square += rows.T @ rows if square.ndim == 2 else (rows * rows).sum(axis=0)
        state["tokens"] += layout.tokens - int(is_apart.sum())

    def add_sensitivity(self, sensitivity: NDArray[np.float64]) -> None:
        """Take a text and its mean squared gradient of the loss by each value: (layers, 2, channels)."""
        self.state["sensitivity"] += sensitivity
        self.add_text()

    def add_text(self) -> None:
        """Take a text whose gradients were not measured. That of others is then too small, alike for all values."""
        self.state["texts"] += 1


def section_layers(layers: int, group_layers: int) -> int:
    """Return how many layers a section holds: the most, up to ten, that divide all and are whole groups."""
    fitting = [n for n in range(1, min(layers, SECTION_LAYERS_MAX) + 1) if layers % n == 0 and n % group_layers == 0]
    return max(fitting, default=group_layers)


class _Spread(NamedTuple):
    """Mean and variance by (groups, values), weight by (layers, 2, channels), which `power` is then to scale.

    octaves: by how much each channel is to be louder, (layers, 2, channels); zeros where none is far out of line.
    """

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    weight: NDArray[np.float64]
    octaves: NDArray[np.float64]

    @property
    def power(self) -> float:
        """Return the mean square of weighted values."""
        return float((self.weight**2 * self.variance.reshape(self.weight.shape)).mean())

    def weights(self, power: float | None) -> NDArray[np.float64]:
        """Return the weights over the root of a power, by default their own."""
        found: NDArray[np.float64] = self.weight / np.sqrt(self.power if power is None else power)
        return found


def _spread(layout: BlockLayout, moments: Mapping[str, NDArray[Any]]) -> _Spread:
    tokens, texts = float(moments["tokens"][0]), float(moments["texts"][0])
    if not tokens or not texts:
        raise ValueError("calibration needs at least one full block and one text's sensitivity, got none")
    mean, squares = moments["sum"] / tokens, moments["square"]
    is_full = squares.ndim > 2
    diagonal = np.diagonal(squares, axis1=-2, axis2=-1).reshape(mean.shape) if is_full else squares
    variance = np.maximum(diagonal.astype(np.float64) / tokens - mean**2, 1e-20)
    shape = (layout.layers, 2, layout.kv_heads * layout.head_dim)
    by_channel, sensitivity = variance.reshape(shape), moments["sensitivity"] / texts
    line = _line(by_channel, sensitivity)
    is_out = np.abs(line) >= OUT_OF_LINE_OCTAVES
    octaves = np.rint(line) * is_out.any()
    # Where no transform mixes channels, only those far out of line are brought into it.
    wanted = np.exp2(line if is_full else octaves * is_out)
    weight = _weights(by_channel, sensitivity, wanted, not is_full)
    if "finer" in moments:
        weight *= np.repeat(moments["finer"], layout.head_dim, axis=-1)
    return _Spread(mean, variance, weight, octaves)


def weighted_power(layout: BlockLayout, moments: Mapping[str, NDArray[Any]]) -> float:
    """Return the mean square of weighted values before weights have a unit. ValueError without moments."""
    return _spread(layout, moments).power


def weighted_moments(
    layout: BlockLayout, moments: Mapping[str, NDArray[Any]], power: float | None = None
) -> Callable[[int], NDArray[np.float64]]:
    """Return what returns the second moments of a group's weighted values. power: as for `draft_profile`."""
    return _weighted_moments(_spread(layout, moments), moments, power)


def _weighted_moments(
    spread: _Spread, moments: Mapping[str, NDArray[Any]], power: float | None
) -> Callable[[int], NDArray[np.float64]]:
    squares, tokens = moments["square"], float(moments["tokens"][0])
    by_value = spread.weights(power).reshape(len(spread.mean), -1)

    def weighted(group: int) -> NDArray[np.float64]:
        square = _centred(squares[group].astype(np.float64) / tokens, spread.mean[group])
        found: NDArray[np.float64] = square * by_value[group][:, None] * by_value[group]
        return found

    return weighted


def stages_for(layout: BlockLayout, has_all: bool, weighted: Callable[[int], NDArray[np.float64]]) -> Stages:
    """Return the stages of the transforms of these layers, of which each has two. has_all: moments are of all pairs."""
    return choose_stages(layout, weighted) if has_all else Stages(block_sizes(layout)[0], 0)


def draft_profile(
    model: str,
    layout: BlockLayout,
    cost_name: str,
    rotary: Rotary | None,
    moments: Mapping[str, NDArray[Any]],
    power: float | None = None,
    stages: Stages | None = None,
) -> Profile:
    """Return a profile with means, weights and transform, whose tables are all alike. ValueError without moments.

    power, stages: `joint_power` and `joint_stages` for one group of a model of several, so that one step means the same
    for all.
    """
    cost = COSTS[cost_name]
    spread = _spread(layout, moments)
    mean, weight, weighted = spread.mean, spread.weights(power), _weighted_moments(spread, moments, power)
    span, channels, squares = transform_layers(cost, layout), layout.kv_heads * layout.head_dim, moments["square"]
    groups = range(len(mean))
    if stages is None and is_staged(cost, layout):
        stages = stages_for(layout, squares.ndim == 3, weighted)
    if squares.ndim == 2:
        arrays = _ordered(spread.variance, weight.reshape(len(mean), -1))
    elif stages is not None:
        arrays = staged(map(weighted, groups), stages, _units)
    else:
        arrays = _transform(map(weighted, groups), cost)
    arrays |= {
        "span": np.array([span, section_layers(layout.layers, span)], dtype=np.uint32),
        "rotary": np.frombuffer(rotary.to_bytes() if rotary else b"", dtype=np.uint8),
        "mean": mean.reshape(layout.layers, 2, channels).astype(np.float32),
        **_weight_arrays(weight, spread.octaves.astype(np.int16)),
        "pulls": np.zeros((TOPS, 4), dtype=np.int16),
        "tables": table_bytes(rounded_tables(np.zeros((TABLES, 32), dtype=np.uint64))),
        "curve": np.array([[0, 1, 1e-3], [THIRD, 0.5, 1e-2]], dtype=np.float32),
    }
    calibrated_on = (int(moments["texts"][0]), int(moments["tokens"][0]))
    return Profile.make(f"tide-{cost_name}", model, layout, calibrated_on, arrays)


def _line(variance: NDArray[np.float64], sensitivity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how many octaves each channel is to be louder to be like the middle one of its stream.

    A channel that is made twice as loud, and read half as loud, has four times the variance and a quarter of the
    sensitivity: their ratio knows how loud it is, whatever it means to the model.
    """
    floor = 1e-6 * float(sensitivity.mean()) + 1e-30
    octaves = np.log2(np.maximum(sensitivity, floor) / variance) / 4
    found: NDArray[np.float64] = np.clip(octaves - np.median(octaves, axis=-1, keepdims=True), -LINE_MAX, LINE_MAX)
    return found


def _weights(
    variance: NDArray[np.float64], sensitivity: NDArray[np.float64], line: NDArray[np.float64], is_by_channel: bool
) -> NDArray[np.float64]:
    """Return a weight for each value; divided by the root of their power, the mean component's scale is one.

    Channels of K or V of a layer differ by `line` alone, unless `is_by_channel`: a transform mixes them anyway.
    """
    spread, felt = variance * line**2, sensitivity / line**2
    floor = 1e-6 * float(felt.mean()) + 1e-30
    by_stream = np.maximum(felt.mean(axis=-1, keepdims=True), floor)
    weight: NDArray[np.float64] = (
        by_stream**SENSITIVITY_POWER * spread.mean(axis=-1, keepdims=True) ** (DEVIATION_POWER / 2) * line
    )
    if is_by_channel:
        weight *= np.maximum(felt / by_stream, 1e-3) ** CHANNEL_POWER
    return weight


def _weight_arrays(weight: NDArray[np.float64], octaves: NDArray[np.int16]) -> dict[str, NDArray[Any]]:
    if not octaves.any():
        return {"weight": weight.astype(np.float32)}
    return {"even_weight": (weight / np.exp2(octaves)).astype(np.float32), "octaves": octaves}


def _centred(square: NDArray[Any], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a group's covariance, with zeros between blocks where only each block's second moments are known."""
    if square.ndim == 2:
        whole: NDArray[np.float64] = square - mean[:, None] * mean
        return whole
    found, block = np.zeros((len(mean), len(mean))), square.shape[-1]
    for start, each in zip(range(0, len(mean), block), square, strict=True):
        here = slice(start, start + block)
        found[here, here] = each - mean[here, None] * mean[here]
    return found


def _transform(groups: Iterable[NDArray[np.float64]], cost: Cost) -> dict[str, NDArray[Any]]:
    """Return the principal components of each group's weighted values, rows with large scales at 16 bits."""
    found: dict[str, list[NDArray[Any]]] = {}
    for square in groups:
        powers, basis = np.linalg.eigh(square)
        kept = round(cost.share * len(square))
        scales = _units(np.sqrt(np.maximum(powers[::-1], 1e-12)))[:kept]
        rows = rounded_rows(basis.T[::-1][:kept], min(cost.fine, kept))
        for name, array in (rows | {"scale": scales}).items():
            found.setdefault(name, []).append(array)
    return {name: np.stack(parts) for name, parts in found.items()}


def _ordered(variance: NDArray[np.float64], by_value: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    scales = np.sqrt(variance) * by_value
    order = np.argsort(-scales, axis=1, kind="stable")
    return {"order": order.astype(np.uint16), "scale": _units(np.take_along_axis(scales, order, axis=1))}


def _units(scales: NDArray[np.float64]) -> NDArray[np.int16]:
    units: NDArray[np.int16] = np.rint(UNITS * np.log2(np.maximum(scales, 1e-6))).astype(np.int16)
    return units
