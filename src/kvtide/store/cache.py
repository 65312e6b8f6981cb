"""The facade that engines use: match, load, store. The one boundary where a cache fault becomes a miss.

Invariant: what `load` hands to the sink has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from kvtide.block import BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import Codec, CodecRegistry, LosslessCodec, Profile
from kvtide.config import Limits
from kvtide.errors import TierUnavailable, UnencodableBlock
from kvtide.index import TIERS_MAX, Index, LruPolicy, RadixIndex, RestoreReport
from kvtide.outcomes import Choice, DecisionCounter, Why, decisions_text
from kvtide.store.loading import QUALITY_SLACK, BlockSink, LayerSink, Loader, LoadReport, MissReason, SectionSink, Sinks
from kvtide.store.storing import Admission, BlockSource, PendingBlock, QueuedBlock, Storer
from kvtide.tier import Ranking, TierStats, stack_of
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId, wants_latest
from kvtide.wire import HEADER_BYTES, object_quality, pack_object

if TYPE_CHECKING:
    from kvtide.tier.ram.device import DeviceMemory

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# The queue counts as a tier in the index, behind all real ones.
_QUEUE = TIERS_MAX - 1
# A block that was found too coarse is not looked up again for so long, unless this process stores it.
COARSE_S = 60.0
COARSE_MAX = 1 << 14


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
        index: Index,
        codec: Codec,
        registry: CodecRegistry,
        clock: Clock,
        limits: Limits,
        quality: float | None = None,
    ) -> None:
        self.tiers = tiers
        self.index = index
        self._codec = codec
        self._quality = codec.quality if quality is None else quality
        self._clock = clock
        self._limits = limits
        self._loader = Loader(
            tiers, index, self._quality, registry, clock, limits.load_threads, self.guarded, self._queued
        )
        self._storer: Storer | None = None
        self._pid = 0
        self._lock = threading.Lock()
        # Blocks that were found too coarse, and when.
        self._coarse: OrderedDict[ObjectId, float] = OrderedDict()
        self._counts: Counter[str] = Counter()
        # What engines decide about the tokens of prompts; told to the tiers in the background.
        self.decisions = DecisionCounter()

    def open(self) -> None:
        """Open the tiers, make what they hold known, start the threads."""
        assert len(self.tiers.tier_names) <= _QUEUE
        self.tiers.observe(_Placement(self.index))
        self.guarded("open", self.tiers.open, None)
        started_s = self._clock.monotonic_s()
        report = self.guarded("list", self._restore, RestoreReport(0, 0))
        took_s = self._clock.monotonic_s() - started_s
        _log.info("index rebuilt from %d stored blocks in %.3f s, %d orphans", report.blocks, took_s, report.orphans)
        self._loader.open()
        self._storer = Storer(self._store_block, self._tell_decisions, self._limits.store_queue_bytes_max)
        self._storer.open()
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Tell whether blocks are loaded and stored now, by this process."""
        return self._storer is not None and self._pid == os.getpid()

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
            self.index.remove(meta.id.key, _QUEUE)
        self._tell_decisions()
        self._loader.close()
        self._storer = None
        self.guarded("close", self.tiers.close, None)

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
        return self.guarded("look up", partial(self._match, ids), 0) if self.is_open else 0

    def _match(self, ids: Sequence[ObjectId]) -> int:
        self.tiers.note_request(ids)
        keys = [object_id.key for object_id in ids]
        known = 0 if any(map(wants_latest, ids)) else len(self.index.match(keys).blocks)
        for tier in self.tiers.run_places(ids[known:]):
            self.index.insert(ids[known].namespace, keys[known : known + 1], keys[known - 1] if known else None, tier)
            known += 1
        oldest_s = self._clock.monotonic_s() - COARSE_S
        coarse = (i for i, each in enumerate(ids[:known]) if self._coarse.get(each, -math.inf) > oldest_s)
        return next(coarse, known) if self._coarse else known

    def _queued(self, object_id: ObjectId) -> BlockSource | None:
        # Read once: `close` takes it away at any moment.
        storer = self._storer
        block = storer.find(object_id) if storer is not None and not wants_latest(object_id) else None
        # What waits may have been invalidated meanwhile.
        return block.source if block is not None and self.tiers.is_valid(block.meta.id) else None

    def is_queued(self, ids: Sequence[ObjectId]) -> bool:
        """Tell whether any of these blocks still waits to be stored."""
        return self.is_open and any(self._queued(object_id) is not None for object_id in ids)

    def load(
        self,
        metas: Sequence[BlockMeta],
        sink: BlockSink,
        deadline_s: float | None = None,
        take: SectionSink = lambda position, codec, sections: False,
        layer_sink: LayerSink | None = None,
    ) -> LoadReport:
        """Load blocks, at most until `deadline_s` seconds from now, and report how many leading ones came whole.

        Blocks behind the first missing one may reach the sinks too, even after the return: they don't count. With a
        `layer_sink` the first layers of all blocks come before the next ones of any, as far as codecs keep them apart.
        """
        if not self.is_open:
            return LoadReport(0, 0, MissReason.CLOSED)
        give_up_s = self._limits.load_s_max if deadline_s is None else deadline_s
        load = partial(self._loader.load, metas, Sinks(sink, take, layer_sink), give_up_s)
        report = self.guarded("load", load, LoadReport(0, 0, MissReason.FAULT))
        if report.reason is MissReason.COARSE:
            self._note_coarse(metas[report.blocks].id)
        why = Why.DEADLINE if report.reason is MissReason.DEADLINE else Why.NOT_THERE
        for position, meta in enumerate(metas):
            decided = (Choice.LOAD, Why.IN_TIME) if position < report.blocks else (Choice.ABANDONED, why)
            self.decisions.add(*decided, meta.layout.tokens, meta.id.namespace)
        return report

    def _note_coarse(self, object_id: ObjectId) -> None:
        with self._lock:
            self._coarse[object_id] = self._clock.monotonic_s()
            self._coarse.move_to_end(object_id)
            if len(self._coarse) > COARSE_MAX:
                self._coarse.popitem(last=False)

    def store(self, blocks: Sequence[PendingBlock]) -> int:
        """Queue blocks to be encoded and stored in the background; return how many leading ones wait now.

        The first that does not fit ends it: blocks behind a gap could not be matched.
        """
        return self.guarded("queue blocks", partial(self._queue, blocks), 0) if self.is_open else 0

    def _queue(self, blocks: Sequence[PendingBlock]) -> int:
        storer = self._storer
        for count, block in enumerate(blocks):
            if storer is None or not self._queue_one(storer, block):
                with self._lock:
                    self._counts["dropped"] += len(blocks) - count
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
            self.index.insert(meta.id.namespace, [meta.id.key], meta.parent, _QUEUE, cost=block.cost)
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
        self._loader.check()
        self.index.check()
        self.tiers.check()

    def _tell_decisions(self) -> None:
        self.guarded("tell decisions", partial(self.decisions.tell, self.tiers.note_decisions), None)

    def _store_block(self, block: QueuedBlock) -> None:
        pack = partial(self._packed, block)
        self.guarded("store", partial(self._place, block.meta, pack, block.cost), False)
        self.index.remove(block.meta.id.key, _QUEUE)

    def _packed(self, block: QueuedBlock) -> bytearray | None:
        """Return the object; by the lossless codec where ours can't, or may not take the memory; else None."""
        meta, bits = block.meta, block.source()
        for codec in (self._codec, LosslessCodec()):
            if codec.scratch_bytes(meta.layout) > self._limits.encode_scratch_bytes_max:
                continue
            try:
                # A block computed on top of blocks of this quality is no better, however it is encoded.
                return pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile, self._quality)
            except UnencodableBlock as error:
                with self._lock:
                    self._counts["unencodable"] += 1
                    is_first = self._counts["unencodable"] == 1
                level = logging.WARNING if is_first else logging.DEBUG
                _log.log(level, "%s can't keep block %s, stored losslessly: %s", codec.codec_id, meta.id, error)
        return None

    def keep(self, meta: BlockMeta, packed: bytes) -> bool:
        """Store a block that came encoded, in the caller's thread. False if no tier has it then."""
        return self.is_open and self.guarded("keep", partial(self._place, meta, lambda: packed), False)

    def _stored_quality(self, object_id: ObjectId) -> float | None:
        """Return the quality of the object that is here, inf for one that can't be read, None if none is."""
        if not self.tiers.contains(object_id):
            return None
        if self._quality == 0:
            # Namespaces of exact blocks have no others.
            return 0.0
        head = bytearray(HEADER_BYTES)
        size = self.tiers.get_into(object_id, memoryview(head))
        return object_quality(head[: size or 0])

    def _place(self, meta: BlockMeta, pack: Callable[[], bytes | bytearray | None], cost: float | None = None) -> bool:
        """Store an object unless one as good is here; put it in the place of a coarser one."""
        here = self._stored_quality(meta.id)
        if here is None or here > self._quality * (1 + QUALITY_SLACK):
            packed, put = pack(), self.tiers.put_from if here is None else self.tiers.replace
            is_stored = packed is not None and put(meta.id, packed)
            with self._lock:
                self._coarse.pop(meta.id, None)
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
        loaded = self._loader.loaded()
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
    # What the index forgets the tiers still have: `match` asks them for what comes behind the last known block.
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), limits.index_blocks_max)
    tiers = stack_of(store, limits, clock, index.is_pinned, ranking, device)
    return Cache(tiers, index, codec, CodecRegistry(profiles), clock, limits, quality)
