"""Means that all ways of loading share, and the rules for each: quality, place, corrupt and absent objects, pins.

Invariant: what is handed out has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec, CodecRegistry, EmbeddedCodec
from kvtide.errors import CorruptPayload
from kvtide.index import RadixIndex
from kvtide.outcomes import Choice, DecisionCounter, Why
from kvtide.plan import Judge
from kvtide.store.load.backfill import Backfill
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.faults import Counts, FaultGuard
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, NamedId, ObjectId, Section
from kvtide.wire import StoredObject, object_bytes_max

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
# Blocks that are decoded at a time while those before them are taken.
AHEAD_THREADS = 2
# Buffers are kept of so many shapes of blocks: engines have one for each group of layers, and one for tails.
_LAYOUTS_MAX = 8
# Blocks that left since somebody asked, those that left last.
GONE_MAX = 1 << 16
# Curves are float32, and headers round up.
QUALITY_SLACK = 2e-3

# Returns the block's bits: the same at every call, from any thread. It keeps at most the block's raw bytes alive.
BlockSource = Callable[[], BlockBits]
# Called with the block's position in the load and its bits, which are valid during the call only. May be called from
# several threads at once, for different blocks, in any order.
BlockSink = Callable[[int, BlockBits], None]


class MissReason(Enum):
    """The reason why a block was not loaded."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNKNOWN_CODEC = "unknown codec or profile"
    COARSE = "coarser than asked for"
    DEADLINE = "deadline"
    FAULT = "fault"
    CLOSED = "the cache is not open, or this is a forked process"


def level_meta(meta: BlockMeta, level: int) -> BlockMeta:
    """Identity of a block stored `level` levels coarser, under the name that the block has."""
    key = BlockKey(hashlib.sha256(meta.id.key + b"level" + level.to_bytes(1)).digest())
    object_id = ObjectId(meta.id.namespace, key)
    if isinstance(meta.id, NamedId):
        object_id = NamedId.of(object_id, meta.id.name, meta.id.is_latest)
    return replace(meta, id=object_id)


def ahead(action: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield what an action makes of each item, in order, while two threads are busy with the next ones."""
    coming: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="kvtide-ahead") as pool:
        for item in items:
            coming.append(pool.submit(action, item))
            if len(coming) > AHEAD_THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class LoadReport(NamedTuple):
    """The leading blocks that a load delivered, and why it ended there (None: all came)."""

    blocks: int
    stored_bytes: int
    reason: MissReason | None


class LoadBuffers(NamedTuple):
    """Memory for loading one block: its object as it is stored, and its bits."""

    layout: BlockLayout
    stored: memoryview
    bits: BlockBits


class LoadWorkers:
    """Twice `threads` loading threads between `open` and `close`, and their buffers.

    The second ones load what the fastest tier has or is queued, so that a slow tier never holds that up.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.far: ThreadPoolExecutor | None = None
        self.near: ThreadPoolExecutor | None = None
        self._scratch: dict[BlockLayout, list[LoadBuffers]] = {}

    def open(self) -> None:
        """Start the threads."""
        self.far = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtide-load")
        self.near = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtide-load-near")

    def close(self) -> None:
        """Begin nothing more. Idempotent."""
        for pool in (self.far, self.near):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self.far = self.near = None

    def check(self) -> None:
        """AssertionError if a buffer is lost. Call it while nothing is loaded."""
        assert all(len(each) <= 2 * self._threads for each in self._scratch.values())

    def take(self, layout: BlockLayout) -> LoadBuffers:
        """Return buffers for a block, to be given back."""
        # At most one for each loading thread; each operation is atomic.
        with contextlib.suppress(KeyError, IndexError):
            return self._scratch[layout].pop()
        # One byte more than an object may have, so that one that is too long shows; aligned for direct reads.
        stored = aligned_buffer(object_bytes_max(layout) + 1)
        return LoadBuffers(layout, stored, np.empty(layout.shape, layout.bits_dtype))

    def give_back(self, scratch: LoadBuffers) -> None:
        """Let the next block use them."""
        if len(self._scratch) >= _LAYOUTS_MAX and scratch.layout not in self._scratch:
            self._scratch.clear()
        self._scratch.setdefault(scratch.layout, []).append(scratch)


@dataclass(slots=True)
class LoadAccess:
    """Tiers, index, codecs and the judge, and what is noted of each load. Thread-safe.

    Blocks that are `queued` are served from there; objects that are corrupt are removed; what is coarser than
    `quality` is not used. coarser_levels: in how many of them blocks are stored besides. counts: outcomes of blocks,
    by name or by `MissReason`. gone: the last blocks that no tier has any more, and the queue neither.
    """

    tiers: TierStack
    index: RadixIndex
    quality: float
    registry: CodecRegistry
    clock: Clock
    judge: Judge
    queued: Callable[[ObjectId], BlockSource | None]
    workers: LoadWorkers
    coarser_levels: int = 0
    quality_max: float = field(init=False)
    decisions: DecisionCounter = field(init=False, default_factory=DecisionCounter)
    guarded: FaultGuard = field(init=False, default_factory=FaultGuard)
    counts: Counts = field(init=False, default_factory=Counts)
    gone: deque[BlockKey] = field(init=False, default_factory=partial(deque[BlockKey], maxlen=GONE_MAX))
    # Completes, for faster tiers, what streamed loads have left unfinished.
    backfill: Backfill = field(init=False)

    def __post_init__(self) -> None:
        self.quality_max = self.quality * (1 + QUALITY_SLACK)

    def open(self) -> None:
        """Start the threads that load; what was closed before begins again."""
        self.workers.open()
        self.backfill = Backfill(self.tiers, self.tiers.keep_above, self.clock, self.guarded)

    @contextlib.contextmanager
    def pinned(self, metas: Sequence[BlockMeta]) -> Iterator[None]:
        """Keep blocks from being evicted meanwhile."""
        keys = [*map(attrgetter("id.key"), metas)]
        self.index.pin(keys)
        try:
            yield
        finally:
            self.index.unpin(keys)

    def codec_of(self, stored: StoredObject, meta: BlockMeta) -> Codec | MissReason:
        """Return what decodes an object that is read for a block, or why it can't be used.

        CorruptPayload if it is at another place of a prompt.
        """
        stored.check_place(meta)
        codec = self.registry.get(stored.codec_id, stored.profile)
        if codec is None:
            return MissReason.UNKNOWN_CODEC
        if stored.quality > self.quality_max:
            self.index.remove(meta.id.key)
            return MissReason.COARSE
        return codec

    def good_sections(self, stored: StoredObject, codec: Codec) -> list[Section]:
        """Return the sections, without bad ones if what is left is as good as the own codec would have made it."""
        good = stored.good_sections()
        if len(good) == len(stored.entries):
            return good
        if not isinstance(codec, EmbeddedCodec):
            raise CorruptPayload(f"{stored.meta.id}: {len(stored.entries) - len(good)} sections are not those stored")
        left = codec.quality_of(good)
        if left > self.quality_max:
            raise CorruptPayload(f"{stored.meta.id}: the good sections have a KL of {left:.2g}, above what is wanted")
        self.counts.add("blocks_damaged")
        return good

    def absent(self, object_id: ObjectId) -> MissReason:
        """Note that a block is not there, whatever the index says."""
        self.index.remove(object_id.key)
        return MissReason.ABSENT

    def corrupt(self, object_id: ObjectId, error: CorruptPayload) -> MissReason:
        """Remove an object that is not what was stored."""
        self.index.remove(object_id.key)
        self.tiers.delete(object_id, "corrupt")
        if self.counts.add("corrupt") == 1:
            _log.warning("removed a corrupt object, served as a miss; further ones are only counted: %s", error)
        return MissReason.CORRUPT

    def decide(self, metas: Sequence[BlockMeta], blocks: int, reason: MissReason | None) -> None:
        """Count that the leading blocks of a load came, and the others were given up."""
        why = Why.DEADLINE if reason is MissReason.DEADLINE else Why.NOT_THERE
        for position, meta in enumerate(metas):
            decided = (Choice.LOAD, Why.IN_TIME) if position < blocks else (Choice.ABANDONED, why)
            self.decisions.add(*decided, meta.layout.tokens, meta.id.namespace)


class Strategy(Protocol):
    """A way to load a run of blocks."""

    def load(self, access: LoadAccess, metas: Sequence[BlockMeta], deadline_s: float) -> LoadReport:
        """Bring blocks, at most until `deadline_s` seconds from now, and count what was decided about each.

        Whatever it raises is a miss of all of them.
        """
