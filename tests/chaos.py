"""A TCP proxy that damages what passes through it, one fault a connection."""

import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, Self

from kvtide.server.settings import ListenAddress

POLL_S = 0.1


class Kind(Enum):
    """What happens when byte `at` of a direction has come by."""

    DELAY = "delay"
    RESET = "reset"
    HALF_CLOSE = "half-close"
    TRICKLE = "one byte a second"
    FLIP = "bit flip"
    TRUNCATE = "truncated body"
    LENGTH = "wrong length"
    NOTHING = "nothing"


class Fault(NamedTuple):
    """A fault in what goes to the client (`is_down`) or to the server."""

    kind: Kind
    is_down: bool
    at: int


class ChaosProxy:
    """Listens on a port of its own in front of another; `choose` gives each connection its fault."""

    def __init__(self, target: ListenAddress, choose: Callable[[], Fault]) -> None:
        self._target = target
        self._choose = choose
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self._is_closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self.connections = 0

    @property
    def address(self) -> ListenAddress:
        return ListenAddress(*self._listener.getsockname())

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed.set()
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            server = socket.create_connection((self._target.host, self._target.port))
            thread = threading.Thread(target=self._run, args=(client, server, self._choose()))
            self._threads.append(thread)
            thread.start()

    def _run(self, client: socket.socket, server: socket.socket, fault: Fault) -> None:
        nothing = Fault(Kind.NOTHING, fault.is_down, 0)
        pairs = [
            (client, server, nothing if fault.is_down else fault),
            (server, client, fault if fault.is_down else nothing),
        ]
        with client, server:
            pumps = [threading.Thread(target=self._pump, args=pair) for pair in pairs]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()

    def _pump(self, source: socket.socket, sink: socket.socket, fault: Fault) -> None:
        passed = 0
        try:
            source.settimeout(POLL_S)
            while not self._is_closed.is_set():
                try:
                    data = bytearray(source.recv(65536))
                except TimeoutError:
                    continue
                if not data:
                    break
                is_hit = passed <= fault.at < passed + len(data)
                if is_hit and not self._strike(data, fault.at - passed, source, sink, fault.kind):
                    return
                passed += len(data)
                if not is_hit or fault.kind in {Kind.FLIP, Kind.LENGTH, Kind.DELAY, Kind.NOTHING}:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            # The other side is gone: so are we.
            for each in (source, sink):
                shut(each)

    def _strike(self, data: bytearray, at: int, source: socket.socket, sink: socket.socket, kind: Kind) -> bool:
        """Do the damage. False if nothing may pass any more."""
        if kind is Kind.FLIP:
            data[at] ^= 1 << at % 8
        elif kind is Kind.LENGTH:
            found = re.search(rb"Content-Length: (\d+)", data)
            if found:
                wrong = b"Content-Length: %d" % (int(found[1]) + (1 if at % 2 else -1))
                data[found.start() : found.end()] = wrong
        elif kind is Kind.DELAY:
            time.sleep(0.05)
        elif kind is Kind.TRICKLE:
            sink.sendall(data[:at])
            for byte in data[at:]:
                if self._is_closed.wait(1.0):
                    break
                sink.sendall(bytes([byte]))
            return False
        elif kind in {Kind.RESET, Kind.TRUNCATE, Kind.HALF_CLOSE}:
            sink.sendall(data[:at])
            if kind is Kind.HALF_CLOSE:
                sink.shutdown(socket.SHUT_WR)
                return False
            for each in (source, sink):
                if kind is Kind.RESET:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.close()
                else:
                    shut(each)
            return False
        return True


def shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
