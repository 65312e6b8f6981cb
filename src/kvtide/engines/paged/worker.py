"""The half of a connector beside the engine's pages: loads blocks into them and stores blocks from them.

Invariant: nothing is written to a page after the load that it was given for has been reported as ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec
from kvtide.engines.paged.kept import KeptBlocks
from kvtide.engines.paged.orders import BlockRef, LoadOrder, LoadTiming, StepCommands, StoreOrder, WorkerReport
from kvtide.engines.paged.pages import Captured, LayeredPages, PagePool
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import Guarded, LoadReport, MissReason, Whole
from kvtide.types import BlockKey, ObjectId, Section

# Requests that load at the same time; more wait their turn.
LOADS_AT_ONCE = 4
# A step without work waits so long for a load to end, instead of spinning through the engine's loop.
IDLE_WAIT_S = 0.005
# As much is copied in 10 ms or so, for which the engine may stand still.
COPY_BYTES_MAX = 128 << 20

_Result = TypeVar("_Result")


class WriteGate:
    """Lets writers in until it is closed; closing waits for those inside. `changed` guards what writers share.

    Keeps late ones out: who was given a place to write may come back after the place is somebody else's.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self._writers = 0

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Be counted as a writer for the time of the `with`; False if the gate is closed and nothing may be written."""
        with self.changed:
            is_in = not self.is_closed
            self._writers += is_in
        try:
            yield is_in
        finally:
            with self.changed:
                self._writers -= is_in
                if self.is_closed:
                    self.changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more; return when nobody is inside. Idempotent."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._writers == 0)


class LoadOutcome(NamedTuple):
    """Loads that ended: of which requests, those within a step apart, and the pages that were not filled."""

    requests: set[str]
    failed_pages: set[int]


class _Load:
    """One load. Its sink is a BlockSink that may be called too late: then it writes nothing."""

    def __init__(
        self, order: LoadOrder, ids: Sequence[ObjectId], pool: PagePool, kept: KeptBlocks, started_s: float
    ) -> None:
        self.order = order
        self.started_s = started_s
        self._ids = ids
        self._pool = pool
        self._kept = kept
        self._captured = [] if order.is_latest else kept.leading(ids)
        self._pages_per_block = pool.layout.tokens // pool.page_tokens
        self._gate = WriteGate()
        # Of each layer, the blocks that are still to come.
        self._missing = [len(order.blocks)] * pool.layout.layers

    @property
    def is_kept(self) -> bool:
        """Tell whether nothing has to come from a tier."""
        return len(self._captured) == len(self._ids)

    def restore_kept(self, guarded: Guarded) -> int:
        """Copy the leading blocks that this process has kept, up to one that can't be; return how many."""
        for position, block in enumerate(self._captured):
            if not guarded("restore", partial(self._restore, position, block), False):
                return position
        return len(self._captured)

    def _restore(self, position: int, block: Captured) -> bool:
        pages, skip_pages = self._room(position)
        with self._gate.enter() as is_in:
            if is_in:
                block.restore(pages, skip_pages)
                self._note_layers()
        return True

    def sink(self, position: int, bits: BlockBits) -> None:
        pages, skip_pages = self._room(position)
        with self._gate.enter() as is_in:
            if is_in:
                self._pool.scatter(bits, pages, skip_pages)
                self._note_layers()
                self._keep(position, pages, skip_pages)

    def take(self, position: int, meta: BlockMeta, codec: Codec, sections: Sequence[Section]) -> bool:
        """Let the pool decode a block into its pages. False if it does not."""
        pages, skip_pages = self._room(position)
        with self._gate.enter() as is_in:
            if is_in:
                if not self._pool.decode(codec, meta, sections, pages, skip_pages):
                    return False
                self._note_layers()
                self._keep(position, pages, skip_pages)
        return True

    def take_layers(self, position: int, first: int, layers: Sequence[BlockBits]) -> None:
        """Write layers of a block, from layer `first` on, into a pool of LayeredPages."""
        assert isinstance(self._pool, LayeredPages)
        pages, skip_pages = self._room(position)
        with self._gate.enter() as is_in:
            if is_in:
                self._pool.scatter_layers(first, layers, pages, skip_pages)
                stop = first + len(layers)
                self._note_layers(first, stop)
                if stop == self._pool.layout.layers:
                    self._keep(position, pages, skip_pages)

    def _keep(self, position: int, pages: Sequence[int], skip_pages: int) -> None:
        """Keep a block that was loaded before as the pages hold it."""
        if not skip_pages and self._kept.is_loaded_again(self._ids[position]):
            captured = self._pool.capture(pages)
            # The engine's thread is another, which may give the pages away once the load has ended.
            captured.wait()
            self._kept.put(self._ids[position], captured)

    def _room(self, position: int) -> tuple[Sequence[int], int]:
        """Return the pages that a block fills, and how many of its pages come before them."""
        start = position * self._pages_per_block - self.order.skip_pages
        return self.order.pages[max(0, start) : start + self._pages_per_block], max(0, -start)

    def _note_layers(self, first: int = 0, stop: int | None = None) -> None:
        with self._gate.changed:
            for layer in range(first, self._pool.layout.layers if stop is None else stop):
                self._missing[layer] -= 1
            if 0 in self._missing[first:stop]:
                self._gate.changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Wait until the layer is whole or the load has ended."""
        with self._gate.changed:
            self._gate.changed.wait_for(lambda: self._gate.is_closed or self._missing[layer] == 0)

    def close(self) -> None:
        """Let nothing more be written; return when nothing is. Idempotent."""
        self._gate.close()

    def unfilled(self, blocks: int) -> tuple[int, ...]:
        """Return the pages behind the first `blocks` blocks."""
        return self.order.pages[max(0, blocks * self._pages_per_block - self.order.skip_pages) :]


class WorkerHalf:
    """Carries out orders on one shard of the model. The engine's thread calls it; loads run in threads of their own."""

    def __init__(
        self, cache: Cache, pool: PagePool, shard: int, label: str, clock: Clock, kept_bytes_max: int = 0
    ) -> None:
        self.cache = cache
        self._kept = KeptBlocks(kept_bytes_max, pool.layout.raw_bytes, cache.tiers.is_valid)
        self._pool = pool
        self._shard = shard
        self._label = label
        self._clock = clock
        self._loaders = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvtide-connector")
        self._changed = threading.Condition()
        self._loads: dict[str, _Load] = {}
        self._ended: list[str] = []
        self._failed_pages: set[int] = set()
        self._step = 0
        # Requests whose load within a step failed, and that step: what they compute is on top of nothing.
        self._failed_requests: dict[str, int] = {}
        self._timings: list[LoadTiming] = []
        self._lost: list[BlockKey] = []
        self._failed: list[str] = []

    def close(self) -> None:
        """End all loads and store what is queued, as long as the cache may. Idempotent."""
        for load in list(self._loads.values()):
            load.close()
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self.cache.close()
        self.cache.guarded("close", self._pool.close, None)

    def start(self, orders: StepCommands) -> None:
        """Start the step's loads."""
        self._step = orders.step
        # Once the scheduler has heard of it, the engine computes anew what was not filled.
        self._failed_requests = {name: step for name, step in self._failed_requests.items() if step > orders.heard}
        has_pages = not orders.loads or self.cache.guarded("follow", self._follow, False)
        for order in orders.loads:
            ids = [self.cache.tiers.named(block.ids[self._shard]) for block in order.blocks]
            load = _Load(order, ids, self._pool, self._kept, self._clock.monotonic_s())
            with self._changed:
                assert order.request not in self._loads, f"{order.request} loads already"
                self._loads[order.request] = load
            if not has_pages:
                # The engine may still be at work on the pages, and nobody can tell.
                self._finish(load, LoadReport(0, 0, MissReason.FAULT))
                continue
            # A copy is over sooner than a thread has woken up.
            if load.is_kept and len(ids) * self._pool.layout.raw_bytes <= COPY_BYTES_MAX:
                self._run(load)
            else:
                self._loaders.submit(self._run, load)

    def _follow(self) -> bool:
        self._pool.follow()
        return True

    def _run(self, load: _Load) -> None:
        kept = load.restore_kept(self.cache.guarded)
        is_whole = kept == len(load.order.blocks)
        self._finish(load, LoadReport(kept, 0, None) if is_whole else self._load_rest(load, kept))

    def _finish(self, load: _Load, report: LoadReport) -> None:
        load.close()
        seconds = self._clock.monotonic_s() - load.started_s
        with self._changed:
            if self._loads.pop(load.order.request, None) is None:
                return
            self._end(load, report)
            self._note(load, report, seconds)
            self._changed.notify_all()

    def _load_rest(self, load: _Load, kept: int) -> LoadReport:
        """Load what comes behind the blocks that were kept; those count as loaded."""
        metas = [self._meta(block, load.order.is_latest) for block in load.order.blocks[kept:]]
        left_s = load.started_s + load.order.deadline_s - self._clock.monotonic_s()

        def sink(position: int, bits: BlockBits) -> None:
            load.sink(kept + position, bits)

        def take(position: int, codec: Codec, sections: Sequence[Section]) -> bool:
            return load.take(kept + position, metas[position], codec, sections)

        def take_layers(position: int, first: int, layers: Sequence[BlockBits]) -> None:
            load.take_layers(kept + position, first, layers)

        by_layer = take_layers if load.order.is_in_step and isinstance(self._pool, LayeredPages) else None
        report = self.cache.load(metas, Whole(sink, take, by_layer), max(0.0, left_s))
        return report._replace(blocks=kept + report.blocks)

    def _end(self, load: _Load, report: LoadReport) -> None:
        unfilled = load.unfilled(report.blocks)
        if not load.order.is_in_step:
            self._ended.append(load.order.request)
        self._failed_pages.update(unfilled)
        if unfilled and load.order.is_in_step:
            self._failed_requests[load.order.request] = self._step

    def _note(self, load: _Load, report: LoadReport, seconds: float) -> None:
        wanted, tokens = len(load.order.blocks), self._pool.layout.tokens
        if report.blocks < wanted:
            self._failed.append(load.order.request)
        if report.reason is MissReason.DEADLINE:
            self._timings.append(LoadTiming(wanted * tokens, seconds * wanted * tokens / (report.blocks * tokens or 1)))
            return
        self._timings.append(LoadTiming(report.blocks * tokens, seconds))
        if report.blocks < wanted:
            self._lost.append(load.order.blocks[report.blocks].ids[self._shard].key)

    def _meta(self, block: BlockRef, is_latest: bool = False) -> BlockMeta:
        object_id = self.cache.tiers.named(block.ids[self._shard], is_latest)
        return BlockMeta(object_id, block.parents[self._shard], block.start, self._pool.layout, self._label)

    def wait_layer(self, layer: int) -> None:
        """Wait until what is being loaded within the step has this layer whole, or has failed."""
        for load in self._loads_in_step():
            load.wait_layer(layer)

    def wait_loads(self) -> None:
        """Wait until nothing is being loaded within the step; each load has a deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loads_in_step())

    def _loads_in_step(self) -> list[_Load]:
        with self._changed:
            return [load for load in self._loads.values() if load.order.is_in_step]

    def store(self, orders: StepCommands) -> None:
        """Copy the blocks that the step completed and queue them. What the queue has no room for is dropped."""
        gaps: set[str] = set()
        for order in orders.stores:
            # What was computed on top of pages that were never filled is no cache of anything, and nothing behind a gap
            # could be matched.
            is_wanted = order.request not in self._failed_requests and order.request not in gaps
            meta = self._meta(order.block)
            pending = PendingBlock(meta, partial(self._capture, order, meta.id))
            if not is_wanted or not self.cache.store([pending]):
                gaps.add(order.request)
                self._note_lost(order)

    def _capture(self, order: StoreOrder, object_id: ObjectId) -> BlockSource:
        captured = self._pool.capture(order.pages)
        self._kept.put(object_id, captured)
        return captured.block

    def _note_lost(self, order: StoreOrder) -> None:
        """Have the scheduler half forget a block that it takes for stored."""
        with self._changed:
            self._lost.append(order.block.ids[self._shard].key)

    def ended(self, finished: Collection[str], is_idle: bool) -> LoadOutcome:
        """Return what has ended since the last call; loads of `finished` requests are given up.

        If nothing is computed (`is_idle`) a load that runs is waited for, for at most IDLE_WAIT_S.
        """
        with self._changed:
            if is_idle and self._loads and not self._ended:
                self._changed.wait_for(lambda: self._ended, IDLE_WAIT_S)
            given_up = [self._loads.pop(request) for request in finished if request in self._loads]
        for load in given_up:
            load.close()
        with self._changed:
            self._ended += [load.order.request for load in given_up if not load.order.is_in_step]
            outcome = LoadOutcome(set(self._ended), self._failed_pages)
            self._ended, self._failed_pages = [], set()
        return outcome

    def report(self, step: int) -> WorkerReport:
        """Return what the scheduler half should know, once."""
        with self._changed:
            found = WorkerReport(step, tuple(self._timings), tuple(self._lost), tuple(self._failed))
            self._timings, self._lost, self._failed = [], [], []
        return found

    def check(self) -> None:
        """AssertionError if a load is left over. Call it while no request runs."""
        with self._changed:
            assert not self._loads, f"loads are left: {sorted(self._loads)}"
            assert not self._ended
        self._kept.check()
