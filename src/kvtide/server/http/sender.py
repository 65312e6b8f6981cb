"""Sends bodies in the slices that the scheduler grants, from memory or from files.

Invariant: a slot is held only while its socket takes bytes; every granted slice is finished, whatever happens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from kvtide.server.http.connections import Body
from kvtide.server.http.exchange import Exchange
from kvtide.server.http.shares import Workers
from kvtide.server.metrics import Metrics
from kvtide.server.scheduler import Scheduler, SchedulerSettings, Send, Slice
from kvtide.server.settings import ProgressBudget
from kvtide.tier.base import FilePart, LentObject
from kvtide.wire.protocol import urgency
from kvtide.wire.ranges import ByteRange

# What TLS takes at a time, and reads of a file: the kernel can't encrypt.
_TLS_BYTES = 256 << 10
# A run that nobody waits for is at most so many slices long: for it the scheduler, and what it shows, lag behind.
_RUN_SLICES_MAX = 16
# One byte in so many is read to wait for a file's pages: half of what the kernel reads ahead by default.
_WARM_STEP_BYTES = 64 << 10
# How often a reader that takes nothing is asked whether it is in somebody's way.
_LOOK_AGAIN_S = 0.2
# A reader that takes nothing for so long stands still; before that, its own tenant's others wait for it.
_LATE_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Some bytes of a file; `[start:stop]` is a part of them, as of memory."""

    file: FilePart
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> FilePiece:
        start, stop, _ = part.indices(self.size)
        return FilePiece(FilePart(self.file.descriptor, self.file.offset + start), stop - start)


# Bytes of a body, wherever they lie.
Piece = memoryview | FilePiece


def lent_pieces(lent: LentObject, part: ByteRange) -> list[Piece]:
    """Return a part of what is lent as pieces."""
    return window(lent.views if lent.file is None else [FilePiece(lent.file, lent.size)], *part)


@dataclass(slots=True)
class SendOrder:
    """A body to send: its pieces, to whom, behind which head, how slowly, and whether others wait for what is lent."""

    exchange: Exchange
    head: bytes
    pieces: Sequence[Piece]
    pace: ProgressBudget
    is_in_the_way: Callable[[], bool]
    size: int = field(init=False)
    # Sending would wait for the disk.
    is_cold: bool = field(init=False)
    # Some pieces lie in memory and others in a file, or in several places of it.
    is_mixed: bool = field(init=False)

    def __post_init__(self) -> None:
        files = [piece for piece in self.pieces if isinstance(piece, FilePiece)]
        self.size = sum(map(len, self.pieces))
        self.is_cold = not all(map(_is_cached, files))
        self.is_mixed = bool(files) and len(self.pieces) > 1


@dataclass(slots=True)
class _Run:
    """Slices of one send that go out one after the other without anybody being asked in between.

    [0, done)           finished
    [done, +piece.size) the slice that holds the slot
    [..., size)         granted when it is reached; nobody else waits
    """

    piece: Slice
    size: int
    done: int = 0
    # None while it can't be shortened.
    body: Body | None = None


@dataclass(eq=False)
class Sender:
    """Runs the scheduler on the running event loop. All calls come from the loop's thread."""

    scheduler: Scheduler
    _workers: Workers
    _stall_s_max: float
    _metrics: Metrics

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Send, asyncio.Future[Slice]] = {}
        self._runs: dict[Send, _Run] = {}
        # Runs when the scheduler's link has room again.
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, order: SendOrder) -> float:
        """Send head and body; return how long they waited. RequestRefused (429), or OSError: too slow or gone."""
        position, stop, wait_s = 0, order.size, None
        send = self._enqueue(order, stop)
        try:
            while position < stop:
                run = await self._granted(send, order, position)
                sent = 0
                try:
                    if wait_s is None:
                        order.exchange.started()
                        wait_s = send.wait_s
                        self._metrics.count_wait(order.exchange.caller.tenant, wait_s)
                        await order.exchange.stream.send_all(order.head, order.pace.due_s, has_more=True)
                    sent = await self._send_run(order, position, run)
                finally:
                    self._finish(run, sent)
                position += sent
                if order.pace.due_s <= self._loop.time():
                    raise TimeoutError
                if sent < run.size:
                    # Nobody waits for a slot behind a peer that takes nothing.
                    self._leave(send)
                    await self._resumed(order)
                    send = self._enqueue(order, stop - position)
            return wait_s or 0.0
        finally:
            self._leave(send)

    def _enqueue(self, order: SendOrder, size: int) -> Send:
        for run in self._runs.values():
            # The scheduler hears of each slice that went out so far.
            sent = run.body.progress().size if run.body is not None else 0
            while sent >= run.done + run.piece.size < run.size:
                self._next(run)
        exchange = order.exchange
        if not self._has_slots(exchange.share, 1):
            # Before it is queued: a slot that is given up by then comes back to its run.
            self._make_way()
        client, now_s = exchange.guest.client, self._loop.time()
        return self.scheduler.enqueue(exchange.share, client, size, now_s, -urgency(exchange.head.headers))

    def _leave(self, send: Send) -> None:
        self.scheduler.cancel(send)
        self._pump()

    async def _resumed(self, order: SendOrder) -> None:
        """Wait until a reader takes bytes again. TimeoutError if it is too slow, or others wait for what it holds."""
        since_s = self._loop.time()
        while self._loop.time() < since_s + _LATE_S_MAX or not order.is_in_the_way():
            look_s = self._loop.time() + _LOOK_AGAIN_S
            if await order.exchange.stream.is_writable(min(look_s, order.pace.due_s)):
                return
            if order.pace.due_s < look_s:
                break
        raise TimeoutError

    async def _granted(self, send: Send, order: SendOrder, position: int) -> _Run:
        """Wait for a slice; go on after it, up to a bound, if nobody else waits for a slot."""
        waiting: asyncio.Future[Slice] = self._loop.create_future()
        self._waiting[send] = waiting
        self._pump()
        if not waiting.done():
            waits_since_s = self._loop.time()
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():
                    # It was granted in the same moment.
                    self.scheduler.finish(waiting.result(), 0, self._loop.time())
                raise
            finally:
                self._waiting.pop(send, None)
                order.pace.paused(self._loop.time() - waits_since_s)
        piece = waiting.result()
        settings, size, stream = self.scheduler.settings, piece.size, order.exchange.stream
        is_alone = not self._waiting and self._has_slots(send.owner, 0)
        if is_alone and not (settings.link_bits_s or order.is_cold or order.is_mixed or stream.is_encrypted):
            size = max(size, min(order.size - position, _RUN_SLICES_MAX * settings.slice_bytes))
        run = self._runs[send] = _Run(piece, size)
        return run

    def _next(self, run: _Run) -> None:
        """Finish a slice of a run that went out, and take the next."""
        now_s = self._loop.time()
        run.done += run.piece.size
        self.scheduler.finish(run.piece, run.piece.size, now_s)
        # Nobody else waits, or the run would have been shortened to the slice that is finished here.
        (run.piece,) = self.scheduler.grant(now_s)

    def _has_slots(self, owner: str, count: int) -> bool:
        """True if so many more slices of this owner would fit."""
        settings = self.scheduler.settings
        held = count + sum(flow.in_flight for flow in self.scheduler.flows() if flow.owner == owner)
        return self.scheduler.slots_used + count <= settings.slots and held <= settings.tenant_slots_max

    def adopt(self, settings: SchedulerSettings) -> None:
        """Share by other settings, as the scheduler does."""
        self._make_way()
        self.scheduler.adopt(settings)

    def _make_way(self) -> None:
        """Let all runs end with the slice that goes out now: somebody is about to wait for a slot."""
        for run in self._runs.values():
            while run.done + run.piece.size < run.size:
                if run.body is None or run.body.shorten(run.done + run.piece.size):
                    run.size = run.done + run.piece.size
                else:
                    # It had sent the whole slice by now.
                    self._next(run)

    def _finish(self, run: _Run, sent: int) -> None:
        del self._runs[run.piece.send]
        while sent > run.done + run.piece.size:
            self._next(run)
        self.scheduler.finish(run.piece, max(0, sent - run.done), self._loop.time())

    def _pump(self) -> None:
        """Tell those whose slices were granted, now and when the link has room again."""
        is_handed_back = True
        while is_handed_back:
            is_handed_back = False
            for piece in self.scheduler.grant(self._loop.time()):
                waiting = self._waiting.pop(piece.send, None)
                if waiting is None or waiting.done():
                    # Its sender has just given up.
                    self.scheduler.cancel(piece.send)
                    self.scheduler.finish(piece, 0, self._loop.time())
                    is_handed_back = True
                else:
                    waiting.set_result(piece)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.scheduler.next_grant_s()
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._pump)

    async def _send_run(self, order: SendOrder, position: int, run: _Run) -> int:
        """Send a run's bytes from `position` on; return how many went out before the peer stopped taking."""
        sent, found = 0, window(order.pieces, position, position + run.size)
        if order.exchange.stream.is_encrypted:
            return await self._send_encrypted(order, found)
        for kind, pieces in groupby(found, type):
            for each in [[piece] for piece in pieces] if kind is FilePiece else [list(pieces)]:
                ahead_bytes = 0 if order.is_mixed else order.size - position
                count = await self._send_pieces(order, run, each, ahead_bytes)
                sent += count
                if count < sum(map(len, each)):
                    return sent
        return sent

    async def _send_pieces(self, order: SendOrder, run: _Run, pieces: Sequence[Piece], ahead_bytes: int) -> int:
        """Send memory, or one piece of a file, of which the disk may read so many bytes ahead."""
        stream, slice_bytes, first = order.exchange.stream, self.scheduler.settings.slice_bytes, pieces[0]
        if isinstance(first, FilePiece):
            if order.is_cold:
                await self._workers.read(order.exchange.owner, partial(_warm, first, max(first.size, ahead_bytes)))
            body = stream.start_file(first.file, first.size, slice_bytes)
        else:
            views = [piece for piece in pieces if isinstance(piece, memoryview)]
            body = stream.start_views(views, slice_bytes)
        if not order.is_mixed:
            run.body = body
        try:
            return await body.end(order.pace, self._stall_s_max)
        except EOFError:
            raise ConnectionAbortedError("the object was evicted while it was sent") from None

    async def _send_encrypted(self, order: SendOrder, pieces: Sequence[Piece]) -> int:
        done = 0
        for piece in pieces:
            for at in range(0, len(piece), _TLS_BYTES):
                part = piece[at : at + _TLS_BYTES]
                if isinstance(part, FilePiece):
                    read = partial(os.pread, part.file.descriptor, part.size, part.file.offset)
                    data = await self._workers.read(order.exchange.owner, read)
                    if len(data) < part.size:
                        raise ConnectionAbortedError("the object was evicted while it was sent")
                    part = memoryview(data)
                sent = await order.exchange.stream.send_encrypted(part, self._stall_s_max)
                order.pace.moved(sent, self._loop.time())
                done += sent
                if sent < len(part):
                    return done
        return done


def window(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """Return bytes [start, stop) of pieces, as pieces."""
    found, at = list[Piece](), 0
    for piece in pieces:
        first, last = max(0, start - at), min(len(piece), stop - at)
        at += len(piece)
        if first < last:
            found.append(piece[first:last])
    return found


def _is_cached(piece: FilePiece) -> bool:
    """True if a piece's ends and middle are in the page cache, so that sending it would not wait for the disk."""
    byte = bytearray(1)
    try:
        for at in (0, piece.size // 2, piece.size - 1):
            os.preadv(piece.file.descriptor, [byte], piece.file.offset + at, os.RWF_NOWAIT)
    except OSError as error:
        # A file system without this question: its reads are taken to be fast.
        return not isinstance(error, BlockingIOError)
    return True


def _warm(piece: FilePiece, count_ahead: int) -> None:
    """Wait until a piece is in the page cache; the disk goes on with what comes after it."""
    descriptor, offset = piece.file
    os.posix_fadvise(descriptor, offset, count_ahead, os.POSIX_FADV_WILLNEED)
    for at in range(0, piece.size, _WARM_STEP_BYTES):
        os.pread(descriptor, 1, offset + at)
