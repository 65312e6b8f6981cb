"""Arguments of the tide kernels: one record for each section to decode, one for each group of layers to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.codec.tide.grid import ENTER_UNITS, TABLES, THIRD, CodedLists, Units, planes
from kvtide.codec.tide.model import place_groups
from kvtide.codec.tide.section import Apart, Base, SectionBytes, Steps
from kvtide_gpu.kernels import Kernels, Staging, address
from kvtide_gpu.targets import PageTarget
from kvtide_gpu.tide_model import DEPTH, TILE, DeviceModel

PARTS = 4

# TideSection of kernels/tide_lists.cuh.
SECTION = np.dtype(
    [(name, "<u8") for name in ("scales", "values", "tallies", "cursors", "items", "run_starts")]
    + [("streams", "<u8", 2), ("escapes", "<u8", 2), ("status", "<u8")]
    + [("stream_bytes", "<u4", 2), ("escape_counts", "<u4", 2)]
    + [(name, "<u4") for name in ("rows", "tokens", "planes", "items_max")]
    + [("base_units", "<i4"), ("refinement", "<i4"), ("gains", "i1", PARTS), ("zero", "<u4")]
)

_ADDRESSES = (
    *("values", "scales", "high", "low", "matrix_high", "matrix_low", "row_of", "pairs", "mean", "scale", "places"),
    *("token_starts", "bases", "turns", "apart_of", "apart_scales", "apart_values", "status", "pulls", "matrix_stride"),
)
_COUNTS = ("rows", "tokens", "depth", "columns", "channels", "head_dim", "angles", "apart_count")
# TideGroup of kernels/tide_restore.cuh.
GROUP = np.dtype(
    [(name, "<u8") for name in _ADDRESSES]
    + [(name, "<u4") for name in _COUNTS]
    + [("units", "<i4"), ("element", "<u4"), ("gains", "i1", PARTS), ("zero", "<u4")]
)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class Extent(NamedTuple):
    """Room that a section takes besides its bytes: items of all lists, planes, bytes of cursors, items, run starts."""

    items: int
    planes: int
    sizes: tuple[int, int, int]


def extent_of(scales: Units, tokens: int, base_units: int, refinement: int) -> Extent:
    """Return what a section of rows of these scales takes. CorruptPayload as of `planes`."""
    found = planes(scales, base_units, refinement)
    rows = sum(len(plane.digits) + len(plane.tops) for plane in found)
    # Each list is filled up to a run, the last one by one more.
    items = rows * tokens + 32 * (TABLES + 1)
    slots = len(found) * len(scales) * PARTS * (3 if refinement else 1)
    return Extent(items, len(found), (_aligned(4 * slots), _aligned(2 * items), _aligned(4 * (TABLES + 1))))


class GroupRecords(NamedTuple):
    """Kernel arguments of one layer range at one step, shared by all blocks. One row a group."""

    rows: NDArray[np.void]
    layers: NDArray[np.uint64]  # before each group in the range
    starts: NDArray[np.uint64]  # rows before each group's
    sizes: NDArray[np.int64]  # bytes of one half of its pulled values
    tiles: int  # jobs of the largest
    scales: list[torch.Tensor]  # that rows have addresses of


class RangePlan:
    """A range of layers at a final step, whatever the block: what is worked out once."""

    def __init__(self, model: DeviceModel, layers: tuple[int, int], final_units: int) -> None:
        self.layers = layers
        self.rows = place_groups(model.model, layers[0], final_units)
        self._model = model
        self._final_units = final_units
        self._extents: dict[tuple[int, int, int], Extent] = {}
        self._records: dict[tuple[int, int], GroupRecords] = {}
        staging = Staging(model.kernels)
        staging.add(self.rows.scales.astype("<i2"))
        self._sent = staging.send()
        # The address of the rows' scales.
        self.scales = address(self._sent)

    def extent(self, tokens: int, base_units: int, refinement: int) -> Extent:
        """Return what a section takes; see `extent_of`."""
        key = (tokens, base_units, refinement)
        if key not in self._extents:
            self._extents[key] = extent_of(self.rows.scales, *key)
        return self._extents[key]

    def records(self, target: PageTarget, bases: int, tokens: int, thirds: int) -> GroupRecords:
        """Return the groups' records for pages at these bases, at a step so many thirds coarser than the final one."""
        key = (tokens, thirds)
        if key not in self._records:
            self._records[key] = self._made_records(target, bases, tokens, thirds)
        return self._records[key]

    def _made_records(self, target: PageTarget, bases: int, tokens: int, thirds: int) -> GroupRecords:
        rows, layout = np.zeros(len(self.rows.places), dtype=GROUP), target.layout
        units, padded = self._final_units + THIRD * thirds, -(-tokens // TILE) * TILE
        tiles, scales = 0, list[torch.Tensor]()
        for job, (group, start, _) in zip(rows, self.rows.places, strict=True):
            device = self._model.group(group)
            used = int(np.count_nonzero(group.scales - units >= ENTER_UNITS))
            job["scales"], job["bases"] = self.scales + 2 * start, bases + 16 * group.layer_start
            job["matrix_high"], job["matrix_low"], job["row_of"] = device.matrix
            job["pairs"], job["mean"] = device.pairs_at(target), device.mean
            scales.append(device.scale(self._final_units, thirds))
            job["scale"] = address(scales[-1])
            job["rows"], job["columns"], job["matrix_stride"] = used, device.column_count, device.stride
            depth = job["depth"] = -(-used // DEPTH) * DEPTH
            # Squares of 32 to pull, tiles of 64 to write, or stretches of 16 tokens where there is no matrix.
            tiles = max(tiles, depth // 32 * (padded // 32), device.column_count // TILE * -(-tokens // 16))
        rows["pulls"], rows["tokens"], rows["units"] = self._model.pulls, tokens, units
        rows["channels"], rows["head_dim"] = layout.kv_heads * layout.head_dim, layout.head_dim
        rows["angles"], rows["element"] = self._model.angles, layout.dtype.code
        before = [group.layer_start - self.layers[0] for group, _, _ in self.rows.places]
        starts = [start for _, start, _ in self.rows.places]
        sizes = rows["depth"].astype(np.int64) * padded
        return GroupRecords(rows, np.array(before, np.uint64), np.array(starts, np.uint64), sizes, tiles, scales)


class DeviceRange:
    """A range of layers of one block: what its base said, and its coefficients on the device."""

    def __init__(self, kernels: Kernels, plan: RangePlan, steps: Steps, base: Base) -> None:
        self.plan = plan
        self.steps = steps
        self.loudness = base.loudness
        self.apart: Apart = base.apart
        self.tokens = len(base.loudness.parts)
        self.sections = 0  # decoded, or queued to be
        count = len(plan.rows.scales)
        self._values_bytes = _aligned(2 * count * self.tokens)
        with kernels.queue():
            size = self._values_bytes + 4 * PARTS * count
            self._room = torch.empty(max(size, 16), dtype=torch.uint8, device=kernels.device)
        # Addresses: coefficients (rows, tokens), int16; how many are 0, and 1 or -1, (rows, parts), uint32.
        self.values = address(self._room)
        self.tallies = self.values + self._values_bytes
        self.addresses = (plan.scales, self.values, self.tallies)
        self.sizes = (count, self.tokens, self.base_units)

    @property
    def base_units(self) -> int:
        """Return the base's step."""
        return self.steps.final_units + THIRD * self.steps.refinements


# In the order of `DeviceRange.addresses` and `sizes`.
_FILLED = ("scales", "values", "tallies", "status", "rows", "tokens", "base_units", "planes", "items_max", "refinement")


class _SectionJob(NamedTuple):
    range: DeviceRange
    refinement: int
    lists: CodedLists
    status: int
    extent: Extent


class SectionJobs:
    """Sections that are decoded together: their bytes and records, to be made and sent at once."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._jobs: list[_SectionJob] = []
        self.rows_max = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, known: DeviceRange, refinement: int, found: SectionBytes, status: int) -> None:
        """Add a section of a range. status: an address."""
        extent = known.plan.extent(known.tokens, known.base_units, refinement)
        self._jobs.append(_SectionJob(known, refinement, found.lists, status, extent))
        self.rows_max = max(self.rows_max, len(known.plan.rows.scales))

    def send(self) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Queue the copy. Returns the address of the records, and what must live until kernels are queued."""
        staging, records = Staging(self._kernels), self._records()
        parts: list[memoryview | NDArray[np.int16]] = []
        for job in self._jobs:
            data, first = memoryview(job.lists.streams.data), job.lists.streams.sizes[0]
            parts += [data[:first], data[first:], job.lists.escapes]
        bytes_of = np.concatenate([records["stream_bytes"], 2 * records["escape_counts"].sum(1, keepdims=True)], axis=1)
        starts = staging.add_all(parts, bytes_of.reshape(-1).tolist()).reshape(-1, 3)
        jobs_at, base = staging.add(records), staging.base
        sizes = np.array([job.extent.sizes for job in self._jobs], dtype=np.uint64)
        ends = np.cumsum(sizes).reshape(sizes.shape)
        with self._kernels.queue():
            scratch = torch.empty(int(ends[-1, -1]), dtype=torch.uint8, device=self._kernels.device)
        starts += np.uint64(base)
        records["streams"] = starts[:, :2]
        records["escapes"][:, 0] = starts[:, 2]
        records["escapes"][:, 1] = starts[:, 2] + np.uint64(2) * records["escape_counts"][:, 0]
        for column, name in enumerate(("cursors", "items", "run_starts")):
            records[name] = np.uint64(address(scratch)) + ends[:, column] - sizes[:, column]
        return base + jobs_at, (staging.send(), scratch)

    def _records(self) -> NDArray[np.void]:
        """Return the records, but for what lies where in the copy."""
        records = np.zeros(len(self._jobs), dtype=SECTION)
        ranges = [job.range for job in self._jobs]
        rows = [
            (*known.addresses, status, *known.sizes, extent.planes, extent.items, refinement)
            for known, refinement, _, status, extent in self._jobs
        ]
        for name, column in zip(_FILLED, np.array(rows, dtype=np.int64).T, strict=True):
            records[name] = column
        records["stream_bytes"] = [job.lists.streams.sizes for job in self._jobs]
        records["escape_counts"] = [job.lists.escape_counts for job in self._jobs]
        records["gains"] = [known.loudness.gains for known in ranges]
        return records


class _GroupJob(NamedTuple):
    range: DeviceRange
    records: GroupRecords
    layer_start: int
    turns: int
    starts_at: int
    status: int


class GroupJobs:
    """Groups of layers that are written together: their records, to be made and sent at once."""

    def __init__(self, model: DeviceModel, target: PageTarget, bases: int) -> None:
        """bases: where the target's are on the device."""
        self._model = model
        self._target = target
        self._bases = bases
        self._staging = Staging(model.kernels)
        self._jobs: list[_GroupJob] = []
        self.count = 0
        self.tiles_max = 0

    def add(self, known: DeviceRange, meta: BlockMeta, starts_at: int, status: int) -> None:
        """Add all groups of a range, at the step that it has been decoded to.

        starts_at: where `add_starts` put the block's tokens; status: an address.
        """
        thirds = known.steps.refinements + 1 - known.sections
        found = known.plan.records(self._target, self._bases, known.tokens, thirds)
        turns = self._model.turns(meta)
        self._jobs.append(_GroupJob(known, found, known.plan.layers[0], turns, starts_at, status))
        self.count += len(found.rows)
        self.tiles_max = max(self.tiles_max, found.tiles)

    def add_starts(self, token_starts: NDArray[np.int64]) -> int:
        """Return where the starts of a block's tokens will be."""
        return self._staging.add(token_starts)

    def send(self) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Queue the copy. Returns the address of the records, and what must live until kernels are queued."""
        # As bytes: numpy compares the fields' types again for each array otherwise.
        records = np.concatenate([job.records.rows.view(np.uint8) for job in self._jobs]).view(GROUP)
        tables = self._tables()
        jobs_at, base = self._staging.add(records), self._staging.base
        self._fill(records, tables + np.uint64(base))
        sizes = np.concatenate([job.records.sizes for job in self._jobs]).astype(np.uint64)
        ends = np.cumsum(2 * sizes)
        with self._model.kernels.queue():
            scratch = torch.empty(int(ends[-1]) + 16, dtype=torch.uint8, device=self._model.kernels.device)
        records["high"] = np.uint64(address(scratch)) + ends - 2 * sizes
        records["low"] = records["high"] + sizes
        return base + jobs_at, (self._staging.send(), scratch)

    def _tables(self) -> NDArray[np.uint64]:
        """Stage what ranges have. Returns where, (ranges, 5): places, apart_of, scales, values, starts of tokens."""
        ranges = [job.range for job in self._jobs]
        parts: list[NDArray[np.generic]] = []
        for known, places in zip(ranges, _places(ranges), strict=True):
            positions, scales, values = known.apart
            apart_of = np.full(known.tokens, -1, dtype=np.int32)
            apart_of[positions] = np.arange(len(positions))
            parts += [places, apart_of, scales, values]
        staged = self._staging.add_all(parts, [part.nbytes for part in parts]).reshape(-1, 4)
        starts = np.array([[job.starts_at] for job in self._jobs], dtype=np.uint64)
        return np.concatenate([staged, starts], axis=1)

    def _fill(self, records: NDArray[np.void], tables: NDArray[np.uint64]) -> None:
        """Write what differs from block to block. tables: addresses, (ranges, 5)."""
        of_range = np.repeat(np.arange(len(self._jobs)), [len(job.records.rows) for job in self._jobs])
        starts = np.concatenate([job.records.starts for job in self._jobs])
        layers = np.concatenate([job.records.layers for job in self._jobs])
        found = np.array(
            [
                (known.values, 2 * known.tokens, turns, first, status, len(known.apart.positions))
                for known, _, first, turns, _, status in self._jobs
            ],
            dtype=np.uint64,
        )[of_range].T
        values, row_bytes, turns, first, status, count = found
        records["values"] = values + row_bytes * starts
        records["turns"] = turns + np.uint64(16) * (layers + first)
        records["status"], records["apart_count"] = status, count
        records["gains"] = np.array([job.range.loudness.gains for job in self._jobs], dtype=np.int8)[of_range]
        places, apart_of, scales, kept, token_starts = tables[of_range].T
        records["places"], records["apart_of"], records["token_starts"] = places, apart_of, token_starts
        before = np.uint64(2) * count * layers
        records["apart_scales"] = scales + np.uint64(2 * self._target.layout.kv_heads) * before
        records["apart_values"] = kept + records["channels"].astype(np.uint64) * before


def _places(ranges: Sequence[DeviceRange]) -> NDArray[np.uint16]:
    """Return each range's tokens in coded order; see `Loudness.places`. Ranges of one number of tokens."""
    return np.argsort([known.loudness.parts for known in ranges], axis=1, kind="stable").astype(np.uint16)
