"""What the kernels of tide are told: one record for each section to decode, one for each group of layers to write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.codec.tide.grid import ENTER_UNITS, TABLES, THIRD, Units, planes
from kvtide.codec.tide.rows import place_groups
from kvtide.codec.tide.section import Apart, Base, SectionBytes, Steps
from kvtide.engines.gpu.kernels import Kernels, Staging, address
from kvtide.engines.gpu.targets import PageTarget
from kvtide.engines.gpu.tide_model import DEPTH, TILE, DeviceModel
from kvtide.errors import CorruptPayload

__all__ = ["GROUP", "SECTION", "DeviceRange", "GroupJobs", "RangePlan", "SectionJobs", "extent_of"]

# A base of more planes is of no sound profile.
PLANES_MAX = 32
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
    """What a section takes besides its bytes: items of all lists, planes, bytes of cursors, items and run starts."""

    items: int
    planes: int
    sizes: tuple[int, int, int]


def extent_of(scales: Units, tokens: int, base_units: int, refinement: int) -> Extent:
    """Return what a section of rows of these scales takes. CorruptPayload for a base of absurdly many planes."""
    found = planes(scales, base_units, refinement)
    if len(found) > PLANES_MAX:
        raise CorruptPayload(f"tide: a base of {len(found)} planes")
    rows = sum(len(plane.digits) + len(plane.tops) for plane in found)
    # Each list is filled up to a run, the last one by one more.
    items = rows * tokens + 32 * (TABLES + 1)
    slots = len(found) * len(scales) * PARTS * (3 if refinement else 1)
    return Extent(items, len(found), (_aligned(4 * slots), _aligned(2 * items), _aligned(4 * (TABLES + 1))))


class GroupRecords(NamedTuple):
    """What is the same for all blocks: a record for each group of a range at a step."""

    rows: NDArray[np.void]
    layers: NDArray[np.uint64]  # before each group in the range
    starts: NDArray[np.uint64]  # rows before each group's
    sizes: NDArray[np.int64]  # bytes of one half of its pulled values
    tiles: int  # jobs of the largest


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

    @property
    def scales(self) -> int:
        """Return the address of the rows' scales."""
        return address(self._sent)

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
        tiles = 0
        for job, (group, start, _) in zip(rows, self.rows.places, strict=True):
            device = self._model.group(group)
            used = int(np.count_nonzero(group.scales - units >= ENTER_UNITS))
            job["scales"], job["bases"] = self.scales + 2 * start, bases + 16 * group.layer_start
            job["matrix_high"], job["matrix_low"], job["row_of"] = device.matrix
            job["pairs"], job["mean"] = device.pairs_at(target), device.mean
            job["scale"] = device.scale(self._final_units, thirds)
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
        return GroupRecords(rows, np.array(before, np.uint64), np.array(starts, np.uint64), sizes, tiles)


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

    @property
    def values(self) -> int:
        """Return the address of the coefficients: (rows, tokens), int16."""
        return address(self._room)

    @property
    def tallies(self) -> int:
        """Return the address of how many coefficients are 0, and 1 or -1: (rows, parts), uint32."""
        return address(self._room) + self._values_bytes

    @property
    def base_units(self) -> int:
        """Return the base's step."""
        return self.steps.final_units + THIRD * self.steps.refinements


class SectionJobs:
    """Sections that are decoded together: their bytes and records, to be sent in one copy."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._staging = Staging(kernels)
        self._rows: list[NDArray[np.void]] = []
        self._extents: list[Extent] = []
        self.rows_max = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, known: DeviceRange, refinement: int, found: SectionBytes, status: int) -> None:
        """Add a section of a range. status: an address. CorruptPayload if it can't be decoded here."""
        staging, coded = self._staging, found.lists
        extent = known.plan.extent(known.tokens, known.base_units, refinement)
        job, rows = np.zeros((), dtype=SECTION), len(known.plan.rows.scales)
        data, addresses = memoryview(coded.streams.data), []
        for size in coded.streams.sizes:
            addresses.append(staging.add(data[:size]))
            data = data[size:]
        escapes = staging.add(coded.escapes)
        # Still relative to what the copy begins with.
        job["streams"], job["escapes"] = addresses, (escapes, escapes + 2 * coded.escape_counts[0])
        job["scales"], job["values"] = known.plan.scales, known.values
        job["tallies"], job["status"] = known.tallies, status
        job["stream_bytes"], job["escape_counts"] = coded.streams.sizes, coded.escape_counts
        job["rows"], job["tokens"] = rows, known.tokens
        job["planes"], job["items_max"] = extent.planes, extent.items
        job["base_units"], job["refinement"] = known.base_units, refinement
        job["gains"] = known.loudness.gains
        self._rows.append(job)
        self._extents.append(extent)
        self.rows_max = max(self.rows_max, rows)

    def send(self) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Queue the copy. Returns the address of the records, and what must live until kernels are queued."""
        jobs = np.frombuffer(bytearray().join(job.tobytes() for job in self._rows), dtype=SECTION)
        jobs_at, base = self._staging.add(jobs), self._staging.base
        sizes = np.array([extent.sizes for extent in self._extents], dtype=np.uint64)
        ends = np.cumsum(sizes).reshape(sizes.shape)
        with self._kernels.queue():
            scratch = torch.empty(int(ends[-1, -1]), dtype=torch.uint8, device=self._kernels.device)
        for name in ("streams", "escapes"):
            jobs[name] += np.uint64(base)
        for column, name in enumerate(("cursors", "items", "run_starts")):
            jobs[name] = np.uint64(address(scratch)) + ends[:, column] - sizes[:, column]
        return base + jobs_at, (self._staging.send(), scratch)


class GroupJobs:
    """Groups of layers that are written together."""

    def __init__(self, model: DeviceModel, target: PageTarget, bases: int) -> None:
        """bases: where the target's are on the device."""
        self._model = model
        self._target = target
        self._bases = bases
        self._staging = Staging(model.kernels)
        self._rows: list[NDArray[np.void]] = []
        self._sizes: list[NDArray[np.int64]] = []
        self.count = 0
        self.tiles_max = 0

    def add(self, known: DeviceRange, meta: BlockMeta, starts_at: int, status: int) -> None:
        """Add all groups of a range, at the step that it has been decoded to.

        starts_at: where `add_starts` put the block's tokens; status: an address.
        """
        staging, (positions, scales, values) = self._staging, known.apart
        found = known.plan.records(
            self._target, self._bases, known.tokens, known.steps.refinements + 1 - known.sections
        )
        apart_of = np.full(known.tokens, -1, dtype=np.int32)
        apart_of[positions] = np.arange(len(positions))
        jobs, channels = found.rows.copy(), int(found.rows["channels"][0])
        jobs["values"] = np.uint64(known.values) + np.uint64(2 * known.tokens) * found.starts
        jobs["turns"] = np.uint64(self._model.turns(meta)) + np.uint64(16) * (
            found.layers + np.uint64(known.plan.layers[0])
        )
        jobs["status"], jobs["gains"], jobs["apart_count"] = status, known.loudness.gains, len(positions)
        # Still relative to what the copy begins with.
        jobs["places"], jobs["apart_of"] = staging.add(known.loudness.places), staging.add(apart_of)
        jobs["token_starts"] = starts_at
        tokens = np.uint64(2 * len(positions)) * found.layers
        jobs["apart_scales"] = np.uint64(staging.add(scales)) + np.uint64(2 * meta.layout.kv_heads) * tokens
        jobs["apart_values"] = np.uint64(staging.add(values)) + np.uint64(channels) * tokens
        self._rows.append(jobs)
        self._sizes.append(found.sizes)
        self.count += len(jobs)
        self.tiles_max = max(self.tiles_max, found.tiles)

    def add_starts(self, token_starts: NDArray[np.int64]) -> int:
        """Return where the starts of a block's tokens will be."""
        return self._staging.add(token_starts)

    def send(self) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Queue the copy. Returns the address of the records, and what must live until kernels are queued."""
        # As bytes: numpy compares the fields' types again for each array otherwise.
        jobs = np.concatenate([rows.view(np.uint8) for rows in self._rows]).view(GROUP)
        sizes = np.concatenate(self._sizes).astype(np.uint64)
        jobs_at, base = self._staging.add(jobs), self._staging.base
        ends = np.cumsum(2 * sizes)
        with self._model.kernels.queue():
            scratch = torch.empty(int(ends[-1]) + 16, dtype=torch.uint8, device=self._model.kernels.device)
        for name in ("places", "token_starts", "apart_of", "apart_scales", "apart_values"):
            jobs[name] += np.uint64(base)
        jobs["high"] = np.uint64(address(scratch)) + ends - 2 * sizes
        jobs["low"] = jobs["high"] + sizes
        return base + jobs_at, (self._staging.send(), scratch)
