"""Clients behind a proxy: told apart by what a trusted one says, and by nothing that anybody else does."""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.floods import GRANTS, TOKENS
from tests.servers import RunningServer, running_server

from kvtide.server.auth import Proxies, ProxyHeader
from kvtide.server.observe.access import ACCESS_LOGGER, write_log
from kvtide.server.settings import ServerLimits, read_settings
from kvtide_lab.bench.services import wait_until

LOCAL = ("127.0.0.1",)
SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


def binary(source: str, command: int = 0x21, more: bytes = b"") -> bytes:
    kind = socket.AF_INET6 if ":" in source else socket.AF_INET
    address = socket.inet_pton(kind, source)
    body = address * 2 + struct.pack("!HH", 1, 2) + more
    return SIGNATURE + bytes([command, 0x21 if kind == socket.AF_INET6 else 0x11]) + struct.pack("!H", len(body)) + body


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    path, log = tmp_path / "access", logging.getLogger(ACCESS_LOGGER)
    write_log(ACCESS_LOGGER, path)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.NOTSET)
    log.propagate = True


@contextmanager
def asked(server: RunningServer, before: bytes = b"", header: str = "", who: str = "") -> Iterator[bytes]:
    """Ask for the status, with something before the head or in it; give the answer's beginning."""
    token = f"Authorization: Bearer {TOKENS[who]}\r\n" if who else ""
    with server.connect() as sock:
        sock.sendall(before + f"GET /v1/status HTTP/1.1\r\nHost: x\r\n{token}{header}\r\n".encode())
        yield sock.recv(1000)


def status(server: RunningServer, before: bytes = b"", header: str = "", who: str = "") -> int:
    with asked(server, before, header, who) as answer:
        return int(answer[9:12]) if answer else 0


@pytest.mark.parametrize(
    ("header", "address"),
    [
        (b"PROXY TCP4 10.1.2.3 10.0.0.1 4711 7421\r\n", "10.1.2.3"),
        (b"PROXY TCP6 2001:db8::7 2001:db8::1 4711 7421\r\n", "2001:db8::7"),
        (b"PROXY UNKNOWN\r\n", "127.0.0.1"),
        (b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n", "127.0.0.1"),
        (binary("10.1.2.3"), "10.1.2.3"),
        (binary("::ffff:10.1.2.3", more=b"\x04\0\x01x"), "10.1.2.3"),
        (binary("10.1.2.3", command=0x20), "127.0.0.1"),
    ],
)
def test_client_behind_a_trusted_proxy_is_known_by_its_header(
    header: bytes, address: str, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    with running_server(trusted_proxies=LOCAL, proxy_header=ProxyHeader.PROXY_PROTOCOL) as server:
        assert status(server, header) == 200
        wait_until(lambda: len(lines()) == 1, "the line")
    assert lines()[0]["address"] == address


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PROXY TCP4 nowhere 10.0.0.1 1 2\r\n",
        b"PROXY TCP4 10.1.2.3\r\n",
        b"PROXY " + b"x" * 200,
        SIGNATURE + b"\x21\x11\xff\xff" + bytes(2000),
        SIGNATURE + b"\x31\x11\0\x0c" + bytes(12),
        SIGNATURE + b"\x21\x11\0\x02ab",
    ],
)
def test_trusted_proxy_that_sends_no_header_is_cut_off(header: bytes) -> None:
    with running_server(trusted_proxies=LOCAL, proxy_header=ProxyHeader.PROXY_PROTOCOL) as server:
        with suppress(ConnectionResetError):
            assert status(server, header) == 0
        assert status(server, binary("10.1.2.3")) == 200


def test_silent_proxy_connections_end_and_do_not_hold_up_a_shutdown() -> None:
    limits = ServerLimits(head_s_max=0.5)
    settings: dict[str, Any] = {"trusted_proxies": LOCAL, "proxy_header": ProxyHeader.PROXY_PROTOCOL}
    with running_server(limits=limits, **settings) as server, server.connect() as silent:
        assert silent.recv(10) == b""
        late = server.connect()
        late.sendall(b"PROX")
    assert late.recv(10) == b""
    late.close()


def test_strangers_header_counts_for_nothing(lines: Callable[[], list[dict[str, Any]]]) -> None:
    for kind in ProxyHeader:
        with running_server(trusted_proxies=("10.0.0.0/8",), proxy_header=kind) as server:
            assert status(server, header="X-Forwarded-For: 10.9.9.9\r\n") == 200
            assert status(server, binary("10.9.9.9")) == 400
    assert {line["address"] for line in lines()} == {"127.0.0.1"}


def test_chain_is_believed_up_to_the_first_address_that_is_not_trusted() -> None:
    proxies = Proxies(("127.0.0.1", "10.0.0.0/8", "unix"), ProxyHeader.X_FORWARDED_FOR)
    for text, client in (
        ("6.6.6.6, 192.0.2.1", "192.0.2.1"),
        ("6.6.6.6, 192.0.2.1, 10.0.0.5", "192.0.2.1"),
        ("10.0.0.9, 10.0.0.5", "10.0.0.9"),
        ("192.0.2.1, nonsense, 10.0.0.5", "10.0.0.5"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", "127.0.0.1"),
    ):
        assert proxies.client_of({"x-forwarded-for": text}, "127.0.0.1") == client
    assert proxies.client_of({"x-forwarded-for": "192.0.2.1"}, "unix") == "192.0.2.1"
    assert proxies.client_of({"x-forwarded-for": "192.0.2.1"}, "192.0.2.9") == "192.0.2.9"


def test_strangers_behind_one_proxy_have_a_rate_each() -> None:
    limits = ServerLimits(stranger_requests_s_max=1, head_s_max=0.2)
    settings: dict[str, Any] = {"trusted_proxies": LOCAL, "proxy_header": ProxyHeader.X_FORWARDED_FOR}
    with running_server(grants=GRANTS, limits=limits, **settings) as server:
        assert [status(server, header="X-Forwarded-For: 192.0.2.1\r\n") for _ in range(3)] == [401, 429, 429]
        assert status(server, header="X-Forwarded-For: 192.0.2.2\r\n") == 401
        assert status(server, header="X-Forwarded-For: 192.0.2.1\r\n", who="victim") == 200


def test_proxy_may_have_more_connections_than_one_client() -> None:
    limits = ServerLimits(tenant_connections_max=2)
    settings: dict[str, Any] = {"trusted_proxies": LOCAL, "proxy_header": ProxyHeader.X_FORWARDED_FOR}
    with running_server(limits=limits, **settings) as server:
        held = [asked(server, header=f"X-Forwarded-For: 192.0.2.{number}\r\n") for number in range(6)]
        assert all(each.__enter__().startswith(b"HTTP/1.1 200 ") for each in held)
        for each in held:
            each.__exit__(None, None, None)


@pytest.mark.parametrize(
    "changes",
    [{"trusted_proxies": ["10.0.0.1"]}, {"proxy_header": "proxy-protocol"}, {"trusted_proxies": ["proxy.example"]}],
)
def test_proxies_that_cannot_be_meant_are_an_error_at_the_start(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"proxy|proxies"):
        read_settings(None, changes)
