"""Bodies that move between sockets and memory or files in a native thread, without the interpreter's lock.

Invariant: when `Body.end` returns, however it does, the thread touches neither socket nor file nor memory any more.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide._native import JOB_ENDED, JOB_STOPPED
from kvtide._native import Mover as NativeMover
from kvtide.server.settings import ProgressBudget
from kvtide.tier.base import FilePart

# A job's number, how many bytes moved, and how it ended: native/mover.hpp has the numbers.
_Outcome = asyncio.Future[tuple[int, int, int]]


class BodyProgress(NamedTuple):
    """How much of a body has moved, and when it last did, on the loop's clock."""

    size: int
    moved_s: float


class Following:
    """Keeps a pace's account of a body that moves. `stall_s_max` ends it sooner if nothing moves for so long."""

    def __init__(self, pace: ProgressBudget, stall_s_max: float = math.inf) -> None:
        self._pace = pace
        self._stall_s_max = stall_s_max
        self._seen = 0

    def due_s(self, progress: BodyProgress) -> float:
        """Note how far the body is; return when it is late if nothing moves until then."""
        self._pace.moved(progress.size - self._seen, progress.moved_s)
        self._seen = progress.size
        return min(self._pace.due_s, progress.moved_s + self._stall_s_max)


class Mover:
    """A thread that moves bodies for one event loop, on whose thread all calls are made.

    Sockets are plain and non-blocking. Who starts a body waits for its `end`.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.native: NativeMover
        # Bodies under way, by their job's number.
        self.waiting: dict[int, _Outcome] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread. OSError if there is no room for one."""
        self.loop, self.native = loop, NativeMover()
        loop.add_reader(self.native.fileno(), self._take)

    def close(self) -> None:
        """End the thread. Who waits for a body is cancelled."""
        self.loop.remove_reader(self.native.fileno())
        while self.waiting:
            job, waiter = self.waiting.popitem()
            self.native.stop(job)
            waiter.cancel()
        del self.native

    def receive(self, descriptor: int, view: memoryview, wake_bytes: int) -> Body:
        """Fill memory from a socket; the thread wakes for so many bytes at once, for any if that is 0."""
        return Body(self, self.native.receive(descriptor, view, wake_bytes))

    def send(self, descriptor: int, views: Sequence[memoryview], slice_bytes: int) -> Body:
        """Send memory in pieces."""
        return Body(self, self.native.send(descriptor, views, slice_bytes))

    def send_file(self, descriptor: int, file: FilePart, size: int, slice_bytes: int) -> Body:
        """Send a part of a file."""
        return Body(self, self.native.send_file(descriptor, file.descriptor, file.offset, size, slice_bytes))

    def _take(self) -> None:
        for outcome in self.native.take():
            waiter = self.waiting.pop(outcome[0])
            if not waiter.done():
                waiter.set_result(outcome)


class Body:
    """A body that moves."""

    def __init__(self, mover: Mover, begun: tuple[int, int, int]) -> None:
        self._mover = mover
        # A small one has moved already; it has no job.
        self._job, self._size, self._error = begun
        self._waiter: _Outcome | None = None
        if self._job:
            self._waiter = mover.waiting[self._job] = mover.loop.create_future()

    def progress(self) -> BodyProgress:
        """Return how far it is, after receiving what has come and was too little to wake the thread."""
        if self._job in self._mover.waiting:
            return BodyProgress(*self._mover.native.progress(self._job))
        # It has ended, and `end` may not have gone on yet.
        waiter, size = self._waiter, self._size
        if waiter is not None and waiter.done() and not waiter.cancelled():
            size = waiter.result()[1]
        return BodyProgress(size, self._mover.loop.time())

    def shorten(self, size: int) -> bool:
        """Send no more than `size` bytes, whole slices. False if it is that far already, or has ended beyond it."""
        if self._job in self._mover.waiting:
            return self._mover.native.shorten(self._job, size)
        return self.progress().size <= size

    async def end(self, due_s: Callable[[BodyProgress], float]) -> int:
        """Wait until all has moved, or the time is over that `due_s` gives it for its progress. Return what has moved.

        EOFError if the peer, or the file, ends before that, OSError if the socket fails.
        """
        if self._waiter is not None:
            _, self._size, self._error = await self._outcome(self._waiter, due_s)
        if self._error == JOB_ENDED:
            raise EOFError(f"it ended after {self._size} bytes")
        if self._error not in {0, JOB_STOPPED}:
            raise OSError(self._error, os.strerror(self._error))
        return self._size

    async def _outcome(self, waiter: _Outcome, due_s: Callable[[BodyProgress], float]) -> tuple[int, int, int]:
        mover, job = self._mover, self._job
        loop, native = mover.loop, mover.native
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            if waiter.done():
                return
            late_s = due_s(self.progress())
            if loop.time() < late_s:
                timer = loop.call_at(late_s, look)
            else:
                del mover.waiting[job]
                waiter.set_result(native.stop(job))

        timer = loop.call_at(due_s(BodyProgress(0, loop.time())), look)
        try:
            return await waiter
        finally:
            timer.cancel()
            # Who was cancelled stops the job, unless it has ended in the meantime.
            if mover.waiting.pop(job, None) is not None:
                native.stop(job)
