"""The half of a connector beside the engine's pages: loads blocks into them and stores blocks from them.

Invariant: nothing is written to a page after the load that it was given for has been reported as ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec
from kvtide.engines.paged.counts import WorkerCounts
from kvtide.engines.paged.loads import KeptBlocks, PageLoad, StreamedPages, part_loads, touch_rooms
from kvtide.engines.paged.pages import HostPages, PagePool
from kvtide.engines.paged.sequence import AdviceOrder, BlockRef, LoadTiming, StepCommands, StoreOrder, WorkerReport
from kvtide.engines.settings import StreamOrder
from kvtide.plan import PrefillSpeed
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import QUALITY_SLACK, LoadReport, MissReason, Whole
from kvtide.types import BlockKey, ObjectId, Section

if TYPE_CHECKING:
    from kvtide.engines.paged.parts import PartLoads
    from kvtide.plan.base import StreamPolicy

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
    """Loads that ended, by request, without those within a step; the requests that did not get all; pages unfilled."""

    requests: set[str]
    failed: set[str]
    failed_pages: set[int]


class WorkerHalf:
    """Carries out orders on one shard of the model. The engine's thread calls it; loads run in threads of their own.

    states: the pages of layers whose past is one state, each beside the last page of a block.
    """

    def __init__(
        self,
        cache: Cache,
        pool: PagePool,
        shard: int,
        label: str,
        clock: Clock,
        kept_bytes_max: int = 0,
        states: PagePool | None = None,
        policy: StreamPolicy | None = None,
        share: float = 1.0,
        tail_tokens: int = 0,
    ) -> None:
        """policy: what streamed loads ask for first. share: of other loads' tokens, those to be exact.

        tail_tokens: of a piece of a block, for HostPages alone.
        """
        assert not tail_tokens or isinstance(pool, HostPages)
        self._tail_tokens = tail_tokens
        self.cache = cache
        self._states = states
        self._kept = KeptBlocks(kept_bytes_max, pool.layout.raw_bytes, cache.tiers.is_valid)
        self._pool = pool
        self._tokens = pool.layout.tokens
        self._shard = shard
        self._label = label
        self._clock = clock
        self._policy = policy
        self._parts = part_loads(cache, share, clock)
        self._loaders = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvtide-connector")
        self._changed = threading.Condition()
        self._loads: dict[str, PageLoad] = {}
        self._ended: list[str] = []
        self._failed_pages: set[int] = set()
        self._broken: set[str] = set()
        self._step = 0
        # Requests whose load within a step failed, and that step: what they compute is on top of nothing.
        self._failed_requests: dict[str, int] = {}
        self._timings: list[LoadTiming] = []
        self._lost: list[BlockKey] = []
        self._failed: list[str] = []
        self._rough: list[str] = []
        self._counts = WorkerCounts()
        self._is_closed = False

    def take_memory(self) -> None:
        """Have the system give memory before blocks need it: the engine's thread would wait for it to be cleared.

        Goes on in the background, behind all that computes, until it is done or this is closed.
        """
        # What is captured of a device lies there.
        kept_bytes = self._kept.bytes_max if self._pool.memory is None else 0
        touch = partial(touch_rooms, self.cache.tiers, kept_bytes, self._pool.layout.raw_bytes, self._is_open)
        touch_all = partial(self.cache.guarded, "take memory", touch, None)
        threading.Thread(target=touch_all, name="kvtide-memory", daemon=True).start()

    def _is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        """End all loads and store what is queued, as long as the cache may. Idempotent."""
        self._is_closed = True
        for load in list(self._loads.values()):
            load.close()
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self.cache.close()
        self.cache.guarded("close", self._pool.close, None)

    def start(self, orders: StepCommands) -> None:
        """Start the step's loads, and pass on advice."""
        for advice in orders.advice:
            self._loaders.submit(self._advise, advice)
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

    def _advise(self, advice: AdviceOrder) -> None:
        ids = [self.cache.tiers.named(block.ids[self._shard]) for block in advice.blocks]
        if advice.hint is not None:
            self.cache.advise(ids, advice.hint)
        if advice.prefetch:
            self.cache.prefetch([self._meta(block) for block in advice.prefetch])

    def _follow(self) -> bool:
        self._pool.follow()
        return True

    def _run(self, load: PageLoad) -> None:
        kept = load.restore_kept(self.cache.guarded)
        is_whole = kept == len(load.order.blocks)
        report = LoadReport(kept, 0, None) if is_whole else self._load_rest(load, kept)
        if self._states is not None and report.blocks == len(load.order.blocks):
            report = self._load_states(load, report, self._states)
        if load.order.tail and report.blocks == len(load.order.blocks):
            report = self._load_tail(load, report)
        self._finish(load, report)

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
        if load.order.stream is not None:
            report = self._stream(load, kept, load.order.stream)
        elif self._parts is not None:
            report = self._load_part(load, kept, self._parts)
        else:
            report = self._load_whole(load, kept)
        return report._replace(blocks=kept + report.blocks)

    def _metas(self, load: PageLoad, first: int) -> list[BlockMeta]:
        return [self._meta(block, load.order.is_latest) for block in load.order.blocks[first:]]

    def _left_s(self, load: PageLoad) -> float:
        return max(0.0, load.started_s + load.order.deadline_s - self._clock.monotonic_s())

    def _load_part(self, load: PageLoad, kept: int, parts: PartLoads) -> LoadReport:
        """Load a share of the tokens exactly and the rest rough, or all, as is faster."""

        def sink(position: int, bits: BlockBits) -> None:
            load.sink(kept + position, bits, is_kept=False)

        def whole(blocks: int) -> LoadReport:
            return self._load_whole(load, kept + blocks)

        found = parts.load(self._metas(load, kept), sink, self._left_s(load), whole)
        if found.is_rough:
            with self._changed:
                self._rough.append(load.order.request)
                self._counts.add(part_loads=1)
        return found.load

    def _load_whole(self, load: PageLoad, kept: int) -> LoadReport:
        metas = self._metas(load, kept)

        def sink(position: int, bits: BlockBits) -> None:
            load.sink(kept + position, bits)

        def take(position: int, codec: Codec, sections: Sequence[Section]) -> bool:
            return load.take(kept + position, metas[position], codec, sections)

        def take_layers(position: int, first: int, layers: Sequence[BlockBits]) -> None:
            load.take_layers(kept + position, first, layers)

        by_layer = take_layers if load.order.is_in_step and isinstance(self._pool, HostPages) else None
        return self.cache.load(metas, Whole(sink, take, by_layer), self._left_s(load))

    def _load_states(self, load: PageLoad, rows: LoadReport, states: PagePool) -> LoadReport:
        """Load the states after the blocks; without them nothing can go on from there."""
        meta = self._state_meta(load.order.blocks[-1], load.order.is_latest)
        found = self.cache.load([meta], Whole(lambda _, bits: load.take_states(states, bits)), self._left_s(load))
        if found.blocks:
            load.state_bytes = found.stored_bytes
            return rows._replace(stored_bytes=rows.stored_bytes + found.stored_bytes)
        load.missed_states = meta.id
        return LoadReport(0, rows.stored_bytes, found.reason)

    def _load_tail(self, load: PageLoad, rows: LoadReport) -> LoadReport:
        """Load the pieces after the blocks; a page of which some are missing is computed."""
        metas = [self._meta(piece, load.order.is_latest, is_tail=True) for piece in load.order.tail]
        found = self.cache.load(metas, Whole(load.take_piece), self._left_s(load))
        load.pieces = found.blocks
        return rows._replace(stored_bytes=rows.stored_bytes + found.stored_bytes, reason=found.reason)

    def _stream(self, load: PageLoad, kept: int, how: StreamOrder) -> LoadReport:
        """Bring the base of all blocks, refinements until then, and write each page once."""
        # Who streams nothing needs none of it.
        from kvtide.store.load.run import FetchLimits, LoadRequest
        from kvtide.store.load.streamed import Streamed

        left_s, until_s = self._left_s(load), load.started_s + how.within_s - self._clock.monotonic_s()
        goal = (self.cache.quality if how.quality is None else how.quality) * (1 + QUALITY_SLACK)
        request = LoadRequest(NO_PREFILL, max(0.0, until_s), goal)
        limits = FetchLimits(read_s_max=max(left_s, READ_S_MIN))
        streamed = Streamed(StreamedPages(load, kept), request, self._policy, computes=False, limits=limits)
        report = self.cache.load(self._metas(load, kept), streamed, left_s)
        if streamed.report is not None and streamed.report.is_rougher_than(self.cache.quality):
            with self._changed:
                self._rough.append(load.order.request)
                self._counts.add(rough_loads=1, streamed_kl=streamed.report.kl)
        return report

    def _end(self, load: PageLoad, report: LoadReport) -> None:
        unfilled = load.unfilled(report.blocks)
        if not load.order.is_in_step:
            self._ended.append(load.order.request)
            self._broken.update([load.order.request] if unfilled else [])
        self._failed_pages.update(unfilled)
        if unfilled and load.order.is_in_step:
            self._failed_requests[load.order.request] = self._step

    def _note(self, load: PageLoad, report: LoadReport, seconds: float) -> None:
        wanted, is_whole = self._tokens_of(len(load.order.blocks), len(load.order.tail)), load.is_whole(report.blocks)
        loaded = self._tokens_of(report.blocks, load.pieces)
        self._counts.add(load_seconds=seconds, loaded_tokens=loaded)
        self._counts.add_load(load, report, self._states is not None)
        if not is_whole:
            self._failed.append(load.order.request)
        # A streamed load takes the time that it was given, which says nothing of a link.
        is_timed = load.order.stream is None or seconds > load.order.stream.within_s
        if report.reason is MissReason.DEADLINE:
            seconds, loaded = seconds * wanted / (loaded or 1), wanted
        elif not is_whole:
            missed = load.missed_states or load.first_missing(report.blocks).ids[self._shard]
            self._lost.append(missed.key)
        if is_timed:
            self._timings.append(LoadTiming(loaded, seconds))

    def _tokens_of(self, blocks: int, pieces: int) -> int:
        return blocks * self._tokens + pieces * self._tail_tokens

    def _meta(self, block: BlockRef, is_latest: bool = False, is_tail: bool = False) -> BlockMeta:
        object_id = self.cache.tiers.named(block.ids[self._shard], is_latest)
        layout = replace(self._pool.layout, tokens=self._tail_tokens) if is_tail else self._pool.layout
        return BlockMeta(object_id, block.parents[self._shard], block.start, layout, self._label)

    def _state_meta(self, block: BlockRef, is_latest: bool = False) -> BlockMeta:
        assert self._states is not None
        object_id, end = self.cache.tiers.named(block.states[self._shard], is_latest), block.start + self._tokens - 1
        # Each stands alone, at its block's last token.
        return BlockMeta(object_id, BlockKey(object_id.namespace), end, self._states.layout, f"{self._label} states")

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
            is_taken = is_wanted and bool(self.cache.store([self._pending(order)]))
            if not is_taken:
                gaps.add(order.request)
                self._note_lost(order)
            with self._changed:
                group = "states" if order.is_state else "tail" if order.is_tail else "rows"
                self._counts.add_group(group, "taken" if is_taken else "dropped")

    def _pending(self, order: StoreOrder) -> PendingBlock:
        if order.is_state and self._states is not None:
            capture = self._states.capture
            # They save the whole prefix.
            cost = float(order.block.start // self._tokens + 1)
            return PendingBlock(self._state_meta(order.block), lambda: capture(order.pages).block, cost, is_exact=True)
        meta = self._meta(order.block, is_tail=order.is_tail)
        if order.is_tail:
            return PendingBlock(meta, partial(self._capture_piece, order))
        return PendingBlock(meta, partial(self._capture, order, meta.id))

    def _capture_piece(self, order: StoreOrder) -> BlockSource:
        assert isinstance(self._pool, HostPages)
        start = order.block.start % self._pool.page_tokens
        bits = self._pool.capture_tokens(order.pages[0], start, start + self._tail_tokens)
        return lambda: bits

    def _capture(self, order: StoreOrder, object_id: ObjectId) -> BlockSource:
        captured = self._pool.capture(order.pages)
        self._kept.put(object_id, captured)
        return captured.block

    def _note_lost(self, order: StoreOrder) -> None:
        """Have the scheduler half forget a block that it takes for stored."""
        with self._changed:
            ids = order.block.states if order.is_state else order.block.ids
            self._lost.append(ids[self._shard].key)

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
            outcome = LoadOutcome(set(self._ended), self._broken, self._failed_pages)
            self._ended, self._broken, self._failed_pages = [], set(), set()
        return outcome

    def report(self, step: int) -> WorkerReport:
        """Return what the scheduler half should know, once."""
        with self._changed:
            timings, lost, failed = tuple(self._timings), tuple(self._lost), tuple(self._failed)
            moves = self.cache.moves.take() if self.cache.moves is not None else ()
            found = WorkerReport(step, timings, lost, failed, tuple(self._rough), moves)
            self._timings, self._lost, self._failed, self._rough = [], [], [], []
        return found

    def take_counts(self) -> dict[tuple[str, ...], float]:
        """Return what was counted since the last call, by name and labels; see `WorkerCounts`."""
        totals = self.cache.profiles.totals()
        with self._changed:
            return self._counts.take(totals)

    def check(self) -> None:
        """AssertionError if a load is left over. Call it while no request runs."""
        with self._changed:
            assert not self._loads, f"loads are left: {sorted(self._loads)}"
            assert not self._ended
        self._kept.check()
