"""A link of any shape between processes of this machine: a TCP proxy that passes answers on as fast as the link would.

All connections share the link. It can be cut, so that open connections break off and new ones are refused, and moved to
another server. For benches and fault tests: requests are small and pass unshaped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

# Small, so that little is on its way: what the kernel holds is not yet through the link.
PIECE_BYTES = 16 << 10
# Heads of answers are shorter.
HEAD_BYTES = 2048
_POLL_S = 0.05
# What the link could have passed so recently is not lost: the proxy's threads wake up late on a busy machine, and what
# waited for them would have waited in front of the link.
LATE_S = 0.02


def as_fast_as_the_machine(seconds: float) -> float:
    """Return what a link passes that is as fast as this machine."""
    return 1e9 * seconds


class ShapedProxy:
    """Listens on a port of its own between `open` and `close`; use it with `with`.

    carried: bytes that the link has passed, by seconds since `restart`. Rates above about 1 Gbit/s are the machine's.
    """

    def __init__(self, target: tuple[str, int], carried: Callable[[float], float]) -> None:
        self.target = target
        self._carried = carried
        self._lock = threading.Lock()
        self._started_s = time.monotonic()
        self._used_bytes = 0.0
        self._is_up = True
        self._is_closed = False
        self._open: set[socket.socket] = set()
        self.passed_bytes = 0
        # Requests that clients have sent.
        self.requests = 0
        # So many of the next large pieces of answers are damaged on their way.
        self.to_damage = 0
        self._listener = socket.socket()
        self._acceptor = threading.Thread(target=self._accept, name="kvtide-shaped", daemon=True)

    def __enter__(self) -> Self:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(_POLL_S)
        self._acceptor.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        self.cut()
        self._acceptor.join()
        self._listener.close()

    @property
    def port(self) -> int:
        """Return the port that clients connect to."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Return the URL of a server behind the link."""
        return f"http://127.0.0.1:{self.port}"

    def restart(self, carried: Callable[[float], float] | None = None) -> None:
        """Begin the link's time again, with another link if one is given."""
        with self._lock:
            self._carried = carried or self._carried
            self._started_s, self._used_bytes = time.monotonic(), 0.0

    def cut(self) -> None:
        """Break every connection off, and refuse new ones until `mend`."""
        self._is_up = False
        with self._lock:
            broken, self._open = self._open, set()
        for sock in broken:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Take connections again."""
        self._is_up = True

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                if not self._is_up:
                    raise ConnectionRefusedError
                server = socket.create_connection(self.target, 1.0)
            except OSError:
                client.close()
                continue
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PIECE_BYTES)
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if is_answer and not self._has_passed(len(data)):
                    break
                with self._lock:
                    # Before its answer can be there.
                    self.requests += 0 if is_answer else data.count(b" HTTP/1.1\r\n")
                sink.sendall(self._damaged(data) if is_answer and self.to_damage else data)
                with self._lock:
                    # Only now: a cut may have come while it waited.
                    self.passed_bytes += len(data) if is_answer else 0
        with self._lock:
            self._open -= {source, sink}
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if is_answer:
            # The other direction ends by the shutdown and closes nothing.
            source.close()
            sink.close()

    def _damaged(self, data: bytes) -> bytes:
        """Flip a bit behind what may be a head."""
        if len(data) < 2 * HEAD_BYTES:
            return data
        self.to_damage -= 1
        return data[:HEAD_BYTES] + bytes([data[HEAD_BYTES] ^ 1]) + data[HEAD_BYTES + 1 :]

    def _has_passed(self, size: int) -> bool:
        """Wait until the link has passed so many more bytes; False if it is cut meanwhile."""
        with self._lock:
            now_s = time.monotonic() - self._started_s
            # What the link could have passed while nobody asked is gone.
            self._used_bytes = mine = max(self._used_bytes, self._carried(max(0.0, now_s - LATE_S))) + size
        while self._is_up:
            with self._lock:
                if self._carried(time.monotonic() - self._started_s) >= mine:
                    return True
            time.sleep(1e-3)
        return False
