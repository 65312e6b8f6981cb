"""Who may do what, over all routes; what strangers can learn; TLS; settings that change under a running server."""

import math
import random
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.attacks.floods import head
from tests.server.worlds import CHAT, exchange, logged, path_of
from tests.server.worlds import ask as ask_world
from tests.servers import RunningServer, ServerProcess, running_server
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.clock import ManualClock, SystemClock
from kvtide.errors import RequestRefused, TierFull, TierUnavailable
from kvtide.server import Service, backing_for
from kvtide.server.auth import Gate, Grant, Scope, new_token, stored_namespace, token_digest
from kvtide.server.logs import ACCESS_LOGGER, write_log
from kvtide.server.scheduler import Scheduler, SchedulerSettings
from kvtide.server.settings import Live, ServerLimits, ServerSettings, TlsSettings, read_settings
from kvtide.tier.http.tier import http_tier
from kvtide_lab.bench.services import grant_words, wait_until

TOKENS = {name: new_token() for name in ("reader", "writer", "admin", "other", "expired")}
GRANTS = (
    Grant(tenant="a", scopes=[Scope.READ], token_sha256=token_digest(TOKENS["reader"])),
    Grant(tenant="a", scopes=[Scope.READ, Scope.WRITE], token_sha256=token_digest(TOKENS["writer"])),
    Grant(tenant="a", scopes=[Scope.ADMIN], token_sha256=token_digest(TOKENS["admin"])),
    Grant(tenant="b", scopes=list(Scope), token_sha256=token_digest(TOKENS["other"])),
    Grant(tenant="a", scopes=list(Scope), token_sha256=token_digest(TOKENS["expired"]), expires_s=1.0),
)
OBJECT = path_of(1)
SPACE = OBJECT.rpartition("/")[0]
KEYS = b'{"keys": ["%s"]}' % object_id(1).key.hex().encode()
# What each caller gets: nobody, an unknown token, an expired one, reader, writer, admin, another tenant.
CALLERS = ("", "unknown", "expired", "reader", "writer", "admin", "other")
MATRIX: list[tuple[str, str, bytes | None, tuple[int, ...]]] = [
    ("GET", OBJECT, None, (401, 401, 401, 200, 200, 403, 404)),
    ("HEAD", OBJECT, None, (401, 401, 401, 200, 200, 403, 404)),
    ("PUT", OBJECT, object_bytes(1), (401, 401, 401, 403, 200, 403, 201)),
    ("DELETE", OBJECT, None, (401, 401, 401, 403, 204, 403, 404)),
    ("POST", f"{SPACE}/exists", KEYS, (401, 401, 401, 200, 200, 403, 200)),
    ("GET", SPACE, None, (401, 401, 401, 200, 200, 403, 200)),
    ("GET", "/v1", None, (401, 401, 401, 200, 200, 403, 200)),
    ("PUT", CHAT, SPACE[4:].encode(), (401, 401, 401, 403, 200, 403, 200)),
    ("GET", CHAT, None, (401, 401, 401, 404, 404, 403, 404)),
    ("GET", "/v1/records", None, (401, 401, 401, 200, 200, 403, 200)),
    ("GET", "/metrics", None, (401, 401, 401, 403, 403, 200, 200)),
    ("GET", "/healthz", None, (200,) * 7),
    ("GET", "/elsewhere", None, (401, 401, 401, 404, 404, 404, 404)),
]


def ask(server: RunningServer, method: str, path: str, token: str, body: bytes | None = None) -> tuple[int, bytes]:
    who = {"Own_Authorization": f"Bearer {TOKENS.get(token, token)}"} if token else {}
    answer, content = ask_world(server, method, path, body, **who)
    return answer.status, content


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(grants=GRANTS) as running:
        assert ask(running, "PUT", OBJECT, "writer", object_bytes(1))[0] == 201
        yield running


@pytest.mark.parametrize(("method", "path", "body", "expected"), MATRIX)
def test_every_route_asks_every_caller(
    server: RunningServer, method: str, path: str, body: bytes | None, expected: tuple[int, ...]
) -> None:
    assert tuple(ask(server, method, path, caller, body)[0] for caller in CALLERS) == expected


def test_another_tenants_object_looks_absent_everywhere(server: RunningServer) -> None:
    absent = f"{SPACE}/{object_id(2).key.hex()}"
    for method in ("GET", "HEAD", "DELETE"):
        assert ask(server, method, OBJECT, "other") == ask(server, method, absent, "other")
    assert b'"present":[false]' in ask(server, "POST", f"{SPACE}/exists", "other", KEYS)[1]
    assert b'"objects":[]' in ask(server, "GET", SPACE, "other")[1]
    assert b'"namespaces":[]' in ask(server, "GET", "/v1", "other")[1]


@pytest.mark.parametrize("value", ["Bearer", "Bearer ", "Basic eA==", "Digest x", "Bearer " + "x" * 5000])
def test_malformed_authorization_is_nobody(value: str) -> None:
    with pytest.raises(RequestRefused, match="token"):
        Gate(GRANTS, SystemClock()).caller({"authorization": value}, None)


def test_grant_expires_by_the_clock(clock: ManualClock) -> None:
    grant = Grant(tenant="a", scopes=[Scope.READ], token_sha256=token_digest("t"), expires_s=clock.wall_s() + 10)
    gate = Gate([grant], clock)
    assert gate.caller({"authorization": "Bearer t"}, None).tenant == "a"
    clock.advance(10)
    with pytest.raises(RequestRefused):
        gate.caller({"authorization": "Bearer t"}, None)


@pytest.mark.parametrize(
    "fields",
    [
        *({"tenant": name} for name in ("", "a b")),
        *({"token_sha256": digest} for digest in ("12", "")),
        *({"common_name": "x"}, {"on_behalf_of": ["a/b"]}),
    ],
)
def test_bad_grant_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tenant"):
        Grant(**{"tenant": "a", "scopes": [], "token_sha256": "0" * 64, **fields})


@pytest.mark.parametrize(
    "text",
    [
        *(f"listen = '{place}'" for place in ["0.0.0.0:1", "[::]:1", "example.org:1", "nonsense", "127.0.0.1:99999"]),
        *("tiers = []", "unknown = 1", "limits = {io_threads = 0}", "limits = {unknown = 1}", "not toml"),
        "[[grants]]\ntenant = 'a'\nscopes = ['fly']\ntoken_sha256 = '" + "0" * 64 + "'",
        grant_words("a", "token") + grant_words("b", "token"),
    ],
)
def test_bad_configuration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kvtide.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_settings(path, {})


def test_listening_for_others_needs_grants_or_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "kvtide.toml"
    path.write_text("listen = '0.0.0.0:1'\n" + grant_words("a", "token"))
    assert read_settings(path, {}).grants[0].tenant == "a"
    assert read_settings(None, {"listen": "0.0.0.0:1", "is_open_to_all": True}).listen == "0.0.0.0:1"


def test_tenant_namespaces_differ_for_each_pair() -> None:
    names = [object_id(1).namespace, object_id(1).key]
    stored = {stored_namespace(tenant, name) for tenant in ("a", "b", "ab") for name in names}
    assert len(stored) == 6
    assert stored_namespace("", object_id(1).namespace) == object_id(1).namespace


def test_objects_travel_over_tls(certificates: Path, tmp_path: Path, local_url: str) -> None:
    tls = TlsSettings(cert_file=certificates / "server.pem", key_file=certificates / "server.key")
    token_file = tmp_path / "token"
    token_file.write_text(TOKENS["writer"] + "\n")
    with running_server(tiers=(local_url,), tls=tls, grants=GRANTS) as server:
        place = f"https://localhost:{server.address.port}"
        known = f"{place}?ca_file={certificates / 'ca.pem'}&token_file={token_file}"
        with opened(http_tier(known, SystemClock())) as tier:
            data, buffer = object_bytes(1, 3_000_000), memoryview(bytearray(4_000_000))
            assert tier.put_from(object_id(1), data)
            assert tier.get_into(object_id(1), buffer) == len(data)
            assert bytes(buffer[: len(data)]) == data
        stranger = http_tier(place, SystemClock())
        with opened(stranger), pytest.raises(TierUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.contains(object_id(1))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_large_object_that_is_refused_is_no_fault_of_its_server(certificates: Path, scheme: str) -> None:
    tls = TlsSettings(cert_file=certificates / "server.pem", key_file=certificates / "server.key")
    limits = ServerLimits(object_bytes_max=1 << 20)
    with running_server(tls=tls if scheme == "https" else None, limits=limits) as server:
        url = f"{scheme}://{server.address}?ca_file={certificates / 'ca.pem'}"
        with opened(http_tier(url, SystemClock())) as tier, pytest.raises(TierFull):
            tier.put_from(object_id(1), object_bytes(1, 32 << 20))


def test_plain_request_to_a_tls_port_ends_quietly(certificates: Path) -> None:
    tls = TlsSettings(cert_file=certificates / "server.pem", key_file=certificates / "server.key")
    with running_server(tls=tls) as server, server.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionResetError):
            assert b"HTTP/1.1 200" not in sock.recv(1000)


@pytest.mark.parametrize("name", ["cert_file", "key_file"])
def test_missing_tls_file_is_a_value_error(certificates: Path, name: str) -> None:
    files = {"cert_file": certificates / "server.pem", "key_file": certificates / "server.key"}
    settings = ServerSettings(tls=TlsSettings(**{**files, name: certificates / "absent"}))
    with pytest.raises(ValueError, match="TLS"):
        Service(settings, backing_for(settings, SystemClock()), SystemClock())


def mann_whitney_p(one: np.ndarray, other: np.ndarray) -> float:
    """Return the two-sided p of the normal approximation; ties are broken by order, there are hardly any."""
    ranks = np.empty(len(one) + len(other))
    ranks[np.argsort(np.concatenate([one, other]), kind="stable")] = np.arange(1, len(ranks) + 1)
    u = ranks[: len(one)].sum() - len(one) * (len(one) + 1) / 2
    mean, deviation = len(one) * len(other) / 2, math.sqrt(len(one) * len(other) * (len(ranks) + 1) / 12)
    return math.erfc(abs(u - mean) / deviation / math.sqrt(2))


def p_of_times(server: RunningServer, token: str, count: int = 2000) -> float:
    """Compare the seconds of `count` HEAD requests for each of objects 1 and 2, in random order on one connection."""
    order = np.random.default_rng(3).permutation(np.repeat([0, 1], count))
    heads = [head("HEAD", path_of(number), Authorization=f"Bearer {TOKENS[token]}") for number in (1, 2)]
    times: list[list[float]] = [[], []]
    with server.connect() as sock:
        for which in order:
            started_s = time.perf_counter()
            sock.sendall(heads[which])
            assert sock.recv(4096).endswith(b"\r\n\r\n")
            times[which].append(time.perf_counter() - started_s)
    return mann_whitney_p(*map(np.array, times))


@pytest.mark.real_time
def test_foreign_hit_takes_the_time_of_a_miss(local_url: str) -> None:
    with running_server(tiers=(local_url,), grants=GRANTS) as server:
        assert ask(server, "PUT", OBJECT, "writer", object_bytes(1))[0] == 201
        foreign = p_of_times(server, "other")
        if foreign <= 0.01:
            # Of a hundred runs without any difference one ends here; of ten thousand one does so twice.
            foreign = p_of_times(server, "other")
        # The test can tell a hit from a miss where both are the caller's own, as they would be without tenants.
        own = p_of_times(server, "reader")
    print({"p_foreign": foreign, "p_own": own})
    assert own < 1e-6
    assert foreign > 0.01


def test_access_log_says_who_did_what_and_no_secret(tmp_path: Path) -> None:
    with logged(ACCESS_LOGGER, tmp_path / "access") as written, running_server(grants=GRANTS) as server:
        data = object_bytes(1)
        for method, token in (("PUT", "writer"), ("GET", "reader"), ("GET", "other"), ("GET", "unknown")):
            ask(server, method, OBJECT, token, data if method == "PUT" else None)
        wait_until(lambda: len(written()) == 4, "every request's line")
    lines, text = written(), (tmp_path / "access").read_text()
    found = [(line["tenant"], line["method"], line["status"]) for line in lines]
    assert found == [("a", "PUT", 201), ("a", "GET", 200), ("b", "GET", 404), ("", "GET", 401)]
    assert [line["route"] for line in lines] == ["object"] * 4
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert (lines[0]["received_bytes"], lines[1]["sent_bytes"]) == (len(data), len(data))
    assert not any(secret in text for secret in (*TOKENS.values(), *OBJECT.split("/")[2:]))


def test_access_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        write_log(ACCESS_LOGGER, tmp_path / "absent" / "access")


@pytest.mark.parametrize("path", ["logs/access", "/dev/full"])
def test_log_whose_folder_is_gone_or_full_costs_its_lines_alone(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    with logged(ACCESS_LOGGER, tmp_path / path), running_server() as server:
        (tmp_path / "logs").rename(tmp_path / "older")
        answers = exchange(server, head("GET", "/v1") + head("GET", "/v1", Connection="close"))
    assert (answers.count(b"HTTP/1.1 200 "), capsys.readouterr().err) == (2, "")


def test_server_that_ends_leaves_its_successor_s_socket_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, was_there = tmp_path / "socket", list[bool]()
    with running_server(socket_path=path) as server:
        end = server.service.acceptor.end

        async def ended() -> None:
            # Nobody listens by now: another server may, where this one did.
            was_there.append(path.exists())
            await end()

        monkeypatch.setattr(server.service.acceptor, "end", ended)
    assert was_there == [False]


# Settings that change under a running server: connections and memory stay, a bad file changes nothing.


class Configured:
    """`kvtide serve` with a file of settings; its log goes to a file."""

    def __init__(self, folder: Path, text: str, stack: ExitStack) -> None:
        self.config, self.log = folder / "kvtide.toml", folder / "log"
        self.write(text)
        self.server = ServerProcess("--config", str(self.config), log=self.log)
        self.port = self.server.port
        stack.callback(self.stop)

    def write(self, text: str) -> None:
        aside = self.config.with_suffix(".new")
        aside.write_text(text)
        aside.rename(self.config)

    def reload(self, text: str) -> None:
        """Replace the file, ask for it to be read, and wait for the line that says so."""
        before = set(self.lines())
        self.write(text)
        self.server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: set(self.lines()) > before, "a line in the log")

    def lines(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "settings" in line]

    def stop(self) -> None:
        assert self.server.terminate() == 0


def status_of(connection: HTTPConnection, token: str, method: str = "GET", body: bytes | None = None) -> int:
    connection.request(method, OBJECT, body, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_tokens_change_on_a_signal_and_connections_and_memory_stay(tmp_path: Path, stack: ExitStack) -> None:
    old, new = new_token(), new_token()
    server = Configured(tmp_path, grant_words("search", old), stack)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    assert status_of(connection, old, "PUT", object_bytes(1)) == 201
    sock = connection.sock
    server.reload(grant_words("search", new))
    assert [status_of(connection, token) for token in (old, new)] == [401, 200]
    limits = "[limits]\ntenant_requests_s_max = 0.05\nmemory_bytes_max = 1000000\n"
    server.reload(grant_words("search", new) + limits)
    assert any("limits.memory_bytes_max" in line for line in server.lines())
    # The burst is one request; the next one is due after 20 s.
    assert [status_of(connection, new) for _ in range(2)] == [200, 429]
    assert connection.sock is sock
    connection.close()


def test_file_that_cannot_be_used_is_refused_with_one_line(tmp_path: Path, stack: ExitStack) -> None:
    token = new_token()
    grant = grant_words("search", token)
    server = Configured(tmp_path, grant, stack)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    tls = '[tls]\ncert_file = "/absent"\nkey_file = "/absent"\n'
    for bad in ("limits = 5\n", "not toml", grant + tls, "[limits]\nx = 1\n"):
        server.reload(bad)
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


def test_certificate_is_renewed_and_connections_stay(tmp_path: Path, certificates: Path, stack: ExitStack) -> None:
    for kind in ("key", "pem"):
        shutil.copy(certificates / f"server.{kind}", tmp_path / f"mine.{kind}")
    files = f'[tls]\ncert_file = "{tmp_path / "mine.pem"}"\nkey_file = "{tmp_path / "mine.key"}"\n'
    server = Configured(tmp_path, files, stack)
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
    kept = ["tiers", "limits.buffer_bytes_max", "limits.io_threads", "sending.policy"]
    assert live.adopt(ServerSettings(tiers=("memory://", "disk:///x"), limits=limits, sending=sending)) == kept
    assert live.limits == ServerLimits(idle_s_max=7.0)
    assert (live.settings.sending, live.settings.tiers) == (SchedulerSettings(weights={"a": 2.0}), before.tiers)


def test_tokens_do_not_go_from_a_port_that_others_reach() -> None:
    live = Live(ServerSettings(listen="0.0.0.0:1", grants=GRANTS), SystemClock())
    with pytest.raises(ValueError, match="no grant"):
        live.adopt(ServerSettings(listen="127.0.0.1:1"))
    assert live.settings.grants == GRANTS


def test_weights_change_under_waiting_bodies() -> None:
    scheduler = Scheduler(SchedulerSettings(slots=1), random.Random(0))
    sends = [scheduler.enqueue(tenant, tenant, 100 << 20, 0.0) for tenant in "ab"]
    scheduler.adopt(SchedulerSettings(slots=1, weights={"a": 3.0}))
    for _ in range(100):
        (part,) = scheduler.grant(0.0)
        scheduler.finish(part, part.size, 0.0)
    assert 2.5 < sends[0].sent_bytes / sends[1].sent_bytes < 3.5
    scheduler.check()
