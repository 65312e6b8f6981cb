"""The facade that engines use: match, load, store. The one boundary where a cache fault becomes a miss.

Invariant: what `load` hands to the sink has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from kvtide.block import BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import AwaitingCodec, Codec, CodecRegistry, LevelledCodec
from kvtide.config import Limits
from kvtide.evict import Advice, Hint, Ranking, States
from kvtide.group import Hit, Parts, hit_of
from kvtide.index import LruPolicy, RadixIndex
from kvtide.outcomes import Choice, Why, decisions_text
from kvtide.plan import Judge
from kvtide.store.load import BlockSource, LoadAccess, LoadReport, LoadWorkers, MissReason, Strategy
from kvtide.store.notes import read_judge, write_judge
from kvtide.store.profile_follower import ProfileFollower
from kvtide.store.storing import QUEUE_TIER, PendingBlock, Placer, QueuedBlock, Storer
from kvtide.tier import stack_of
from kvtide.tier.base import DeviceMemory
from kvtide.tier.breaker import until
from kvtide.tier.stack import TierStack, wants_latest
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats
from kvtide.wire import object_bytes_max

_log = logging.getLogger(__name__)
# What a judge knows is worth no longer wait for a store that is silent.
JUDGE_S_MAX = 2.0
# An engine that stands still meanwhile waits so long for a look-up. Where one took all its time, the next ones wait for
# no other machine for so long.
LOOK_UP_S_MAX, SILENT_S = 3.0, 10.0
_Found = TypeVar("_Found")


class CacheStats(NamedTuple):
    """Counters since the cache was opened; decisions as `decisions_text` writes them.

    Damaged blocks were loaded from their good sections. Unencodable ones and those without profile are lossless,
    checked ones were decoded again and kept their promise.
    """

    blocks_loaded: int
    blocks_damaged: int
    blocks_stored: int
    blocks_dropped: int
    blocks_unencodable: int
    blocks_without_profile: int
    blocks_checked: int
    raw_bytes_stored: int
    bytes_stored: int
    # Prompts that came with advice, one for each group of layers, and those of which no tier took it.
    hints_heard: int
    hints_ignored: int
    # Those above are sums, counted under these names.
    misses: dict[str, int]
    decisions: str
    tiers: list[TierStats]


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
        codec: Codec | AwaitingCodec,
        registry: CodecRegistry,
        clock: Clock,
        limits: Limits,
        quality: float | None = None,
    ) -> None:
        if len(tiers.tier_names) > QUEUE_TIER:
            raise ValueError(f"a cache has {QUEUE_TIER} tiers at most, got {', '.join(tiers.tier_names)}")
        self.tiers = tiers
        self.index = index
        self.quality = quality = codec.quality if quality is None else quality
        self._clock = clock
        self._limits = limits
        self._storer: Storer | None = None
        self._pid = 0
        # What it knows of link, decoding and prefill; engines tell it what they compute.
        self.judge = Judge(limits.load_s_max)
        levels = len(codec.coarser) if isinstance(codec, LevelledCodec) else 0
        workers = LoadWorkers(limits.load_threads)
        self.access = LoadAccess(tiers, index, quality, registry, clock, self.judge, self._queued, workers, levels)
        # Runs what engines do with the cache beside its verbs, too; a fault in it becomes a `fallback`.
        self.guarded = self.access.guarded
        # What engines decide about the tokens of prompts; told to the tiers in the background.
        self.decisions = self.access.decisions
        self._counts = self.access.counts
        self._silent_until_s = 0.0
        self.profiles = ProfileFollower(self.access, codec)
        self._placer = Placer(self.access, self.profiles, limits)

    def open(self) -> None:
        """Open the tiers, make what they hold known, start the threads."""
        self.tiers.observe(
            lambda object_id, tier, size: self.index.place(object_id.key, tier),
            lambda object_id, tier: self.access.gone.extend(self.index.remove(object_id.key, tier)),
        )
        self.guarded("open", self.tiers.open, None)
        self.guarded("list", self._restore, None)
        self.access.open()
        self._storer = Storer(self._placer.store, self._placer.do_chores, self._limits.store_queue_bytes_max)
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
            self.guarded("read the judge's record", self._recall, None)

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

    def _restore(self) -> None:
        started_s = self._clock.monotonic_s()
        blocks = sum(self.index.restore(found, tier) for tier, found in self.tiers.parents_by_tier())
        _log.info("index rebuilt from %d stored blocks in %.3f s", blocks, self._clock.monotonic_s() - started_s)

    def close(self) -> None:
        """Store what is queued, for at most `limits.close_s_max`, then stop. Idempotent; nothing in a forked child."""
        if not self.is_open:
            return
        atexit.unregister(self.close)
        assert self._storer is not None
        for meta in self._storer.close(self._limits.close_s_max):
            self.index.remove(meta.id.key, QUEUE_TIER)
        self._placer.do_chores()
        self.guarded("store the judge's record", self._store_judge, None)
        self.access.backfill.close()
        self.access.workers.close()
        self._storer = None
        self.guarded("close", self.tiers.close, None)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def match(self, ids: Sequence[ObjectId], hint: Advice | None = None, wait_s: float = math.inf) -> int:
        """Return the length of the longest leading run of blocks that some tier seems to have.

        It only seems: blocks may be gone when they are loaded. Blocks that wait to be stored are found, and those that
        another process stored. hint: what the prompt's client advises, a `Hint` or what `Hint.parse` takes. wait_s: for
        other machines, and for none of them for a while once one took all that time.
        """
        return self._look_up(partial(self._match, ids, hint), 0, wait_s)

    def _look_up(self, find: Callable[[], _Found], nothing: _Found, wait_s: float) -> _Found:
        if not self.is_open:
            return nothing
        now_s = self._clock.monotonic_s()
        until_s = now_s if now_s < self._silent_until_s else now_s + wait_s
        with until(until_s) if until_s < math.inf else nullcontext():
            found = self.guarded("look up", find, nothing)
        if now_s < until_s <= self._clock.monotonic_s():
            self._silent_until_s = until_s + SILENT_S
        return found

    def advise(self, ids: Sequence[ObjectId], hint: Advice | None = None) -> None:
        """Note a prompt, and its advice, where others look it up."""
        if self.is_open:
            self.guarded("advise", partial(self._note_request, ids, hint), None)

    def take_gone(self) -> tuple[BlockKey, ...]:
        """Return blocks that were stored or queued and are nowhere any more, the last ones, each once."""
        gone = self.access.gone
        found = dict.fromkeys(gone.popleft() for _ in range(len(gone)))
        return tuple(key for key in found if not self.index.is_held(key))

    def prefetch(self, metas: Sequence[BlockMeta]) -> int:
        """Have blocks that are in slower tiers brought to the faster ones; return how many leading ones are queued."""
        size_max = max((object_bytes_max(meta.layout) for meta in metas), default=0)
        bring = partial(self.tiers.prefetch, [meta.id for meta in metas], size_max)
        return self.guarded("prefetch", bring, 0) if self.is_open else 0

    def _note_request(self, ids: Sequence[ObjectId], said: Advice | None, states: States = ()) -> None:
        hint = None if said is None else Hint.parse(said)
        is_taken = self.tiers.note_request(ids, hint, states)
        if said is not None:
            self._counts.add("hints_heard")
            self._counts.add("hints_ignored", not is_taken)

    def _match(self, ids: Sequence[ObjectId], hint: Advice | None = None, states: States = ()) -> int:
        self._note_request(ids, hint, states)
        keys = [*map(attrgetter("key"), ids)]
        known = 0 if any(map(wants_latest, ids)) else self.index.match(keys)
        for tier in self.tiers.run_places(ids[known:]):
            key, parent = keys[known], keys[known - 1] if known else None
            if self.index.is_held(key):
                # Within a run that was looked up from another block on.
                self.index.place(key, tier)
            else:
                self.index.insert(ids[known].namespace, [key], parent, tier)
            known += 1
        return known

    def match_parts(self, groups: Sequence[Parts], hint: Advice | None = None, wait_s: float = math.inf) -> Hit:
        """Return how many leading blocks of a model of several groups seem restorable; they only seem, as in `match`.

        Parts that are not sparse are looked for as leading runs, the others each by itself.
        """
        return self._look_up(partial(self._match_parts, groups, hint), Hit(0), wait_s)

    def _match_parts(self, groups: Sequence[Parts], hint: Advice | None) -> Hit:
        # The first group of rows ranks the states.
        first = next((group for group in groups if not group.is_sparse), None)
        states = [group.ids for group in groups if group.is_sparse]
        runs = [
            None if group.is_sparse else self._match(group.ids, hint, states if group is first else ())
            for group in groups
        ]
        blocks = len(groups[0].ids)
        # A hit ends no later, and what stands alone is asked for up to there.
        stop = min((run for run in runs if run is not None), default=blocks)
        present = [
            [*self._present(group.ids[:stop]), *[False] * (blocks - stop)]
            if run is None
            else [each < run for each in range(blocks)]
            for run, group in zip(runs, groups, strict=True)
        ]
        rows = [number for number, run in enumerate(runs) if run is not None]
        return hit_of(present, [group.reach for group in groups], rows)

    def _present(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Tell of each object whether it waits to be stored or some tier has it."""
        known = {each for each in ids if not wants_latest(each) and self.index.is_held(each.key)}
        asked = [each for each in ids if each not in known]
        found = {each for each, is_here in zip(asked, self.tiers.contains_each(asked), strict=True) if is_here}
        return [each in known or each in found for each in ids]

    def is_near(self, ids: Sequence[ObjectId]) -> bool:
        """Tell whether all of the objects are in the fastest of several tiers."""
        return bool(ids) and self.guarded("look up", partial(all, map(self.tiers.is_near, ids)), False)

    def is_worth(self, tokens: int, is_near: bool, namespace: Namespace) -> bool:
        """Tell whether loading tokens is expected to be faster than computing them; where it is not, count it."""
        if is_near or self.judge.is_load_faster(tokens, self._clock.monotonic_s()):
            return True
        self.decisions.add(Choice.RECOMPUTE, Why.LINK_SLOWER, tokens, namespace)
        return False

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
        report = self.guarded("load", load, LoadReport(0, 0, MissReason.FAULT))
        self._counts.add("blocks_loaded", report.blocks)
        if report.reason is not None:
            self._counts.add(report.reason)
        return report

    def _load(self, metas: Sequence[BlockMeta], strategy: Strategy, give_up_s: float) -> LoadReport:
        with self.access.pinned(metas):
            return strategy.load(self.access, metas, give_up_s)

    def store(self, blocks: Sequence[PendingBlock]) -> int:
        """Queue blocks to be encoded and stored in the background; return how many leading ones wait now.

        The first that does not fit ends it: blocks after a gap could not be matched.
        """
        return self.guarded("queue blocks", partial(self._queue, blocks), 0) if self.is_open else 0

    def _queue(self, blocks: Sequence[PendingBlock]) -> int:
        storer = self._storer
        for count, block in enumerate(blocks):
            if storer is None or not storer.add(block.meta, partial(self._captured, block)):
                self._counts.add("blocks_dropped", len(blocks) - count)
                return count
        return len(blocks)

    def _captured(self, block: PendingBlock) -> QueuedBlock:
        meta, source = block.meta, block.capture()
        # Before the storing thread may be done with it.
        self.index.insert(meta.id.namespace, [meta.id.key], meta.parent, QUEUE_TIER)
        return QueuedBlock(meta, source, block.is_exact, block.orders, block.group)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored. False if that took longer than `timeout_s`."""
        storer = self._storer
        return not self.is_open or storer is None or storer.flush(timeout_s)

    def check(self) -> None:
        """AssertionError if memory is lost or accounted wrong. Call it while nothing is loaded or stored."""
        if self._storer is not None:
            self._storer.check()
        self.access.workers.check()
        self.access.backfill.check()
        self.index.check()
        self.tiers.check()

    def stats(self, tier_names: Collection[str] | None = None) -> CacheStats:
        """Return the counters. tier_names: the tiers to ask, all by default; those of other machines take a while."""
        counts = self._counts.all()
        return CacheStats(
            **{name: counts[name] for name in CacheStats._fields[:-3]},
            misses={reason.value: counts[reason] for reason in MissReason if counts[reason]},
            decisions=decisions_text(self.decisions.counts()),
            tiers=self.tiers.tier_stats(tier_names),
        )


def cache_for(
    store: str | Path,
    codec: Codec | AwaitingCodec,
    registry: CodecRegistry | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
    quality: float | None = None,
) -> Cache:
    """Return a cache, not yet opened, of memory in front of a store by URL or folder, and of `device` before both.

    Profiles are those of `registry` and of the store. `ranking` is `stack_of`'s, `quality` the cache's. ValueError for
    a bad URL.
    """
    limits, clock = limits or Limits(), clock or SystemClock()
    # What the index forgets the tiers still have: `match` asks them for what comes after the last known block.
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), limits.index_blocks_max)
    tiers = stack_of(store, limits, clock, index.is_pinned, ranking, device)
    return Cache(tiers, index, codec, registry or CodecRegistry(), clock, limits, quality)
