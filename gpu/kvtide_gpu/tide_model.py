"""A tide profile on a device: tables, matrices as bytes in the order that kernels want, angles of positions.

And sums over a block that give its loudness and tell how well the profile fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide.coding import loudness_weights
from kvtide.codec.tide.grid import step_of
from kvtide.codec.tide.model import ONE, SIXTEENTHS, Group, Place, RangeRows, TideModel
from kvtide.codec.tide.promise import Seen
from kvtide_gpu.kernels import DeviceRans, Kernels, Staging, address
from kvtide_gpu.targets import PageTarget

TILE = 64
DEPTH = 32
# Of a tile's 32 pairs of columns each of a warp's four columns of lanes has eight neighbours: what a lane writes lies
# side by side.
_TILE_PAIRS = TILE // 2
_TILE_ORDER = np.arange(_TILE_PAIRS).reshape(4, 8).T.reshape(-1)
# Blocks of positions whose angles are kept on the device; a long prompt has a few hundred.
TURNS_MAX = 1024

# ColumnPair of kernels/tide_restore.cuh.
PAIR = np.dtype([("places", "<i8", 2), ("values", "<i4", 2), ("stream", "<i4"), ("angle", "<i4")])


# Loudness is summed in sixteen places, group by group, as on the processor.
LANES = 16
END_OF_GROUP = -2
TOKEN_BYTES = 16


class ColumnPairs(NamedTuple):
    """A group's values two by two, padded to whole tiles, (pairs, 2), and each pair's angle: -1 for none."""

    values: NDArray[np.int64]
    angles: NDArray[np.int64]

    @property
    def columns(self) -> NDArray[np.int64]:
        """Return the value of each column."""
        return self.values.reshape(-1)


def _head_pairs(head_dim: int, rotary: Rotary | None) -> ColumnPairs:
    """Return the dims of one head: those that turn together as pairs, the others in twos."""
    first, turning = (0, np.empty((0, 2), dtype=np.int64))
    if rotary is not None:
        first, count = rotary.dim_start, rotary.pair_count
        index = np.arange(count)
        turning = np.stack([2 * index, 2 * index + 1] if rotary.neighbours else [index, index + count], axis=1) + first
    rest = np.setdiff1d(np.arange(head_dim), turning.reshape(-1))
    rest = np.append(rest, [-1] * (len(rest) % 2)).reshape(-1, 2)
    angles = np.append(np.arange(len(turning)), [-1] * len(rest))
    return ColumnPairs(np.concatenate([turning, rest]).astype(np.int64), angles.astype(np.int64))


def column_pairs(group: Group, kv_heads: int, head_dim: int, rotary: Rotary | None) -> ColumnPairs:
    """Return the columns of a group's matrix in the order of the device."""
    values, angles = [], []
    streams = 2 * (group.layer_stop - group.layer_start)
    for stream in range(streams):
        pairs = _head_pairs(head_dim, rotary if stream % 2 == 0 else None)
        for head in range(kv_heads):
            start = (stream * kv_heads + head) * head_dim
            values.append(np.where(pairs.values < 0, -1, pairs.values + start))
            angles.append(pairs.angles)
    found, turned = np.concatenate(values), np.concatenate(angles)
    padding = -len(found) % _TILE_PAIRS
    found = np.concatenate([found, np.full((padding, 2), -1)])
    turned = np.concatenate([turned, np.full(padding, -1)])
    if not group.order.size:
        order = (np.arange(0, len(found), _TILE_PAIRS)[:, None] + _TILE_ORDER).reshape(-1)
        found, turned = found[order], turned[order]
    return ColumnPairs(found, turned)


def _by_column(values: NDArray[np.float32], columns: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.where(columns < 0, np.float32(0), values[columns]).astype(np.float32)


def _split_bytes(matrix: NDArray[np.int16]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return high and low bytes."""
    return (matrix >> 8).astype(np.int8).view(np.uint8), (matrix & 0xFF).astype(np.uint8)


class DeviceGroup:
    """A group of layers: its matrix, or its order, and what columns are."""

    def __init__(self, kernels: Kernels, model: TideModel, group: Group) -> None:
        profile = model.profile
        self._kernels = kernels
        self.group = group
        self.pairs = column_pairs(group, profile.kv_heads, profile.head_dim, model.rotary)
        columns = self.pairs.columns
        self.column_count = len(columns)
        mean, self._weight = model.mean_and_weight(group)
        staging = Staging(kernels)
        self._mean_at = staging.add(_by_column(mean, columns))
        components, values = group.shape
        self.stride = -(-components // DEPTH) * DEPTH
        row_of = np.full(values, -1, dtype=np.int32)
        if group.order.size:
            row_of[group.order] = np.arange(components)
            halves = (np.empty(0, np.uint8), np.empty(0, np.uint8))
        else:
            by_column = np.zeros((self.column_count, self.stride), dtype=np.int16)
            by_column[columns >= 0, :components] = group.matrix.T[columns[columns >= 0]]
            halves = _split_bytes(by_column)
        self._places = [staging.add(array) for array in (*halves, row_of)]
        self._sent = staging.send()
        self._targets: dict[tuple[int, int], torch.Tensor] = {}
        self._inverse_scales: dict[int, torch.Tensor] = {}
        self._components: tuple[torch.Tensor, list[int]] | None = None

    @property
    def mean(self) -> int:
        """Return the address of the columns' means."""
        return address(self._sent) + self._mean_at

    @property
    def matrix(self) -> tuple[int, int, int]:
        """Return the addresses of high bytes, low bytes, and of the rows that values are."""
        high, low, row_of = (address(self._sent) + place for place in self._places)
        return high, low, row_of

    def scale(self, units: int, thirds: int) -> torch.Tensor:
        """Return the columns' scales at a step, on the device, for who asks to keep: objects may be of any step."""
        scale = step_of(units, thirds) / (SIXTEENTHS * ONE) / self._weight.astype(np.float64)
        return self._kept(_by_column(scale.astype(np.float32), self.pairs.columns))

    @property
    def values_depth(self) -> int:
        """Return the values of a token, padded for products over them."""
        return -(-self.group.shape[1] // DEPTH) * DEPTH

    def components(self) -> tuple[int, int, int]:
        """Return the addresses of the matrix the other way, high and low bytes, and of the order."""
        if self._components is None:
            staging, order = Staging(self._kernels), self.group.order
            halves = (np.empty(0, np.uint8), np.empty(0, np.uint8))
            if not order.size:
                count, values = self.group.shape
                padded = np.zeros((-(-count // TILE) * TILE, self.values_depth), dtype=np.int16)
                padded[:count, :values] = self.group.matrix
                halves = _split_bytes(padded)
            places = [staging.add(array) for array in (*halves, order)]
            self._components = (staging.send(), places)
        sent, places = self._components
        high, low, order_at = (address(sent) + place for place in places)
        return high, low, order_at

    def inverse_scale(self, units: int) -> int:
        """Return the address of what columns are multiplied by to be in 16ths of a step."""
        if units not in self._inverse_scales:
            scale = (self._weight * (SIXTEENTHS / step_of(units, 0))).astype(np.float32)
            self._inverse_scales[units] = self._kept(_by_column(scale, self.pairs.columns))
        return address(self._inverse_scales[units])

    def pairs_at(self, target: PageTarget) -> int:
        """Return the address of the columns' places in such pages."""
        head_dim, kv_heads = target.layout.head_dim, target.layout.kv_heads
        key = (target.head_stride, head_dim)
        if key not in self._targets:
            rows = np.zeros(len(self.pairs.values), dtype=PAIR)
            rows["values"], rows["angle"] = self.pairs.values, self.pairs.angles
            rows["stream"] = self.pairs.values[:, 0] // (kv_heads * head_dim)
            head, dim = np.divmod(np.maximum(self.pairs.values, 0) % (kv_heads * head_dim), head_dim)
            rows["places"] = head * target.head_stride + dim
            self._targets[key] = self._kept(rows)
        return address(self._targets[key])

    def _kept(self, array: NDArray[np.void] | NDArray[np.float32]) -> torch.Tensor:
        staging = Staging(self._kernels)
        staging.add(array)
        return staging.send()


class DeviceModel:
    """A profile on a device; groups are sent when they are first used. One thread at a time."""

    def __init__(self, kernels: Kernels, model: TideModel) -> None:
        self.kernels = kernels
        self.model = model
        self.rans = DeviceRans(kernels, model.tables)
        staging = Staging(kernels)
        staging.add(model.pulls)
        self._pulls = staging.send()
        self._groups: dict[int, DeviceGroup] = {}
        self._turns: OrderedDict[tuple[int, int, bool], torch.Tensor] = OrderedDict()

    @property
    def pulls(self) -> int:
        """Return the address of the pulls."""
        return address(self._pulls)

    @property
    def angles(self) -> int:
        """Return how many pairs of dims of a head turn."""
        return self.model.rotary.pair_count if self.model.rotary else 0

    def group(self, group: Group) -> DeviceGroup:
        """Return a group of the model."""
        if group.layer_start not in self._groups:
            self._groups[group.layer_start] = DeviceGroup(self.kernels, self.model, group)
        return self._groups[group.layer_start]

    def turns(self, meta: BlockMeta, is_back: bool = False) -> int:
        """Return the address of a table (layers, 2): where the cosines, then the sines, of a block's tokens are.

        0 stands for no turning: values, and keys of a model that does not rotate.
        """
        key = (meta.start, meta.layout.tokens, is_back)
        if key not in self._turns:
            self._turns[key] = self._made_turns(meta, is_back)
        self._turns.move_to_end(key)
        return address(self._turns[key])

    def trim(self) -> None:
        """Forget what was not used for longest, if there is much. Not before what uses it is queued."""
        while len(self._turns) > TURNS_MAX:
            self._turns.popitem(last=False)

    def _made_turns(self, meta: BlockMeta, is_back: bool) -> torch.Tensor:
        rotary, staging = self.model.rotary, Staging(self.kernels)
        table = np.zeros((self.model.profile.layers, 2), dtype=np.uint64)
        staging.add(table)
        if rotary is not None:
            make = rotary.inverse_tables if is_back else rotary.tables
            kinds = [rotary.frequencies(layer) for layer in range(len(table))]
            places = {
                kind: staging.add(np.stack(make(meta.start, meta.layout.tokens, kinds.index(kind))))
                for kind in dict.fromkeys(kinds)
            }
            table[:, 0] = [staging.base + places[kind] for kind in kinds]
        return staging.send()


def loud_columns(rows: RangeRows, final_units: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the row and the weight of each column that loudness is summed over, -1 for none.

    Each group's fill whole sixteens; sixteen of END_OF_GROUP follow.
    """
    weights, columns, factors = loudness_weights(rows.scales, final_units), [], []
    for place in rows.places:
        # The group's values, of which some are coded, in another order; else its rows.
        order, coded = place.group.order, place.stop - place.start
        count = place.group.shape[1] if order.size else coded
        padded = np.full(-(-count // LANES) * LANES, -1, dtype=np.int32)
        padded[order[:coded] if order.size else slice(coded)] = np.arange(place.start, place.stop)
        columns += [padded, np.full(LANES, END_OF_GROUP, dtype=np.int32)]
        factors += [np.where(padded < 0, 0, weights[padded]), np.zeros(LANES)]
    return np.concatenate(columns), np.concatenate(factors).astype(np.float32)


class PerToken(NamedTuple):
    """The kernels' notes on each token of a group; see TideSource of kernels/tide_project.cuh."""

    crossed: NDArray[np.int64]
    halvings: NDArray[np.int32]
    squares: NDArray[np.float32]


def per_token(data: NDArray[np.uint8], tokens: int) -> Iterator[PerToken]:
    """Yield what each source's tokens have, in the order of sources."""
    for row in data.reshape(-1, TOKEN_BYTES * tokens):
        crossed, halvings, squares = np.split(row, [8 * tokens, 12 * tokens])
        yield PerToken(crossed.view(np.int64), halvings.view(np.int32), squares.view(np.float32))


def seen_of(place: Place, totals: NDArray[np.int64], tokens: PerToken, is_coded: NDArray[np.bool_]) -> Seen:
    """Return what was found of a group, as native/tide_project.hpp does.

    totals: (rows, 2), sums of steps and of their squares. is_coded: of each token of the range. A token that a later
    group is too loud for counts in none; on the processor it does in those before.
    """
    sums, squares = totals[place.start : place.stop].T.astype(np.float64)
    count, energy = int(is_coded.sum()), float(squares.sum())
    error = float(tokens.squares[is_coded].sum(dtype=np.float64)) / SIXTEENTHS**2 - energy
    # A product of steps and what rounding took is in 2^-17, and counts twice.
    error -= float(tokens.crossed[is_coded].sum()) / (1 << 16)
    # Values are whole 16ths, those of halved tokens coarser.
    coarse = float(np.exp2(2.0 * tokens.halvings[is_coded]).sum())
    error += place.group.shape[1] * coarse / (12 * SIXTEENTHS**2)
    return Seen(error, energy - float((sums**2).sum()) / max(count, 1), float(count))
