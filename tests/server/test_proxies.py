"""Clients behind a proxy: told apart by what a trusted one says, and by nothing that anybody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.floods import GRANTS, TOKENS
from tests.server.worlds import logged
from tests.servers import RunningServer, running_server

from kvtide.server.auth import Proxies
from kvtide.server.logs import ACCESS_LOGGER
from kvtide.server.settings import ServerLimits, read_settings

PROXY: dict[str, Any] = {"trusted_proxies": ("127.0.0.1",)}


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    with logged(ACCESS_LOGGER, tmp_path / "access") as lines:
        yield lines


@contextmanager
def asked(server: RunningServer, client: str, who: str = "") -> Iterator[bytes]:
    """Ask for the metrics as a proxy that names a client; give the answer's beginning."""
    token = f"Authorization: Bearer {TOKENS[who]}\r\n" if who else ""
    with server.connect() as sock:
        sock.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{token}X-Forwarded-For: {client}\r\n\r\n".encode())
        yield sock.recv(1000)


def status(server: RunningServer, client: str, who: str = "") -> int:
    with asked(server, client, who) as answer:
        return int(answer[9:12])


def test_strangers_header_counts_for_nothing(lines: Callable[[], list[dict[str, Any]]]) -> None:
    with running_server(trusted_proxies=("10.0.0.0/8",)) as server:
        assert status(server, "10.9.9.9") == 200
    assert {line["address"] for line in lines()} == {"127.0.0.1"}


def test_chain_is_believed_up_to_the_first_address_that_is_not_trusted() -> None:
    proxies = Proxies(("127.0.0.1", "10.0.0.0/8", "unix"))
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
    with running_server(grants=GRANTS, limits=limits, **PROXY) as server:
        assert [status(server, "192.0.2.1") for _ in range(3)] == [401, 429, 429]
        assert status(server, "192.0.2.2") == 401
        assert status(server, "192.0.2.1", who="victim") == 200


def test_proxy_may_have_more_connections_than_one_client() -> None:
    with running_server(limits=ServerLimits(tenant_connections_max=2), **PROXY) as server, ExitStack() as stack:
        for number in range(6):
            assert stack.enter_context(asked(server, f"192.0.2.{number}")).startswith(b"HTTP/1.1 200 ")


def test_proxy_that_cannot_be_meant_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="proxy"):
        read_settings(None, {"trusted_proxies": ["proxy.example"]})
