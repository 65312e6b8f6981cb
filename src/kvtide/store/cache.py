"""The facade that engines use: match, load, store. The one boundary where a cache fault becomes a miss.

Invariant: what `load` hands to the sink has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from kvtide.block import BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import Codec, CodecRegistry, LevelledCodec, Profile
from kvtide.config import Limits
from kvtide.evict import Ranking
from kvtide.index import LruPolicy, RadixIndex, RestoreReport
from kvtide.outcomes import DecisionCounter, decisions_text
from kvtide.plan import Judge
from kvtide.store.judging import read_judge, write_judge
from kvtide.store.load import Backfill, LoadAccess, LoadReport, LoadWorkers, MissReason, Strategy
from kvtide.store.placing import QUEUE_TIER, CoarseBlocks, FaultGuard, Placer
from kvtide.store.storing import Admission, BlockSource, PendingBlock, QueuedBlock, Storer
from kvtide.tier import stack_of
from kvtide.tier.breaker import until
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId, TierStats, wants_latest

if TYPE_CHECKING:
    from kvtide.tier.ram.device import DeviceMemory

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# What a judge knows is worth no longer wait for a store that is silent.
JUDGE_S_MAX = 2.0


class CacheStats(NamedTuple):
    """Counters since the cache was opened; decisions as `decisions_text` writes them.

    Damaged blocks were loaded from the sections of theirs that were good.
    """

    blocks_loaded: int
    blocks_damaged: int
    blocks_stored: int
    blocks_dropped: int
    blocks_unencodable: int
    raw_bytes_stored: int
    bytes_stored: int
    misses: dict[str, int]
    decisions: str
    tiers: list[TierStats]


class _Placement:
    """Keeps the index's tiers up to date."""

    def __init__(self, index: RadixIndex) -> None:
        self._index = index

    def placed(self, object_id: ObjectId, tier: int, size: int) -> None:
        self._index.place(object_id.key, tier)

    def removed(self, object_id: ObjectId, tier: int) -> None:
        self._index.remove(object_id.key, tier)


class Cache:
    """Blocks of many namespaces over one stack of tiers.

    Owns a storing thread and loading threads between `open` and `close`; use it with `with`. A process that ends
    without `close` closes it. Faults of tiers and payloads never leave it; before `open`, after `close` and in a
    forked child everything is a miss, at once. `quality` is the KL divergence that blocks are stored for; coarser ones
    are misses. By default the codec's.
    """

    def __init__(
        self,
        tiers: TierStack,
        index: RadixIndex,
        codec: Codec,
        registry: CodecRegistry,
        clock: Clock,
        limits: Limits,
        quality: float | None = None,
    ) -> None:
        self.tiers = tiers
        self.index = index
        self.quality = quality = codec.quality if quality is None else quality
        self._clock = clock
        self._limits = limits
        self._guard = FaultGuard()
        self._storer: Storer | None = None
        self._pid = 0
        self._coarse = CoarseBlocks(clock)
        # What engines decide about the tokens of prompts; told to the tiers in the background.
        self.decisions = DecisionCounter()
        # What it knows of link, decoding and prefill; engines tell it what they compute.
        self.judge = Judge(limits.load_s_max)
        self._workers = LoadWorkers(limits.load_threads)
        # Completes what a streamed load has left unfinished, for the faster tiers.
        self.backfill = Backfill(tiers, lambda meta, data: tiers.keep_above(meta.id, data), clock)
        self.access = LoadAccess(
            tiers,
            index,
            quality,
            registry,
            clock,
            self.judge,
            self.decisions,
            self._guard,
            self._queued,
            self._workers,
            self.backfill,
            len(codec.coarser) if isinstance(codec, LevelledCodec) else 0,
        )
        self._placer = Placer(tiers, index, codec, quality, limits, self._guard, self._coarse, self.decisions)

    def open(self) -> None:
        """Open the tiers, make what they hold known, start the threads."""
        assert len(self.tiers.tier_names) <= QUEUE_TIER
        self.tiers.observe(_Placement(self.index))
        self._guard("open", self.tiers.open, None)
        started_s = self._clock.monotonic_s()
        report = self._guard("list", self._restore, RestoreReport(0, 0))
        took_s = self._clock.monotonic_s() - started_s
        _log.info("index rebuilt from %d stored blocks in %.3f s, %d orphans", report.blocks, took_s, report.orphans)
        self._workers.open()
        self._storer = Storer(self._placer, self._limits.store_queue_bytes_max)
        self._storer.open()
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Tell whether blocks are loaded and stored now, by this process."""
        return self._storer is not None and self._pid == os.getpid()

    def recall(self) -> None:
        """Have the judge go by what the last process on this machine knew of the store."""
        if self.is_open:
            self._guard("read the judge's record", self._recall, None)

    def _recall(self) -> None:
        with until(self._clock.monotonic_s() + JUDGE_S_MAX):
            record = read_judge(self.tiers)
        if record is not None:
            self.judge.restore(record)

    def _store_judge(self) -> None:
        # Without a link there is nothing to keep.
        if self.judge.link.estimator.bytes_per_s() is not None:
            with until(self._clock.monotonic_s() + JUDGE_S_MAX):
                write_judge(self.tiers, self.judge.record())

    def _restore(self) -> RestoreReport:
        reports = [self.index.restore(records, tier) for tier, records in self.tiers.records()]
        return RestoreReport(sum(each.blocks for each in reports), sum(each.orphans for each in reports))

    def close(self) -> None:
        """Store what is queued, for at most `limits.close_s_max`, then stop. Idempotent; nothing in a forked child."""
        if not self.is_open:
            return
        atexit.unregister(self.close)
        assert self._storer is not None
        for meta in self._storer.close(self._limits.close_s_max):
            self.index.remove(meta.id.key, QUEUE_TIER)
        self._placer.tell_decisions()
        self.backfill.close()
        self._guard("store the judge's record", self._store_judge, None)
        self._workers.close()
        self._storer = None
        self._guard("close", self.tiers.close, None)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def match(self, ids: Sequence[ObjectId]) -> int:
        """Return the length of the longest leading run of blocks that some tier seems to have.

        A hint: blocks may be gone when they are loaded. Blocks that wait to be stored are found, and those that another
        process stored.
        """
        return self._guard("look up", partial(self._match, ids), 0) if self.is_open else 0

    def _match(self, ids: Sequence[ObjectId]) -> int:
        self.tiers.note_request(ids)
        keys = [object_id.key for object_id in ids]
        known = 0 if any(map(wants_latest, ids)) else len(self.index.match(keys).blocks)
        for tier in self.tiers.run_places(ids[known:]):
            self.index.insert(ids[known].namespace, keys[known : known + 1], keys[known - 1] if known else None, tier)
            known += 1
        return self._coarse.first_of(ids[:known])

    def _queued(self, object_id: ObjectId) -> BlockSource | None:
        # Read once: `close` takes it away at any moment.
        storer = self._storer
        block = storer.find(object_id) if storer is not None and not wants_latest(object_id) else None
        # What waits may have been invalidated meanwhile.
        return block.source if block is not None and self.tiers.is_valid(block.meta.id) else None

    def load(self, metas: Sequence[BlockMeta], strategy: Strategy, deadline_s: float | None = None) -> LoadReport:
        """Load blocks, at most until `deadline_s` seconds from now, and report how many leading ones came.

        The one way in: whatever the strategy, blocks are pinned meanwhile, what is decided of them is counted, and
        objects that are corrupt, at another place or too coarse are no blocks.
        """
        if not self.is_open:
            return LoadReport(0, 0, MissReason.CLOSED)
        give_up_s = self._limits.load_s_max if deadline_s is None else deadline_s
        load = partial(self._load, metas, strategy, give_up_s)
        report = self._guard("load", load, LoadReport(0, 0, MissReason.FAULT))
        if report.reason is MissReason.COARSE:
            self._coarse.note(metas[report.blocks].id)
        self.access.count(report)
        return report

    def _load(self, metas: Sequence[BlockMeta], strategy: Strategy, give_up_s: float) -> LoadReport:
        with self.access.pinned(metas):
            return strategy.load(self.access, metas, give_up_s)

    def store(self, blocks: Sequence[PendingBlock]) -> int:
        """Queue blocks to be encoded and stored in the background; return how many leading ones wait now.

        The first that does not fit ends it: blocks after a gap could not be matched.
        """
        return self._guard("queue blocks", partial(self._queue, blocks), 0) if self.is_open else 0

    def _queue(self, blocks: Sequence[PendingBlock]) -> int:
        storer = self._storer
        for count, block in enumerate(blocks):
            if storer is None or not self._queue_one(storer, block):
                self._placer.counts.add("dropped", len(blocks) - count)
                return count
        return len(blocks)

    def _queue_one(self, storer: Storer, block: PendingBlock) -> bool:
        meta = block.meta
        admission = storer.reserve(meta)
        if admission is not Admission.RESERVED:
            return admission is Admission.QUEUED
        try:
            source = block.capture()
            # Before the storing thread may be done with it.
            self.index.insert(meta.id.namespace, [meta.id.key], meta.parent, QUEUE_TIER, cost=block.cost)
        except BaseException:
            storer.release(meta)
            raise
        return storer.append(QueuedBlock(meta, source, block.cost))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored. False if that took longer than `timeout_s`."""
        storer = self._storer
        return not self.is_open or storer is None or storer.flush(timeout_s)

    def check(self) -> None:
        """AssertionError if memory is lost or accounted wrong. Call it while nothing is loaded or stored."""
        if self._storer is not None:
            self._storer.check()
        self._workers.check()
        self.backfill.check()
        self.index.check()
        self.tiers.check()

    def guarded(self, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run what an engine does with the cache beside its verbs; a fault in it becomes `fallback`."""
        return self._guard(verb, action, fallback)

    def stats(self) -> CacheStats:
        """Return the counters."""
        counts = self._placer.counts.all()
        loaded = self.access.loaded()
        return CacheStats(
            blocks_loaded=loaded.blocks,
            blocks_damaged=loaded.damaged,
            blocks_stored=counts["stored"],
            blocks_dropped=counts["dropped"],
            blocks_unencodable=counts["unencodable"],
            raw_bytes_stored=counts["raw_bytes"],
            bytes_stored=counts["bytes"],
            misses={reason.value: count for reason, count in loaded.misses.items()},
            decisions=decisions_text(self.decisions.counts()),
            tiers=self.tiers.tier_stats(),
        )


def cache_for(
    store: str | Path,
    codec: Codec,
    profiles: Sequence[Profile] = (),
    limits: Limits | None = None,
    clock: Clock | None = None,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
    quality: float | None = None,
) -> Cache:
    """Return a cache, not yet opened, of memory in front of a store by URL or folder, and of `device` before both.

    Objects of any codec that ships are read, those that need a profile if it is among `profiles`. `ranking` is
    `stack_of`'s, `quality` the cache's. ValueError for a bad URL.
    """
    limits, clock = limits or Limits(), clock or SystemClock()
    # What the index forgets the tiers still have: `match` asks them for what comes after the last known block.
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), limits.index_blocks_max)
    tiers = stack_of(store, limits, clock, index.is_pinned, ranking, device)
    return Cache(tiers, index, codec, CodecRegistry(profiles), clock, limits, quality)
