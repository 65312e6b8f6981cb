"""A tide profile checked and made ready for coding: groups of layers, their rows at a step, tables, trellis, curve.

Immutable, but matrices and rows are made when they are first used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockMeta
from kvtide.codec.entropy import SYMBOLS, RansTables
from kvtide.codec.profile import Profile
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import grid
from kvtide.codec.tide.law import read_law_table
from kvtide.codec.tide.section import STEP_UNITS_MAX, KeyRotation, Octaves, Steps
from kvtide.errors import CorruptPayload

_Made = TypeVar("_Made")
_Arrays = Mapping[str, NDArray[Any]]

# Entries of matrices and coefficients that meet them are whole numbers in these units.
ONE = 1 << 13
SIXTEENTHS = 16
PANEL_COLUMNS = 16
# A few qualities, each with the prefixes of its refinements, of a few ranges of layers.
REMEMBERED_MAX = 256
# Blocks of contexts begin at the same few places again and again; a block's angles take 64 KiB and more.
TURNS_MAX = 64

_NO_ORDER = np.empty(0, dtype=np.uint16)
_NO_PANELS = np.empty(0, dtype=np.int16)

# The first half of a transform in two stages as kernels take it: panels of all blocks, values of a block, places that
# are mixed, the place of each coefficient.
Stage = tuple[NDArray[np.int16], int, NDArray[np.uint16], NDArray[np.uint16]]
NO_STAGE: Stage = (_NO_PANELS, 0, _NO_ORDER, _NO_ORDER)
# A channel may be so much louder or softer than others of its stream; Qwen's biases are by 50 to 500 times.
OCTAVES_MAX = 12
# Scales of float32 values.
SCALE_UNITS_MAX = 128 * grid.UNITS
QUALITY_MIN, QUALITY_MAX = 1e-5, 1.0
# Of what rounded levels lose at a step: a path's that are cut to thirds (.63 to .85 of twelve contexts' KL).
_CUT_SHARE = 0.7


def units_of_quality(curve: NDArray[np.float32], quality: float) -> int:
    """Return the step in units at which KL is `quality`; beyond the ends by the slope. CorruptPayload for no curve."""
    units, kls = _points(curve)
    # The curve is float32: a quality that it names must not fall to the unit below.
    found = _between(kls, units, math.log(quality)) + 1e-3
    return math.floor(min(max(found, -STEP_UNITS_MAX), STEP_UNITS_MAX))


def quality_of_units(curve: NDArray[np.float32], units: int) -> float:
    """Return the KL at a step, beyond the ends by the slope there. CorruptPayload for a curve that is none."""
    steps, kls = _points(curve)
    return math.exp(min(_between(steps, kls, units), 0.0))


def _points(curve: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return steps and logarithms of KL. curve: rows of step in units, bits an element, KL."""
    is_curve = curve.ndim == 2 and curve.shape[1] == 3 and len(curve) > 1 and np.isfinite(curve).all()
    if not is_curve or not (curve[:, 2] > 0).all():
        raise CorruptPayload("the profile's curve must have two or more points of step, bits and a KL above zero")
    units, kls = curve[:, 0].astype(np.float64), np.log(curve[:, 2].astype(np.float64))
    if (np.diff(units) <= 0).any() or (np.diff(kls) <= 0).any():
        raise CorruptPayload("the profile's curve must rise")
    return units, kls


def _between(known: NDArray[np.float64], wanted: NDArray[np.float64], at: float) -> float:
    i = int(np.clip(np.searchsorted(known, at) - 1, 0, len(known) - 2))
    share = (at - known[i]) / (known[i + 1] - known[i])
    return float(wanted[i] + share * (wanted[i + 1] - wanted[i]))


# Of held-out blocks' errors over those that follow from a profile's scales: above this it does not fit its model.
EXCESS_MAX = 2.0
# A block's own loss is so many times the curve's at most, as a logarithm: what lies beyond was not seen.
_OWN_LOG_MAX = 2.0


class OwnLoss(NamedTuple):
    """A block's own loss above the curve's, told by how loud its loudest tokens are, which its base says.

    One that is quieter than usual loses less, but not so surely that its promise could be another.

    by_step: rows of step in units, the mean of texts' gains there and their standard deviation. deviation: nats of the
    logarithm of KL for one such deviation; 0 where nothing was measured.
    """

    by_step: NDArray[np.float64]
    deviation: float

    def factor(self, units: int, gain: float) -> float:
        """Return a block's loss over the curve's at a step; gain: of the loudest part, the mean of ranges."""
        if self.deviation == 0:
            return 1.0
        usual, spread = (float(np.interp(units, self.by_step[:, 0], self.by_step[:, i])) for i in (1, 2))
        return math.exp(min(max(self.deviation * (gain - usual) / spread, 0.0), _OWN_LOG_MAX))


class Group:
    """The components of layers [layer_start, layer_stop): their scales, falling, and what they are made of."""

    def __init__(self, layers: tuple[int, int], scales: grid.Units, values: int, arrays: _Arrays) -> None:
        self.layer_start, self.layer_stop = layers
        self.layers = slice(*layers)
        self.scales = scales
        self.shape = (len(scales), values)
        self._arrays = arrays
        # The transform is in two stages.
        self.is_staged = "place" in arrays
        # The value that each component is; empty if components are sums of values.
        self.order: NDArray[np.uint16] = arrays.get("order", _NO_ORDER)

    @cached_property
    def matrix(self) -> NDArray[np.int16]:
        """The matrix from components to values, or to the strongest of all blocks, in units of 1 / ONE."""
        return whole_rows(self._arrays, "mix_" if self.is_staged else "")

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return the rows and columns of the matrix."""
        return self.matrix.shape if self.is_staged else self.shape

    @cached_property
    def to_values(self) -> NDArray[np.int16]:
        """Return the matrix in panels; empty if there is none."""
        return _NO_PANELS if self.order.size else _packed(self.matrix)

    @cached_property
    def to_components(self) -> NDArray[np.int16]:
        """Return its transpose in panels."""
        return _NO_PANELS if self.order.size else _packed(self.matrix.T)

    def stage(self, count: int, is_back: bool) -> Stage:
        """Return the first half of a transform in two stages, of which so many components are coded."""
        if not self.is_staged:
            return NO_STAGE
        panels = self._blocks_to_values if is_back else self._blocks_to_components
        return panels, self._blocks.shape[-1], self._arrays["mixed"], self._arrays["place"][:count]

    @cached_property
    def _blocks(self) -> NDArray[np.int16]:
        return whole_rows(self._arrays, "block_")

    @cached_property
    def _blocks_to_values(self) -> NDArray[np.int16]:
        return np.concatenate([_packed(matrix) for matrix in self._blocks])

    @cached_property
    def _blocks_to_components(self) -> NDArray[np.int16]:
        return np.concatenate([_packed(matrix.T) for matrix in self._blocks])


def _packed(matrix: NDArray[np.int16]) -> NDArray[np.int16]:
    rows, columns = matrix.shape
    panels = np.empty(-(-columns // PANEL_COLUMNS) * (-(-rows // 2)) * 2 * PANEL_COLUMNS, dtype=np.int16)
    _native.tide_pack(np.ascontiguousarray(matrix), panels)
    return panels


def whole_rows(arrays: _Arrays, prefix: str) -> NDArray[np.int16]:
    """Return the rows that `fit` rounded, or those of many blocks, in units of 1 / ONE."""
    fine, coarse, unit = (arrays[f"{prefix}{name}"] for name in ("fine", "coarse", "unit"))
    rows = np.concatenate([fine.astype(np.float64), coarse.view(np.int8).astype(np.float64)], axis=-2)
    return np.clip(np.rint(rows * unit.astype(np.float64)[..., None] * ONE), -32767, 32767).astype(np.int16)


class Place(NamedTuple):
    """The rows [start, stop) of one group."""

    group: Group
    start: int
    stop: int

    def by_column(self, each: NDArray[Any], fill: int = 0) -> NDArray[Any]:
        """Spread per-row values over projection columns: the rows, or else the group's values; others get `fill`."""
        if not self.group.order.size:
            return each
        found = np.full(self.group.shape[1], fill, dtype=each.dtype)
        found[self.group.order[: len(each)]] = each
        return found


class RestoredRows(NamedTuple):
    """Rows of some layers that go back to values at once. matrix: panels, their shape, order, as kernels take them."""

    layers: slice
    rows: slice
    matrix: tuple[NDArray[np.int16], tuple[int, int], NDArray[np.uint16], Stage]


@dataclass(frozen=True)
class RangeRows:
    """The place of each group's components, and the scale of each row."""

    places: list[Place]
    scales: grid.Units
    # By base step and refinement: blocks of one store ask for the same again and again.
    _planes: dict[tuple[int, int], list[grid.Plane]] = field(default_factory=dict)

    def planes(self, base_units: int, refinement: int) -> list[grid.Plane]:
        """Return what a section holds of these rows, coarsest first."""
        key = (base_units, refinement)
        if key not in self._planes:
            self._planes[key] = grid.planes(self.scales, base_units, refinement)
        return self._planes[key]

    @cached_property
    def restored(self) -> list[RestoredRows]:
        """Return what goes back to values: group by group, or all at once where components are values."""
        first, count = self.places[0].group, len(self.places)
        values = first.shape[1]
        if first.order.size and count * values <= np.iinfo(np.uint16).max + 1:
            orders = [group.order[: stop - start] + i * values for i, (group, start, stop) in enumerate(self.places)]
            layers, rows = slice(first.layer_start, self.places[-1].group.layer_stop), self.places[-1].stop
            shape, order = (rows, count * values), np.concatenate(orders).astype(np.uint16)
            return [RestoredRows(layers, slice(rows), (first.to_values, shape, order, NO_STAGE))]
        found = []
        for group, start, stop in self.places:
            matrix = (group.to_values, group.matrix_shape, group.order, group.stage(stop - start, is_back=True))
            found.append(RestoredRows(group.layers, slice(start, stop), matrix))
        return found


def place_groups(model: TideModel, layer_start: int, units: int) -> RangeRows:
    """Return the rows of all components of a section's layers that are coded at a step."""

    def make() -> RangeRows:
        places, start, layers = [], 0, range(layer_start, layer_start + model.section_layers)
        for group in (each for each in model.groups if each.layer_start in layers):
            stop = start + int(np.count_nonzero(group.scales - units >= grid.ENTER_UNITS))
            places.append(Place(group, start, stop))
            start = stop
        return RangeRows(places, np.concatenate([group.scales[: stop - start] for group, start, stop in places]))

    return model.remembered(("rows", layer_start, units), make)


class TideModel:
    """A profile of kind `tide-…` in the form that coding needs. Threads may share it: a race builds a thing twice."""

    def __init__(self, profile: Profile) -> None:
        """CorruptPayload if arrays are missing or do not fit each other."""
        self.profile = profile
        self._made: dict[str, dict[tuple[str | int, ...], object]] = {}
        try:
            self._read(profile.arrays)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise CorruptPayload(f"an array of the profile is missing or none that tide can use: {error!r}") from error

    def _read(self, arrays: _Arrays) -> None:
        profile = self.profile
        layers, channels = profile.layers, profile.kv_heads * profile.head_dim
        group_layers, section_layers = (int(extent) for extent in _shaped(arrays, "span", (2,)))
        is_nested = 0 < group_layers <= section_layers and section_layers % group_layers == 0
        if not is_nested or layers % section_layers:
            raise CorruptPayload(f"spans of {group_layers} and {section_layers} of {layers} layers")
        self.section_layers = section_layers
        rotary = arrays["rotary"].tobytes()
        self.rotary = Rotary.parse(rotary) if rotary else None
        turn = self.rotary
        if turn is not None and (turn.dim_stop > profile.head_dim or 0 < len(turn.layer_kinds) < layers):
            wanted = f"{layers} layers with heads of {profile.head_dim} dims"
            raise CorruptPayload(f"the profile's rotation is not of {wanted}")
        self.mean: NDArray[np.float32] = _shaped(arrays, "mean", (layers, 2, channels)).astype(np.float32)
        # In a profile of channels out of line `weight` is missing: readers that know no octaves refuse it.
        self._octaves = _octaves(arrays, (layers, 2, channels))
        even = _shaped(arrays, "weight" if self._octaves is None else "even_weight", (layers, 2, channels))
        self.weight: NDArray[np.float32] = even.astype(np.float32)
        if self._octaves is not None:
            self.weight *= np.exp2(self._octaves).astype(np.float32)
        if not np.isfinite(self.mean).all() or not np.isfinite(self.weight).all() or float(self.weight.min()) <= 0:
            raise CorruptPayload("the profile's means and weights must be finite, weights above zero")
        # Layers that share sections, [start, stop). The profile has as many as it says.
        self.ranges = [(start, start + section_layers) for start in range(0, layers, section_layers)]
        self.pulls = np.ascontiguousarray(_shaped(arrays, "pulls", (grid.TOPS, 4)), dtype=np.int8)
        self.tables: RansTables = RansTables.parse(arrays["tables"].tobytes(), grid.TABLES)
        self.curve: NDArray[np.float32] = arrays["curve"].astype(np.float32)
        _points(self.curve)
        self.trellis: Trellis | None = None
        if "trellis_tables" in arrays:
            frequencies = RansTables.parse(arrays["trellis_tables"].tobytes(), grid.TRELLIS_TABLES).rows
            self.trellis = make_trellis(frequencies, arrays["trellis_curve"].astype(np.float32))
        self.own_loss = _own_loss(arrays)
        self._excess = _excess_by_step(arrays)
        self.positions = read_law_table(arrays.get("law"))
        self.groups = self._groups(arrays, group_layers, 2 * channels * group_layers)

    def _groups(self, arrays: _Arrays, group_layers: int, values: int) -> list[Group]:
        count, kept = self.profile.layers // group_layers, arrays["scale"].shape[-1]
        scales = _shaped(arrays, "scale", (count, kept)).astype(np.int64)
        is_rising = arrays["scale"].dtype != np.int16 or (np.diff(scales) > 0).any()
        if is_rising or not 0 < kept <= values or int(np.abs(scales).max()) > SCALE_UNITS_MAX:
            raise CorruptPayload("the profile's scales must fall, for no more components than there are values")
        if "order" in arrays:
            order = _shaped(arrays, "order", (count, kept))
            if not 0 <= order.min() <= order.max() < values:
                raise CorruptPayload(f"the profile's order names values beyond {values}")
            per_group = {"order": order.astype(np.uint16)}
        elif "place" in arrays:
            per_group = _staged(arrays, (count, values), self.profile.head_dim)
        else:
            per_group = _rows(arrays, "", (count, kept, values))
        found = []
        for i in range(count):
            layers = (i * group_layers, (i + 1) * group_layers)
            found.append(Group(layers, scales[i], values, {name: array[i] for name, array in per_group.items()}))
        return found

    @property
    def is_for_host(self) -> bool:
        """Tell whether devices leave it to the processor: transforms in two stages, or channels out of line."""
        return self.groups[0].is_staged or self._octaves is not None

    def octaves_of(self, layers: slice) -> Octaves | None:
        """Return the octaves by which these layers' channels are brought into line, None if none is out of it."""
        return None if self._octaves is None else self._octaves[layers]

    def mean_and_weight(self, group: Group) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean and the weight of each value of a group, layer by layer, K before V."""
        return self.mean[group.layers].reshape(-1), self.weight[group.layers].reshape(-1)

    def tables_of(self, steps: Steps) -> RansTables:
        """Return the tables of levels of a kind. CorruptPayload along a trellis of which the profile says nothing."""
        if not steps.is_trellis:
            return self.tables
        if self.trellis is None:
            raise CorruptPayload("tide: levels lie on a trellis, of which the profile says nothing")
        return self.trellis.tables

    def final_units(self, quality: float, is_trellis: bool) -> int:
        """Return the step at which levels have a quality; see `units_of_quality`."""
        return units_of_quality(self._curve(is_trellis), quality)

    def excess(self, units: int) -> float:
        """Return how many times the error that follows from the scales at a step was the largest one measured."""
        return float(np.interp(units, self._excess[:, 0], self._excess[:, 1]))

    def own_steps(self, steps: Steps, quality: float, gain: float) -> Steps:
        """Return the step at which a block's own loss is `quality`. gain: as it was found at these steps."""
        factor = self.own_loss.factor(steps.final_units, gain)
        wanted = max(self.own_quality(quality, 1 / factor, steps.is_trellis), QUALITY_MIN)
        return steps._replace(final_units=self.final_units(wanted, steps.is_trellis))

    def own_quality(self, quality: float, factor: float, is_trellis: bool = False) -> float:
        """Return the KL of a block that loses `factor` times as much as the curve, but for its finest step's loss."""
        floor = min(quality, float(self._curve(is_trellis)[0, 2]))
        return floor + (quality - floor) * factor

    def quality_at(self, steps: Steps, missing: int) -> float:
        """Return the KL that was measured at a step of which so many refinements are missing."""
        is_cut = steps.is_trellis and missing > 0
        curve = self._curve(steps.is_trellis and not is_cut)
        return (_CUT_SHARE if is_cut else 1.0) * quality_of_units(curve, steps.final_units + grid.THIRD * missing)

    def _curve(self, is_trellis: bool) -> NDArray[np.float32]:
        return self.trellis.curve if is_trellis and self.trellis is not None else self.curve

    def remembered(
        self, key: tuple[str, *tuple[int, ...]], make: Callable[[], _Made], most: int = REMEMBERED_MAX
    ) -> _Made:
        """Return what was made for a key, which begins with its kind; make it if need be. At most `most` are kept."""
        made = self._made.setdefault(key[0], {})
        found = made.get(key)
        if found is None:
            if len(made) >= most:
                made.clear()
            found = made[key] = make()
        return cast(_Made, found)

    def turns(self, meta: BlockMeta, is_back: bool) -> KeyRotation:
        """Return how keys of a block of this model turn; see `KeyRotation`."""
        key = ("turns", meta.start, meta.layout.tokens, int(is_back))
        return self.remembered(key, lambda: KeyRotation(meta, self.rotary, is_back), TURNS_MAX)


def _own_loss(arrays: _Arrays) -> OwnLoss:
    """Return what the arrays `own_gains` and `own_deviation` say, which a profile may lack."""
    if "own_gains" not in arrays:
        return OwnLoss(np.zeros((1, 3)), 0.0)
    by_step = _shaped(arrays, "own_gains", (len(arrays["own_gains"]), 3)).astype(np.float64)
    (deviation,) = _shaped(arrays, "own_deviation", (1,)).astype(np.float64).tolist()
    is_rising = len(by_step) > 0 and (np.diff(by_step[:, 0]) > 0).all()
    if not (np.isfinite(by_step).all() and is_rising and (by_step[:, 2] > 0).all() and 0 <= deviation < math.inf):
        raise CorruptPayload("gains by step must rise with it, deviations must be above zero")
    return OwnLoss(by_step, deviation)


def _excess_by_step(arrays: _Arrays) -> NDArray[np.float64]:
    """Return rows of step in units and excess there. A profile may lack them: then errors are those of its scales."""
    if "excess" not in arrays:
        return np.array([[0.0, 1.0]])
    found = _shaped(arrays, "excess", (len(arrays["excess"]), 2)).astype(np.float64)
    is_rising = len(found) > 0 and (np.diff(found[:, 0]) > 0).all()
    if not (is_rising and (found[:, 1] >= 1).all() and (found[:, 1] <= EXCESS_MAX).all()):
        raise CorruptPayload(f"errors over those of the scales are 1 to {EXCESS_MAX}, by rising steps")
    return found


def _octaves(arrays: _Arrays, shape: tuple[int, ...]) -> Octaves | None:
    if "octaves" not in arrays:
        return None
    found = _shaped(arrays, "octaves", shape)
    if found.dtype != np.int16:
        raise CorruptPayload(f"octaves are whole numbers of 16 bits, not {found.dtype}")
    if int(np.abs(found).max()) > OCTAVES_MAX:
        raise CorruptPayload(f"channels are out of line by {OCTAVES_MAX} octaves at most")
    return found


def _rows(arrays: _Arrays, prefix: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Return rounded rows of this shape, the last two rows and columns."""
    *outer, rows, columns = shape
    fine = arrays[f"{prefix}fine"].shape[-2]
    shapes = {"fine": (*outer, fine, columns), "coarse": (*outer, rows - fine, columns), "unit": (*outer, rows)}
    found = {f"{prefix}{name}": _shaped(arrays, f"{prefix}{name}", each) for name, each in shapes.items()}
    if found[f"{prefix}coarse"].dtype != np.uint8 or not np.isfinite(found[f"{prefix}unit"]).all():
        raise CorruptPayload("the profile's rows must be bytes times finite units")
    return found


def _staged(arrays: _Arrays, extent: tuple[int, int], head_dim: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of transforms in two stages, of (groups, values)."""
    count, values = extent
    block, mixed = arrays["block_unit"].shape[-1], arrays["mixed"].shape[-1]
    if block == 0 or block % 2 or head_dim % block or mixed > values:
        raise CorruptPayload(f"the profile mixes {mixed} components of blocks of {block} values, {head_dim} in a head")
    places = _shaped(arrays, "place", (count, values)).astype(np.uint16)
    chosen = _shaped(arrays, "mixed", (count, mixed)).astype(np.uint16)
    if not all(_is_once_each(*pair, values) for pair in zip(places.tolist(), chosen.tolist(), strict=True)):
        raise CorruptPayload("the profile's places must be those of all components, once each")
    mix, blocks = (count, mixed, mixed), (count, values // block, block, block)
    return _rows(arrays, "mix_", mix) | _rows(arrays, "block_", blocks) | {"place": places, "mixed": chosen}


def _is_once_each(places: Sequence[int], mixed: Sequence[int], values: int) -> bool:
    """Tell whether each component stands at one place, or is mixed."""
    inner = [place for place in places if place >= values]
    outer = [place for place in places if place < values]
    return inner == list(range(values, values + len(mixed))) and sorted([*outer, *mixed]) == list(range(values))


def _shaped(arrays: _Arrays, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    found = arrays[name]
    if found.shape != shape:
        raise CorruptPayload(f"the profile's array {name!r} has shape {found.shape}, expected {shape}")
    return found


# What a bit is worth, in half steps squared. Least error at equal bits takes .35, 2 ln 2 times the error at many bits;
# the model minds zeros in weak components more than their error says, and loses least at .1 to .2 (docs/codec.md).
_PRICE = 0.12 * (SIXTEENTHS // 2) ** 2
_PRICED_LEVELS, _RATE_MAX = 16, 1000
_TOTAL = 4096
_NO_CURVE = np.empty((0, 3), dtype=np.float32)
# Bits of a magnitude that has no symbol.
_ESCAPE_BITS = 16


class Trellis(NamedTuple):
    """The part of a profile for levels along a trellis: two quantisers, and a state that says whose turn is next.

    Quantiser 0 has the even multiples of half a step, quantiser 1 zero and the odd ones. A token's path goes through
    its components in coded order; the parity of a level moves the state. Trellis-coded quantisation with eight states
    (Fischer, Marcellin and Wang, 1991; JPEG 2000 part 2), chosen by error and rate together (docs/codec.md).

    tables: of thirds, then of levels by state. curve: as a profile's. rates: what the path's search takes of a class,
    quantiser and magnitude, (TOPS, 32).
    """

    tables: RansTables
    curve: NDArray[np.float32]
    rates: NDArray[np.int16]


def make_trellis(frequencies: NDArray[np.uint16], curve: NDArray[np.float32] = _NO_CURVE) -> Trellis:
    """Return a trellis of these tables, (TRELLIS_TABLES, 32)."""
    tops = frequencies[grid.STATE_TOPS : grid.STATE_DIGITS].astype(np.float64)
    levels = np.arange(1, _PRICED_LEVELS)
    either = np.maximum(tops[:, grid.TOP_CENTRE + levels] + tops[:, grid.TOP_CENTRE - levels], 0.5) / 2
    zero = np.maximum(tops[:, grid.TOP_CENTRE, None], 0.5)
    bits = np.log2(_TOTAL) - np.log2(np.concatenate([zero, either], axis=1))
    bits[:, -1] = np.minimum(bits[:, -1], _ESCAPE_BITS - np.log2(np.maximum(tops[:, -1], 0.5) / _TOTAL))
    whole = np.clip(np.rint(_PRICE * bits), 0, _RATE_MAX).astype(np.int16)
    rates = np.ascontiguousarray(np.concatenate([whole[: grid.TOPS_TWIN], whole[grid.TOPS_TWIN :]], axis=1))
    return Trellis(RansTables(frequencies), curve, rates)


def first_trellis() -> Trellis:
    """Return a trellis for Laplace-distributed values of each class' scale, to begin a fit with."""
    scales = np.exp2((grid.TOP_UNITS_MIN + grid.CLASS_UNITS * (np.arange(grid.TOPS) + 0.5)) / grid.UNITS)
    counts, levels = np.ones((grid.TRELLIS_TABLES, SYMBOLS)), np.arange(grid.TOP_CENTRE + 1)
    for quantiser in (0, 1):
        upper = np.maximum(levels + 0.5 * (1 - quantiser), 0.25 + 0.25 * (1 - quantiser))
        below = np.exp(-np.sqrt(2) * upper / scales[:, None])
        shares = np.concatenate([1 - below[:, :1], -np.diff(below, axis=1) / 2], axis=1)
        here = counts[grid.STATE_TOPS + quantiser * grid.TOPS_TWIN :][: grid.TOPS]
        here[:, grid.TOP_CENTRE - levels] = here[:, grid.TOP_CENTRE + levels] = 1 + 1e6 * shares
    return make_trellis(RansTables.build(counts.astype(np.uint64)).rows)
