"""One connection of the event loop: bytes between a non-blocking socket and the caller's buffers or files.

`Mover` moves bodies in a native thread, without the interpreter's lock.

Every wait has a deadline in the loop's time; TimeoutError when it passes, ConnectionError when the peer is gone.
Invariant: bytes that were read behind a head stay in order in front of what the socket still holds.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvtide._native import JOB_ENDED, JOB_STOPPED
from kvtide._native import Mover as NativeMover
from kvtide.errors import RequestRefused
from kvtide.server.settings import ProgressBudget
from kvtide.tier.base import FilePart
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END

# A job's number, how many bytes moved, and how it ended: native/mover.hpp has the numbers.
_Outcome = asyncio.Future[tuple[int, int, int]]


# The mover is woken for a body only when so much of it has come: 16 wakes for 4 MiB instead of 60.
WAKE_BYTES = 256 << 10
# What a connection that is being closed may still send before we stop listening.
LINGER_BYTES_MAX = 1 << 20
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BodyProgress(NamedTuple):
    """The bytes of a body that have moved, and when the last did, on the loop's clock."""

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


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """Return the common name in a certificate as `ssl` tells it; None for none, and for several: which one counts?"""
    subject = certificate.get("subject", ()) if certificate else ()
    # A tuple of relative names, each a tuple of pairs.
    names = [value for part in subject for name, value in part if name == "commonName"]
    return str(names[0]) if len(names) == 1 else None


class Connection:
    """A connected socket, plain or TLS. One coroutine at a time uses it.

    Bodies on plain sockets move in the mover's thread; what TLS encrypts, and heads, move here.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, mover: Mover) -> None:
        self._sock = sock
        self._loop = loop
        self._mover = mover
        self._descriptor = sock.fileno()
        self._pending = b""
        # When the first byte of the last head came, or was found after the request before.
        self.head_began_s = loop.time()
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._wake_bytes = WAKE_BYTES if sock.family in {socket.AF_INET, socket.AF_INET6} else 0

    @property
    def has_pending(self) -> bool:
        """True if bytes are here that nobody has asked for yet."""
        return bool(self._pending)

    def now_s(self) -> float:
        """Return the loop's time, in which deadlines are."""
        return self._loop.time()

    async def handshake(self, deadline_s: float) -> str | None:
        """Shake hands if this is TLS. Return the common name in the peer's verified certificate, if it has one."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return None
        await self._until_done(self._sock.do_handshake, deadline_s)
        return common_name(self._sock.getpeercert())

    async def read_head(self, idle_deadline_s: float, head_s_max: float) -> bytes | None:
        """Return the bytes of the next head, its empty line included; None if the peer closed before one began.

        Waits until `idle_deadline_s` for its first byte, from then on for `head_s_max`. RequestRefused (431) if it
        is too long.
        """
        deadline_s, searched = idle_deadline_s, 0
        if self._pending:
            self.head_began_s = self._loop.time()
            deadline_s = self.head_began_s + head_s_max
        while (end := self._pending.find(HEAD_END, max(0, searched - len(HEAD_END)))) < 0:
            searched = len(self._pending)
            if searched > HEAD_BYTES_MAX:
                raise RequestRefused(431, f"the head has more than {HEAD_BYTES_MAX} bytes")
            data = await self._until_done(lambda: self._sock.recv(HEAD_BYTES_MAX), deadline_s)
            if not data:
                if searched:
                    raise ConnectionResetError("the peer closed within a head")
                return None
            if not searched:
                self.head_began_s = self._loop.time()
                deadline_s = self.head_began_s + head_s_max
            self._pending += data
        end += len(HEAD_END)
        head, self._pending = self._pending[:end], self._pending[end:]
        return head

    async def is_readable(self, deadline_s: float) -> None:
        """Wait until bytes are here, or the end. TimeoutError if the peer sends none until the deadline."""
        if not self._pending and not (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            await self._wait(BlockingIOError(), deadline_s, is_send=False)

    async def read_into(self, view: memoryview, pace: ProgressBudget) -> None:
        """Fill `view`. ConnectionResetError if the peer closes before that, TimeoutError if it falls behind `pace`."""
        done = min(len(self._pending), len(view))
        view[:done] = self._pending[:done]
        self._pending = self._pending[done:]

        if not self._is_tls and done < len(view):
            await self._receive(view[done:], pace)
            return
        while done < len(view):
            came = await self._until_done(partial(self._sock.recv_into, view[done:]), pace.due_s)
            if not came:
                raise ConnectionResetError(f"the peer closed after {done} of {len(view)} bytes")
            done += came
            pace.moved(came, self._loop.time())

    async def _receive(self, view: memoryview, pace: ProgressBudget) -> None:
        body, follow = self._mover.receive(self._descriptor, view, self._wake_bytes), Following(pace)
        try:
            done = await body.end(follow.due_s)
        except EOFError as error:
            raise ConnectionResetError(f"the peer closed within a body: {error}") from None
        if done < len(view):
            raise TimeoutError
        follow.due_s(BodyProgress(done, self._loop.time()))

    async def send_all(self, data: bytes, deadline_s: float, has_more: bool = False) -> None:
        """Send bytes; with `has_more` they may wait in the kernel for what follows."""
        view = memoryview(data)
        flags = socket.MSG_MORE if has_more and not self._is_tls else 0
        while view:
            sent = await self._until_done(partial(self._sock.send, view, flags), deadline_s, is_send=True)
            view = view[sent:]

    @property
    def is_encrypted(self) -> bool:
        """True if bodies go through `send_encrypted`; otherwise they are started and move on their own."""
        return self._is_tls

    def start_views(self, views: Sequence[memoryview], slice_bytes: int) -> Body:
        """Begin to send memory in pieces, by calls that end where slices do."""
        return self._mover.send(self._descriptor, views, slice_bytes)

    def start_file(self, file: FilePart, size: int, slice_bytes: int) -> Body:
        """Begin to send a part of a file, as `start_views` does."""
        return self._mover.send_file(self._descriptor, file, size, slice_bytes)

    async def send_encrypted(self, views: Sequence[memoryview], stall_s_max: float) -> int:
        """Send memory in pieces over TLS. Return how much went out before the peer took nothing for so long."""
        done = 0
        for view in views:
            rest = view
            while rest:
                try:
                    send, due_s = partial(self._sock.send, rest), self.now_s() + stall_s_max
                    sent = await self._until_done(send, due_s, is_send=True)
                except TimeoutError:
                    return done
                done, rest = done + sent, rest[sent:]
        return done

    async def is_writable(self, deadline_s: float) -> bool:
        """Wait until the socket takes bytes. False if it did not until the deadline."""
        try:
            await self._wait(BlockingIOError(), deadline_s, is_send=True)
        except TimeoutError:
            return False
        return True

    async def _until_done(self, action: Callable[[], Any], deadline_s: float, is_send: bool = False) -> Any:
        while True:
            try:
                return action()
            except _WOULD_BLOCK as error:
                await self._wait(error, deadline_s, is_send)

    async def _wait(self, error: OSError, deadline_s: float, is_send: bool) -> None:
        """Wait until what would have blocked can go on: TLS may have to read to write, and the other way round."""
        if isinstance(error, ssl.SSLError):
            is_send = isinstance(error, ssl.SSLWantWriteError)
        waiter = self._loop.create_future()
        timer = self._loop.call_at(deadline_s, _expire, waiter)
        if is_send:
            self._loop.add_writer(self._descriptor, _wake, waiter)
        else:
            self._loop.add_reader(self._descriptor, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            if is_send:
                self._loop.remove_writer(self._descriptor)
            else:
                self._loop.remove_reader(self._descriptor)

    async def linger(self, deadline_s: float) -> None:
        """Let the peer read our last words: it may still be sending, and a close with bytes unread would reset it."""
        if self._is_tls:
            return
        try:
            self._sock.shutdown(socket.SHUT_WR)
            for _ in range(LINGER_BYTES_MAX // HEAD_BYTES_MAX):
                if not await self._until_done(lambda: self._sock.recv(HEAD_BYTES_MAX), deadline_s):
                    return
        except OSError:
            # It is gone already, or keeps on sending: either way we have done what we could.
            return

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
