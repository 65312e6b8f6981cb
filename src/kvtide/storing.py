"""Blocks that wait to be stored, and the thread that stores them.

Invariant: what waits, or is being stored, never keeps more than `bytes_max` bytes of blocks alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.block import BlockBits, BlockMeta
from kvtide.config import step_back

__all__ = ["BlockSource", "PendingBlock", "Storer"]

# Beside a thread that computes on the same core, the storing thread gets a tenth: enough to let go of locks soon.
STORE_NICE = 10
# A storing thread without work calls `idle` so often.
IDLE_S = 5.0

# Returns the block's bits; called later, from the storing thread.
BlockSource = Callable[[], BlockBits]


class PendingBlock(NamedTuple):
    """A block to be stored in the background; `cost` as for `Index.insert`."""

    meta: BlockMeta
    source: BlockSource
    cost: float | None = None


class Storer:
    """Calls `store` for one block after another, in a thread of its own that gives way to others.

    Neither `store` nor `idle`, which is called now and then without work, may raise.
    """

    def __init__(self, store: Callable[[PendingBlock], None], idle: Callable[[], None], bytes_max: int) -> None:
        self._store = store
        self._idle = idle
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._queue: deque[PendingBlock] = deque()
        self._queued_bytes = 0
        self._is_closing = False
        self.thread = threading.Thread(target=self._store_until_closed, name="kvtide-store", daemon=True)

    def open(self) -> None:
        """Start the thread. A storer is opened once."""
        self.thread.start()

    def close(self, timeout_s: float) -> None:
        """Store what is queued, for at most `timeout_s`; drop the rest, and wait as long again for the thread."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
        self.thread.join(timeout_s)

    def put(self, blocks: Sequence[PendingBlock]) -> int:
        """Queue blocks; return how many the bound let in.

        The first that does not fit ends it: blocks behind a gap could not be matched.
        """
        with self._changed:
            for count, block in enumerate(blocks):
                raw_bytes = block.meta.layout.raw_bytes
                if self._is_closing or self._queued_bytes + raw_bytes > self._bytes_max:
                    return count
                self._queue.append(block)
                self._queued_bytes += raw_bytes
                self._changed.notify_all()
        return len(blocks)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored. False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_bytes == 0, timeout_s)

    def check(self) -> None:
        """AssertionError if bytes are still accounted for. Call it while nothing is stored."""
        with self._changed:
            assert self._queued_bytes == 0, f"{self._queued_bytes} bytes are still taken for queued"

    def _store_until_closed(self) -> None:
        step_back(STORE_NICE)
        while True:
            with self._changed:
                has_work = self._changed.wait_for(lambda: self._queue or self._is_closing, IDLE_S)
                if self._is_closing:
                    return
                block = self._queue.popleft() if has_work else None
            if block is None:
                self._idle()
                continue
            self._store(block)
            with self._changed:
                # Close may have dropped the queue meanwhile.
                self._queued_bytes = max(0, self._queued_bytes - block.meta.layout.raw_bytes)
                self._changed.notify_all()
