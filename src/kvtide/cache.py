"""The facade that engines use: match, load, store. The one boundary where a cache fault becomes a miss.

Invariant: what `load` hands to the sink has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from enum import Enum
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import numpy as np

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import Codec, CodecRegistry, EmbeddedCodec, LosslessCodec, Profile
from kvtide.config import Limits
from kvtide.decisions import Choice, DecisionCounter, Why, decisions_text
from kvtide.errors import CorruptPayload, TierUnavailable, UnencodableBlock
from kvtide.index import Index, RadixIndex, RestoreReport, policy_named
from kvtide.storing import BlockSource, PendingBlock, Storer
from kvtide.tier import DeviceMemory, TierStack, TierStats, stack_of
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.ranking import Ranking
from kvtide.types import ObjectId, Section
from kvtide.wire import StoredObject, object_bytes_max, pack_object, parse_object

__all__ = ["BlockSink", "BlockSource", "Cache", "CacheStats", "LoadReport", "MissReason", "PendingBlock", "cache_for"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# Curves are float32.
_QUALITY_SLACK = 1e-3

# Called with the block's position in the load and its bits, which are valid during the call only. May be called from
# several threads at once, for different blocks, in any order.
BlockSink = Callable[[int, BlockBits], None]
# Offered a block's checked sections first; if it takes them, the block is not decoded for the sink.
SectionSink = Callable[[int, Codec, Sequence[Section]], bool]


class MissReason(Enum):
    """Why a block was not loaded."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNKNOWN_CODEC = "unknown codec or profile"
    DEADLINE = "deadline"
    FAULT = "fault"


class LoadReport(NamedTuple):
    """The leading blocks that a load delivered, and why it ended there (None: all came)."""

    blocks: int
    stored_bytes: int
    reason: MissReason | None


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

    def __init__(self, index: Index) -> None:
        self._index = index

    def placed(self, object_id: ObjectId, tier: int) -> None:
        self._index.place(object_id.key, tier)

    def removed(self, object_id: ObjectId, tier: int) -> None:
        self._index.remove(object_id.key, tier)


class _Scratch(NamedTuple):
    layout: BlockLayout
    stored: memoryview
    bits: BlockBits


class Cache:
    """Blocks of many namespaces over one stack of tiers.

    Owns a storing thread and, twice, `limits.load_threads` loading threads between `open` and `close`; use it with
    `with`. The second ones load what the fastest tier has, so that a slow tier never holds that up.
    Faults of tiers and payloads never leave it.
    """

    def __init__(
        self, tiers: TierStack, index: Index, codec: Codec, registry: CodecRegistry, clock: Clock, limits: Limits
    ) -> None:
        self.tiers = tiers
        self.index = index
        self._codec = codec
        self._registry = registry
        self._clock = clock
        self._limits = limits
        self._loaders: ThreadPoolExecutor | None = None
        self._near_loaders: ThreadPoolExecutor | None = None
        self._storer: Storer | None = None
        self._lock = threading.Lock()
        self._scratch: list[_Scratch] = []
        self._counts: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()
        # What engines decide about stored blocks; told to the tiers in the background.
        self.decisions = DecisionCounter()

    def open(self) -> None:
        """Open the tiers, make what they hold known, start the threads."""
        self.tiers.observe(_Placement(self.index))
        self.tiers.open()
        started_s = self._clock.monotonic_s()
        report = self.guarded("list", self._restore, RestoreReport(0, 0))
        took_s = self._clock.monotonic_s() - started_s
        _log.info("index rebuilt from %d stored blocks in %.3f s, %d orphans", report.blocks, took_s, report.orphans)
        self._loaders = ThreadPoolExecutor(self._limits.load_threads, thread_name_prefix="kvtide-load")
        self._near_loaders = ThreadPoolExecutor(self._limits.load_threads, thread_name_prefix="kvtide-load-near")
        self._storer = Storer(self._store_block, self._tell_decisions, self._limits.store_queue_bytes_max)
        self._storer.open()

    def _restore(self) -> RestoreReport:
        reports = [self.index.restore(records, tier) for tier, records in self.tiers.records()]
        return RestoreReport(sum(each.blocks for each in reports), sum(each.orphans for each in reports))

    def close(self) -> None:
        """Store what is queued, for at most `limits.close_s_max`, then stop. Idempotent."""
        if self._storer is None or self._loaders is None or self._near_loaders is None:
            return
        self._storer.close(self._limits.close_s_max)
        self._tell_decisions()
        for loaders in (self._loaders, self._near_loaders):
            loaders.shutdown(wait=False, cancel_futures=True)
        self._storer = self._loaders = self._near_loaders = None
        self.tiers.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def match(self, ids: Sequence[ObjectId]) -> int:
        """Return the length of the longest leading run of blocks that some tier seems to have.

        A hint: blocks may be gone when they are loaded. Blocks that another process stored are found too.
        """
        keys = [object_id.key for object_id in ids]
        known = len(self.index.match(keys).blocks)
        nothing: list[int] = []
        for tier in self.guarded("look up", partial(self.tiers.run_places, ids[known:]), nothing):
            self.index.insert(ids[known].namespace, keys[known : known + 1], keys[known - 1] if known else None, tier)
            known += 1
        return known

    def load(
        self,
        metas: Sequence[BlockMeta],
        sink: BlockSink,
        deadline_s: float | None = None,
        take: SectionSink = lambda position, codec, sections: False,
    ) -> LoadReport:
        """Load blocks, at most until `deadline_s` seconds from now, and report how many leading ones came whole.

        Blocks behind the first missing one may reach the sinks too, even after the return: they don't count.
        """
        near, far = self._near_loaders, self._loaders
        assert near is not None and far is not None, "load before open"
        give_up_s = self._clock.monotonic_s() + (self._limits.load_s_max if deadline_s is None else deadline_s)
        keys = [meta.id.key for meta in metas]
        self.index.pin(keys)
        try:
            pending = []
            for position, meta in enumerate(metas):
                is_near = self.guarded("look up", partial(self.tiers.is_near, meta.id), False)
                pending.append((near if is_near else far).submit(self._load_one, position, meta, sink, take))
            report = self._leading(pending, give_up_s)
        finally:
            self.index.unpin(keys)
        with self._lock:
            self._counts["loaded"] += report.blocks
            if report.reason is not None:
                self._misses[report.reason] += 1
        self.decisions.add(Choice.LOAD, Why.IN_TIME, report.blocks)
        why = Why.DEADLINE if report.reason is MissReason.DEADLINE else Why.NOT_THERE
        self.decisions.add(Choice.ABANDONED, why, len(metas) - report.blocks)
        return report

    def _leading(self, pending: Sequence[Future[int | MissReason]], give_up_s: float) -> LoadReport:
        stored_bytes = 0
        for count, future in enumerate(pending):
            try:
                outcome = future.result(max(0.0, give_up_s - self._clock.monotonic_s()))
            except FutureTimeoutError:
                outcome = MissReason.DEADLINE
            if isinstance(outcome, MissReason):
                for rest in pending[count:]:
                    rest.cancel()
                return LoadReport(count, stored_bytes, outcome)
            stored_bytes += outcome
        return LoadReport(len(pending), stored_bytes, None)

    def _load_one(self, position: int, meta: BlockMeta, sink: BlockSink, take: SectionSink) -> int | MissReason:
        fault: int | MissReason = MissReason.FAULT
        return self.guarded("load", partial(self._load_block, position, meta, sink, take), fault)

    def _load_block(self, position: int, meta: BlockMeta, sink: BlockSink, take: SectionSink) -> int | MissReason:
        scratch = self._take_scratch(meta.layout)
        try:
            size = self.tiers.get_into(meta.id, scratch.stored)
            if size is None:
                self.index.remove(meta.id.key)
                return MissReason.ABSENT
            stored = parse_object(scratch.stored[:size], meta.id)
            if (stored.meta.layout, stored.meta.start, stored.meta.parent) != (meta.layout, meta.start, meta.parent):
                raise CorruptPayload(f"{meta.id}: expected {meta.layout} at {meta.start}, got {stored.meta}")
            codec = self._registry.get(stored.codec_id, stored.profile)
            if codec is None:
                return MissReason.UNKNOWN_CODEC
            if not take(position, codec, sections := self._sections(stored, codec)):
                codec.decode(meta, sections, scratch.bits)
                sink(position, scratch.bits)
            return size
        except CorruptPayload as error:
            self._drop_corrupt(meta.id, error)
            return MissReason.CORRUPT
        finally:
            self._scratch.append(scratch)

    def _sections(self, stored: StoredObject, codec: Codec) -> list[Section]:
        """Return the sections, without bad ones if what is left is as good as the own codec would have made it."""
        good = stored.good_sections()
        if len(good) == len(stored.entries):
            return good
        if not (isinstance(codec, EmbeddedCodec) and isinstance(self._codec, EmbeddedCodec)):
            raise CorruptPayload(f"{stored.meta.id}: {len(stored.entries) - len(good)} sections are not those stored")
        left = codec.quality_of(good)
        if left > self._codec.quality * (1 + _QUALITY_SLACK):
            raise CorruptPayload(f"{stored.meta.id}: the good sections have a KL of {left:.2g}, above what is wanted")
        with self._lock:
            self._counts["damaged"] += 1
        return good

    def _drop_corrupt(self, object_id: ObjectId, error: CorruptPayload) -> None:
        self.index.remove(object_id.key)
        self.tiers.delete(object_id, "corrupt")
        with self._lock:
            self._counts["corrupt"] += 1
            is_first = self._counts["corrupt"] == 1
        if is_first:
            _log.warning("removed a corrupt object, served as a miss; further ones are only counted: %s", error)

    def _take_scratch(self, layout: BlockLayout) -> _Scratch:
        while self._scratch:  # at most one for each loading thread; list operations are atomic
            scratch = self._scratch.pop()
            if scratch.layout == layout:
                return scratch
        # One byte more than an object may have, so that one that is too long shows; aligned for direct reads.
        stored = aligned_buffer(object_bytes_max(layout) + 1)
        return _Scratch(layout, stored, np.empty(layout.shape, layout.bits_dtype))

    def store(self, blocks: Sequence[PendingBlock]) -> int:
        """Queue blocks to be encoded and stored in the background; return how many leading ones had room."""
        count = self._storer.put(blocks) if self._storer is not None else 0
        with self._lock:
            self._counts["dropped"] += len(blocks) - count
        return count

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored. False if that took longer than `timeout_s`."""
        return self._storer is None or self._storer.flush(timeout_s)

    def check(self) -> None:
        """AssertionError if memory is lost or accounted wrong. Call it while nothing is loaded or stored."""
        if self._storer is not None:
            self._storer.check()
        assert len(self._scratch) <= 2 * self._limits.load_threads, f"{len(self._scratch)} buffers"
        self.index.check()
        self.tiers.check()

    def _tell_decisions(self) -> None:
        self.guarded("tell decisions", partial(self.decisions.tell, self.tiers.note_decisions), None)

    def _store_block(self, block: PendingBlock) -> None:
        pack = partial(self._packed, block)
        self.guarded("store", partial(self._place, block.meta, pack, block.cost), False)

    def _packed(self, block: PendingBlock) -> bytearray | None:
        return self._encoded(block.meta, block.source())

    def keep(self, meta: BlockMeta, packed: bytes) -> bool:
        """Store a block that came encoded, in the caller's thread. False if no tier has it then."""
        return self.guarded("keep", partial(self._place, meta, lambda: packed), False)

    def _place(self, meta: BlockMeta, pack: Callable[[], bytes | bytearray | None], cost: float | None = None) -> bool:
        if not self.tiers.contains(meta.id):
            packed = pack()
            is_stored = packed is not None and self.tiers.put_from(meta.id, packed)
            with self._lock:
                self._counts["stored" if is_stored else "dropped"] += 1
                self._counts["raw_bytes"] += is_stored * meta.layout.raw_bytes
                self._counts["bytes"] += len(packed) if is_stored and packed else 0
            if not is_stored:
                return False
        for number, tier in enumerate(self.tiers.places(meta.id)):
            if number:
                self.index.place(meta.id.key, tier)
            else:
                self.index.insert(meta.id.namespace, [meta.id.key], meta.parent, tier, cost=cost)
        return True

    def _encoded(self, meta: BlockMeta, bits: BlockBits) -> bytearray | None:
        """Return the object; by the lossless codec where ours can't, or may not take the memory; else None."""
        for codec in (self._codec, LosslessCodec()):
            if codec.scratch_bytes(meta.layout) > self._limits.encode_scratch_bytes_max:
                continue
            try:
                return pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile)
            except UnencodableBlock as error:
                with self._lock:
                    self._counts["unencodable"] += 1
                _log.debug("%s can't keep block %s: %s", codec.codec_id, meta.id, error)
        return None

    def guarded(self, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run an action; whatever goes wrong in it is counted, logged once for each verb, and becomes `fallback`."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - the one boundary: a cache fault never fails the engine
            with self._lock:
                self._counts[f"fault {verb}"] += 1
                is_first = self._counts[f"fault {verb}"] == 1
            if is_first:
                is_expected = isinstance(error, TierUnavailable)
                _log.warning("can't %s, served as a miss: %s", verb, error, exc_info=None if is_expected else error)
            return fallback

    def stats(self) -> CacheStats:
        """Return the counters."""
        with self._lock:
            counts = self._counts.copy()
            misses = {reason.value: count for reason, count in self._misses.items()}
        return CacheStats(
            blocks_loaded=counts["loaded"],
            blocks_damaged=counts["damaged"],
            blocks_stored=counts["stored"],
            blocks_dropped=counts["dropped"],
            blocks_unencodable=counts["unencodable"],
            raw_bytes_stored=counts["raw_bytes"],
            bytes_stored=counts["bytes"],
            misses=misses,
            decisions=decisions_text(self.decisions.counts()),
            tiers=self.tiers.tier_stats(),
        )


def cache_for(
    store: str,
    codec: Codec,
    profiles: Sequence[Profile] = (),
    limits: Limits | None = None,
    clock: Clock | None = None,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
) -> Cache:
    """Return a cache, not yet opened, of memory in front of the store that the URL names, and of `device` before both.

    Objects of any codec that ships are read, those that need a profile if it is among `profiles`. `ranking` is
    `stack_of`'s. ValueError for a bad URL.
    """
    limits, clock = limits or Limits(), clock or SystemClock()
    # What the index forgets the tiers still have: `match` asks them for what comes behind the last known block.
    index = RadixIndex(clock, policy_named("lru"), limits.index_blocks_max)
    tiers = stack_of(store, limits, clock, index.is_pinned, ranking, device)
    return Cache(tiers, index, codec, CodecRegistry(profiles), clock, limits)
