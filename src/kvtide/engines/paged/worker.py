"""The half of a connector beside the engine's pages: loads blocks into them and stores blocks from them.

Invariant: nothing is written to a page after the load that it was given for has been reported as ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec
from kvtide.engines.paged.kept import KeptBlocks
from kvtide.engines.paged.loads import PageLoad, StreamedPages
from kvtide.engines.paged.orders import BlockRef, LoadTiming, StepCommands, StoreOrder, WorkerReport
from kvtide.engines.paged.pages import LayeredPages, PagePool
from kvtide.engines.settings import StreamOrder
from kvtide.plan import PrefillSpeed
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import QUALITY_SLACK, LoadReport, MissReason, Whole
from kvtide.types import BlockKey, ObjectId, Section

# Requests that load at the same time; more wait their turn.
LOADS_AT_ONCE = 4
# A step without work waits so long for a load to end, instead of spinning through the engine's loop.
IDLE_WAIT_S = 0.005
# As much is copied in 10 ms or so, for which the engine may stand still.
COPY_BYTES_MAX = 128 << 20
# Between steps nothing is computed beside a load: how fast the engine would be matters to nobody there.
NO_PREFILL = PrefillSpeed(1.0)
# A streamed load whose time is over still gets what is under way.
READ_S_MIN = 0.05

_Result = TypeVar("_Result")


class LoadOutcome(NamedTuple):
    """Loads that ended: of which requests, those within a step apart, and the pages that were not filled."""

    requests: set[str]
    failed_pages: set[int]


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
        self._loads: dict[str, PageLoad] = {}
        self._ended: list[str] = []
        self._failed_pages: set[int] = set()
        self._step = 0
        # Requests whose load within a step failed, and that step: what they compute is on top of nothing.
        self._failed_requests: dict[str, int] = {}
        self._timings: list[LoadTiming] = []
        self._lost: list[BlockKey] = []
        self._failed: list[str] = []
        self._rough: list[str] = []
        self._counts: dict[str, float] = {}

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
        # Once the scheduler has heard of it, the engine computes again what was not filled.
        self._failed_requests = {name: step for name, step in self._failed_requests.items() if step > orders.heard}
        has_pages = not orders.loads or self.cache.guarded("follow", self._follow, False)
        for order in orders.loads:
            ids = [self.cache.tiers.named(block.ids[self._shard]) for block in order.blocks]
            load = PageLoad(order, ids, self._pool, self._kept, self._clock.monotonic_s())
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

    def _run(self, load: PageLoad) -> None:
        kept = load.restore_kept(self.cache.guarded)
        is_whole = kept == len(load.order.blocks)
        self._finish(load, LoadReport(kept, 0, None) if is_whole else self._load_rest(load, kept))

    def _finish(self, load: PageLoad, report: LoadReport) -> None:
        load.close()
        seconds = self._clock.monotonic_s() - load.started_s
        with self._changed:
            if self._loads.pop(load.order.request, None) is None:
                return
            self._end(load, report)
            self._note(load, report, seconds)
            self._changed.notify_all()

    def _load_rest(self, load: PageLoad, kept: int) -> LoadReport:
        """Load what comes after the blocks that were kept; those count as loaded."""
        metas = [self._meta(block, load.order.is_latest) for block in load.order.blocks[kept:]]
        left_s = max(0.0, load.started_s + load.order.deadline_s - self._clock.monotonic_s())
        if load.order.stream is not None:
            return self._stream(load, metas, kept, left_s, load.order.stream)

        def sink(position: int, bits: BlockBits) -> None:
            load.sink(kept + position, bits)

        def take(position: int, codec: Codec, sections: Sequence[Section]) -> bool:
            return load.take(kept + position, metas[position], codec, sections)

        def take_layers(position: int, first: int, layers: Sequence[BlockBits]) -> None:
            load.take_layers(kept + position, first, layers)

        by_layer = take_layers if load.order.is_in_step and isinstance(self._pool, LayeredPages) else None
        report = self.cache.load(metas, Whole(sink, take, by_layer), left_s)
        return report._replace(blocks=kept + report.blocks)

    def _stream(
        self, load: PageLoad, metas: Sequence[BlockMeta], kept: int, left_s: float, how: StreamOrder
    ) -> LoadReport:
        """Bring the base of all blocks, refinements until then, and write each page once."""
        # Who streams nothing needs none of it.
        from kvtide.store.load.job import LoadRequest
        from kvtide.store.load.run import FetchLimits
        from kvtide.store.load.streamed import Streamed

        until_s = load.started_s + how.within_s - self._clock.monotonic_s()
        goal = (self.cache.quality if how.quality is None else how.quality) * (1 + QUALITY_SLACK)
        request = LoadRequest(NO_PREFILL, max(0.0, until_s), goal)
        limits = FetchLimits(read_s_max=max(left_s, READ_S_MIN))
        streamed = Streamed(StreamedPages(load, kept), request, computes=False, limits=limits)
        report = self.cache.load(metas, streamed, left_s)
        if streamed.report is not None and streamed.report.is_rougher_than(self.cache.quality):
            with self._changed:
                self._rough.append(load.order.request)
                self._count(rough_loads=1, streamed_kl=streamed.report.kl)
        return report._replace(blocks=kept + report.blocks)

    def _end(self, load: PageLoad, report: LoadReport) -> None:
        unfilled = load.unfilled(report.blocks)
        if not load.order.is_in_step:
            self._ended.append(load.order.request)
        self._failed_pages.update(unfilled)
        if unfilled and load.order.is_in_step:
            self._failed_requests[load.order.request] = self._step

    def _note(self, load: PageLoad, report: LoadReport, seconds: float) -> None:
        wanted, tokens = len(load.order.blocks), self._pool.layout.tokens
        self._count(loads=1, loaded_tokens=report.blocks * tokens, loaded_bytes=report.stored_bytes)
        self._count(load_seconds=seconds, failed_loads=report.blocks < wanted)
        if report.blocks < wanted:
            self._failed.append(load.order.request)
        # A streamed load takes the time that it was given, which says nothing of a link.
        is_timed = load.order.stream is None or seconds > load.order.stream.within_s
        if report.reason is MissReason.DEADLINE:
            seconds, loaded = seconds * wanted * tokens / (report.blocks * tokens or 1), wanted
        else:
            loaded = report.blocks
            if report.blocks < wanted:
                self._lost.append(load.order.blocks[report.blocks].ids[self._shard].key)
        if is_timed:
            self._timings.append(LoadTiming(loaded * tokens, seconds))

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

    def _loads_in_step(self) -> list[PageLoad]:
        with self._changed:
            return [load for load in self._loads.values() if load.order.is_in_step]

    def store(self, orders: StepCommands) -> None:
        """Copy the blocks that the step completed and queue them. What the queue has no room for is dropped."""
        gaps: set[str] = set()
        for order in orders.stores:
            # What was computed on top of pages that were never filled is no cache of anything, and nothing after a gap
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
            timings, lost, failed = tuple(self._timings), tuple(self._lost), tuple(self._failed)
            found = WorkerReport(step, timings, lost, failed, tuple(self._rough))
            self._timings, self._lost, self._failed, self._rough = [], [], [], []
        return found

    def take_counts(self) -> dict[str, float]:
        """Return what ended loads brought since the last call: loads, tokens, bytes, seconds, those that were rough."""
        with self._changed:
            found, self._counts = self._counts, {}
        return found

    def _count(self, **counts: float) -> None:
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def check(self) -> None:
        """AssertionError if a load is left over. Call it while no request runs."""
        with self._changed:
            assert not self._loads, f"loads are left: {sorted(self._loads)}"
            assert not self._ended
        self._kept.check()
