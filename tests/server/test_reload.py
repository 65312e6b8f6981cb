"""Settings that change under a running server: connections and memory stay, a bad file changes nothing."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tests.servers import START_S_MAX

from kvtide.clock import SystemClock
from kvtide.server.auth import new_token, token_digest
from kvtide.server.scheduler import Scheduler, SchedulerSettings
from kvtide.server.settings import Live, ServerLimits, ServerSettings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide_lab.bench.services import free_ports, wait_until


class Configured:
    """`kvtide serve` with a file of settings; its log goes to a file."""

    def __init__(self, folder: Path, text: str) -> None:
        self.config, self.log = folder / "kvtide.toml", folder / "log"
        (self.port,) = free_ports(1)
        self.write(text)
        command = [sys.executable, "-m", "kvtide.cli", "serve", "--config", str(self.config)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        assert b" on " in self.process.stdout.readline(), self.log.read_text()

    def write(self, text: str) -> None:
        """Replace the file whole."""
        aside = self.config.with_suffix(".new")
        aside.write_text(f'listen = "127.0.0.1:{self.port}"\n{text}')
        aside.rename(self.config)

    def reload(self, text: str) -> None:
        """Replace the file, ask for it to be read, and wait for the line that says so."""
        before = set(self.lines())
        self.write(text)
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: set(self.lines()) > before, "a line in the log")

    def lines(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "settings" in line]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(START_S_MAX) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Sequence[Configured]]:
    made: list[Configured] = []
    yield made
    for each in made:
        each.stop()


def grants(*tokens: str) -> str:
    return "".join(
        f'[[grants]]\ntenant = "search"\nscopes = ["read", "write"]\ntoken_sha256 = "{token_digest(token)}"\n'
        for token in tokens
    )


def status_of(connection: HTTPConnection, token: str, method: str = "GET", body: bytes | None = None) -> int:
    name = object_id(1)
    path, header = f"/v1/{name.namespace.hex()}/{name.key.hex()}", {"Authorization": f"Bearer {token}"}
    connection.request(method, path, body, header)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_tokens_change_on_a_signal_and_connections_and_memory_stay(
    tmp_path: Path, configured: list[Configured]
) -> None:
    old, new = new_token(), new_token()
    configured.append(server := Configured(tmp_path, grants(old)))
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    assert status_of(connection, old, "PUT", object_bytes(1)) == 201
    sock = connection.sock
    server.reload(grants(new))
    assert status_of(connection, old) == 401
    assert status_of(connection, new) == 200
    server.reload(grants(new) + "[limits]\ntenant_requests_s_max = 0.05\nmemory_bytes_max = 1000000\n")
    assert any("limits.memory_bytes_max" in line for line in server.lines())
    # The burst is one request; the next one is due after 20 s.
    assert [status_of(connection, new) for _ in range(2)] == [200, 429]
    assert connection.sock is sock
    connection.close()


def test_file_that_cannot_be_used_is_refused_with_one_line(tmp_path: Path, configured: list[Configured]) -> None:
    token = new_token()
    configured.append(server := Configured(tmp_path, grants(token)))
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    for bad in (
        "limits = 5\n",
        "not toml",
        '[tls]\ncert_file = "/absent"\nkey_file = "/absent"\n',
        "[limits]\nx = 1\n",
    ):
        server.reload(grants(token) + bad if "tls" in bad else bad)
    lines = server.lines()
    assert sum("stay as they are" in line for line in set(lines)) == 3
    assert any("wait for a restart: tls" in line for line in lines)
    assert status_of(connection, token, "PUT", object_bytes(1)) == 201
    connection.close()


@contextmanager
def hands_shaken(port: int, authority: Path) -> Iterator[tuple[ssl.SSLSocket, int]]:
    """Connect; give the connection and the serial number of the certificate that the server showed."""
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as sock,
    ):
        certificate = sock.getpeercert()
        assert certificate is not None
        yield sock, int(str(certificate["serialNumber"]), 16)


def serial_of(port: int, authority: Path) -> int:
    with hands_shaken(port, authority) as (_, serial):
        return serial


def test_certificate_is_renewed_and_connections_stay(
    tmp_path: Path, certificates: Path, configured: list[Configured]
) -> None:
    for kind in ("key", "pem"):
        shutil.copy(certificates / f"server.{kind}", tmp_path / f"mine.{kind}")
    files = f'[tls]\ncert_file = "{tmp_path / "mine.pem"}"\nkey_file = "{tmp_path / "mine.key"}"\n'
    configured.append(server := Configured(tmp_path, files))
    authority = certificates / "ca.pem"
    with hands_shaken(server.port, authority) as (old, serial):
        shutil.copy(certificates / "client.pem", tmp_path / "mine.pem")
        # A certificate without its key is refused, and taken when the key has come too.
        server.reload(files)
        assert "stay as they are" in server.lines()[-1]
        assert serial_of(server.port, authority) == serial
        shutil.copy(certificates / "client.key", tmp_path / "mine.key")
        server.reload(files)
        assert serial_of(server.port, authority) != serial
        old.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert old.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_settings_are_taken_whole_or_not_at_all() -> None:
    live = Live(ServerSettings(), SystemClock())
    before = live.settings
    limits = ServerLimits(idle_s_max=7.0, io_threads=9, buffer_bytes_max=1 << 20)
    sending = SchedulerSettings(policy="fifo", weights={"a": 2.0})
    assert live.adopt(ServerSettings(tiers=("memory://", "disk:///x"), limits=limits, sending=sending)) == [
        "tiers",
        "limits.buffer_bytes_max",
        "limits.io_threads",
        "sending.policy",
    ]
    assert live.limits == ServerLimits(idle_s_max=7.0)
    assert (live.settings.sending, live.settings.tiers) == (SchedulerSettings(weights={"a": 2.0}), before.tiers)


def test_weights_change_under_waiting_bodies() -> None:
    scheduler = Scheduler(SchedulerSettings(slots=1), random.Random(0))
    sends = [scheduler.enqueue(tenant, tenant, 100 << 20, 0.0) for tenant in "ab"]
    scheduler.adopt(SchedulerSettings(slots=1, weights={"a": 3.0}))
    for _ in range(100):
        (part,) = scheduler.grant(0.0)
        scheduler.finish(part, part.size, 0.0)
    assert 2.5 < sends[0].sent_bytes / sends[1].sent_bytes < 3.5
    scheduler.check()
