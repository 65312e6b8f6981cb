"""Who is connected, and on whose account: strangers come and go, who was let in stays. And the sockets they come by.

Invariant: a stranger's connection never keeps anybody out. Where there is no room left the stranger who has been here
longest makes some: who has a token shows it with the first bytes.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from kvtide.errors import RequestRefused
from kvtide.server.settings import FILES_MAX, ListenAddress, ServerLimits

_log = logging.getLogger(__name__)

# Whoever has one address of a network like this has all of them.
_IPV6_NETWORK_BITS = 64
# No tenant's name begins like that.
ADDRESS_MARK = "@"
# Accounts of all that runs on this machine.
SHARED_ADDRESSES = frozenset({f"{ADDRESS_MARK}unix", f"{ADDRESS_MARK}127.0.0.1", f"{ADDRESS_MARK}::"})

_BACKLOG = 1024
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


def turn_away(sock: socket.socket) -> None:
    """Tell a client that there is no room for it, and close."""
    with sock:
        try:
            sock.send(_BUSY, socket.MSG_DONTWAIT)
        except OSError as error:
            _log.debug("a connection too many went away: %s", error)
