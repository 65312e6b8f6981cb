"""Fits a tide profile from a model's caches. Pure: the caller runs the model, and keeps `state` to go on later.

Two passes over the texts: moments make means, weights and the transform; then, with these, blocks are quantised and
counted, after which only the curves are missing. Memory is bounded by the groups' covariances, whatever the number of
texts.

A wide layer's transform is in two stages: each block of values has its own, then there is one for the strongest
components of all blocks. One matrix over 2 x 8 heads x 128 dims takes 2,048 products a value, blocks of 128 and 256
mixed components take 160. Engines whose blocks have the rows of all layers take one profile of them (`joined_draft`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.entropy import RansTables
from kvtide.codec.profile import Profile
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import grid
from kvtide.codec.tide.coding import apart_tokens, levels_of, list_section, project
from kvtide.codec.tide.model import TideModel, first_trellis, make_trellis
from kvtide.codec.tide.section import KeyRotation, Steps, StoredLayers, load_values
from kvtide.group import ALL_ROWS

_Matrix = NDArray[np.float64]
Arrays = Mapping[str, NDArray[Any]]
# Returns the second moments of a group's weighted values.
_Weighted = Callable[[int], _Matrix]


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

# A profile's bytes, and products a value, with which decoding has half of the speed that it has without a transform
# (docs/decisions/0034-answered-benches.md).
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

# Steps that counts are taken at, in units around the mean scale: they fill the tables of all classes.
_COUNT_UNITS = (-36, -24, -12, 0, 12, 24, 36)
_COUNT_REFINEMENTS = 3
# A block counts twice as much as one so many blocks before it, until it counts 2 to that power times the first.
_BLOCKS_TO_DOUBLE, _DOUBLINGS_MAX = 3, 6
_PULLS_SEEN_MIN = 100
_COUNT_MAX = 1 << 40


def transform_layers(cost: Cost, layout: BlockLayout) -> int:
    """Return how many layers a transform spans: the most that divide all, fit the budget and are not too wide; or 1."""
    values = 2 * layout.kv_heads * layout.head_dim
    fitting = (n for n in range(cost.layers_max, 1, -1) if layout.layers % n == 0 and n * values <= SPANNED_VALUES_MAX)
    return next(fitting, 1)


def is_staged(cost: Cost, layout: BlockLayout) -> bool:
    """Tell whether a layer has its transform in two stages."""
    is_wide = 2 * layout.kv_heads * layout.head_dim > DENSE_VALUES_MAX
    return cost.layers_max > 0 and transform_layers(cost, layout) == 1 and is_wide and bool(block_sizes(layout))


def block_sizes(layout: BlockLayout) -> list[int]:
    """Return the sizes that blocks may have, the largest first: even parts of a head, so long as there are any."""
    sizes = [n for n in range(2, min(layout.head_dim, BLOCK_VALUES_MAX) + 1, 2) if layout.head_dim % n == 0]
    return [n for n in reversed(sizes) if 2 * n >= sizes[-1]]


def has_full_moments(layout: BlockLayout) -> bool:
    """Tell whether second moments of all values of each layer are small enough to be taken."""
    values = 2 * layout.kv_heads * layout.head_dim
    return 4 * layout.layers * values**2 <= MOMENTS_BYTES_MAX


def section_layers(layers: int, group_layers: int) -> int:
    """Return how many layers a section holds: the most, up to ten, that divide all and are whole groups."""
    fitting = [n for n in range(1, min(layers, SECTION_LAYERS_MAX) + 1) if layers % n == 0 and n % group_layers == 0]
    return max(fitting, default=group_layers)


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
        """Take a block. Tokens that are kept apart are left out. UnencodableBlock if a value is not finite."""
        state, layout = self.state, self._layout
        is_coded, turns = apart_tokens(meta, bits) == 0, KeyRotation(meta, rotary, is_back=True)
        for group, start in enumerate(range(0, layout.layers, self._span)):
            values = load_values(StoredLayers(bits[start : start + self._span], layout.dtype, start, turns))
            rows = values.reshape(2 * self._span, layout.tokens, -1).transpose(1, 0, 2).reshape(layout.tokens, -1)
            rows = rows[is_coded]
            state["sum"][group] += rows.sum(axis=0, dtype=np.float64)
            square = state["square"][group]
            if square.ndim == 3:
                blocks = rows.reshape(len(rows), len(square), -1).transpose(1, 2, 0)
                square += blocks @ blocks.transpose(0, 2, 1)
            else:
                square += rows.T @ rows if square.ndim == 2 else (rows * rows).sum(axis=0)
        state["tokens"] += int(is_coded.sum())

    def add_text(self, sensitivity: NDArray[np.float64] | float) -> None:
        """Take a text and its mean squared gradient of the loss by each value: (layers, 2, channels).

        0 where it was not measured. That of others is then too small, alike for all values.
        """
        self.state["sensitivity"] += sensitivity
        self.state["texts"] += 1


class _Spread(NamedTuple):
    """Mean and variance by (groups, values), weight by (layers, 2, channels), over the root of the model's power.

    octaves: by how much each channel is to be louder, (layers, 2, channels); zeros where none is far out of line.
    squares: sums over tokens, as `Moments` has them.
    """

    mean: _Matrix
    variance: _Matrix
    weight: NDArray[np.float64]
    octaves: NDArray[np.float64]
    squares: NDArray[np.float32]
    tokens: float

    @property
    def power(self) -> float:
        """Return the mean square of weighted values."""
        return float((self.weight**2 * self.variance.reshape(self.weight.shape)).mean())

    def weighted(self, group: int) -> _Matrix:
        """Return the second moments of a group's weighted values."""
        by_value = self.weight.reshape(len(self.mean), -1)[group]
        square = _centred(self.squares[group].astype(np.float64) / self.tokens, self.mean[group])
        found: _Matrix = square * by_value[:, None] * by_value
        return found


def _spread(layout: BlockLayout, moments: Arrays) -> _Spread:
    """ValueError without moments."""
    tokens, texts = float(moments["tokens"][0]), float(moments["texts"][0])
    if not tokens or not texts:
        raise ValueError("calibration needs at least one full block and one text's sensitivity, got none")
    mean, squares = moments["sum"] / tokens, moments["square"]
    is_full = squares.ndim > 2
    diagonal = np.diagonal(squares, axis1=-2, axis2=-1).reshape(mean.shape) if is_full else squares
    variance = np.maximum(diagonal.astype(np.float64) / tokens - mean**2, 1e-20)
    by_channel = variance.reshape(layout.layers, 2, layout.kv_heads * layout.head_dim)
    sensitivity = moments["sensitivity"] / texts
    line = _line(by_channel, sensitivity)
    is_out = np.abs(line) >= OUT_OF_LINE_OCTAVES
    octaves = np.rint(line) * is_out.any()
    # Where no transform mixes channels, only those far out of line are brought into it.
    wanted = np.exp2(line if is_full else octaves * is_out)
    weight = _weights(by_channel, sensitivity, wanted, not is_full)
    if "finer" in moments:
        weight *= np.repeat(moments["finer"], layout.head_dim, axis=-1)
    return _Spread(mean, variance, weight, octaves, squares, tokens)


def _line(variance: NDArray[np.float64], sensitivity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how many octaves each channel is to be louder to be like the middle one of its stream.

    A channel that is made twice as loud, and read half as loud, has four times the variance and a quarter of the
    sensitivity: their ratio knows how loud it is, whatever it means to the model.
    """
    floor = 1e-6 * float(sensitivity.mean()) + 1e-30
    octaves = np.log2(np.maximum(sensitivity, floor) / variance) / 4
    return np.clip(octaves - np.median(octaves, axis=-1, keepdims=True), -LINE_MAX, LINE_MAX)


def _weights(
    variance: NDArray[np.float64], sensitivity: NDArray[np.float64], line: NDArray[np.float64], is_by_channel: bool
) -> NDArray[np.float64]:
    """Return a weight for each value. Channels of K or V of a layer differ by `line` alone, unless `is_by_channel`."""
    spread, felt = variance * line**2, sensitivity / line**2
    by_stream = np.maximum(felt.mean(axis=-1, keepdims=True), 1e-6 * float(felt.mean()) + 1e-30)
    deviation = spread.mean(axis=-1, keepdims=True) ** (DEVIATION_POWER / 2)
    weight: NDArray[np.float64] = by_stream**SENSITIVITY_POWER * deviation * line
    if is_by_channel:
        weight *= np.maximum(felt / by_stream, 1e-3) ** CHANNEL_POWER
    return weight


def _centred(square: NDArray[Any], mean: NDArray[np.float64]) -> _Matrix:
    """Return a group's covariance, with zeros between blocks where only each block's second moments are known."""
    if square.ndim == 2:
        return square - mean[:, None] * mean
    found, block = np.zeros((len(mean), len(mean))), square.shape[-1]
    for start, each in zip(range(0, len(mean), block), square, strict=True):
        here = slice(start, start + block)
        found[here, here] = each - mean[here, None] * mean[here]
    return found


class AllRows(NamedTuple):
    """Rows of one shape in all groups of a model: the layout of a block of all, and each group's layers in it."""

    layout: BlockLayout
    places: tuple[tuple[int, ...], ...]
    rotary: Rotary | None


def draft_profiles(
    model: str,
    cost_name: str,
    groups: Sequence[tuple[BlockLayout, Arrays]],
    rotaries: Sequence[Rotary | None],
    rows: AllRows | None = None,
) -> list[Profile]:
    """Return a profile of each group's moments with means, weights and transform, whose tables are all alike.

    A step means the same in all. With `rows` their transforms have the same stages, chosen by all layers, so that they
    can be joined. ValueError without moments.
    """
    cost, spreads = COSTS[cost_name], [_spread(*each) for each in groups]
    powers = [each.power for each in spreads]
    # Of a plain model it would be its own, but for rounding.
    power = np.average(powers, weights=[each.mean.size for each in spreads]) if len(powers) > 1 else powers[0]
    spreads = [each._replace(weight=each.weight / np.sqrt(power)) for each in spreads]
    stages = None
    if rows is not None and all(is_staged(cost, layout) for layout, _ in groups):
        homes = {place: (group, layer) for group, mine in enumerate(rows.places) for layer, place in enumerate(mine)}
        weighted = {place: partial(spreads[group].weighted, layer) for place, (group, layer) in homes.items()}
        has_all = all(each.squares.ndim == 3 for each in spreads)
        stages = choose_stages(rows.layout, has_all, lambda place: weighted[place]())
    drafts = []
    for (layout, moments), rotary, spread in zip(groups, rotaries, spreads, strict=True):
        arrays = _drafted(layout, cost, spread, stages)
        arrays["rotary"] = np.frombuffer(rotary.to_bytes() if rotary else b"", dtype=np.uint8)
        calibrated_on = (int(moments["texts"][0]), int(moments["tokens"][0]))
        drafts.append(Profile.make(f"tide-{cost_name}", model, layout, calibrated_on, arrays))
    return drafts


def _drafted(layout: BlockLayout, cost: Cost, spread: _Spread, stages: Stages | None) -> dict[str, NDArray[Any]]:
    mean, weight, span, groups = spread.mean, spread.weight, transform_layers(cost, layout), range(len(spread.mean))
    if stages is None and is_staged(cost, layout):
        stages = choose_stages(layout, spread.squares.ndim == 3, spread.weighted)
    if spread.squares.ndim == 2:
        scales = np.sqrt(spread.variance) * weight.reshape(len(mean), -1)
        order = np.argsort(-scales, axis=1, kind="stable")
        arrays = {"order": order.astype(np.uint16), "scale": _units(np.take_along_axis(scales, order, axis=1))}
    elif stages is not None:
        arrays = _stacked(_staged(spread.weighted(group), stages) for group in groups)
    else:
        arrays = _stacked(_transform(spread.weighted(group), cost) for group in groups)
    octaves = spread.octaves.astype(np.int16)
    if octaves.any():
        arrays |= {"even_weight": (weight / np.exp2(octaves)).astype(np.float32), "octaves": octaves}
    else:
        arrays |= {"weight": weight.astype(np.float32)}
    return arrays | {
        "span": np.array([span, section_layers(layout.layers, span)], dtype=np.uint32),
        "mean": mean.reshape(weight.shape).astype(np.float32),
        "pulls": np.zeros((grid.TOPS, 4), dtype=np.int16),
        "tables": table_bytes(rounded_tables(np.zeros((grid.TABLES, 32), dtype=np.uint64))),
        "curve": np.array([[0, 1, 1e-3], [grid.THIRD, 0.5, 1e-2]], dtype=np.float32),
    }


def _stacked(groups: Iterable[Arrays]) -> dict[str, NDArray[Any]]:
    found = list(groups)
    return {name: np.stack([each[name] for each in found]) for name in found[0]}


def _transform(square: _Matrix, cost: Cost) -> dict[str, NDArray[Any]]:
    """Return the principal components of a group's weighted values, rows with large scales at 16 bits."""
    powers, basis = np.linalg.eigh(square)
    kept = round(cost.share * len(square))
    scales = _units(np.sqrt(np.maximum(powers[::-1], 1e-12)))[:kept]
    return {**_rounded_rows(basis.T[::-1][:kept], min(cost.fine, kept)), "scale": scales}


def _units(scales: NDArray[np.float64]) -> NDArray[np.int16]:
    units: NDArray[np.int16] = np.rint(grid.UNITS * np.log2(np.maximum(scales, 1e-6))).astype(np.int16)
    return units


def _rounded_rows(rows: _Matrix, fine: int | None = None) -> dict[str, NDArray[Any]]:
    """Return rows as whole numbers of a unit each, the first `fine` at 16 bits, the rest at 8; see `whole_rows`."""
    fine = round(FINE_SHARE * len(rows)) if fine is None else fine
    peaks = np.abs(rows).max(axis=1, initial=1e-9)
    unit = (peaks / np.where(np.arange(len(rows)) < fine, 32767, 127)).astype(np.float32)
    whole = np.rint(rows / unit[:, None])
    coarse = np.clip(whole[fine:], -127, 127).astype(np.int8)
    # One byte each; profiles have no signed bytes.
    return {"fine": whole[:fine].astype(np.int16), "coarse": coarse.view(np.uint8), "unit": unit}


class Stages(NamedTuple):
    """Values of a block, and components that are mixed."""

    block: int
    mixed: int


def choose_stages(layout: BlockLayout, has_all: bool, weighted: _Weighted) -> Stages:
    """Return the stages with the fewest products among those with nearly the fewest bits, by a few layers' moments.

    has_all: moments are of all pairs of values; else nothing is mixed.
    """
    if not has_all:
        return Stages(block_sizes(layout)[0], 0)
    values = 2 * layout.kv_heads * layout.head_dim
    layers = sorted({0, layout.layers // 2, layout.layers - 1})
    found: list[tuple[float, float, Stages]] = []
    for block in block_sizes(layout):
        most = _mixed_max(layout.layers, values, block)
        counts = sorted({round(most * share / _MIXED_STEP) * _MIXED_STEP for share in (0, 0.25, 0.5, 0.75, 1)})
        bits = np.zeros(len(counts))
        for layer in layers:
            square = weighted(layer)
            bases, scales = _first_stage(square, block)
            between = _between_components(square, bases)
            bits += [_bits(between, scales, count) for count in counts]
        found += [(block + n**2 / values, float(each), Stages(block, n)) for n, each in zip(counts, bits, strict=True)]
    least = min(bits for _, bits, _ in found)
    return min(each for each in found if each[1] <= least * (1 + _WORTH_BITS))[2]


def _mixed_max(layers: int, values: int, block: int) -> int:
    by_products = (max(PRODUCTS_MAX - block, 0) * values) ** 0.5
    left = PROFILE_BYTES_MAX / layers - values * (block * (1 + FINE_SHARE) + 8)
    by_bytes = (max(left, 0) / (1 + FINE_SHARE)) ** 0.5
    return int(min(by_products, by_bytes, values / 2, MIXED_MAX) / _MIXED_STEP) * _MIXED_STEP


def _first_stage(square: _Matrix, block: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each block's principal components, (blocks, components, values), and the scales of all of them."""
    starts = range(0, len(square), block)
    powers, bases = np.linalg.eigh(np.stack([square[start : start + block, start : start + block] for start in starts]))
    scales = np.sqrt(np.maximum(powers[:, ::-1], 1e-12))
    return np.ascontiguousarray(bases.transpose(0, 2, 1)[:, ::-1]), scales.reshape(-1)


def _strongest(scales: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    return np.argsort(-scales, kind="stable")[:count]


def _between_components(square: _Matrix, bases: NDArray[np.float64]) -> _Matrix:
    """Return the second moments of all blocks' components."""
    count, block, _ = bases.shape
    rows = bases @ square.reshape(count, block, -1)
    found = bases @ rows.reshape(len(square), count, block).transpose(1, 2, 0)
    return found.reshape(square.shape)


def _bits(between: _Matrix, scales: NDArray[np.float64], mixed: int) -> float:
    strongest = _strongest(scales, mixed)
    powers = np.linalg.eigvalsh(between[np.ix_(strongest, strongest)]) if mixed else np.empty(0)
    rest, least = np.delete(scales, strongest) ** 2, 2.0 ** (2 * _STEP_UNITS / grid.UNITS) / 12
    return float(0.5 * np.log2(np.maximum(np.concatenate([powers, rest]), least) / least).sum())


def _staged(square: _Matrix, stages: Stages) -> dict[str, NDArray[Any]]:
    """Return a profile's arrays of a group's transform in two stages."""
    bases, scales = _first_stage(square, stages.block)
    mixed = _strongest(scales, stages.mixed)
    powers, mix = np.linalg.eigh(_between_components(square, bases)[np.ix_(mixed, mixed)])
    places = np.concatenate([np.arange(len(mix)) + len(square), np.delete(np.arange(len(square)), mixed)])
    scale = _units(np.append(np.sqrt(np.maximum(powers[::-1], 1e-12)), np.delete(scales, mixed)))
    order = np.argsort(-scale, kind="stable")
    parts = {"scale": scale[order], "place": places[order].astype(np.uint16), "mixed": mixed.astype(np.uint16)}
    parts |= {f"mix_{name}": array for name, array in _rounded_rows(mix.T[::-1]).items()}
    blocks = _stacked(_rounded_rows(basis) for basis in bases)
    return parts | {f"block_{name}": array for name, array in blocks.items()}


# Arrays of a profile by layer; the rest it has for all, but for `rotary` and `span`, and the name of a group.
_BY_LAYER = ("mean", "weight", "even_weight", "octaves", "scale", "order", "fine", "coarse", "unit", "place", "mixed")
_PREFIXES = ("", "mix_", "block_")


def joined_draft(rows: AllRows, drafts: Sequence[Profile]) -> Profile | None:
    """Return one draft of all layers, of the group ALL_ROWS; None if transforms span layers. drafts: of these rows."""
    if any(int(each.arrays["span"][0]) != 1 for each in drafts):
        return None
    parts = [dict(each.arrays) for each in drafts]
    if any("octaves" in each for each in parts):
        for each in (part for part in parts if "octaves" not in part):
            weight = each["even_weight"] = each.pop("weight")
            each["octaves"] = np.zeros(weight.shape, dtype=np.int16)
    order = np.argsort([place for places in rows.places for place in places])
    names = {f"{prefix}{name}" for prefix in _PREFIXES for name in _BY_LAYER}
    arrays = {name: np.concatenate([each[name] for each in parts])[order] for name in parts[0] if name in names}
    arrays |= {
        "span": np.array([1, section_layers(rows.layout.layers, 1)], dtype=np.uint32),
        "rotary": np.frombuffer(rows.rotary.to_bytes() if rows.rotary else b"", dtype=np.uint8),
        "group": np.frombuffer(ALL_ROWS.encode(), dtype=np.uint8),
    }
    first = drafts[0]
    return Profile.make(first.kind, first.model, rows.layout, (first.texts, first.tokens), parts[0] | arrays)


class TideCounts:
    """Counts what a draft's tables would code, and how far magnitudes lie from the middle. `state` is all there is.

    Levels along a trellis follow from the tables, which follow from levels: blocks are taken with what those before
    them say, and the first ones count little.
    """

    def __init__(self, draft: Profile) -> None:
        self._model = TideModel(draft)
        self._path = _native.tide_paths()[0]
        self.state: dict[str, NDArray[Any]] = {
            "symbols": np.zeros((grid.TABLES, 32), dtype=np.uint64),
            "pulled": np.zeros((grid.TOPS, 4)),
            "magnitudes": np.zeros((grid.TOPS, 4)),
        }
        if COSTS[draft.kind.removeprefix("tide-")].has_trellis:
            self.state |= {"trellis_blocks": np.zeros(1), "trellis_symbols": np.zeros((grid.TRELLIS_TABLES, 32))}

    def add(self, meta: BlockMeta, bits: BlockBits, number: int) -> None:
        """Take a block; `number` is that of the block, so that blocks take turns with steps."""
        model, has_trellis = self._model, "trellis_blocks" in self.state
        if has_trellis:
            is_first = not self.state["trellis_blocks"][0]
            model.trellis = first_trellis() if is_first else make_trellis(trellis_tables(self.state["trellis_symbols"]))
        apart = apart_tokens(meta, bits)
        for start, stop in model.ranges:
            stored = StoredLayers(bits[start:stop], meta.layout.dtype, start, model.turns(meta, is_back=True))
            for refinements in (0, _COUNT_REFINEMENTS):
                units = _COUNT_UNITS[number % len(_COUNT_UNITS)] - grid.THIRD * (refinements // 2)
                self._count(Steps(units, refinements), stored, apart)
                if has_trellis:
                    self._count(Steps(units, refinements, is_trellis=True), stored, apart)
        if has_trellis:
            self.state["trellis_blocks"] += 1

    def _count(self, steps: Steps, stored: StoredLayers, apart: NDArray[np.uint8]) -> None:
        levels = levels_of(self._model, project(self._model, steps, stored, apart, self._path), self._path)
        refinements = range(steps.refinements + 1)
        counts = [list_section(levels, steps, each, self._path)[0].symbol_counts() for each in refinements]
        if steps.is_trellis:
            doublings = min(float(self.state["trellis_blocks"][0]) / _BLOCKS_TO_DOUBLE, _DOUBLINGS_MAX)
            self.state["trellis_symbols"] += 2.0**doublings * np.sum(counts, axis=0)
            return
        self.state["symbols"] += np.sum(counts, axis=0)
        tables = grid.top_tables(levels.rows.scales, levels.loudness.gains, steps.base_units).astype(np.int64)
        rounded, exact = levels.values[0], levels.values[-1] / 3.0**steps.refinements
        magnitude = np.minimum(np.abs(rounded), 3)
        pulled = (np.abs(rounded) - np.sign(rounded) * exact) * (magnitude > 0)
        by_token = np.repeat(tables, np.diff(grid.part_bounds(rounded.shape[1])), axis=1)
        place = (by_token * 4 + magnitude).reshape(-1)
        self.state["pulled"] += np.bincount(place, pulled.reshape(-1), grid.TOPS * 4).reshape(grid.TOPS, 4)
        self.state["magnitudes"] += np.bincount(place, minlength=grid.TOPS * 4).reshape(grid.TOPS, 4)


def finished_profile(
    draft: Profile,
    layout: BlockLayout,
    counts: Mapping[str, NDArray[Any]],
    curve: NDArray[np.float32],
    trellis_curve: NDArray[np.float32],
) -> Profile:
    """Return the draft with tables of what was counted, and curves: rows of step units, bits, KL, rising."""
    seen = np.maximum(counts["magnitudes"], 1)
    pulls = np.clip(np.rint(16 * counts["pulled"] / seen), -8, 8) * (counts["magnitudes"] >= _PULLS_SEEN_MIN)
    arrays = dict(draft.arrays) | {
        "tables": table_bytes(rounded_tables(counts["symbols"])),
        "pulls": pulls.astype(np.int16),
        "curve": curve.astype(np.float32),
    }
    if "trellis_symbols" in counts:
        arrays["trellis_tables"] = table_bytes(trellis_tables(counts["trellis_symbols"]))
        arrays["trellis_curve"] = trellis_curve.astype(np.float32)
    return Profile.make(draft.kind, draft.model, layout, (draft.texts, draft.tokens), arrays)


def rounded_tables(symbols: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the frequencies of rounded levels' tables, or those of thirds; whatever a value is, it has a code."""
    counts = symbols.astype(np.float64)
    return _frequencies(_leaning(counts[: grid.TOPS]), _leaning(counts[grid.TOPS :].reshape(-1, grid.CONTEXTS, 32)))


def trellis_tables(symbols: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return the frequencies of all tables of levels along a trellis."""
    thirds, tops, digits = np.split(symbols, [grid.STATE_TOPS, grid.STATE_DIGITS])
    by_quantiser = [_leaning(each) for each in np.split(tops, 2)]
    by_context = [_leaning(each.reshape(-1, grid.STATE_CONTEXTS, 32)) for each in np.split(digits, 2)]
    states = _frequencies(np.concatenate(by_quantiser), np.concatenate(by_context))
    return np.concatenate([rounded_tables(thirds), states])


def table_bytes(frequencies: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return tables as profiles have them."""
    return np.frombuffer(RansTables(frequencies).to_bytes(), dtype=np.uint8)


def _frequencies(tops: NDArray[np.float64], digits: NDArray[np.float64]) -> NDArray[np.uint16]:
    digits = digits + np.where(np.arange(32) < 3, 1.0, 0.0)
    whole = np.rint(64 * np.concatenate([(tops + 0.02).reshape(-1, 32), digits.reshape(-1, 32)]))
    return RansTables.build(np.minimum(whole, float(_COUNT_MAX)).astype(np.uint64)).rows


def _leaning(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts with a few of the classes beside each, more where a class saw little."""
    total = counts.sum(axis=-1, keepdims=True) + 1
    shares = counts / total
    beside = (np.roll(shares, 1, axis=0) + np.roll(shares, -1, axis=0)) / 2
    leaning: NDArray[np.float64] = counts + beside * np.minimum(50.0, 2000.0 / total)
    return leaning
