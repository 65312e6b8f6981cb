"""Sockets that a server listens on."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path

from kvtide.server.settings import ListenAddress

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


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
        listener.bind((address.host, address.port))
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
