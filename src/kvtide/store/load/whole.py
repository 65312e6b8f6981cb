"""Loads blocks in a few threads: whole ones, or the first layers of all blocks before the next layers of any.

Invariant: what is handed to a sink has passed every check of the object format and belongs to the block asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from enum import Enum
from functools import partial
from itertools import zip_longest
from mmap import PAGESIZE
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec, CodecRegistry, EmbeddedCodec, LayeredCodec, layer_section_ids
from kvtide.errors import CorruptPayload
from kvtide.index import Index
from kvtide.store.storing import BlockSource
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId, Section
from kvtide.wire import SectionEntry, StoredObject, head_bytes, object_bytes_max, parse_header, parse_object

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# Curves are float32, and headers round up.
QUALITY_SLACK = 2e-3
# As much of a block is read at a time where layers come one after the other: a disk is as fast with this as with more.
PIECE_BYTES = 1 << 20

# Called with the block's position in the load and its bits, which are valid during the call only. May be called from
# several threads at once, for different blocks, in any order.
BlockSink = Callable[[int, BlockBits], None]
# Offered a block's checked sections first; if it takes them, the block is not decoded for the sink.
SectionSink = Callable[[int, Codec, Sequence[Section]], bool]
# Called with the block's position, a layer, and from there on the values of one layer after the other, each
# (2, tokens, kv_heads, head_dim); otherwise as a BlockSink. Layers of a block come in order.
LayerSink = Callable[[int, int, Sequence[BlockBits]], None]


class Guarded(Protocol):
    """Turns faults into misses."""

    def __call__(self, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """See `Cache.guarded`."""


class MissReason(Enum):
    """Why a block was not loaded."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNKNOWN_CODEC = "unknown codec or profile"
    COARSE = "coarser than asked for"
    DEADLINE = "deadline"
    FAULT = "fault"
    CLOSED = "the cache is not open, or this is a forked process"


class LoadReport(NamedTuple):
    """The leading blocks that a load delivered, and why it ended there (None: all came)."""

    blocks: int
    stored_bytes: int
    reason: MissReason | None


class Sinks(NamedTuple):
    """Where blocks go. With `layers`, those of a codec that keeps layers apart come by layers, and nowhere else."""

    bits: BlockSink
    sections: SectionSink = lambda position, codec, sections: False
    layers: LayerSink | None = None


class Loaded(NamedTuple):
    """What was loaded so far. damaged: loaded from the sections that were good."""

    blocks: int
    damaged: int
    misses: dict[MissReason, int]


class _Scratch(NamedTuple):
    layout: BlockLayout
    stored: memoryview
    bits: BlockBits


# Stored bytes that were read for a block so far.
_Outcome = int | MissReason


class _Layered:
    """A block of which the first `layers` layers have been delivered. Its pieces are loaded one after the other."""

    def __init__(self, position: int, meta: BlockMeta) -> None:
        self.position = position
        self.meta = meta
        self.codec: LayeredCodec | None = None
        self.entries: Sequence[SectionEntry] = ()
        self.layers = 0
        self.read_bytes = 0


class Loader:
    """Twice `threads` loading threads between `open` and `close`.

    The second ones load what the fastest tier has or is `queued`, so that a slow tier never holds that up. `guarded`
    turns faults into misses; objects that are corrupt are removed. What is coarser than `quality` is not used.
    """

    def __init__(
        self,
        tiers: TierStack,
        index: Index,
        quality: float,
        registry: CodecRegistry,
        clock: Clock,
        threads: int,
        guarded: Guarded,
        queued: Callable[[ObjectId], BlockSource | None],
    ) -> None:
        self._tiers = tiers
        self._index = index
        self._quality_max = quality * (1 + QUALITY_SLACK)
        self._registry = registry
        self._clock = clock
        self._threads = threads
        self._guarded = guarded
        self._queued = queued
        self._far: ThreadPoolExecutor | None = None
        self._near: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._scratch: list[_Scratch] = []
        self._counts: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()

    def open(self) -> None:
        """Start the threads."""
        self._far = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtide-load")
        self._near = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtide-load-near")

    def close(self) -> None:
        """Begin nothing more. Idempotent."""
        for pool in (self._far, self._near):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._far = self._near = None

    def check(self) -> None:
        """AssertionError if a buffer is lost. Call it while nothing is loaded."""
        assert len(self._scratch) <= 2 * self._threads, f"{len(self._scratch)} buffers"

    def loaded(self) -> Loaded:
        """Return the counters."""
        with self._lock:
            return Loaded(self._counts["loaded"], self._counts["damaged"], dict(self._misses))

    def load(self, metas: Sequence[BlockMeta], sinks: Sinks, deadline_s: float) -> LoadReport:
        """Load blocks, at most until `deadline_s` seconds from now; see `Cache.load`."""
        give_up_s = self._clock.monotonic_s() + deadline_s
        begin = self._begin_whole if sinks.layers is None else partial(self._begin_layers, layers=sinks.layers)
        keys = [meta.id.key for meta in metas]
        self._index.pin(keys)
        try:
            report = self._leading(begin(metas, sinks), give_up_s)
        finally:
            self._index.unpin(keys)
        with self._lock:
            self._counts["loaded"] += report.blocks
            if report.reason is not None:
                self._misses[report.reason] += 1
        return report

    def _pool(self, object_id: ObjectId) -> ThreadPoolExecutor:
        near, far = self._near, self._far
        assert near is not None and far is not None, "load before open"
        if self._queued(object_id) is not None:
            return near
        is_near = self._guarded("look up", partial(self._tiers.is_near, object_id), False)
        return near if is_near else far

    def _leading(self, pending: Sequence[Sequence[Future[_Outcome]]], give_up_s: float) -> LoadReport:
        """Wait for one block after the other; each is done with the last of its pieces, or with one that fails."""
        stored_bytes = 0
        for count, pieces in enumerate(pending):
            block_bytes = 0
            for piece in pieces:
                try:
                    outcome = piece.result(max(0.0, give_up_s - self._clock.monotonic_s()))
                except FutureTimeoutError:
                    outcome = MissReason.DEADLINE
                except CancelledError:
                    outcome = MissReason.CLOSED
                if isinstance(outcome, MissReason):
                    # Backwards: a piece that runs must not find the one before it cancelled under its feet.
                    for rest in reversed([each for block in pending for each in block]):
                        rest.cancel()
                    return LoadReport(count, stored_bytes, outcome)
                block_bytes = outcome
            stored_bytes += block_bytes
        return LoadReport(len(pending), stored_bytes, None)

    # Whole blocks

    def _begin_whole(self, metas: Sequence[BlockMeta], sinks: Sinks) -> list[list[Future[_Outcome]]]:
        return [
            [self._pool(meta.id).submit(self._checked, meta, partial(self._load_whole, position, meta, sinks))]
            for position, meta in enumerate(metas)
        ]

    def _checked(self, meta: BlockMeta, action: Callable[[_Scratch], _Outcome]) -> _Outcome:
        """Run an action on a scratch; what it finds corrupt is removed, other faults are misses."""

        def run() -> _Outcome:
            scratch = self._take_scratch(meta.layout)
            try:
                return action(scratch)
            except CorruptPayload as error:
                self._drop_corrupt(meta.id, error)
                return MissReason.CORRUPT
            finally:
                self._scratch.append(scratch)

        fault: _Outcome = MissReason.FAULT
        return self._guarded("load", run, fault)

    def _load_whole(self, position: int, meta: BlockMeta, sinks: Sinks, scratch: _Scratch) -> _Outcome:
        source = self._queued(meta.id)
        if source is not None:
            sinks.bits(position, source())
            return 0
        size = self._tiers.get_into(meta.id, scratch.stored)
        if size is None:
            self._index.remove(meta.id.key)
            return MissReason.ABSENT
        stored = parse_object(scratch.stored[:size], meta.id)
        stored.check_place(meta)
        codec = self._registry.get(stored.codec_id, stored.profile)
        if codec is None:
            return MissReason.UNKNOWN_CODEC
        if stored.quality > self._quality_max:
            self._index.remove(meta.id.key)
            return MissReason.COARSE
        if not sinks.sections(position, codec, sections := self._sections(stored, codec)):
            codec.decode(meta, sections, scratch.bits)
            sinks.bits(position, scratch.bits)
        return size

    def _sections(self, stored: StoredObject, codec: Codec) -> list[Section]:
        """Return the sections, without bad ones if what is left is as good as the own codec would have made it."""
        good = stored.good_sections()
        if len(good) == len(stored.entries):
            return good
        if not isinstance(codec, EmbeddedCodec):
            raise CorruptPayload(f"{stored.meta.id}: {len(stored.entries) - len(good)} sections are not those stored")
        left = codec.quality_of(good)
        if left > self._quality_max:
            raise CorruptPayload(f"{stored.meta.id}: the good sections have a KL of {left:.2g}, above what is wanted")
        with self._lock:
            self._counts["damaged"] += 1
        return good

    # Layers

    def _begin_layers(
        self, metas: Sequence[BlockMeta], sinks: Sinks, layers: LayerSink
    ) -> list[list[Future[_Outcome]]]:
        """Queue the first layers of all blocks, then the next ones: as few as fill a piece."""
        pending: list[list[Future[_Outcome]]] = [[] for _ in metas]
        blocks = [(_Layered(position, meta), self._pool(meta.id)) for position, meta in enumerate(metas)]
        for stops in zip_longest(*[_piece_ends(meta.layout) for meta in metas]):
            for (block, pool), stop, before in zip(blocks, stops, pending, strict=True):
                if stop is not None:
                    last = before[-1] if before else None
                    before.append(pool.submit(self._load_piece, block, stop, last, sinks, layers))
        return pending

    def _load_piece(
        self, block: _Layered, stop: int, before: Future[_Outcome] | None, sinks: Sinks, layers: LayerSink
    ) -> _Outcome:
        """Deliver a block's layers up to `stop`, after those of the piece before, which was queued before."""
        outcome: _Outcome = 0
        if before is not None:
            outcome = MissReason.DEADLINE if before.cancelled() else before.result()
        if isinstance(outcome, MissReason) or block.layers >= stop:
            return outcome
        return self._checked(block.meta, partial(self._load_layers, block, stop, sinks, layers))

    def _load_layers(self, block: _Layered, stop: int, sinks: Sinks, layers: LayerSink, scratch: _Scratch) -> _Outcome:
        meta, start = block.meta, 0
        if not block.layers and self._queued(meta.id) is not None:
            block.layers = meta.layout.layers
            return self._load_whole(block.position, meta, sinks, scratch)
        if block.layers:
            # Direct reads begin at a page.
            start = block.entries[block.layers].offset // PAGESIZE * PAGESIZE
            end = block.entries[stop - 1].offset + block.entries[stop - 1].size
        else:
            end = min(len(scratch.stored), head_bytes(meta.layout.layers) + stop * meta.layout.layer_bytes)
        size = self._tiers.get_into(meta.id, scratch.stored[: end - start], start)
        if size is None:
            self._index.remove(meta.id.key)
            return MissReason.ABSENT
        block.read_bytes += size
        data = scratch.stored[:size]
        if not block.layers and not self._begin_block(block, data, stop):
            # The bytes so far are read again.
            block.layers = meta.layout.layers
            return self._load_whole(block.position, meta, sinks, scratch)
        assert block.codec is not None
        values = [
            block.codec.decode_layer(meta.layout, entry.cut(data, start, meta.id))
            for entry in block.entries[block.layers : stop]
        ]
        layers(block.position, block.layers, values)
        block.layers = stop
        return block.read_bytes

    def _begin_block(self, block: _Layered, data: memoryview, stop: int) -> bool:
        """Take the head of a block's object; False if layers up to `stop` are no sections of their own in `data`."""
        stored = parse_header(data, block.meta.id)
        stored.check_place(block.meta)
        codec = self._registry.get(stored.codec_id, stored.profile)
        last = stored.entries[min(stop, len(stored.entries)) - 1]
        if (
            stored.quality > self._quality_max
            or not isinstance(codec, LayeredCodec)
            or list(stored.section_ids) != layer_section_ids(block.meta.layout)
        ):
            return False
        block.codec, block.entries = codec, stored.entries
        return last.offset + last.size <= len(data)

    def _drop_corrupt(self, object_id: ObjectId, error: CorruptPayload) -> None:
        self._index.remove(object_id.key)
        self._tiers.delete(object_id, "corrupt")
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


def _piece_ends(layout: BlockLayout) -> list[int]:
    """Return the layer behind each piece of a block."""
    step = max(1, PIECE_BYTES // layout.layer_bytes)
    return [*range(step, layout.layers, step), layout.layers]
