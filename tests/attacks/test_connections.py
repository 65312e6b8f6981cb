"""Connections of strangers: few, short, and never in the way of who has shown a token."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.attacks.floods import GRANTS, ask, head
from tests.servers import RunningServer, running_server

from kvtide.server.http.connections import ConnectionLimits, Guest, connections_for
from kvtide.server.settings import FILES_MAX, ServerLimits


@contextmanager
def silent(server: RunningServer, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(server.connect()) for _ in range(count)]


def test_silent_connections_keep_nobody_out() -> None:
    with running_server(grants=GRANTS, limits=ServerLimits(connections_max=32)) as server, server.connect() as known:
        known.sendall(head("GET", "/v1", "victim"))
        assert known.recv(1000).startswith(b"HTTP/1.1 200 ")
        with silent(server, 40):
            assert ask(server, "GET", "/healthz", "")[0].status == 200
            assert ask(server, "GET", "/v1")[0].status == 200
            known.sendall(head("GET", "/v1", "victim"))
            assert known.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_connection_that_says_nothing_is_closed_after_the_time_for_a_head() -> None:
    limits = ServerLimits(head_s_max=1.0, idle_s_max=300)
    with running_server(grants=GRANTS, limits=limits) as server, server.connect() as mute, server.connect() as known:
        known.sendall(head("GET", "/v1", "victim"))
        known.recv(1000)
        assert mute.recv(1) == b""
        known.sendall(head("GET", "/v1", "victim"))
        assert known.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_strangers_of_one_address_are_answered_no_faster_than_their_rate() -> None:
    with running_server(grants=GRANTS, limits=ServerLimits(stranger_requests_s_max=5)) as server:
        with server.connect() as stranger:
            started_s = time.monotonic()
            stranger.sendall(head("GET", "/v1") * 12)
            answers = b""
            while answers.count(b"HTTP/1.1 401 ") < 12:
                answers += stranger.recv(65536)
        assert time.monotonic() - started_s > 1.0
        assert ask(server, "GET", "/v1")[0].status == 200


def test_connections_of_one_tenant_are_bounded() -> None:
    limits = ServerLimits(tenant_connections_max=3)
    with running_server(grants=GRANTS, limits=limits) as server, silent(server, 3) as held:
        for sock in held:
            sock.sendall(head("GET", "/v1", "attacker"))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        answer, _ = ask(server, "GET", "/v1", "attacker")
        assert (answer.status, answer.headers["Connection"]) == (429, "close")
        assert ask(server, "GET", "/v1", "victim")[0].status == 200


def test_strangers_leave_in_the_order_in_which_they_came() -> None:
    cut: list[str] = []
    doors = ConnectionLimits(3, 10, lambda guest: cut.append(guest.client))
    guests = [doors.enter(str(number), "@here") for number in range(3)]
    assert isinstance(guests[0], Guest)
    doors.settle(guests[0], "tenant")
    assert doors.enter("3", "@here") is not None
    assert cut == ["1"]
    doors.check()


def test_descriptors_that_are_few_bound_the_connections(caplog: pytest.LogCaptureFixture) -> None:
    limits = ServerLimits(connections_max=4096)
    assert connections_for(limits, 65536) == 4096
    assert connections_for(limits, 1024) == 1024 - FILES_MAX
    assert "connections_max" in caplog.text
