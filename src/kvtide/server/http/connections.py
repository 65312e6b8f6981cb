"""Connections: sockets that listen, who is connected and on whose account, and the bytes that move.

`Mover` moves bodies in a native thread, without the interpreter's lock. Every wait has a deadline in the loop's time;
TimeoutError when it passes, ConnectionError when the peer is gone.
Invariant: bytes that were read behind a head stay in order in front of what the socket still holds. A stranger's
connection never keeps anybody out: where there is no room left the stranger who has been here longest makes some.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, NamedTuple

from kvtide._native import JOB_ENDED, JOB_STOPPED
from kvtide._native import Mover as NativeMover
from kvtide.errors import RequestRefused
from kvtide.server.settings import FILES_MAX, ListenAddress, Live, ProgressBudget, ServerLimits
from kvtide.tier.base import FilePart
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END

# A job's number, how many bytes moved, and how it ended: native/mover.hpp has the numbers.
_Outcome = asyncio.Future[tuple[int, int, int]]

# The mover wakes for a body only when so much of it has come (0: for any byte): 16 times for 4 MiB instead of 60.
WAKE_BYTES = 256 << 10
# What a connection that is being closed may still send before we stop listening.
LINGER_BYTES_MAX = 1 << 20
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_log = logging.getLogger(__name__)

# Whoever has one address of a network like this has all of them.
_IPV6_NETWORK_BITS = 64
# No tenant's name begins like that.
ADDRESS_MARK = "@"
# Accounts of all that runs on this machine.
SHARED_ADDRESSES = frozenset({f"{ADDRESS_MARK}unix", f"{ADDRESS_MARK}127.0.0.1", f"{ADDRESS_MARK}::"})

_BACKLOG = 1024
# The listener is closed. Of other faults a connection is the cause, or a lack of descriptors, memory or rights,
# and connections wait in the backlog meanwhile.
_DEAF = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})
_ACCEPT_PAUSE_S = 0.1
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
# A reader on this machine gets the bytes while they are in the processor's cache: 0.18 instead of 0.26 s of CPU a GB,
# half as much throughput again. Over a network the kernel knows better.
_LOOPBACK_SEND_BYTES = 256 << 10
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BodyProgress(NamedTuple):
    """The bytes of a body that have moved, and when the last did, on the loop's clock."""

    size: int
    moved_s: float


class Mover:
    """A thread that moves bodies for one event loop. Sockets are plain and non-blocking."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.native: NativeMover
        # Bodies under way, by their job's number.
        self.waiting: dict[int, _Outcome] = {}

    def open(self) -> None:
        """Start the thread, for the running loop. OSError if there is no room for one."""
        self.loop, self.native = asyncio.get_running_loop(), NativeMover()
        self.loop.add_reader(self.native.fileno(), self._take)

    def close(self) -> None:
        """End the thread. Who waits for a body is cancelled."""
        self.loop.remove_reader(self.native.fileno())
        while self.waiting:
            job, waiter = self.waiting.popitem()
            self.native.stop(job)
            waiter.cancel()
        del self.native

    def _take(self) -> None:
        for outcome in self.native.take():
            waiter = self.waiting.pop(outcome[0])
            if not waiter.done():
                waiter.set_result(outcome)


class Body:
    """A body that moves. `begun`: what the native thread said when it was given it."""

    def __init__(self, mover: Mover, begun: tuple[int, int, int]) -> None:
        self._mover = mover
        # A small one has moved already; it has no job.
        self._job, self._size, self._error = begun
        self._waiter: _Outcome | None = None
        if self._job:
            self._waiter = mover.waiting[self._job] = mover.loop.create_future()

    def progress(self) -> BodyProgress:
        """Return how far it is, what was too little to wake the thread included."""
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

    async def end(self, pace: ProgressBudget, stall_s_max: float = math.inf) -> int:
        """Wait until all has moved, or it is late by its pace, or nothing has moved for `stall_s_max`.

        Return how many bytes have moved; the pace has heard of them. EOFError if a side ended, else OSError.
        """
        paced_bytes = 0

        def due_s(progress: BodyProgress) -> float:
            nonlocal paced_bytes
            pace.moved(progress.size - paced_bytes, progress.moved_s)
            paced_bytes = progress.size
            return min(pace.due_s, progress.moved_s + stall_s_max)

        if self._waiter is not None:
            _, self._size, self._error = await self._outcome(self._waiter, due_s)
        if self._error == JOB_ENDED:
            raise EOFError(f"it ended after {self._size} bytes")
        if self._error not in {0, JOB_STOPPED}:
            raise OSError(self._error, os.strerror(self._error))
        due_s(BodyProgress(self._size, self._mover.loop.time()))
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
    """Common name in a certificate as `ssl` tells it; None for none, and for several: which one counts?"""
    subject = certificate.get("subject", ()) if certificate else ()
    # A tuple of relative names, each a tuple of pairs.
    names = [value for part in subject for name, value in part if name == "commonName"]
    return str(names[0]) if len(names) == 1 else None


class Connection:
    """A connected socket, plain or TLS; one coroutine at a time uses it. Heads, and what TLS encrypts, move here."""

    def __init__(self, sock: socket.socket, mover: Mover) -> None:
        self._sock = sock
        self._mover, self._loop = mover, mover.loop
        self._descriptor = sock.fileno()
        self._pending = b""
        # When the first byte of the last head came, or was found after the request before.
        self.head_began_s = self._loop.time()
        # Then bodies go through `send_encrypted`; others are started and move on their own.
        self.is_encrypted = isinstance(sock, ssl.SSLSocket)
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
        if not self._pending:
            self._pending = await self._until_done(lambda: self._sock.recv(HEAD_BYTES_MAX), idle_deadline_s)
            if not self._pending:
                return None
        self.head_began_s, searched = self._loop.time(), 0
        while (end := self._pending.find(HEAD_END, max(0, searched - len(HEAD_END)))) < 0:
            searched = len(self._pending)
            if searched > HEAD_BYTES_MAX:
                raise RequestRefused(431, f"the head has more than {HEAD_BYTES_MAX} bytes")
            deadline_s = self.head_began_s + head_s_max
            data = await self._until_done(lambda: self._sock.recv(HEAD_BYTES_MAX), deadline_s)
            if not data:
                raise ConnectionResetError("the peer closed within a head")
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
        if not self.is_encrypted and done < len(view):
            body = Body(self._mover, self._mover.native.receive(self._descriptor, view[done:], self._wake_bytes))
            try:
                done += await body.end(pace)
            except EOFError as error:
                raise ConnectionResetError(f"the peer closed within a body: {error}") from None
            if done < len(view):
                raise TimeoutError
        while done < len(view):
            came = await self._until_done(partial(self._sock.recv_into, view[done:]), pace.due_s)
            if not came:
                raise ConnectionResetError(f"the peer closed after {done} of {len(view)} bytes")
            done += came
            pace.moved(came, self._loop.time())

    async def send_all(self, data: bytes, deadline_s: float, has_more: bool = False) -> None:
        """Send bytes; with `has_more` they may wait in the kernel for what follows."""
        view = memoryview(data)
        flags = socket.MSG_MORE if has_more and not self.is_encrypted else 0
        while view:
            sent = await self._until_done(partial(self._sock.send, view, flags), deadline_s, is_send=True)
            view = view[sent:]

    def start_views(self, views: Sequence[memoryview], slice_bytes: int) -> Body:
        """Begin to send memory in pieces, by calls that end where slices do."""
        return Body(self._mover, self._mover.native.send(self._descriptor, views, slice_bytes))

    def start_file(self, file: FilePart, size: int, slice_bytes: int) -> Body:
        """Begin to send a part of a file, as `start_views` does."""
        begun = self._mover.native.send_file(self._descriptor, file.descriptor, file.offset, size, slice_bytes)
        return Body(self._mover, begun)

    async def send_encrypted(self, view: memoryview, stall_s_max: float) -> int:
        """Send memory over TLS. Return how much went out before the peer took nothing for so long."""
        done = 0
        with suppress(TimeoutError):
            while done < len(view):
                send, due_s = partial(self._sock.send, view[done:]), self.now_s() + stall_s_max
                done += await self._until_done(send, due_s, is_send=True)
        return done

    async def is_writable(self, deadline_s: float) -> bool:
        """Wait until the socket takes bytes. False if it did not until the deadline."""
        with suppress(TimeoutError):
            await self._wait(BlockingIOError(), deadline_s, is_send=True)
            return True
        return False

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
        timer = self._loop.call_at(deadline_s, _settle, waiter, TimeoutError())
        add, remove = self._loop.add_reader, self._loop.remove_reader
        if is_send:
            add, remove = self._loop.add_writer, self._loop.remove_writer
        add(self._descriptor, _settle, waiter, None)
        try:
            await waiter
        finally:
            timer.cancel()
            remove(self._descriptor)

    async def linger(self, deadline_s: float) -> None:
        """Let the peer read our last words: it may still be sending, and a close with bytes unread would reset it."""
        if self.is_encrypted:
            return
        # An error: it is gone already, or keeps on sending.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            for _ in range(LINGER_BYTES_MAX // HEAD_BYTES_MAX):
                if not await self._until_done(lambda: self._sock.recv(HEAD_BYTES_MAX), deadline_s):
                    return

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()


def _settle(waiter: asyncio.Future[None], error: TimeoutError | None) -> None:
    if waiter.done():
        return
    if error is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(None)


def host_of(peer: object) -> str:
    """Address of a socket's peer as logs say it: `unix`, or IPv4 also where a listener on `::` sees it as IPv6."""
    host = str(peer[0]).partition("%")[0] if isinstance(peer, tuple) else "unix"
    return str(IPv6Address(host).ipv4_mapped or host) if ":" in host else host


def account_of(host: str) -> str:
    """Account of an address: an IPv4 address, an IPv6 network of 64 bits, or this machine's sockets."""
    if ":" in host:
        bits = 128 - _IPV6_NETWORK_BITS
        host = str(IPv6Address(int(IPv6Address(host)) >> bits << bits))
    return f"{ADDRESS_MARK}{host}"


def connections_for(limits: ServerLimits, descriptors: int) -> int:
    """Return how many connections there may be where a process may have so many descriptors."""
    wanted, room = limits.connections_max, max(1, descriptors - FILES_MAX)
    if room < wanted:
        text = "connections_max is %d, descriptors are for %d: raise the hard limit (LimitNOFILE=, `ulimit -Hn`)"
        _log.warning(text, wanted, room)
    return min(wanted, room)


@dataclass(slots=True, eq=False)
class Guest:
    """A connection. `owner` is on whose account it is: its address until a request was let in, then who sent that."""

    client: str
    address: str
    owner: str
    # The whole address, for logs.
    host: str = ""
    is_known: bool = False
    # In its verified certificate.
    common_name: str | None = None


Serve = Callable[[Connection, Guest], Coroutine[None, None, None]]


class ConnectionLimits:
    """Lets in `connections_max` connections, `owner_connections_max` of one owner; `cut` ends one that has to leave."""

    def __init__(self, connections_max: int, owner_connections_max: int, cut: Callable[[Guest], None]) -> None:
        self._connections_max, self._owner_connections_max, self._cut = connections_max, owner_connections_max, cut
        self._owners: Counter[str] = Counter()
        self._known = 0
        # In the order in which they came.
        self._strangers: dict[Guest, None] = {}

    def __len__(self) -> int:
        """Return how many are inside."""
        return self._known + len(self._strangers)

    def enter(self, client: str, address: str, host: str = "") -> Guest | None:
        """Let a stranger in; None if there is no room."""
        is_full = self._owners[address] >= self._owner_connections_max
        if is_full or len(self) >= self._connections_max:
            # Who has been here longest makes room, of this address if that has all that it may.
            oldest = next((guest for guest in self._strangers if not is_full or guest.address == address), None)
            if oldest is None:
                return None
            self.leave(oldest)
            self._cut(oldest)
        guest = Guest(client, address, address, host)
        self._strangers[guest] = None
        self._owners[address] += 1
        return guest

    def settle(self, guest: Guest, owner: str) -> None:
        """Let a guest stay on an owner's account from the first request on. RequestRefused (429) if that is full."""
        if guest.is_known or guest not in self._strangers:
            return
        if owner != guest.owner and self._owners[owner] >= self._owner_connections_max:
            raise RequestRefused(429, "too many connections", retry_after_s=1.0)
        self._take_off(guest.owner)
        self._owners[owner] += 1
        del self._strangers[guest]
        self._known += 1
        guest.owner, guest.is_known = owner, True

    def leave(self, guest: Guest) -> None:
        """Note that a guest is gone. Idempotent."""
        if guest.is_known:
            self._known -= 1
            guest.is_known = False
        elif guest in self._strangers:
            del self._strangers[guest]
        else:
            return
        self._take_off(guest.owner)

    def _take_off(self, owner: str) -> None:
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        assert self._known >= 0
        assert self._owners.total() == len(self) <= self._connections_max
        assert all(0 < count <= self._owner_connections_max for count in self._owners.values())


def listener_on(address: ListenAddress) -> socket.socket:
    """Return a socket that listens on an address. OSError if it is taken."""
    if address.path:
        path = Path(address.path)
        if path.is_socket():
            # Left by a server that was killed: one that lives answers.
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(address.path) == 0:
                    raise OSError(errno.EADDRINUSE, f"another server listens on {address}")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.path)
        listener.listen(_BACKLOG)
    else:
        place, is_v6 = (address.host, address.port), ":" in address.host
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        listener = socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=is_v6)
    listener.setblocking(False)
    return listener


class Acceptor:
    """Takes connections from listening sockets and serves each in a task of its own. Runs on one event loop."""

    def __init__(self, live: Live, address: ListenAddress) -> None:
        self._live = live
        self._address = address
        self.mover = Mover()
        self._tasks: dict[Guest, asyncio.Task[None]] = {}
        self._accepted = 0
        limits, descriptors = live.limits, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limits = ConnectionLimits(connections_for(limits, descriptors), limits.tenant_connections_max, self._cut)

    async def accept(self, listener: socket.socket, serve: Serve) -> None:
        """Take connections until the task is cancelled. OSError if the listener is closed."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                # Without a pause whoever connects without one would be all that happens here.
                await asyncio.sleep(0)
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _DEAF:
                    raise
                _log.warning("can't accept a connection now: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._admit(sock, host_of(peer), serve)

    def _admit(self, sock: socket.socket, host: str, serve: Serve) -> None:
        """Take a connection from an address, if there is room for one."""
        self._accepted += 1
        account, number = account_of(host), str(self._accepted)
        if self._live.proxies.is_trusted(host):
            # Its connections are of many clients: no bound of one address holds for them together.
            account = f"{account}#{number}"
        guest = self.limits.enter(number, account, host)
        if guest is None:
            _turn_away(sock)
            return
        try:
            self._start(sock, guest, serve)
        except OSError as error:
            self.limits.leave(guest)
            sock.close()
            _log.debug("a connection was gone before it was taken: %s", error)

    def _start(self, sock: socket.socket, guest: Guest, serve: Serve) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if host_of(sock.getpeername()) in _LOOPBACK:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
        is_near = sock.family == socket.AF_UNIX and not self._address.path
        if self._live.tls is not None and not is_near:
            sock = self._live.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        stream = Connection(sock, self.mover)
        task = self._tasks[guest] = self.mover.loop.create_task(serve(stream, guest))
        task.add_done_callback(partial(self._end, guest, stream))

    def _cut(self, guest: Guest) -> None:
        self._tasks[guest].cancel()

    def _end(self, guest: Guest, stream: Connection, task: asyncio.Task[None]) -> None:
        # A task that was cut before it began has closed nothing.
        stream.close()
        del self._tasks[guest]
        self.limits.leave(guest)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a connection ended with a fault of ours", exc_info=task.exception())

    async def drain(self, busy: Callable[[], Collection[Guest]], drain_s_max: float) -> None:
        """Close idle connections and wait for those that are `busy` now. Newcomers are no reason to wait."""
        staying = busy()
        ending = [task for guest, task in self._tasks.items() if guest in staying]
        for guest, task in self._tasks.items():
            if guest not in staying:
                task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=drain_s_max)

    async def end(self) -> None:
        """End all connections. Call it once none is accepted."""
        ending = list(self._tasks.values())
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def _turn_away(sock: socket.socket) -> None:
    with sock:
        try:
            sock.send(_BUSY, socket.MSG_DONTWAIT)
        except OSError as error:
            _log.debug("a connection too many went away: %s", error)
