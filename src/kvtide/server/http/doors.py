"""Sockets that listen, and who is connected, on whose account: strangers come and go, who was let in stays.

Invariant: a stranger's connection never keeps anybody out. Where there is no room left the stranger who has been here
longest makes some: who has a token shows it with the first bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path

from kvtide.errors import RequestRefused
from kvtide.server.auth import ProxyHeader, read_proxy_header
from kvtide.server.http.connection import Connection, Mover
from kvtide.server.live import Live
from kvtide.server.settings import FILES_MAX, ListenAddress, ServerLimits

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


def host_of(peer: object) -> str:
    """Return the address of a socket's peer as logs say it; `unix` for one of this machine's sockets.

    An IPv4 address in IPv6 clothes, as a listener on `::` sees it, is itself.
    """
    host = str(peer[0]).partition("%")[0] if isinstance(peer, tuple) else "unix"
    return str(IPv6Address(host).ipv4_mapped or host) if ":" in host else host


def account_of(host: str) -> str:
    """Return the account of an address: an IPv4 address, an IPv6 network of 64 bits, or this machine's sockets."""
    if ":" in host:
        bits = 128 - _IPV6_NETWORK_BITS
        host = str(IPv6Address(int(IPv6Address(host)) >> bits << bits))
    return f"{ADDRESS_MARK}{host}"


def connections_for(limits: ServerLimits, descriptors: int) -> int:
    """Return how many connections there may be where a process may have so many descriptors."""
    room = max(1, descriptors - FILES_MAX)
    if room < limits.connections_max:
        _log.warning(
            "connections_max is %d, descriptors are for %d: raise the hard limit (LimitNOFILE=, `ulimit -Hn`)",
            limits.connections_max,
            room,
        )
    return min(limits.connections_max, room)


@dataclass(slots=True, eq=False)
class Guest:
    """A connection. `owner` is on whose account it is: its address until a request was let in, then who sent that."""

    client: str
    address: str
    owner: str
    # The whole address, for logs.
    host: str = ""
    is_known: bool = False


# Answers the requests of a connection until one of both sides ends it.
Serve = Callable[[Connection, Guest], Coroutine[None, None, None]]


class ConnectionLimits:
    """Lets in `connections_max` connections, `owner_connections_max` of one owner. `cut` ends one that has to leave."""

    def __init__(self, connections_max: int, owner_connections_max: int, cut: Callable[[Guest], None]) -> None:
        self._connections_max = connections_max
        self._owner_connections_max = owner_connections_max
        self._cut = cut
        self._owners: Counter[str] = Counter()
        self._known = 0
        # In the order in which they came.
        self._strangers: dict[Guest, None] = {}

    def __len__(self) -> int:
        """Return how many are inside."""
        return self._known + len(self._strangers)

    def enter(self, client: str, address: str, host: str = "") -> Guest | None:
        """Let a stranger in; None if there is no room."""
        if self._owners[address] >= self._owner_connections_max:
            # Of this address one makes room as well, if one of its strangers has been here longest.
            oldest = next((guest for guest in self._strangers if guest.address == address), None)
        elif len(self) >= self._connections_max:
            oldest = next(iter(self._strangers), None)
        else:
            return self._entered(client, address, host)
        if oldest is None:
            return None
        self.leave(oldest)
        self._cut(oldest)
        return self._entered(client, address, host)

    def _entered(self, client: str, address: str, host: str) -> Guest:
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
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
        except OSError:
            listener.close()
            raise
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def bound(address: ListenAddress, listener: socket.socket) -> ListenAddress:
    """Return the address with the port that the listener really has."""
    return address if address.path else address._replace(port=listener.getsockname()[1])


class Acceptor:
    """Takes connections from listening sockets and serves each in a task of its own, within the limits that hold.

    Runs on one event loop. `address` is the one that the server was told to listen on.
    """

    def __init__(self, live: Live, address: ListenAddress) -> None:
        self._live = live
        self._address = address
        self._mover = Mover()
        self._tasks: dict[Guest, asyncio.Task[None]] = {}
        self._accepted = 0
        # Connections of proxies that have not said yet whom they are of.
        self._introducing: set[asyncio.Task[None]] = set()
        limits, descriptors = live.limits, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limits = ConnectionLimits(connections_for(limits, descriptors), limits.tenant_connections_max, self._cut)

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._tasks)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread that moves bodies."""
        self._mover.open(loop)

    def close(self) -> None:
        """End that thread. Idempotent."""
        self._mover.close()

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
            host = host_of(peer)
            if not self._live.proxies.speaks_for_others(host, ProxyHeader.PROXY_PROTOCOL):
                self._admit(sock, host, serve)
            elif len(self._introducing) >= self._live.limits.connections_max:
                _turn_away(sock)
            else:
                task = loop.create_task(self._introduce(sock, host, serve))
                self._introducing.add(task)
                task.add_done_callback(self._introducing.discard)

    async def _introduce(self, sock: socket.socket, host: str, serve: Serve) -> None:
        """Let a connection in as that of whom a proxy speaks for."""
        try:
            async with asyncio.timeout(self._live.limits.head_s_max):
                client = await read_proxy_header(sock, host)
        except (OSError, TimeoutError, ValueError) as error:
            _log.warning("a connection of the proxy %s is closed: %s", host, error or "its header came too slowly")
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        self._admit(sock, client, serve)

    def _admit(self, sock: socket.socket, host: str, serve: Serve) -> None:
        """Take a connection from an address, if there is room for one."""
        self._accepted += 1
        account, number = account_of(host), str(self._accepted)
        if self._live.proxies.speaks_for_others(host, ProxyHeader.X_FORWARDED_FOR):
            # Its connections are of many clients: no bound of one address holds for them together.
            account = f"{account}#{number}"
        guest = self.limits.enter(number, account, host)
        if guest is None:
            _turn_away(sock)
            return
        try:
            self._start(self._set_up(sock), guest, serve)
        except OSError as error:
            self.limits.leave(guest)
            sock.close()
            _log.debug("a connection was gone before it was taken: %s", error)

    def _set_up(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if host_of(sock.getpeername()) in _LOOPBACK:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
        is_near = sock.family == socket.AF_UNIX and not self._address.path
        if self._live.tls is not None and not is_near:
            return self._live.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock

    def _start(self, sock: socket.socket, guest: Guest, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        stream = Connection(sock, loop, self._mover)
        task = self._tasks[guest] = loop.create_task(serve(stream, guest))
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
        """Close idle connections, wait for those that are `busy` from now on, then end those too."""
        for task in self._introducing:
            task.cancel()
        await asyncio.gather(*self._introducing, return_exceptions=True)
        staying = busy()
        for guest, task in self._tasks.items():
            if guest not in staying:
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks.values()), timeout=drain_s_max)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _turn_away(sock: socket.socket) -> None:
    """Tell a client that there is no room for it, and close."""
    with sock:
        try:
            sock.send(_BUSY, socket.MSG_DONTWAIT)
        except OSError as error:
            _log.debug("a connection too many went away: %s", error)
