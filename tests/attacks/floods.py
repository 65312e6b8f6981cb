"""Attackers for tests: connections that ask without pause, or hold what they have."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPResponse

from tests.server.worlds import ask as ask_world
from tests.server.worlds import bearer, granted, token_of
from tests.servers import RunningServer

GRANTS = (granted("attacker"), granted("second"), granted("victim"))


def head(method: str, path: str, who: str = "", **headers: object) -> bytes:
    """A request's head; `Content_Length=5` goes as that header."""
    lines = {"Host": "x", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if who:
        lines["Authorization"] = f"Bearer {token_of(who)}"
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode()


def ask(
    server: RunningServer, method: str, path: str, who: str = "victim", body: bytes | None = None, **headers: str
) -> tuple[HTTPResponse, bytes]:
    """One request on a connection of its own."""
    own = {f"Own_{name}": value for name, value in headers.items()}
    return ask_world(server, method, path, body, **own, **(bearer(who) if who else {}))


@contextmanager
def flood(server: RunningServer, request: bytes) -> Iterator[None]:
    """Pipeline one request without pause, and read what comes."""
    is_over = threading.Event()
    data = request * (65536 // len(request))

    def run(action: str, sock: socket.socket) -> None:
        try:
            while not is_over.is_set():
                if action == "send":
                    sock.sendall(data)
                elif not sock.recv(1 << 20):
                    return
        except OSError:
            return

    with server.connect() as sock, ThreadPoolExecutor(2) as threads:
        for action in ("send", "recv"):
            threads.submit(run, action, sock)
        try:
            yield
        finally:
            is_over.set()
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
