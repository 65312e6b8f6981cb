"""The facade that engines use: match, load, store. The one boundary where a cache fault becomes a miss.

Invariant: what `load` hands to the sink has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import Codec, CodecRegistry, LosslessCodec, Profile
from kvtide.config import Limits
from kvtide.decisions import Choice, DecisionCounter, Why, decisions_text
from kvtide.errors import TierUnavailable, UnencodableBlock
from kvtide.index import Index, RadixIndex, RestoreReport, policy_named
from kvtide.loading import BlockSink, LayerSink, Loader, LoadReport, MissReason, SectionSink, Sinks
from kvtide.storing import BlockSource, PendingBlock, Storer
from kvtide.tier import DeviceMemory, TierStack, TierStats, stack_of
from kvtide.tier.ranking import Ranking
from kvtide.types import ObjectId
from kvtide.wire import pack_object

__all__ = ["BlockSink", "BlockSource", "Cache", "CacheStats", "LoadReport", "MissReason", "PendingBlock", "cache_for"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


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


class Cache:
    """Blocks of many namespaces over one stack of tiers.

    Owns a storing thread and loading threads between `open` and `close`; use it with `with`.
    Faults of tiers and payloads never leave it.
    """

    def __init__(
        self, tiers: TierStack, index: Index, codec: Codec, registry: CodecRegistry, clock: Clock, limits: Limits
    ) -> None:
        self.tiers = tiers
        self.index = index
        self._codec = codec
        self._clock = clock
        self._limits = limits
        self._loader = Loader(tiers, index, codec, registry, clock, limits.load_threads, self.guarded)
        self._storer: Storer | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
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
        self._loader.open()
        self._storer = Storer(self._store_block, self._tell_decisions, self._limits.store_queue_bytes_max)
        self._storer.open()

    def _restore(self) -> RestoreReport:
        reports = [self.index.restore(records, tier) for tier, records in self.tiers.records()]
        return RestoreReport(sum(each.blocks for each in reports), sum(each.orphans for each in reports))

    def close(self) -> None:
        """Store what is queued, for at most `limits.close_s_max`, then stop. Idempotent."""
        if self._storer is None:
            return
        self._storer.close(self._limits.close_s_max)
        self._tell_decisions()
        self._loader.close()
        self._storer = None
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
        layer_sink: LayerSink | None = None,
    ) -> LoadReport:
        """Load blocks, at most until `deadline_s` seconds from now, and report how many leading ones came whole.

        Blocks behind the first missing one may reach the sinks too, even after the return: they don't count. With a
        `layer_sink` the first layers of all blocks come before the next ones of any, as far as codecs keep them apart.
        """
        sinks = Sinks(sink, take, layer_sink)
        report = self._loader.load(metas, sinks, self._limits.load_s_max if deadline_s is None else deadline_s)
        self.decisions.add(Choice.LOAD, Why.IN_TIME, report.blocks)
        why = Why.DEADLINE if report.reason is MissReason.DEADLINE else Why.NOT_THERE
        self.decisions.add(Choice.ABANDONED, why, len(metas) - report.blocks)
        return report

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
        self._loader.check()
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
