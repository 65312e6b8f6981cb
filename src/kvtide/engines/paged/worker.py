"""The half of a connector beside the engine's pages: loads blocks into them and stores blocks from them.

Invariant: nothing is written to a page after the load that it was given for has been reported as ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec
from kvtide.config import step_back
from kvtide.engines.gate import WriteGate
from kvtide.engines.paged.pages import Captured, HostPages, PagePool
from kvtide.engines.paged.sequence import (
    AdviceOrder,
    BlockRef,
    EndedLoad,
    LoadOrder,
    StepCommands,
    StoreOrder,
    WorkerReport,
)
from kvtide.engines.settings import StreamOrder
from kvtide.evict import Recent
from kvtide.plan import PrefillSpeed
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import QUALITY_SLACK, LoadReport, MissReason, Whole
from kvtide.tier.faults import FaultGuard
from kvtide.tier.ram import MemoryTier
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
# A load in which something was raised that is no tier's fault.
FAULTY = LoadReport(0, 0, MissReason.FAULT)


class LoadOutcome(NamedTuple):
    """Loads that ended, by request, without those within a step; the requests that did not get all; pages unfilled."""

    requests: set[str]
    failed: set[str]
    failed_pages: set[int]


@dataclass(eq=False, repr=False)
class WorkerHalf:
    """Carries out orders on one shard for the engine's thread; loads run in others. states: pages of layers' states.

    is_refused: the pages are not to be used; every load fails at once, and nothing is stored. has_room: pieces of tails
    would not take the place of blocks, or they are not stored.
    """

    cache: Cache
    _pool: PagePool
    _shard: int
    _label: str
    _clock: Clock
    kept_bytes_max: InitVar[int] = 0
    _states: PagePool | None = None
    _tail_tokens: int = 0
    _is_refused: bool = False
    _has_room: Callable[[], bool] = lambda: True

    def __post_init__(self, kept_bytes_max: int) -> None:
        assert not self._tail_tokens or isinstance(self._pool, HostPages)
        self._kept = KeptBlocks(kept_bytes_max, self._pool.room_bytes, self.cache.tiers.is_valid)
        self._loaders = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvtide-connector")
        self._is_closed = False
        self._step = 0
        self._held: list[BlockKey] = []
        # The last step in which a load within it failed or came rough: what any request computes may be on top of it.
        self._failed_step = 0
        # Guards all below.
        self._changed = threading.Condition()
        self._loads: dict[str, PageLoad] = {}
        self._outcome = LoadOutcome(set(), set(), set())
        self._report = WorkerReport(0)
        self._counts: Counter[str] = Counter()

    def take_memory(self) -> None:
        """Take memory in the background before blocks need it: the engine's thread would wait for it to be cleared."""

        def take() -> None:
            # Behind all else that computes.
            step_back(TOUCH_NICE)
            self._pool.reserve(self._kept.count_max, lambda: not self._is_closed)
            memory = self.cache.tiers.open_tiers.get(MemoryTier.name)
            if isinstance(memory, MemoryTier):
                memory.touch(TOUCHED_BYTES_MAX, lambda: not self._is_closed)

        take_all = partial(self.cache.guarded, "take memory", take, None)
        threading.Thread(target=take_all, name="kvtide-memory", daemon=True).start()

    def close(self) -> None:
        """End all loads and store what is queued, as long as the cache may. Idempotent."""
        self._is_closed = True
        for load in list(self._loads.values()):
            load.close()
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self.cache.close()
        self.cache.guarded("close", self._pool.close, None)

    # Loads

    def start(self, orders: StepCommands) -> None:
        """Start the step's loads, and pass on advice."""
        for advice in orders.advice:
            self._submit(partial(self._advise, advice))
        self._step = orders.step
        held = [block.ids[self._shard].key for block in orders.held]
        self.cache.index.pin(held)
        self.cache.index.unpin(self._held)
        self._held = held
        can_follow = not orders.loads or self.cache.guarded("follow", self._follow, False)
        for order in orders.loads:
            ids = [self.cache.tiers.named(block.ids[self._shard]) for block in order.blocks]
            load = PageLoad(order, ids, self._pool, self._kept, self._clock.monotonic_s())
            with self._changed:
                assert order.request not in self._loads, f"{order.request} loads already"
                self._loads[order.request] = load
            if self._is_refused or not can_follow:
                # The engine may still be at work on the pages, and nobody can tell.
                self._finish(load, FAULTY)
            # A copy is over sooner than a thread has woken up.
            elif load.is_kept and len(ids) * self._pool.layout.raw_bytes <= COPY_BYTES_MAX:
                self._run(load)
            elif not self._submit(partial(self._run, load)):
                self._finish(load, FAULTY)

    def _submit(self, action: Callable[[], None]) -> bool:
        """Have a thread do it; False if there is none to be had."""
        return self.cache.guarded("start a thread", lambda: bool(self._loaders.submit(action)), False)

    def _advise(self, advice: AdviceOrder) -> None:
        ids = [self.cache.tiers.named(block.ids[self._shard]) for block in advice.blocks]
        if ids:
            self.cache.advise(ids, advice.hint)
        if advice.prefetch:
            self.cache.prefetch([self._meta(block) for block in advice.prefetch])

    def _follow(self) -> bool:
        self._pool.follow()
        if self._states is not None:
            self._states.follow()
        return True

    def _run(self, load: PageLoad) -> None:
        load.has_begun = True
        # The engine waits for a load until it has ended, whatever went wrong in it.
        self._finish(load, self.cache.guarded("load into pages", partial(self._bring, load), FAULTY))

    def _bring(self, load: PageLoad) -> LoadReport:
        order, kept = load.order, load.restore_kept(self.cache.guarded)
        report = LoadReport(kept, 0, None)
        # The cache counts what comes from it alone.
        self.cache.access.decide([self._meta(block) for block in order.blocks[:kept]], kept, None)
        if kept < len(load.refs):
            metas = [self._meta(block, order.is_latest) for block in order.blocks[kept:]]
            metas += [self._meta(piece, order.is_latest, self._tail_tokens) for piece in order.tail]
            stream = order.stream
            rest = self._load_whole(load, metas) if stream is None else self._stream(load, metas, stream)
            # What was kept counts as loaded.
            report = rest._replace(blocks=kept + rest.blocks)
        if self._states is not None and report.blocks == len(order.blocks):
            return self._load_states(load, report, self._states)
        return report

    def _load_whole(self, load: PageLoad, metas: Sequence[BlockMeta]) -> LoadReport:
        by_layer = load.write if isinstance(self._pool, HostPages) else None
        into = Whole(load.write, partial(load.take, metas), by_layer, bool(by_layer) and load.order.is_in_step)
        return self.cache.load(metas, into, self._left_s(load))

    def _stream(self, load: PageLoad, metas: Sequence[BlockMeta], how: StreamOrder) -> LoadReport:
        """Bring the base of all blocks, refinements until then, and write each page once."""
        # Who streams nothing needs none of it.
        from kvtide.plan.policies import Layered
        from kvtide.store.load.run import FetchLimits, LoadRequest
        from kvtide.store.load.streamed import Streamed

        left_s, until_s = self._left_s(load), load.started_s + how.within_s - self._clock.monotonic_s()
        goal = (self.cache.quality if how.quality is None else how.quality) * (1 + QUALITY_SLACK)
        request = LoadRequest(NO_PREFILL, max(0.0, until_s), goal)
        limits = FetchLimits(read_s_max=max(left_s, READ_S_MIN))
        streamed = Streamed(load, request, Layered(), computes=False, limits=limits)
        report = self.cache.load(metas, streamed, left_s)
        if streamed.report is not None and streamed.report.is_rougher_than(self.cache.quality):
            load.is_rough = True
            with self._changed:
                self._counts.update({"rough_loads": 1, "streamed_kl": streamed.report.kl})
        return report

    def _load_states(self, load: PageLoad, rows: LoadReport, states: PagePool) -> LoadReport:
        """Load the states after the blocks; without them nothing can go on from there."""
        meta = self._state_meta(load.order.blocks[-1], states, load.order.is_latest)
        found = self.cache.load([meta], Whole(lambda _, bits: load.take_states(states, bits)), self._left_s(load))
        if found.blocks:
            return rows._replace(stored_bytes=rows.stored_bytes + found.stored_bytes)
        load.missed_states = meta.id
        return LoadReport(0, rows.stored_bytes, found.reason)

    def _finish(self, load: PageLoad, report: LoadReport) -> None:
        load.close()
        seconds = self._clock.monotonic_s() - load.started_s
        with self._changed:
            if self._loads.get(load.order.request) is not load:
                return
            order, unfilled = load.order, load.unfilled(report.blocks)
            del self._loads[order.request]
            if not order.is_in_step:
                self._outcome.requests.add(order.request)
                self._outcome.failed.update([order.request] if unfilled else [])
            elif unfilled or load.is_rough:
                self._failed_step = self._step
            self._outcome.failed_pages.update(unfilled)
            self._note(load, report, seconds)
            self._changed.notify_all()

    def _note(self, load: PageLoad, report: LoadReport, seconds: float) -> None:
        order, refs = load.order, load.refs
        tokens = [self._pool.layout.tokens] * len(order.blocks) + [self._tail_tokens] * len(order.tail)
        wanted, loaded = sum(tokens), sum(tokens[: report.blocks])
        counts = {"loads": 1, "loaded_tokens": loaded, "loaded_bytes": report.stored_bytes}
        self._counts.update({**counts, "load_seconds": seconds, "failed_loads": loaded < wanted})
        # A streamed load takes the time that it was given, which says nothing of a link.
        is_timed = order.stream is None or seconds > order.stream.within_s
        ended = EndedLoad(order.request, loaded, wanted, seconds, report.reason, load.is_rough, is_timed)
        is_lost = loaded < wanted and report.reason is not MissReason.DEADLINE
        lost = ((load.missed_states or refs[report.blocks].ids[self._shard]).key,) if is_lost else ()
        self._report = self._report.joined(WorkerReport(0, (ended,), lost))

    def _left_s(self, load: PageLoad) -> float:
        return max(0.0, load.started_s + load.order.deadline_s - self._clock.monotonic_s())

    def _meta(self, block: BlockRef, is_latest: bool = False, tail_tokens: int = 0) -> BlockMeta:
        object_id = self.cache.tiers.named(block.ids[self._shard], is_latest)
        layout = replace(self._pool.layout, tokens=tail_tokens) if tail_tokens else self._pool.layout
        return BlockMeta(object_id, block.parents[self._shard], block.start, layout, self._label)

    def _state_meta(self, block: BlockRef, states: PagePool, is_latest: bool = False) -> BlockMeta:
        object_id = self.cache.tiers.named(block.states[self._shard], is_latest)
        # Each stands alone, at its block's last token.
        end = block.start + self._pool.layout.tokens - 1
        return BlockMeta(object_id, BlockKey(object_id.namespace), end, states.layout, f"{self._label} states")

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

    # Stores

    def store(self, orders: StepCommands) -> None:
        """Copy the blocks that the step completed and queue them. What the queue has no room for is dropped."""
        gaps: set[str] = set()
        for order in orders.stores:
            # What was computed on top of pages that were never filled or are rough is no cache of anything, whoever
            # shares them, until the scheduler has heard of it; and nothing after a gap could be matched.
            is_wanted = self._failed_step <= orders.heard and order.request not in gaps
            is_wanted = is_wanted and (not order.is_tail or self._has_room())
            if not (is_wanted and not self._is_refused and self.cache.store([self._pending(order)])):
                gaps.add(order.request)
                # The scheduler half takes it for stored.
                lost = (order.block.states if order.is_state else order.block.ids)[self._shard].key
                with self._changed:
                    self._report = self._report.joined(WorkerReport(0, lost=(lost,)))

    def _pending(self, order: StoreOrder) -> PendingBlock:
        if order.is_state:
            assert self._states is not None
            capture = self._states.capture
            meta = self._state_meta(order.block, self._states)
            return PendingBlock(meta, lambda: capture(order.pages).block, is_exact=True)
        if order.is_tail:
            return PendingBlock(self._meta(order.block, tail_tokens=self._tail_tokens), partial(self._piece, order))
        meta = self._meta(order.block)
        return PendingBlock(meta, partial(self._capture, order, meta.id))

    def _piece(self, order: StoreOrder) -> BlockSource:
        assert isinstance(self._pool, HostPages)
        start = order.block.start % self._pool.page_tokens
        bits = self._pool.capture_tokens(order.pages[0], start, start + self._tail_tokens)
        return lambda: bits

    def _capture(self, order: StoreOrder, object_id: ObjectId) -> BlockSource:
        captured = self._pool.capture(order.pages)
        self._kept.put(object_id, captured)
        return captured.block

    # What the engine and the scheduler half are told

    def ended(self, finished: Collection[str], is_idle: bool) -> LoadOutcome:
        """Return what has ended since the last call; loads of `finished` requests are given up.

        If nothing is computed (`is_idle`) a load that runs is waited for, for at most IDLE_WAIT_S.
        """
        with self._changed:
            if is_idle and self._loads and not self._outcome.requests:
                self._changed.wait_for(lambda: self._outcome.requests, IDLE_WAIT_S)
            given_up = [self._loads.pop(request) for request in finished if request in self._loads]
            # Who waits for a turn waits no longer than its load may take.
            late = [load for load in self._loads.values() if not (load.has_begun or self._left_s(load))]
        for load in given_up:
            load.close()
        for load in late:
            self._finish(load, LoadReport(0, 0, MissReason.DEADLINE))
        with self._changed:
            outcome, self._outcome = self._outcome, LoadOutcome(set(), set(), set())
        outcome.requests.update(load.order.request for load in given_up if not load.order.is_in_step)
        return outcome

    def report(self, step: int) -> WorkerReport:
        """Return what the scheduler half should know, once."""
        with self._changed:
            found, self._report = self._report, WorkerReport(0)
        return WorkerReport(step, found.ended, found.lost + self.cache.take_gone(), self._is_refused)

    def take_counts(self) -> Mapping[str, float]:
        """Return what was counted of loads that ended since the last call, by name."""
        with self._changed:
            found, self._counts = self._counts, Counter()
        return found

    def check(self) -> None:
        """AssertionError if a load is left over. Call it while no request runs."""
        with self._changed:
            assert not self._loads, f"loads are left: {sorted(self._loads)}"
            assert not self._outcome.requests


# Of the memory tier's room so much is taken from the system before it is needed.
TOUCHED_BYTES_MAX = 512 << 20
TOUCH_NICE = 19
# Blocks loaded once are remembered, so that what is loaded a second time is kept.
LOADED_MAX = 1 << 14


class KeptBlocks:
    """Captured blocks of one size, by name. Thread-safe. Those of an id that `is_valid` no more are not here."""

    def __init__(self, bytes_max: int, block_bytes: int, is_valid: Callable[[ObjectId], bool]) -> None:
        self.count_max = bytes_max // block_bytes
        self._is_valid = is_valid
        self._lock = threading.Lock()
        # With the id that was current then: equal ids may be of different generations.
        self._blocks: Recent[ObjectId, tuple[ObjectId, Captured]] = Recent(self.count_max)
        self._loaded: Recent[ObjectId, None] = Recent(LOADED_MAX)

    def leading(self, object_ids: Sequence[ObjectId]) -> list[Captured]:
        """Return the longest leading run of blocks that are here; they stay valid."""
        found = []
        with self._lock:
            for object_id in object_ids:
                named, block = self._blocks.get(object_id, (object_id, None))
                if block is None or not self._is_valid(named):
                    break
                self._blocks.move_to_end(object_id)
                found.append(block)
        return found

    def put(self, object_id: ObjectId, block: Captured) -> None:
        """Keep a block in place of those that were not used for longest."""
        with self._lock:
            self._blocks[object_id] = (object_id, block)

    def is_loaded_again(self, object_id: ObjectId) -> bool:
        """Note a load from a tier; tell whether the block has earned a place by it. Never where no block has room."""
        if self.count_max == 0:
            return False
        with self._lock:
            if object_id in self._loaded:
                del self._loaded[object_id]
                return True
            self._loaded[object_id] = None
        return False


class PageLoad:
    """One load, of blocks and then of pieces behind them, by position. Sinks that are called too late write nothing."""

    def __init__(
        self, order: LoadOrder, ids: Sequence[ObjectId], pool: PagePool, kept: KeptBlocks, started_s: float
    ) -> None:
        self.order = order
        self.started_s = started_s
        self.has_begun = False
        # Where the blocks came, and the states after them did not.
        self.missed_states: ObjectId | None = None
        self.refs = (*order.blocks, *order.tail)
        # A stream that ended before all refinements were there.
        self.is_rough = False
        # Leading blocks that were kept: what comes from tiers is counted from there on.
        self._first = 0
        self._ids = ids
        self._pool = pool
        self._kept = kept
        self._captured = [] if order.is_latest else kept.leading(ids)
        # Nothing has to come from a tier.
        self.is_kept = len(self._captured) == len(self.refs)
        self._pages_per_block = pool.layout.tokens // pool.page_tokens
        self._gate = WriteGate()
        # The token that the pages begin with.
        self._start = self.refs[0].start + order.skip_pages * pool.page_tokens
        # Of each layer, the blocks that are still to come.
        self._missing = [len(self.refs)] * pool.layout.layers

    def restore_kept(self, guarded: FaultGuard) -> int:
        """Copy the leading blocks that this process has kept, up to one that can't be; return how many."""
        for position, block in enumerate(self._captured):
            if not guarded("restore", partial(self._restore, position, block), False):
                break
            self._first = position + 1
        return self._first

    def _restore(self, position: int, block: Captured) -> bool:
        with self._gate.enter() as is_in:
            if is_in:
                block.restore(*self._room(position))
                self._note_layers()
        return True

    def write(self, position: int, layers: Any, first: int = 0, is_kept: bool = True) -> None:
        """Write a block, or HostPages' layers of one from `first` on, into its pages; a BlockSink and a LayerSink."""
        pool, position, stop = self._pool, self._first + position, first + len(layers)
        with self._gate.enter() as is_in:
            if not is_in:
                return
            if position >= len(self._ids):
                assert isinstance(pool, HostPages)
                page, token = divmod(self.refs[position].start - self._start, pool.page_tokens)
                pool.scatter_tokens(layers, self.order.pages[page], token, first)
            elif isinstance(pool, HostPages):
                pool.scatter(layers, *self._room(position), first)
            else:
                pool.scatter(layers, *self._room(position))
            self._note_layers(first, stop)
            if is_kept and position < len(self._ids) and stop == pool.layout.layers:
                self._keep(position)

    def append(self, block: int, bits: BlockBits) -> None:
        """Write a block of a stream, for this request alone: it may be rough."""
        self.write(block, bits, is_kept=False)

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Compute nothing: between steps nobody does."""
        return False

    def take(self, metas: Sequence[BlockMeta], position: int, codec: Codec, sections: Sequence[Section]) -> bool:
        """Let the pool decode a block, of those that come from tiers, into its pages. False if it does not."""
        meta, position = metas[position], self._first + position
        if position >= len(self._ids):
            return False
        with self._gate.enter() as is_in:
            if is_in:
                if not self._pool.decode(codec, meta, sections, *self._room(position)):
                    return False
                self._note_layers()
                self._keep(position)
        return True

    def take_states(self, pool: PagePool, bits: BlockBits) -> None:
        """Write the states at the end of the last block into the page that they have there."""
        with self._gate.enter() as is_in:
            if is_in:
                pool.scatter(bits, self.order.pages[-1:], 0)

    def _keep(self, position: int) -> None:
        """Keep a block that was loaded before as the pages hold it."""
        pages, skip_pages = self._room(position)
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

    def unfilled(self, came: int) -> tuple[int, ...]:
        """Return the pages after the blocks among so many leading blocks and pieces, if something is missing."""
        if came == len(self.refs):
            return ()
        blocks = min(came, len(self.order.blocks))
        return self.order.pages[max(0, blocks * self._pages_per_block - self.order.skip_pages) :]
