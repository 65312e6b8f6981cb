"""Bodies that don't come and readers that don't read: they hold little, not for long, and nothing of other tenants."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import redis
from tests.attacks.floods import GRANTS, ask, head
from tests.server.worlds import path_of
from tests.servers import RunningServer, counted, running_server

from kvtide.errors import QueueFull
from kvtide.server.http import BodyBuffers
from kvtide.server.settings import ProgressBudget, ServerLimits
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide_lab.bench.services import BenchService, valkey_server, wait_until

MIB = 1 << 20
OBJECT = path_of(1)


def url_of(valkey: BenchService) -> str:
    """A busy machine is no silent server."""
    return f"valkey://127.0.0.1:{valkey.port}?wait_s_max=20"


@contextmanager
def sending(server: RunningServer, *starts: bytes) -> Iterator[list[socket.socket]]:
    """Connections that send so much, and then neither send nor read; they have small receive buffers."""
    with ExitStack() as stack:
        socks = []
        for start in starts:
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(10)
            sock.connect((server.address.host, server.address.port))
            sock.sendall(start)
            socks.append(sock)
        yield socks


def upload(who: str, number: int, size: int, sent: int = 0) -> bytes:
    return head("PUT", path_of(number), who, Content_Length=size) + bytes(sent)


def test_uploads_without_a_byte_hold_no_buffer() -> None:
    limits = ServerLimits(buffer_bytes_max=8 * MIB, tenant_buffer_bytes_max=4 * MIB, object_bytes_max=4 * MIB)
    silent = [upload(who, number, 4 * MIB) for who in ("attacker", "second") for number in range(2)]
    with running_server(grants=GRANTS, limits=limits) as server, sending(server, *silent):
        wait_until(lambda: len(server.service.acceptor.limits) == 4, "the uploads to be let in")
        assert server.service.buffers.lent_bytes == 0
        assert ask(server, "PUT", OBJECT, body=object_bytes(1, 3 * MIB))[0].status == 201


def test_upload_holds_a_buffer_in_proportion_to_what_has_come() -> None:
    with running_server(grants=GRANTS) as server, sending(server, upload("attacker", 1, 200 * MIB, 1)):
        wait_until(lambda: server.service.buffers.lent_bytes > 0, "the first byte to come")
        assert server.service.buffers.lent_bytes == 4 * MIB
    with running_server(grants=GRANTS) as server:
        data = object_bytes(1, 41 * MIB)
        assert ask(server, "PUT", OBJECT, body=data)[0].status == 201
        assert ask(server, "GET", OBJECT)[1] == data


@pytest.mark.parametrize("sent", [0, 1, 2 * MIB])
def test_upload_that_stands_still_ends_however_large_it_is(sent: int) -> None:
    start = upload("attacker", 1, 200 * MIB, sent)
    with running_server(grants=GRANTS, limits=ServerLimits(head_s_max=0.3)) as server:
        with sending(server, start) as (sock,):
            assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: server.service.buffers.lent_bytes == 0, "the buffer to come back")


def test_tenants_never_take_all_buffers() -> None:
    buffers = BodyBuffers(16 * MIB, 8 * MIB)
    for tenant in "abcdef":
        with pytest.raises(QueueFull):
            while buffers.take(64 << 10, tenant):
                buffers.check()
    assert buffers.take(64 << 10, "last") is not None


def test_readers_that_take_nothing_leave_buffers_where_the_tier_cannot_lend() -> None:
    limits = ServerLimits(buffer_bytes_max=64 * MIB)
    with valkey_server() as behind, running_server(tiers=(url_of(behind),), grants=GRANTS, limits=limits) as server:
        assert ask(server, "PUT", OBJECT, "attacker", object_bytes(1, 16 * MIB))[0].status == 201
        assert ask(server, "PUT", OBJECT, body=object_bytes(1, MIB))[0].status == 201
        with sending(server, *[head("GET", OBJECT, "attacker")] * 8):
            wait_until(lambda: server.service.buffers.lent_bytes >= 32 * MIB, "the readers to stall")
            assert ask(server, "GET", OBJECT)[1] == object_bytes(1, MIB)
            assert ask(server, "PUT", path_of(2), body=object_bytes(2, MIB))[0].status == 201


def test_reader_that_stands_still_is_cut_off_however_much_it_took() -> None:
    with running_server(grants=GRANTS, limits=ServerLimits(head_s_max=3.0)) as server:
        data = object_bytes(1, 48 * MIB)
        assert ask(server, "PUT", OBJECT, body=data)[0].status == 201
        with server.connect() as sock:
            sock.sendall(head("GET", OBJECT, "victim"))
            came = 0
            while came < 20 * MIB:
                came += len(sock.recv(MIB))
            wait_until(lambda: len(server.service.acceptor.limits) == 0, "the reader to be cut off")


def test_pace_is_of_the_last_seconds() -> None:
    pace = ProgressBudget(10.0, 100.0, 0.0)
    pace.moved(10**6, 1.0)
    assert pace.due_s == 11.0
    pace.moved(100, 5.0)
    assert pace.due_s == 12.0
    pace.paused(3.0)
    assert pace.due_s == 15.0


def test_readers_that_take_nothing_leave_the_memory_to_what_others_store() -> None:
    limits, mine, others = ServerLimits(memory_bytes_max=64 * MIB), range(10, 14), range(4)
    with running_server(grants=GRANTS, limits=limits) as server:
        for number in others:
            ask(server, "PUT", path_of(number), "attacker", object_bytes(number, 14 * MIB))
        with sending(server, *[head("GET", path_of(number), "attacker") for number in others]):
            wait_until(lambda: counted(server, "kvtide_object_reads_total", result="found") == 4, "all to have begun")
            stored = [ask(server, "PUT", path_of(number), body=object_bytes(number, 12 * MIB)) for number in mine]
    assert [answer.status for answer, _ in stored] == [201] * len(mine)


def test_readers_share_what_they_hold_of_the_memory_and_are_all_served() -> None:
    limits = ServerLimits(memory_bytes_max=16 * MIB)
    with running_server(limits=limits) as server:
        data = object_bytes(1, 3 * MIB)
        assert ask(server, "PUT", OBJECT, "", data)[0].status == 201
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: ask(server, "GET", OBJECT, "")[1], range(24)))
    assert found == [data] * 24


def test_a_late_reader_is_not_cut_off_for_others_of_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.http.sender._LATE_S_MAX", 20.0)
    limits = ServerLimits(memory_bytes_max=16 * MIB)
    with running_server(limits=limits) as server, ThreadPoolExecutor(1) as threads:
        data = object_bytes(1, 3 * MIB)
        assert ask(server, "PUT", OBJECT, "", data)[0].status == 201
        with sending(server, head("GET", OBJECT, "")) as (late,):
            wait_until(lambda: counted(server, "kvtide_object_reads_total", result="found") == 1, "it to have begun")
            other = threads.submit(ask, server, "GET", OBJECT, "")
            time.sleep(0.5)
            came = b""
            while not came.endswith(data[-1000:]) and (part := late.recv(1 << 16)):
                came += part
        assert came.endswith(data) and other.result()[1] == data


@pytest.mark.parametrize("value", [b"x" * 10, bytes(400), b"\xff" * 400, object_bytes(3)[:900]])
def test_damaged_value_behind_a_server_is_removed_and_a_miss(value: bytes) -> None:
    with valkey_server() as behind, running_server(tiers=(url_of(behind),)) as server:
        assert ask(server, "PUT", OBJECT, "", object_bytes(1))[0].status == 201
        with redis.Redis(port=behind.port, protocol=2) as client:
            name = next(key for key in client.scan_iter() if object_id(1).key.hex().encode() in key)
            client.set(name, value)
        assert ask(server, "GET", OBJECT, "")[0].status == 404
        assert ask(server, "PUT", OBJECT, "", object_bytes(1))[0].status == 201
        assert ask(server, "GET", OBJECT, "")[1] == object_bytes(1)
