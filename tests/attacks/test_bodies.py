"""Bodies that don't come, readers that don't read, slow tiers, odd requests, strangers: others are served."""

import errno
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.attacks.floods import GRANTS, ask, flood, head
from tests.server.worlds import path_of
from tests.servers import RunningServer, counted, running_server
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.errors import RequestRefused
from kvtide.server.http import BodyBuffers
from kvtide.server.http import connections as doors
from kvtide.server.http.connections import ConnectionLimits, Guest, common_name
from kvtide.server.http.shares import Rates
from kvtide.server.scheduler import SchedulerSettings
from kvtide.server.settings import ProgressBudget, ServerLimits, ServerSettings
from kvtide_lab.bench.services import BenchService, valkey_server, wait_until
from kvtide_lab.wrapped import Watched

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
        with pytest.raises(RequestRefused, match="of a tenant"):
            while buffers.take(64 << 10, tenant):
                buffers.check()
    assert buffers.take(64 << 10, "last")


def test_uploads_of_one_tenant_leave_buffers_to_others() -> None:
    limits, data = ServerLimits(object_bytes_max=MIB, tenant_buffer_bytes_max=MIB), object_bytes(1, 700_000)
    with running_server(grants=GRANTS, limits=limits) as server, sending(server, upload("attacker", 1, len(data), 1)):
        wait_until(lambda: server.service.buffers.lent_bytes > 0, "the first upload to hold its buffer")
        refused, reason = ask(server, "PUT", OBJECT, "attacker", data)
        assert (refused.status, b"of a tenant" in reason) == (429, True)
        assert ask(server, "PUT", OBJECT, body=data)[0].status == 201
        assert ask(server, "PUT", OBJECT, "attacker", bytes(MIB + 1))[0].status == 413
    # No time makes room for it.
    with running_server(limits=ServerLimits(buffer_bytes_max=MIB)) as server:
        assert ask(server, "PUT", OBJECT, body=bytes(MIB + 1))[0].status == 413


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
        # Its receive buffer is small: one of the kernel's own size can take all that is left.
        with sending(server, head("GET", OBJECT, "victim")) as (sock,):
            came = 0
            while came < 20 * MIB:
                came += len(sock.recv(MIB))
            wait_until(lambda: len(server.service.acceptor.limits) == 0, "the reader to be cut off")


def test_no_error_is_written_into_a_body_that_has_begun() -> None:
    slow_link = SchedulerSettings(tenant_sends_max=1, link_bits_s=2e6, slice_bytes=64 << 10)
    with running_server(grants=GRANTS, sending=slow_link) as server:
        data, flows = object_bytes(1, 4 * MIB), server.service.scheduler.flows
        assert ask(server, "PUT", OBJECT, body=data)[0].status == 201
        with sending(server, head("GET", OBJECT, "victim")) as (late,):
            came = late.recv(1)
            wait_until(lambda: not flows(), "the reader to stand still")
            with sending(server, head("GET", OBJECT, "victim")):
                wait_until(lambda: bool(flows()), "another one to wait for the link")
                # It goes on, and its place is taken.
                late.settimeout(3)
                with suppress(TimeoutError):
                    while part := late.recv(MIB):
                        came += part
    assert data.startswith(came.partition(b"\r\n\r\n")[2])


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


def test_damaged_value_behind_a_server_is_removed_and_a_miss() -> None:
    with (
        valkey_server() as behind,
        running_server(tiers=(url_of(behind),)) as server,
        redis.Redis(port=behind.port, protocol=2) as client,
    ):
        for value in (b"x" * 10, bytes(400), b"\xff" * 400, object_bytes(3)[:900]):
            assert ask(server, "PUT", OBJECT, "", object_bytes(1))[0].status == 201
            assert ask(server, "GET", OBJECT, "")[1] == object_bytes(1)
            name = next(key for key in client.scan_iter() if object_id(1).key.hex().encode() in key)
            client.set(name, value)
            assert ask(server, "GET", OBJECT, "")[0].status == 404


# Slow tiers and floods of one tenant: threads and look-ups are shared, and a deadline holds wherever one waits.

SPACE = OBJECT.rpartition("/")[0]


class Blocked(Watched):
    """A tier whose verbs wait until it is let go. It can't lend."""

    def __init__(self, inner: object, verbs: set[str]) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.verbs = verbs
        self.waiting = 0
        self.go_on = threading.Event()

    def before(self, verb: str) -> None:
        if verb in self.verbs:
            self.waiting += 1
            self.go_on.wait(20)
            self.waiting -= 1


@contextmanager
def blocked(server: RunningServer, *verbs: str) -> Iterator[Blocked]:
    """Let a server's only tier hang."""
    store = server.store
    tier = store._open[0].tier = Blocked(store._open[0].tier, set(verbs))
    try:
        yield tier
    finally:
        tier.go_on.set()
        wait_until(lambda: not tier.waiting, "the calls to come back")


@pytest.mark.parametrize("limits", [ServerLimits(), ServerLimits(io_threads=2)])
def test_slow_reads_of_one_tenant_leave_threads_to_others(limits: ServerLimits) -> None:
    with running_server(grants=GRANTS, limits=limits) as server:
        assert ask(server, "PUT", OBJECT, body=object_bytes(1))[0].status == 201
        with blocked(server, "get") as tier:
            absent = [path_of(number) for number in range(10, 22)]
            with ThreadPoolExecutor(12) as threads:
                asked = threads.map(lambda path: ask(server, "GET", path, "attacker"), absent)
                wait_until(lambda: tier.waiting >= max(1, limits.io_threads - 1), "the attacker's calls to hang")
                if limits == ServerLimits():
                    assert ask(server, "PUT", OBJECT, "attacker", object_bytes(1))[0].status == 201, "a thread is left"
                tier.verbs.clear()
                assert ask(server, "GET", OBJECT)[1] == object_bytes(1)
                assert ask(server, "PUT", path_of(2), body=object_bytes(2))[0].status == 201
                assert tier.waiting
                tier.go_on.set()
            assert len(list(asked)) == 12


@pytest.mark.parametrize(
    ("method", "path", "body", "verb"),
    [
        ("GET", OBJECT, None, "get"),
        ("HEAD", OBJECT, None, "get"),
        ("PUT", OBJECT, object_bytes(1), "put"),
        ("PUT", OBJECT, object_bytes(2), "contains"),
        ("DELETE", OBJECT, None, "delete"),
        ("POST", f"{SPACE}/exists", json.dumps({"keys": [object_id(1).key.hex()]}).encode(), "contains"),
    ],
)
def test_deadline_holds_while_a_tier_hangs(
    method: str, path: str, body: bytes | None, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(limits=ServerLimits(io_threads=1)) as server, blocked(server, verb) as tier:
        for _ in range(3):
            started_s = time.monotonic()
            answer, _ = ask(server, method, path, "", body, Kvtide_Deadline_Ms="200")
            assert answer.status == 504
            assert time.monotonic() - started_s < 15
        # A call whose time was over before its thread began has not begun at all.
        assert tier.waiting <= 1
        tier.go_on.set()
        wait_until(lambda: not tier.waiting, "the call to come back")
        tier.verbs.clear()
        assert ask(server, "GET", "/v1", "")[0].status == 200
        gc.collect()
        assert "never retrieved" not in caplog.text, "a fault that nobody waits for"


def test_deadline_counts_from_the_first_byte_and_ends_an_upload() -> None:
    with running_server() as server, server.connect() as sock:
        started_s = time.monotonic()
        sock.sendall(head("PUT", OBJECT, Content_Length=1000, Kvtide_Deadline_Ms=5000)[:-2])
        time.sleep(4.0)
        # Requests that pass it on the way don't count against it.
        assert ask(server, "GET", OBJECT, "")[0].status == 404
        sock.sendall(b"\r\nx")
        assert sock.recv(1000).startswith(b"HTTP/1.1 504 ")
        # From the end of the head it would be nine seconds.
        assert time.monotonic() - started_s < 8.5


def test_look_ups_of_many_keys_cost_as_many_requests() -> None:
    keys = json.dumps({"keys": [object_id(number).key.hex() for number in range(1000)]}).encode()
    with running_server(grants=GRANTS, limits=ServerLimits(tenant_requests_s_max=500)) as server:
        assert ask(server, "POST", f"{SPACE}/exists", "attacker", keys)[0].status == 200
        assert ask(server, "POST", f"{SPACE}/exists", "attacker", keys)[0].status == 429
        assert ask(server, "POST", f"{SPACE}/exists", "victim", keys)[0].status == 200
    leading = keys.replace(b"}", b', "leading_only": true}')
    with running_server(grants=GRANTS, limits=ServerLimits(tenant_requests_s_max=500)) as server:
        for _ in range(5):
            assert ask(server, "POST", f"{SPACE}/exists", "attacker", leading)[0].status == 200


def test_rates_forget_who_has_not_asked_for_a_while() -> None:
    rates = Rates(lambda: 10.0)
    for number in range(5000):
        rates.take(f"junk-{number}", number / 1000)
    assert len(rates._left) < 1200
    rates.take("one", 100.0)
    assert len(rates._left) <= 64
    bounded = Rates(lambda: 10.0, owners_max=80)
    for number in range(100):
        bounded.take(str(number), 0.0)
    assert len(bounded._left) == 80


# Requests that are not what they seem: pages of a browser, upgrades, ranges of another version, two names.


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
        server.service.live.adopt(ServerSettings())
        assert ask(server, "GET", "/v1", "", Host="cache.example")[0].status == 421
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


# Connections of strangers: few, short, and never in the way of who has shown a token.


def test_silent_connections_keep_nobody_out() -> None:
    with running_server(grants=GRANTS, limits=ServerLimits(connections_max=32)) as server, server.connect() as known:
        known.sendall(head("GET", "/v1", "victim"))
        assert known.recv(1000).startswith(b"HTTP/1.1 200 ")
        with sending(server, *[b""] * 40):
            assert ask(server, "GET", "/healthz", "")[0].status == 200
            assert ask(server, "GET", "/v1")[0].status == 200
            known.sendall(head("GET", "/v1", "victim"))
            assert known.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("before", [b"", head("GET", "/v1", "attacker")], ids=["strangers", "known"])
def test_strangers_of_one_address_are_answered_no_faster_than_their_rate(before: bytes) -> None:
    with running_server(grants=GRANTS, limits=ServerLimits(stranger_requests_s_max=5)) as server:
        with server.connect() as stranger:
            stranger.sendall(before)
            assert not before or stranger.recv(65536).startswith(b"HTTP/1.1 200 ")
            started_s = time.monotonic()
            stranger.sendall(head("GET", "/v1") * 12)
            answers = b""
            while answers.count(b"HTTP/1.1 401 ") < 12:
                answers += stranger.recv(65536)
        assert time.monotonic() - started_s > 1.0
        assert ask(server, "GET", "/v1")[0].status == 200


@pytest.mark.parametrize(("grants", "who", "status"), [(GRANTS, "attacker", 429), ((), "", 503)])
def test_connections_of_one_tenant_or_address_are_bounded(grants: Any, who: str, status: int) -> None:
    limits, questions = ServerLimits(tenant_connections_max=3), [head("GET", "/v1", who)] * 3
    with running_server(grants=grants, limits=limits) as server, sending(server, *questions) as held:
        for sock in held:
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        answer, _ = ask(server, "GET", "/v1", who)
        assert (answer.status, answer.headers["Connection"]) == (status, "close")
        assert not grants or ask(server, "GET", "/v1", "victim")[0].status == 200


def test_strangers_leave_in_the_order_in_which_they_came() -> None:
    cut: list[str] = []
    doors = ConnectionLimits(3, 10, lambda guest: cut.append(guest.client))
    guests = [doors.enter(str(number), "@here") for number in range(3)]
    assert isinstance(guests[0], Guest)
    doors.settle(guests[0], "tenant")
    assert doors.enter("3", "@here") is not None
    assert cut == ["1"]
    doors.check()


# Requests without pause: each owner gets its turns, whoever else asks how often.


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1", {}), ("/healthz", {}), ("/v1/nothing", {}), ("/v1", {"Kvtide_Deadline_Ms": "nonsense"})],
)
def test_requests_without_pause_leave_the_others_their_turns(path: str, headers: dict[str, str]) -> None:
    with running_server(grants=GRANTS) as server:
        assert ask(server, "PUT", OBJECT, body=object_bytes(1))[0].status == 201
        with flood(server, head("GET", path, **headers)):
            for _ in range(3):
                assert ask(server, "GET", OBJECT)[1] == object_bytes(1)


def test_server_ends_while_somebody_asks_without_pause(tmp_path: Path) -> None:
    with running_server(grants=GRANTS) as server, flood(server, head("GET", "/v1")):
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join(15)
        assert not stopping.is_alive()


def test_reader_whose_object_left_the_memory_while_it_waited_is_served_from_the_disk(tmp_path: Path) -> None:
    """Issue 47: it was sent as a file in memory, of no bytes, and the connection ended with a fault of ours."""
    limits, tiers = ServerLimits(memory_bytes_max=16 * MIB), ("memory://", f"disk://{tmp_path}")
    with running_server(tiers=tiers, limits=limits) as server, ThreadPoolExecutor(1) as threads:
        data = {number: object_bytes(number, 3 * MIB) for number in (1, 2)}
        for number in data:
            assert ask(server, "PUT", path_of(number), "", data[number])[0].status == 201
        memory = server.store.open_tiers["memory"]
        second = next(info.id for info in memory.objects() if info.id.key == object_id(2).key)
        # In the page cache, where lending it needs no waiting.
        assert sum(len(path.read_bytes()) for path in tmp_path.glob("segments/*")) > 6 * MIB
        with sending(server, head("GET", OBJECT, "")):
            wait_until(lambda: counted(server, "kvtide_object_reads_total", result="found") == 1, "it to have begun")
            hits = memory.stats().hits
            other = threads.submit(ask, server, "GET", path_of(2), "")
            wait_until(lambda: memory.stats().hits > hits, "the other to wait for its share")
            assert memory.delete(second, "evicted")
        assert other.result()[1] == data[2]
