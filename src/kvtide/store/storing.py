"""The queue of blocks that wait to be stored, which loads are served from, and the thread that empties it.

Invariant: a block's content is fixed when it is queued, and what waits or is being stored never keeps more than
`bytes_max` bytes alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvtide.block import BlockMeta
from kvtide.codec import Codec, LevelledCodec, LosslessCodec, OrderingCodec
from kvtide.config import Limits, step_back
from kvtide.index import TIERS_MAX
from kvtide.store.load import BlockSource, LoadAccess, level_meta
from kvtide.store.profile_follower import ProfileFollower
from kvtide.tier import started
from kvtide.tier.base import Buffer
from kvtide.tier.buffers import recycled_buffer
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, object_quality, pack_object

if TYPE_CHECKING:
    from kvtide.importance import Orders


# Beside a thread that computes on the same core, the storing thread gets a tenth: enough to let go of locks soon.
STORE_NICE = 10
# A storing thread without work does its chores so often.
IDLE_S = 5.0
# A thread that is still storing a block when `close` has waited its time gets so much longer.
END_S_MAX = 1.0


class PendingBlock(NamedTuple):
    """A block to be stored in the background.

    capture: called once there is room for the block, in the thread that queues it. What it returns must not change
    when the engine goes on: a copy. is_exact: to be kept losslessly whatever the cache's codec. orders: of its tokens,
    for an `OrderingCodec`. group: of the model's groups of layers, for codecs with a profile for each.
    """

    meta: BlockMeta
    capture: Callable[[], BlockSource]
    is_exact: bool = False
    orders: Orders | None = None
    group: int = 0


class QueuedBlock(NamedTuple):
    """A block whose content is fixed."""

    meta: BlockMeta
    source: BlockSource
    is_exact: bool = False
    orders: Orders | None = None
    group: int = 0


class Storer:
    """Has one block after another stored, in a thread of its own that gives way to others.

    add(meta, capture)  its bytes count from here on, and look-ups find it from when `capture` returns
    store(block)        until this returns
    """

    def __init__(self, store: Callable[[QueuedBlock], None], do_chores: Callable[[], None], bytes_max: int) -> None:
        """do_chores: is called now and then while nothing waits. Both raise nothing."""
        self._store = store
        self._do_chores = do_chores
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._queue: deque[QueuedBlock] = deque()
        # All that count, by id; None until they are captured.
        self._waiting: dict[ObjectId, QueuedBlock | None] = {}
        self._queued_bytes = 0
        self._is_closing = False
        self.thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread; where none can be had, the next block tries again. A storer is opened once."""
        with self._changed:
            self._has_thread()

    def _has_thread(self) -> bool:
        self.thread = self.thread or started(self._store_until_closed, "kvtide-store")
        return self.thread is not None

    def close(self, timeout_s: float) -> list[BlockMeta]:
        """Store what is queued, for at most `timeout_s`; drop and return the rest. Waits END_S_MAX for the thread."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            dropped = [block.meta for block in self._queue]
            self._queue.clear()
            for meta in dropped:
                self._release(meta)
            self._changed.notify_all()
        if self.thread is not None:
            self.thread.join(END_S_MAX)
        return dropped

    def add(self, meta: BlockMeta, capture: Callable[[], QueuedBlock]) -> bool:
        """Queue what `capture` returns, which is called once there is room. True if the block waits, or did already.

        False if there is no room or no thread, or closing began.
        """
        with self._changed:
            if meta.id in self._waiting:
                return True
            has_room = self._queued_bytes + meta.layout.raw_bytes <= self._bytes_max
            if self._is_closing or not has_room or not (self.thread or self._has_thread()):
                return False
            self._waiting[meta.id] = None
            self._queued_bytes += meta.layout.raw_bytes
        block: QueuedBlock | None = None
        try:
            block = capture()
        finally:
            with self._changed:
                is_queued = block is not None and not self._is_closing
                if block is None or not is_queued:
                    self._release(meta)
                else:
                    self._waiting[meta.id] = block
                    self._queue.append(block)
                    self._changed.notify_all()
        return is_queued

    def _release(self, meta: BlockMeta) -> None:
        del self._waiting[meta.id]
        self._queued_bytes -= meta.layout.raw_bytes
        self._changed.notify_all()

    def find(self, object_id: ObjectId) -> QueuedBlock | None:
        """Return a block that is queued or being stored."""
        with self._changed:
            return self._waiting.get(object_id)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored. False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_bytes == 0, timeout_s)

    def check(self) -> None:
        """AssertionError if bytes are still accounted for. Call it while nothing is stored."""
        with self._changed:
            assert self._queued_bytes == 0, f"{self._queued_bytes} bytes are still taken for queued"
            assert not self._waiting

    def _store_until_closed(self) -> None:
        step_back(STORE_NICE)
        while True:
            with self._changed:
                if not self._queue and not self._is_closing:
                    self._changed.wait(IDLE_S)
                if self._is_closing:
                    return
                block = self._queue.popleft() if self._queue else None
            if block is None:
                self._do_chores()
                continue
            self._store(block)
            with self._changed:
                self._release(block.meta)


# The queue counts as a tier in the index, after all real ones.
QUEUE_TIER = TIERS_MAX - 1


class Placer:
    """Encodes blocks and places them in tiers and index; counts the outcomes."""

    def __init__(self, access: LoadAccess, profiles: ProfileFollower, limits: Limits) -> None:
        self._access = access
        self._tiers = access.tiers
        self._index = access.index
        self._counts = access.counts
        self._profiles = profiles
        self._limits = limits

    def store(self, block: QueuedBlock) -> None:
        """Place a block that was queued; it waits no more. Raises nothing."""
        guarded = self._access.guarded
        # Once: a profile that comes meanwhile is not that of the bytes.
        codec = self._profiles.newest_codec(block.group)
        if block.orders is not None and isinstance(codec, OrderingCodec):
            exact: Codec = LosslessCodec()
            codec = guarded("order", partial(codec.ordered, block.orders), exact)
        # A block computed on top of blocks of this quality is no better, however it is encoded.
        pack = partial(self._packed, block, self._access.quality, codec, LosslessCodec())
        guarded("store", partial(self.place, block.meta, pack), False)
        if isinstance(codec, LevelledCodec) and codec.coarser and not block.is_exact:
            guarded("store levels", partial(self._place_levels, block, codec), None)
        self._access.gone.extend(self._index.remove(block.meta.id.key, QUEUE_TIER))

    def do_chores(self) -> None:
        """Look for profiles, and tell the tiers what engines decided since they were told last. Raises nothing."""
        self._profiles.look()
        tell = partial(self._access.decisions.tell, self._tiers.note_decisions)
        self._access.guarded("tell decisions", tell, None)

    def _packed(self, block: QueuedBlock, quality: float, *codecs: Codec) -> Buffer | None:
        """Return the object, by the first of the codecs that can keep it and may take the memory; None without one."""
        meta, bits = block.meta, block.source()
        for codec in codecs:
            is_large = codec.scratch_bytes(meta.layout) > self._limits.encode_scratch_bytes_max
            if is_large or (block.is_exact and not codec.is_lossless):
                continue
            sections = self._profiles.encode(codec, meta, bits, block.group, block.is_exact)
            if sections is not None:
                # Whole pages go to the disk as they are, and recycled ones need not be cleared.
                return pack_object(meta, codec.codec_id, sections, codec.profile, quality, room_of=recycled_buffer)
        return None

    def _place_levels(self, block: QueuedBlock, codec: LevelledCodec) -> None:
        """Store a block in the coarser levels too, each an object of its own."""
        for number, level in enumerate(codec.coarser, 1):
            meta = level_meta(block.meta, number)
            if not self._tiers.contains(meta.id):
                packed = self._packed(block._replace(meta=meta), level.quality, level)
                if packed is not None:
                    self._tiers.put_from(meta.id, packed)

    def place(self, meta: BlockMeta, pack: Callable[[], Buffer | None]) -> bool:
        """Store an object unless one as good is here; put it in the place of a coarser one."""
        here = self._stored_quality(meta.id) if self._tiers.contains(meta.id) else None
        if here is None or here > self._access.quality_max:
            packed, put = pack(), self._tiers.put_from if here is None else self._tiers.replace
            if packed is None or not put(meta.id, packed):
                self._counts.add("blocks_dropped")
                return False
            self._counts.add("blocks_stored")
            self._counts.add("raw_bytes_stored", meta.layout.raw_bytes)
            self._counts.add("bytes_stored", len(packed))
            # The tiers have told where it is now.
            return True
        for number, tier in enumerate(self._tiers.places(meta.id)):
            if number:
                self._index.place(meta.id.key, tier)
            else:
                self._index.insert(meta.id.namespace, [meta.id.key], meta.parent, tier)
        return True

    def _stored_quality(self, object_id: ObjectId) -> float:
        """Return the quality of an object that is here, inf for one that can't be read or decoded."""
        if self._access.quality == 0:
            # Namespaces of exact blocks have no others.
            return 0.0
        head = bytearray(HEADER_BYTES)
        size = self._tiers.get_into(object_id, memoryview(head))
        return object_quality(head[: size or 0], self._profiles.lost)
