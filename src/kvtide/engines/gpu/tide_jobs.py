"""What the kernels of tide are told: one record for each section to decode, one for each group of layers to write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.codec.tide.grid import ENTER_UNITS, TABLES, THIRD, Units, planes
from kvtide.codec.tide.rows import Place, RangeRows
from kvtide.codec.tide.section import Apart, Base, SectionBytes, Steps
from kvtide.engines.gpu.kernels import Kernels, Staging, address
from kvtide.engines.gpu.targets import PageTarget
from kvtide.engines.gpu.tide_model import DEPTH, TILE, DeviceModel
from kvtide.errors import CorruptPayload

__all__ = ["GROUP", "SECTION", "DeviceRange", "Extent", "GroupJobs", "SectionJobs", "extent_of"]

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


class DeviceRange:
    """A range of layers of one block: what its base said, and its coefficients on the device."""

    def __init__(self, kernels: Kernels, layers: tuple[int, int], steps: Steps, base: Base, rows: RangeRows) -> None:
        self.layers = layers
        self.steps = steps
        self.loudness = base.loudness
        self.apart: Apart = base.apart
        self.rows = rows
        self.tokens = len(base.loudness.parts)
        self.sections = 0  # decoded, or queued to be
        count = len(rows.scales)
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
        extent = extent_of(known.rows.scales, known.tokens, known.base_units, refinement)
        job = np.zeros((), dtype=SECTION)
        data, addresses = memoryview(coded.streams.data), []
        for size in coded.streams.sizes:
            addresses.append(staging.add(data[:size]))
            data = data[size:]
        escapes = staging.add(coded.escapes)
        # Still relative to what the copy begins with.
        job["streams"], job["escapes"] = addresses, (escapes, escapes + 2 * coded.escape_counts[0])
        job["scales"] = staging.add(known.rows.scales.astype("<i2"))
        job["values"], job["tallies"], job["status"] = known.values, known.tallies, status
        job["stream_bytes"], job["escape_counts"] = coded.streams.sizes, coded.escape_counts
        job["rows"], job["tokens"] = len(known.rows.scales), known.tokens
        job["planes"], job["items_max"] = extent.planes, extent.items
        job["base_units"], job["refinement"] = known.base_units, refinement
        job["gains"] = known.loudness.gains
        self._rows.append(job)
        self._extents.append(extent)
        self.rows_max = max(self.rows_max, len(known.rows.scales))

    def send(self) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Queue the copy. Returns the address of the records, and what must live until kernels are queued."""
        jobs = np.array(self._rows, dtype=SECTION)
        jobs_at, base = self._staging.add(jobs), self._staging.base
        with self._kernels.queue():
            size = sum(sum(extent.sizes) for extent in self._extents)
            scratch = torch.empty(size, dtype=torch.uint8, device=self._kernels.device)
        for name in ("streams", "escapes", "scales"):
            jobs[name] += np.uint64(base)
        at = address(scratch)
        for job, extent in zip(jobs, self._extents, strict=True):
            for name, size in zip(("cursors", "items", "run_starts"), extent.sizes, strict=True):
                job[name], at = at, at + size
        return base + jobs_at, (self._staging.send(), scratch)


class GroupJobs:
    """Groups of layers that are written together."""

    def __init__(self, model: DeviceModel, target: PageTarget) -> None:
        self._model = model
        self._target = target
        self._staging = Staging(model.kernels)
        self._rows: list[NDArray[np.void]] = []
        self._sizes: list[int] = []
        self.tiles_max = 0
        self.is_ordered = False

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, known: DeviceRange, meta: BlockMeta, token_starts: NDArray[np.int64], status: int) -> None:
        """Add all groups of a range, at the step that it has been decoded to. status: an address."""
        staging, layout = self._staging, meta.layout
        positions, scales, values = known.apart
        apart_of = np.full(known.tokens, -1, dtype=np.int32)
        apart_of[positions] = np.arange(len(positions))
        shared = np.zeros((), dtype=GROUP)
        shared["places"] = staging.add(known.loudness.places)
        shared["token_starts"], shared["apart_of"] = staging.add(token_starts), staging.add(apart_of)
        shared["status"], shared["pulls"] = status, self._model.pulls
        shared["tokens"], shared["apart_count"] = known.tokens, len(positions)
        shared["channels"], shared["head_dim"] = layout.kv_heads * layout.head_dim, layout.head_dim
        shared["angles"] = self._model.angles
        thirds = known.steps.refinements + 1 - known.sections
        shared["units"] = known.steps.final_units + THIRD * thirds
        shared["element"], shared["gains"] = layout.dtype.code, known.loudness.gains
        for place in known.rows.places:
            layers = slice(place.group.layer_start - known.layers[0], place.group.layer_stop - known.layers[0])
            job = shared.copy()
            job["apart_scales"] = staging.add(scales[layers])
            job["apart_values"] = staging.add(values[layers])
            self._add_group(job, known, place, meta, thirds)

    def _add_group(self, job: NDArray[np.void], known: DeviceRange, place: Place, meta: BlockMeta, thirds: int) -> None:
        group, start, _ = place
        staging, device = self._staging, self._model.group(group)
        used = int(np.count_nonzero(group.scales - int(job["units"]) >= ENTER_UNITS))
        job["values"] = known.values + 2 * start * known.tokens
        job["scales"] = staging.add(group.scales[:used].astype("<i2"))
        job["matrix_high"], job["matrix_low"], job["row_of"] = device.matrix
        job["pairs"], job["mean"] = device.pairs_at(self._target), device.mean
        job["scale"] = device.scale(known.steps.final_units, thirds)
        layers = range(group.layer_start, group.layer_stop)
        job["bases"] = staging.add(self._target.bases[group.layer_start : group.layer_stop])
        turns = [[self._model.turns(meta, layer), 0] for layer in layers]
        job["turns"] = staging.add(np.array(turns, dtype=np.uint64))
        job["rows"], job["columns"], job["matrix_stride"] = used, device.column_count, device.stride
        job["depth"] = -(-used // DEPTH) * DEPTH
        padded = -(-known.tokens // TILE) * TILE
        self._rows.append(job)
        self._sizes.append(int(job["depth"]) * padded)
        self.is_ordered = bool(group.order.size)
        # Squares of 32 to pull, tiles of 64 to write, or stretches of 16 tokens where there is no matrix.
        tiles = (int(job["depth"]) // 32 * (padded // 32), device.column_count // TILE * -(-known.tokens // 16))
        self.tiles_max = max(self.tiles_max, *tiles)

    def send(self) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Queue the copy. Returns the address of the records, and what must live until kernels are queued."""
        jobs = np.array(self._rows, dtype=GROUP)
        jobs_at, base = self._staging.add(jobs), self._staging.base
        with self._model.kernels.queue():
            scratch = torch.empty(2 * sum(self._sizes) + 16, dtype=torch.uint8, device=self._model.kernels.device)
        for name in ("places", "token_starts", "apart_of", "apart_scales", "apart_values", "scales", "bases", "turns"):
            jobs[name] += np.uint64(base)
        at = address(scratch)
        for job, size in zip(jobs, self._sizes, strict=True):
            job["high"], job["low"], at = at, at + size, at + 2 * size
        return base + jobs_at, (self._staging.send(), scratch)
