"""Servers for tests: one in this process on a thread of its own, one as a process, and made-up ones."""

import asyncio
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from kvtide.clock import SystemClock
from kvtide.server import Service, backing_for
from kvtide.server.settings import ListenAddress, ServerSettings
from kvtide.tier.http import PeerSettings
from kvtide.tier.http.tier import HttpTier, http_tier
from kvtide.tier.pool import Member

START_S_MAX = 30.0


class RunningServer:
    """A server in this process. `service` and `store` can be looked into; `check` says whether anything leaked."""

    def __init__(self, settings: ServerSettings, member: Member | None = None) -> None:
        self.settings = settings
        clock = SystemClock()
        self.backing = backing_for(settings, clock)
        self.store, self.records, self.region = self.backing.store, self.backing.records, self.backing
        self.service = Service(settings, self.backing, clock, member)
        self.address = ListenAddress("", 0)
        self._listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()

        def listening(address: ListenAddress) -> None:
            self.address = address
            self._listening.set()

        await self.service.run(self._stop, listening)

    def start(self) -> None:
        self.backing.open()
        self._thread.start()
        assert self._listening.wait(START_S_MAX)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def connect(self) -> socket.socket:
        sock = socket.create_connection((self.address.host, self.address.port), 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S_MAX)
            assert not self._thread.is_alive()
        self.backing.close()


@contextmanager
def running_server(member: Member | None = None, **settings: Any) -> Iterator[RunningServer]:
    """Run a server on a free port; afterwards everything that it lent must be back."""
    server = RunningServer(ServerSettings(listen="127.0.0.1:0", **settings), member)
    server.start()
    try:
        yield server
    finally:
        server.stop()
    server.service.check()
    assert len(server.service.acceptor.limits) == 0


def counted(server: RunningServer, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    families = server.service.metrics.registry.collect()
    samples = (each for family in families for each in family.samples if each.name == name)
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def hints_heard(server: RunningServer) -> int:
    return int(counted(server, "kvtide_hints_total"))


class ServerProcess:
    def __init__(self, *arguments: str, port: int = 0, log: Path | None = None) -> None:
        command = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", f"127.0.0.1:{port}", *arguments]
        with log.open("wb") if log else nullcontext() as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        line = self.process.stdout.readline()
        if " on " not in line:
            self.kill()
            raise AssertionError(f"the server said {line!r} and ended with {self.process.returncode}")
        self.port = int(line.rsplit(":", 1)[1])

    @property
    def address(self) -> ListenAddress:
        return ListenAddress("127.0.0.1", self.port)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        status = self.process.wait(START_S_MAX)
        self.process.stdout.close()
        return status


@contextmanager
def server_process(*arguments: str, port: int = 0) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, port=port)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@contextmanager
def listening(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    """Let a handler answer whoever connects to a port of this machine."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class Responder(BaseHTTPRequestHandler):
    """Answers HTTP requests, and logs none."""

    protocol_version = "HTTP/1.1"

    def reply(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@contextmanager
def answering(answer: bytes, *, closes: bool = False) -> Iterator[str]:
    """Say one thing to every request at a URL."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(65536):
                self.request.sendall(answer)
                if closes:
                    return

    with listening(Handler) as port:
        yield f"http://127.0.0.1:{port}"


def tier_on(*servers: Any, options: str = "", operation_s_max: float = 20.0, **bounds: int) -> HttpTier:
    """Return the tier, not yet open, of whatever has an `address`. bounds: of PeerSettings."""
    hosts = ",".join(str(each.address) for each in servers)
    return http_tier(f"http://{hosts}{options}", SystemClock(), PeerSettings(**bounds), operation_s_max)


def disk_arguments(store: Path) -> Sequence[str]:
    return ("--tier", f"disk://{store}")
