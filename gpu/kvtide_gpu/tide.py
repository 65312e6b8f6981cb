"""Objects of the codec tide to pages, decoded on a device: many blocks at a time, section by section as they arrive.

The bytes are those of `kvtide.codec.tide`. Nothing comes back to the host but, at the end, whether a block was whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.codec.tide.section import SectionBytes, split_base, split_refinement
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionKind
from kvtide_gpu.kernels import THREADS, Kernels, Staging, address, warp_blocks
from kvtide_gpu.targets import PageTarget, StoredBlock
from kvtide_gpu.tide_jobs import DeviceRange, GroupJobs, RangePlan, SectionJobs
from kvtide_gpu.tide_model import DeviceModel

MATRIX_THREADS = 128
# Ranges at a final step that are remembered: objects of one store have few steps.
PLANS_MAX = 128


class DeviceBlock:
    """A block under way. Sections may come in any order; those after a gap wait for it to close.

    fault: why its sections can't be decoded, as far as the host sees it.
    """

    def __init__(self, kernels: Kernels, meta: BlockMeta, token_starts: NDArray[np.int64]) -> None:
        """token_starts: of the pages that it will be written to (`PageTarget.token_starts`)."""
        if token_starts.shape != (meta.layout.tokens,) or token_starts.dtype != np.int64:
            raise ValueError(f"expected a place for each of {meta.layout.tokens} tokens, got {token_starts.shape}")
        self.meta = meta
        self.token_starts = token_starts
        self.ranges: dict[int, DeviceRange] = {}
        self.waiting: dict[tuple[int, int], Section] = {}
        self.fault: CorruptPayload | None = None
        with kernels.queue():
            self.status = torch.zeros(1, dtype=torch.int32, device=kernels.device)


class _Ready(NamedTuple):
    """A section that can be decoded now."""

    block: DeviceBlock
    range: DeviceRange
    refinement: int
    found: SectionBytes


class DeviceTide:
    """Decodes into one engine's pages. One thread at a time; blocks of one model.

    A block is written whole or, if anything in its streams is wrong, not at all.
    """

    def __init__(self, model: DeviceModel, target: PageTarget) -> None:
        """ValueError for pages of another shape than the model's."""
        if not model.model.profile.fits(target.layout):
            raise ValueError("the pages are not of the profile's model")
        self._model = model
        self._kernels = model.kernels
        self._target = target
        staging = Staging(self._kernels)
        staging.add(target.bases)
        self._bases = staging.send()
        self._plans: OrderedDict[tuple[int, int], RangePlan] = OrderedDict()

    def _plan(self, layers: tuple[int, int], final_units: int) -> RangePlan:
        key = (layers[0], final_units)
        if key not in self._plans:
            self._plans[key] = RangePlan(self._model, layers, final_units)
            if len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def block(self, meta: BlockMeta, token_starts: NDArray[np.int64]) -> DeviceBlock:
        """Return a block to be fed."""
        return DeviceBlock(self._kernels, meta, token_starts)

    def decode(self, stored: Sequence[StoredBlock], wait: Callable[[], None]) -> list[bool]:
        """Write blocks to their pages, whole or not at all; `wait` is called before the first page is written."""
        blocks = [self.block(each.meta, each.token_starts) for each in stored]
        self.feed([(block, each.sections) for block, each in zip(blocks, stored, strict=True)])
        wait()
        self.write(blocks)
        return [fault is None for fault in self.check(blocks)]

    def feed(self, arrivals: Sequence[tuple[DeviceBlock, Sequence[Section]]]) -> None:
        """Queue the decoding of sections, as far as what comes before them is here. Faults are noted in their block."""
        blocks = {id(block): block for block, _ in arrivals}
        for block, sections in arrivals:
            self._sort_in(block, sections)
        while ready := [each for block in blocks.values() for each in self._ready(block)]:
            self._decode(ready)

    def _sort_in(self, block: DeviceBlock, sections: Sequence[Section]) -> None:
        step = self._model.model.section_layers
        for section in sections:
            kind, refinement, start, stop = section.id
            known = block.ranges.get(start)
            is_new = (start, refinement) not in block.waiting and refinement >= (known.sections if known else 0)
            if kind is not SectionKind.DATA or start % step or stop != start + step or not is_new:
                block.fault = CorruptPayload(f"tide: {section.id} is no section of this profile, or came twice")
            block.waiting[start, refinement] = section

    def _ready(self, block: DeviceBlock) -> list[_Ready]:
        """Take the next section of each range, if it is here."""
        found: list[_Ready] = []
        nexts = {start: known.sections for start, known in block.ranges.items()}
        for start, refinement in list(block.waiting):
            if block.fault is not None or refinement != nexts.get(start, 0):
                continue
            known = block.ranges.get(start)
            section = block.waiting.pop((start, refinement))
            try:
                found.append(self._parsed(block, section, known))
            except CorruptPayload as error:
                block.fault = error
        return found

    def _parsed(self, block: DeviceBlock, section: Section, known: DeviceRange | None) -> _Ready:
        _, refinement, start, stop = section.id
        data = memoryview(section.data)
        if known is None:
            coded, base = split_base(data, (stop - start, *block.meta.layout.shape[1:]))
            plan = self._plan((start, stop), coded.steps.final_units)
            known = DeviceRange(self._kernels, plan, coded.steps, base)
            block.ranges[start] = known
        else:
            coded = split_refinement(data)
            if coded.steps != known.steps or refinement > known.steps.refinements:
                raise CorruptPayload(f"tide: refinement {refinement} has {coded.steps}, its base {known.steps}")
        if coded.steps.is_trellis:
            raise CorruptPayload("tide: levels along a trellis are the processor's")
        # A step that is too fine shows here, and takes no other block along.
        known.plan.extent(known.tokens, known.base_units, refinement)
        known.sections += 1
        return _Ready(block, known, refinement, coded)

    def _decode(self, ready: Sequence[_Ready]) -> None:
        jobs = SectionJobs(self._kernels)
        for block, known, refinement, found in ready:
            jobs.add(known, refinement, found, address(block.status))
        jobs_at, _kept = jobs.send()
        args = (jobs_at, len(jobs), self._model.rans.lanes, jobs.rows_max)
        self._kernels.launch("tide_place", args, len(jobs), THREADS)
        self._kernels.launch("tide_decode", args, warp_blocks(2 * len(jobs)), THREADS)
        self._kernels.launch("tide_deal", args, warp_blocks(len(jobs) * jobs.rows_max), THREADS)

    def write(self, blocks: Sequence[DeviceBlock]) -> None:
        """Queue writing blocks to their pages, each range of layers at the step that has come so far.

        Who may still use the pages must come before: `Kernels.follow` or `wait_for`. Blocks without all bases are left
        out; a later call writes finer values over these.
        """
        jobs = GroupJobs(self._model, self._target, address(self._bases))
        for block in filter(self._has_bases, blocks):
            starts_at = jobs.add_starts(block.token_starts)
            for known in block.ranges.values():
                jobs.add(known, block.meta, starts_at, address(block.status))
        if not jobs.count:
            return
        jobs_at, _kept = jobs.send()
        args = (jobs_at, jobs.count, jobs.tiles_max)
        tiles = jobs.count * jobs.tiles_max
        if self._model.model.groups[0].order.size:
            self._kernels.launch("tide_restore_ordered", args, warp_blocks(tiles), THREADS)
        else:
            self._kernels.launch("tide_pull", args, warp_blocks(tiles), THREADS)
            self._kernels.launch("tide_restore", args, tiles, MATRIX_THREADS)
        self._model.trim()

    def _has_bases(self, block: DeviceBlock) -> bool:
        ranges = self._model.model.profile.layers // self._model.model.section_layers
        return block.fault is None and len(block.ranges) == ranges

    def check(self, blocks: Sequence[DeviceBlock]) -> list[CorruptPayload | None]:
        """Wait for all that is queued, and return what is wrong with each block, None if it was written."""
        # Here, and not on torch's current stream: that is the engine's.
        with self._kernels.queue():
            statuses = torch.cat([block.status for block in blocks]).tolist() if blocks else []
        self._kernels.finish()
        found = []
        for block, status in zip(blocks, statuses, strict=True):
            fault = block.fault
            if fault is None and not self._has_bases(block):
                fault = CorruptPayload("tide: the base of some layers is missing")
            if fault is None and status:
                fault = CorruptPayload("tide: streams or lists are not of the lengths that they must have")
            found.append(fault)
        return found
