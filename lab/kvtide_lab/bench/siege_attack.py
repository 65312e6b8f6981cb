"""One attack of the siege, a process of its own: connections that ask without pause, or that hold what they have.

Usage: python -m kvtide_lab.bench.siege_attack HOST PORT < ATTACK   (one line of JSON)

Says `ready` once its connections are open, and goes on until it is killed. Whoever asks has so many requests under
way and sends the next one when an answer has come: the server sets the pace, and a slow generator asks for less.
Connections that the server ends are opened again, no faster than `connects_s_max`.
"""

from __future__ import annotations

import resource
import selectors
import socket
import sys
import time

import msgspec

_ANSWER = b"HTTP/1.1 "
_READ_BYTES = 1 << 20


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that every connection sends, in turn one of `requests`; `under_way` at a time, or one for good."""

    requests: list[bytes]
    connections: int
    under_way: int = 0
    connects_s_max: float = 2000.0
    is_reading: bool = True


class _Crowd:
    def __init__(self, attack: Attack, address: tuple[str, int]) -> None:
        self._attack = attack
        self._address = address
        self._selector = selectors.DefaultSelector()
        # The end of what came on a connection, in which an answer may begin.
        self._tails: dict[socket.socket, bytes] = {}
        # How many were opened so far, those that have ended included.
        self.opened = 0

    def __len__(self) -> int:
        return len(self._tails)

    def open_one(self) -> None:
        sock = socket.socket()
        if not self._attack.is_reading:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(5.0)
        try:
            sock.connect(self._address)
            requests = self._attack.requests
            if requests:
                sock.sendall(requests[self.opened % len(requests)] * max(1, self._attack.under_way))
        except OSError:
            sock.close()
            return
        self._tails[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ, requests[self.opened % len(requests)] if requests else b"")
        self.opened += 1

    def step(self, wait_s: float) -> None:
        """Read what came, and ask again for every answer."""
        if not self._attack.is_reading:
            time.sleep(wait_s)
            return
        for key, _ in self._selector.select(wait_s):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                data = sock.recv(_READ_BYTES)
                if data and self._attack.under_way:
                    came = self._tails[sock] + data
                    self._tails[sock] = came[-len(_ANSWER) + 1 :]
                    sock.sendall(key.data * came.count(_ANSWER))
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(sock)
                del self._tails[sock]
                sock.close()


def main(host: str, port: str) -> None:
    """Run the attack; see the module."""
    attack = msgspec.json.decode(sys.stdin.readline(), type=Attack)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = _Crowd(attack, (host, int(port)))
    is_ready, next_s = False, time.monotonic()
    while True:
        now_s = time.monotonic()
        while len(crowd) < attack.connections and next_s <= now_s:
            crowd.open_one()
            next_s = max(next_s, now_s - 0.01) + 1 / attack.connects_s_max
            crowd.step(0.0)
        if not is_ready and crowd.opened >= min(attack.connections, 1000):
            is_ready = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        crowd.step(min(0.05, 1 / attack.connects_s_max) if len(crowd) < attack.connections else 0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
