"""Requests that are not what they seem: pages of a browser, upgrades, ranges of another version, two names."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from tests.attacks.floods import GRANTS, ask, head
from tests.server.worlds import path_of
from tests.servers import running_server

from kvtide.server.http import connections as doors
from kvtide.server.http.connections import common_name
from kvtide.testing.tier_suite import object_bytes

OBJECT = path_of(1)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:7421", None, 200),
        ("localhost", "http://localhost", 200),
        ("[::1]:7421", None, 200),
        ("box", None, 200),
        ("cache.localhost:80", None, 200),
        ("evil.example", None, 421),
        ("evil.example.:7421", None, 421),
        ("127.0.0.1.evil.example", None, 421),
        ("localhost", "http://evil.example", 421),
        ("localhost:7421", "null", 421),
    ],
)
def test_open_server_answers_no_page_of_another_site(host: str, origin: str | None, status: int) -> None:
    headers: dict[str, Any] = {"Host": host, **({"Origin": origin} if origin else {})}
    with running_server() as server:
        assert ask(server, "GET", "/v1", "", **headers)[0].status == status


def test_server_with_tokens_or_open_to_all_has_any_name() -> None:
    with running_server(grants=GRANTS) as server:
        assert ask(server, "GET", "/v1", Host="cache.example")[0].status == 200
    with running_server(is_open_to_all=True) as server:
        assert ask(server, "GET", "/v1", "", Host="cache.example")[0].status == 200


def test_upgrade_is_not_taken_and_the_request_is_answered() -> None:
    with running_server() as server, server.connect() as sock:
        lines = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABkAAQC"}
        sock.sendall(head("GET", "/healthz", **lines))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        sock.sendall(head("GET", "/healthz"))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_range_of_another_version_is_the_whole_object() -> None:
    with running_server() as server:
        ask(server, "PUT", OBJECT, "", object_bytes(1))
        tag = ask(server, "HEAD", OBJECT, "")[0].headers["ETag"]
        others = ('"another"', f"W/{tag}", "Sun, 01 Jan 2026 00:00:00 GMT")
        for condition, status in ((tag, 206), *((other, 200) for other in others)):
            answer, content = ask(server, "GET", OBJECT, "", Range="bytes=0-9", If_Range=condition)
            assert (answer.status, len(content)) == (status, 10 if status == 206 else 1000)


def test_certificate_of_two_names_has_none() -> None:
    name = (("organizationName", "o"),), (("commonName", "a"),)
    assert common_name({"subject": name}) == "a"
    assert common_name({"subject": (*name, (("commonName", "b"),))}) is None
    assert common_name({}) is None and common_name(None) is None


@pytest.mark.parametrize("number", [errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.EMFILE])
def test_fault_of_accept_does_not_end_the_server(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [OSError(number, "no")]
    accept = socket.socket.accept

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if faults:
            raise faults.pop()
        return accept(listener)

    monkeypatch.setattr(doors, "_ACCEPT_PAUSE_S", 0.01)
    with running_server() as server:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert ask(server, "GET", "/healthz", "")[0].status == 200
        assert not faults
