"""The queue of blocks that wait to be stored, which loads are served from, and the thread that empties it.

Invariant: a block's content is fixed when it is queued, and what waits or is being stored never keeps more than
`bytes_max` bytes alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvtide.block import BlockBits, BlockMeta
from kvtide.config import step_back
from kvtide.types import ObjectId

if TYPE_CHECKING:
    from kvtide.importance import Orders

# Beside a thread that computes on the same core, the storing thread gets a tenth: enough to let go of locks soon.
STORE_NICE = 10
# A storing thread without work does its chores so often.
IDLE_S = 5.0
# A thread that is still storing a block when `close` has waited its time gets so much longer.
END_S_MAX = 1.0

# Returns the block's bits: the same at every call, from any thread. It keeps at most the block's raw bytes alive.
BlockSource = Callable[[], BlockBits]


class PendingBlock(NamedTuple):
    """A block to be stored in the background; `cost` as for `RadixIndex.insert`.

    capture: called once there is room for the block, in the thread that queues it. What it returns must not change
    when the engine goes on: a copy. is_exact: to be kept losslessly whatever the cache's codec. orders: of its tokens,
    for an `OrderingCodec`. group: of the model's groups of layers, for codecs with a profile for each.
    """

    meta: BlockMeta
    capture: Callable[[], BlockSource]
    cost: float | None = None
    is_exact: bool = False
    orders: Orders | None = None
    group: int = 0


class QueuedBlock(NamedTuple):
    """A block whose content is fixed."""

    meta: BlockMeta
    source: BlockSource
    cost: float | None
    is_exact: bool = False
    orders: Orders | None = None
    group: int = 0


class Admission(Enum):
    """The answer of `Storer.reserve` about a block."""

    RESERVED = "there is room, which is now taken"
    QUEUED = "it waits already"
    REFUSED = "no room, no thread, or closing"


class Storer:
    """Has one block after another stored, in a thread of its own that gives way to others.

    reserve(meta)       its bytes count from here on
    append(block)       look-ups find it from here on
    store(block)        until this returns
    """

    def __init__(self, store: Callable[[QueuedBlock], None], do_chores: Callable[[], None], bytes_max: int) -> None:
        """do_chores: is called now and then while nothing waits. Both raise nothing."""
        self._store = store
        self._do_chores = do_chores
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._queue: deque[QueuedBlock] = deque()
        # All that count, by id; None before they are appended.
        self._waiting: dict[ObjectId, QueuedBlock | None] = {}
        self._queued_bytes = 0
        self._is_closing = False
        self.thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread; where none can be had, the next block tries again. A storer is opened once."""
        with self._changed:
            self._has_thread()

    def _has_thread(self) -> bool:
        if self.thread is None:
            thread = threading.Thread(target=self._store_until_closed, name="kvtide-store", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more
                return False
            self.thread = thread
        return True

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

    def reserve(self, meta: BlockMeta) -> Admission:
        """Take room for a block. After RESERVED comes `append` or `release`."""
        with self._changed:
            if meta.id in self._waiting:
                return Admission.QUEUED
            has_room = self._queued_bytes + meta.layout.raw_bytes <= self._bytes_max
            if self._is_closing or not has_room or not self._has_thread():
                return Admission.REFUSED
            self._waiting[meta.id] = None
            self._queued_bytes += meta.layout.raw_bytes
            return Admission.RESERVED

    def release(self, meta: BlockMeta) -> None:
        """Give reserved room back."""
        with self._changed:
            self._release(meta)

    def _release(self, meta: BlockMeta) -> None:
        del self._waiting[meta.id]
        self._queued_bytes -= meta.layout.raw_bytes
        self._changed.notify_all()

    def append(self, block: QueuedBlock) -> bool:
        """Queue a block that room was reserved for. False if closing began meanwhile; the room is then given back."""
        with self._changed:
            if self._is_closing:
                self._release(block.meta)
                return False
            self._waiting[block.meta.id] = block
            self._queue.append(block)
            self._changed.notify_all()
            return True

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
                has_work = self._changed.wait_for(lambda: self._queue or self._is_closing, IDLE_S)
                if self._is_closing:
                    return
                block = self._queue.popleft() if has_work else None
            if block is None:
                self._do_chores()
                continue
            self._store(block)
            with self._changed:
                self._release(block.meta)
