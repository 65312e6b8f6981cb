"""Blocks from pages to objects of the codec tide, encoded on a device.

The bytes are those of `kvtide.codec.tide`, but where the mean loudness of a quarter of the tokens is half a unit from a
whole one to the last bits of a float32: means are taken in another order here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.codec.entropy import Streams
from kvtide.codec.tide.coding import Fit, first_apart
from kvtide.codec.tide.grid import THIRD, CodedLists
from kvtide.codec.tide.model import RangeRows, place_groups
from kvtide.codec.tide.promise import check_promise, promise_of
from kvtide.codec.tide.section import Base, Loudness, SectionBytes, Steps, join_base, join_refinement, kept_tokens
from kvtide.errors import UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind
from kvtide_gpu.kernels import THREADS, Staging, address, warp_blocks
from kvtide_gpu.targets import PageTarget
from kvtide_gpu.tide_jobs import PARTS, SECTION, extent_of
from kvtide_gpu.tide_model import TILE, TOKEN_BYTES, DeviceModel, loud_columns, per_token, seen_of

TOKENS_MAX = 1024
MATRIX_THREADS = 128
STATES_BYTES = 128
PIECES = 4
NOT_FINITE = 2
# TideSource of kernels/tide_project.cuh.
SOURCE = np.dtype(
    [
        (name, "<u8")
        for name in (
            *("pairs", "mean", "scale", "token_starts", "bases", "turns", "matrix_high", "matrix_low", "order"),
            *("scaled", "high", "low", "halvings", "apart", "out", "squares", "crossed", "status"),
        )
    ]
    + [(name, "<u4") for name in ("components", "tokens", "depth", "columns", "values", "angles", "element", "zero")]
)
# TideRange and TideWriting of kernels/tide_encode.cuh.
RANGE = np.dtype(
    [
        (name, "<u8")
        for name in (
            "coefficients",
            "apart",
            "loud_rows",
            "weights",
            "parts",
            "gains",
            "places",
            "levels",
            "tallies",
            "totals",
        )
    ]
    + [(name, "<u4") for name in ("rows", "tokens", "refinements", "loud_count")]
)
WRITING = np.dtype(
    [("lists", SECTION)] + [(name, "<u8") for name in ("parents", "words", "escapes", "sizes")], align=False
)


class PagedBlock(NamedTuple):
    """A block in pages: token_starts are those of the pages that it lies in."""

    meta: BlockMeta
    token_starts: NDArray[np.int64]


class _Range(NamedTuple):
    """A range of layers of one block."""

    block: int
    layers: tuple[int, int]
    rows: RangeRows


class _Answers(NamedTuple):
    """The device's findings about ranges: tokens apart, loudness, how well the profile fits."""

    apart: NDArray[np.uint32]  # (ranges, tokens)
    parts: NDArray[np.uint8]  # (ranges, tokens)
    gains: NDArray[np.int32]  # (ranges, PARTS)
    fits: list[Fit]  # of each block


class _Written(NamedTuple):
    """Sections side by side, and where the pieces of each end: its streams, their escapes."""

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]


class DeviceTideEncoder:
    """Encodes blocks of one model out of one engine's pages at one step. One thread at a time."""

    def __init__(self, model: DeviceModel, source: PageTarget, steps: Steps) -> None:
        """ValueError for pages of another shape than the model's, or blocks of more than TOKENS_MAX tokens."""
        if not model.model.profile.fits(source.layout) or source.layout.tokens > TOKENS_MAX:
            raise ValueError(f"the pages are not of the profile's model, or of more than {TOKENS_MAX} tokens")
        self._model = model
        self._kernels = model.kernels
        self._source = source
        self._steps = steps
        self._kept: list[torch.Tensor] = []

    def encode(self, blocks: Sequence[PagedBlock]) -> list[list[Section] | UnencodableBlock | None]:
        """Return each block's sections, or why it has none; None for a block that keeps its promise at a finer step.

        Pages are read after what torch's current stream has queued, and must not change before the return.
        ValueError for a block that is not whole.
        """
        tokens = self._source.layout.tokens
        for block in blocks:
            if block.token_starts.shape != (tokens,) or int(block.token_starts.min(initial=0)) < 0:
                raise ValueError(f"expected a place for each of {tokens} tokens")
        if not blocks:
            return []
        self._kernels.follow()
        step, model = self._model.model.section_layers, self._model.model
        ranges = [
            _Range(i, (start, start + step), place_groups(model, start, self._steps.final_units))
            for i in range(len(blocks))
            for start in range(0, model.profile.layers, step)
        ]
        try:
            return _Batch(self, blocks, ranges).sections()
        finally:
            self._kernels.finish()
            self._kept.clear()
            self._model.trim()


class _Batch:
    """Blocks being encoded together."""

    def __init__(self, encoder: DeviceTideEncoder, blocks: Sequence[PagedBlock], ranges: Sequence[_Range]) -> None:
        self._model = encoder._model
        self._kernels = encoder._kernels
        self._source = encoder._source
        self._steps = encoder._steps
        self._kept = encoder._kept
        self._blocks = blocks
        self._ranges = ranges
        self._layout = encoder._source.layout
        count, tokens = len(ranges), self._layout.tokens
        apart = np.stack([first_apart(blocks[known.block].meta) for known in ranges]).astype(np.uint32)
        self._apart = self._sent(apart)
        self._status = self._zeros(4 * len(blocks))
        self._parts, self._gains = self._zeros(count * tokens), self._zeros(4 * PARTS * count)
        self._coefficients = [self._empty(2 * len(known.rows.scales) * tokens) for known in ranges]
        levels = self._steps.refinements + 1
        self._levels = [self._empty(2 * levels * len(known.rows.scales) * tokens) for known in ranges]
        self._totals = [self._empty(16 * len(known.rows.scales)) for known in ranges]
        self._tallies = [self._empty(4 * levels * len(known.rows.scales) * PARTS) for known in ranges]
        self._rows_max = max(len(known.rows.scales) for known in ranges)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        # Kernels get addresses: what they are of must live until the end.
        self._kept.append(tensor)
        return tensor

    def _empty(self, size: int) -> torch.Tensor:
        with self._kernels.queue():
            return self._keep(torch.empty(max(size, 16), dtype=torch.uint8, device=self._kernels.device))

    def _zeros(self, size: int) -> torch.Tensor:
        with self._kernels.queue():
            return self._keep(torch.zeros(max(size, 16), dtype=torch.uint8, device=self._kernels.device))

    def _sent(self, array: NDArray[np.generic]) -> torch.Tensor:
        staging = Staging(self._kernels)
        staging.add(array)
        return self._keep(staging.send())

    def _found(self, tensor: torch.Tensor, size: int) -> NDArray[np.uint8]:
        with self._kernels.queue():
            found: NDArray[np.uint8] = tensor[:size].cpu().numpy()
        return found

    def sections(self) -> list[list[Section] | UnencodableBlock | None]:
        sources = self._project()
        answers = self._measure()
        written = self._write(answers)
        apart = self._keep_apart(sources, answers)
        # A view of torch's memory, which goes with the batch.
        status = self._found(self._status, 4 * len(self._blocks)).view(np.uint32).copy()
        coded: list[list[Section] | UnencodableBlock | None] = []
        for number, block in enumerate(self._blocks):
            try:
                if status[number]:
                    reason = "a value is not finite" if status[number] == NOT_FINITE else "a symbol has no probability"
                    raise UnencodableBlock(reason)
                tokens = int(np.count_nonzero(first_apart(block.meta) == 0))
                is_finer = check_promise(answers.fits[number], tokens) > 0
                coded.append(None if is_finer else self._sections_of(number, answers, written, apart))
            except UnencodableBlock as error:
                coded.append(error)
        return coded

    def _sections_of(
        self, number: int, answers: _Answers, written: _Written, apart: list[NDArray[np.float32]]
    ) -> list[Section]:
        """Return the sections of a block."""
        sections: list[Section] = []
        for i, known in enumerate(self._ranges):
            if known.block == number:
                kept = kept_tokens(apart[i], np.flatnonzero(answers.apart[i]).astype(np.uint16))
                loudness = Loudness(answers.parts[i], answers.gains[i].astype(np.int64))
                sections += self._joined(i, written, Base(loudness, kept))
        if sum(len(section.data) for section in sections) >= self._layout.raw_bytes:
            raise UnencodableBlock("the block does not get smaller")
        return sections

    def _project(self) -> torch.Tensor:
        """Queue what makes coefficients of pages. Returns the sources' records."""
        tokens, model = self._layout.tokens, self._model
        padded = -(-tokens // TILE) * TILE
        places = [(i, place) for i, known in enumerate(self._ranges) for place in known.rows.places]
        jobs = np.zeros(len(places), dtype=SOURCE)
        starts = [self._sent(block.token_starts) for block in self._blocks]
        self._seen = self._zeros(TOKEN_BYTES * tokens * len(places))
        first = address(self._seen) + tokens * TOKEN_BYTES * np.arange(len(places))
        jobs["crossed"], jobs["halvings"], jobs["squares"] = first, first + 8 * tokens, first + 12 * tokens
        for job, (i, place) in zip(jobs, places, strict=True):
            block, group = self._ranges[i].block, model.group(place.group)
            meta, layers = self._blocks[block].meta, range(place.group.layer_start, place.group.layer_stop)
            depth = group.values_depth
            job["pairs"], job["mean"] = group.pairs_at(self._source), group.mean
            job["scale"], job["token_starts"] = group.inverse_scale(self._steps.final_units), address(starts[block])
            job["bases"] = address(self._sent(self._source.bases[layers.start : layers.stop]))
            job["turns"] = model.turns(meta, is_back=True) + 16 * layers.start
            job["matrix_high"], job["matrix_low"], job["order"] = group.components()
            job["scaled"] = address(self._empty(4 * tokens * depth))
            job["high"], job["low"] = address(self._empty(padded * depth)), address(self._empty(padded * depth))
            job["apart"] = address(self._apart) + 4 * tokens * i
            job["out"] = address(self._coefficients[i]) + 2 * tokens * place.start
            job["status"] = address(self._status) + 4 * block
            job["components"], job["tokens"], job["depth"] = place.stop - place.start, tokens, depth
            job["columns"], job["values"], job["angles"] = group.column_count, place.group.shape[1], model.angles
            job["element"] = self._layout.dtype.code
        sent = self._sent(jobs)
        self._kernels.launch("tide_load", (address(sent), len(jobs), padded), warp_blocks(len(jobs) * padded), THREADS)
        components = int(jobs["components"].max())
        if places[0][1].group.order.size:
            args = (address(sent), len(jobs), components)
            self._kernels.launch("tide_project_ordered", args, warp_blocks(len(jobs) * components), THREADS)
        else:
            tiles = -(-components // TILE) * (padded // TILE)
            self._kernels.launch("tide_project", (address(sent), len(jobs), tiles), len(jobs) * tiles, MATRIX_THREADS)
        return sent

    def _measure(self) -> _Answers:
        """Sort tokens by loudness, make levels, and return what the host must know."""
        tokens, jobs = self._layout.tokens, np.zeros(len(self._ranges), dtype=RANGE)
        for i, (job, known) in enumerate(zip(jobs, self._ranges, strict=True)):
            columns, weights = loud_columns(known.rows, self._steps.final_units)
            job["coefficients"], job["apart"] = address(self._coefficients[i]), address(self._apart) + 4 * tokens * i
            job["loud_rows"], job["weights"] = address(self._sent(columns)), address(self._sent(weights))
            job["loud_count"] = len(columns)
            job["parts"] = address(self._parts) + tokens * i
            job["gains"] = address(self._gains) + 4 * PARTS * i
            job["places"] = address(self._empty(2 * tokens))
            job["levels"], job["tallies"] = address(self._levels[i]), address(self._tallies[i])
            job["totals"] = address(self._totals[i])
            job["rows"], job["tokens"] = len(known.rows.scales), tokens
            job["refinements"] = self._steps.refinements
        args = (address(self._sent(jobs)), len(jobs), self._rows_max)
        self._kernels.launch("tide_loudness", args, len(jobs), THREADS)
        self._kernels.launch("tide_levels", args, warp_blocks(len(jobs) * self._rows_max), THREADS)
        count = len(jobs)
        apart = self._found(self._apart, 4 * tokens * count).view(np.uint32).reshape(count, tokens)
        parts = self._found(self._parts, tokens * count).reshape(count, tokens)
        gains = self._found(self._gains, 4 * PARTS * count).view(np.int32).reshape(count, PARTS)
        return _Answers(apart.copy(), parts.copy(), gains.copy(), self._fits(apart))

    def _fits(self, apart: NDArray[np.uint32]) -> list[Fit]:
        """Return how well the profile fits each block."""
        fits: list[Fit] = [[] for _ in self._blocks]
        sources = iter(per_token(self._found(self._seen, self._seen.numel()), self._layout.tokens))
        units = self._steps.final_units
        excess = self._model.model.excess(units)
        for i, known in enumerate(self._ranges):
            totals = self._found(self._totals[i], 16 * len(known.rows.scales)).view(np.int64).reshape(-1, 2)
            fits[known.block] += [
                (promise_of(place, units, excess), seen_of(place, totals, next(sources), apart[i] == 0))
                for place in known.rows.places
            ]
        return fits

    def _write(self, answers: _Answers) -> _Written:
        """Make all sections' streams, by range, then by refinement."""
        tokens, refinements = self._layout.tokens, self._steps.refinements + 1
        count = len(self._ranges) * refinements
        jobs, sizes = np.zeros(count, dtype=WRITING), self._zeros(4 * PIECES * count)
        base_units = self._steps.final_units + THIRD * self._steps.refinements
        total = 0
        for i, known in enumerate(self._ranges):
            scales = known.rows.scales
            scales_at, rows = address(self._sent(scales.astype("<i2"))), len(scales)
            for refinement in range(refinements):
                job = jobs[i * refinements + refinement]
                lists, extent = job["lists"], extent_of(scales, tokens, base_units, refinement)
                level = address(self._levels[i]) + 2 * refinement * rows * tokens
                before = max(refinement - 1, 0)
                lists["scales"], lists["values"] = scales_at, level
                lists["tallies"] = address(self._tallies[i]) + 4 * before * rows * PARTS
                lists["cursors"], lists["items"] = (
                    address(self._empty(extent.sizes[0])),
                    address(self._zeros(extent.sizes[1])),
                )
                lists["run_starts"], lists["status"] = (
                    address(self._empty(extent.sizes[2])),
                    address(self._status) + 4 * known.block,
                )
                lists["rows"], lists["tokens"], lists["planes"] = rows, tokens, extent.planes
                lists["items_max"], lists["base_units"] = extent.items, base_units
                lists["refinement"], lists["gains"] = refinement, answers.gains[i]
                job["parents"] = level - 2 * rows * tokens if refinement else 0
                job["words"] = address(self._empty(2 * extent.items + 2 * STATES_BYTES))
                job["escapes"] = address(self._empty(2 * extent.items))
                job["sizes"] = address(sizes) + 4 * PIECES * (i * refinements + refinement)
                total += 4 * extent.items + 2 * STATES_BYTES
        sent, lists_sent = self._sent(jobs), self._sent(np.ascontiguousarray(jobs["lists"]))
        rans, rows_max = self._model.rans, self._rows_max
        self._kernels.launch("tide_place", (address(lists_sent), count, rans.lanes, rows_max), count, THREADS)
        args = (address(sent), count, rans.codes, rows_max)
        self._kernels.launch("tide_put", args, warp_blocks(count * rows_max), THREADS)
        self._kernels.launch("tide_encode", args, warp_blocks(2 * count), THREADS)
        return self._packed(sent, sizes, count, total)

    def _packed(self, sent: torch.Tensor, sizes: torch.Tensor, count: int, total: int) -> _Written:
        with self._kernels.queue():
            each = sizes[: 4 * PIECES * count].view(torch.int32).to(torch.int64)
            ends = self._keep(torch.cumsum(each, 0))
            starts = self._keep(ends - each)
        packed = self._empty(total)
        args = (address(sent), count, address(starts), address(packed))
        self._kernels.launch("tide_pack", args, warp_blocks(PIECES * count), THREADS)
        with self._kernels.queue():
            found: NDArray[np.int64] = ends.cpu().numpy().copy()
        return _Written(self._found(packed, int(found[-1])).copy(), found)

    def _keep_apart(self, sources: torch.Tensor, answers: _Answers) -> list[NDArray[np.float32]]:
        """Return the tokens that stand apart of each range: (layers, 2, count, kv_heads, head_dim)."""
        layout, counts = self._layout, answers.apart.sum(axis=1).astype(np.int64)
        channels = layout.kv_heads * layout.head_dim
        rooms, positions, outs, of_source = [], [], [], []
        for i, known in enumerate(self._ranges):
            layers, count = known.layers[1] - known.layers[0], int(counts[i])
            room = self._empty(8 * layers * count * channels)
            rooms.append((room, (layers, 2, count, layout.kv_heads, layout.head_dim)))
            at = address(self._sent(np.flatnonzero(answers.apart[i]).astype(np.uint16)))
            for place in known.rows.places:
                first = place.group.layer_start - known.layers[0]
                positions.append(at)
                outs.append(address(room) + 8 * first * count * channels)
                of_source.append(count)
        tables = [self._sent(np.array(each, dtype=np.uint64)) for each in (positions, of_source, outs)]
        most = int(counts.max(initial=0))
        args = (address(sources), len(of_source), *map(address, tables), most, channels)
        self._kernels.launch("tide_apart", args, warp_blocks(len(of_source) * most), THREADS)
        return [self._found(room, 4 * int(np.prod(shape))).view(np.float32).reshape(shape) for room, shape in rooms]

    def _joined(self, index: int, written: _Written, base: Base) -> list[Section]:
        """Return the sections of one range."""
        known, refinements, found = self._ranges[index], self._steps.refinements + 1, []
        for refinement in range(refinements):
            first = PIECES * (index * refinements + refinement)
            start = int(written.ends[first - 1]) if first else 0
            bounds = [start, *written.ends[first : first + PIECES].tolist()]
            sizes = [stop - begin for begin, stop in pairwise(bounds)]
            streams = Streams(written.data[bounds[0] : bounds[2]].tobytes(), sizes[:2])
            escapes = written.data[bounds[2] : bounds[4]].copy().view("<i2").astype(np.int16)
            coded = SectionBytes(self._steps, CodedLists(streams, escapes, (sizes[2] // 2, sizes[3] // 2)))
            data = join_refinement(coded) if refinement else join_base(coded, base)
            found.append(Section(SectionId(SectionKind.DATA, refinement, *known.layers), data))
        return found
