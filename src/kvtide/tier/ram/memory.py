"""Objects in frames of one page-aligned arena of this machine's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.evict import EvictionOrder
from kvtide.tier.base import Buffer, IsPinned, LentObject
from kvtide.tier.buffers import copy_bytes
from kvtide.tier.ram.framed import Arena, FramedTier, Resident
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES

_log = logging.getLogger(__name__)

# Locks memory for fast transfers to a GPU and returns what takes that back. OSError if it can't be locked.
Pin = Callable[[memoryview], Callable[[], None]]


class MemoryTier(FramedTier[Arena]):
    """Keeps copies of objects in at most `bytes_max`; see FramedTier.

    `pin` is given all of the memory once at `open`; what it can't lock serves as ordinary memory.
    """

    name = "memory"

    def __init__(
        self,
        bytes_max: int,
        clock: Clock,
        is_pinned: IsPinned,
        order: EvictionOrder | None = None,
        frame_bytes: int | None = None,
        pin: Pin | None = None,
    ) -> None:
        super().__init__(bytes_max, clock, is_pinned, order, frame_bytes)
        self._pin = pin
        self._unpin: Callable[[], None] | None = None

    def _reserve(self) -> Arena:
        # The system gives the memory as it is first used, or at once if it is pinned.
        try:
            arena = Arena(self._bytes_max, self._frame_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise TierUnavailable(f"no {self._bytes_max} bytes of memory to reserve: {error}") from error
        if self._pin is not None:
            try:
                self._unpin = self._pin(arena.memory)
            except OSError as error:
                _log.warning("memory tier: %s; its memory is not pinned", error)
        return arena

    def _give_up(self, frames: Arena) -> None:
        if self._unpin is not None:
            self._unpin()
        self._unpin = None

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Copy the object's bytes from `offset` on into `buffer`."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        with self.lease(object_id) as views:
            if views is None:
                return None
            done = 0
            for view in views:
                part = view[offset : offset + len(buffer) - done]
                offset = max(0, offset - len(view))
                copy_bytes(buffer[done : done + len(part)], part)
                done += len(part)
            return done

    @contextmanager
    def lease(self, object_id: ObjectId) -> Iterator[list[memoryview] | None]:
        """Lend the object's memory, piece by piece, for the time of the `with`; None if it is not here.

        It is not reused meanwhile, even if the object is removed or evicted. Read it only.
        """
        held = self._hold(object_id)
        if held is None:
            yield None
            return
        try:
            yield [view.toreadonly() for view in held.frames.views(held.resident.runs, held.resident.size)]
        finally:
            self._let_go(held)

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object's memory until it is released."""
        with ExitStack() as lease:
            views = lease.enter_context(self.lease(object_id))
            if views is None:
                return None
            return LentObject(sum(map(len, views)), _joined(views, HEADER_BYTES), views, None, lease.pop_all().close)

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object's memory if it is here."""
        return self.lend(object_id) if object_id in self._residents else None

    def _write(self, frames: Arena, resident: Resident, buffer: Buffer) -> None:
        rest = memoryview(buffer)
        for view in frames.views(resident.runs, resident.size):
            copy_bytes(view, rest[: len(view)])
            rest = rest[len(view) :]

    def _copy_out(self, frames: Arena, resident: Resident, buffer: memoryview) -> bool:
        for view in frames.views(resident.runs, resident.size):
            copy_bytes(buffer[: len(view)], view)
            buffer = buffer[len(view) :]
        return True


def _joined(views: Sequence[memoryview], size: int) -> bytes:
    parts = []
    for view in views:
        if size <= 0:
            break
        parts.append(bytes(view[:size]))
        size -= len(view)
    return b"".join(parts)
