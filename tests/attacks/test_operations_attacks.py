"""What an operator needs while clients, files and disks are not on his side: real servers over loopback."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tests.attacks.floods import GRANTS, ask, head
from tests.server.worlds import World, exchange, granted, logged, path_of, put, stalled
from tests.server.worlds import ask as ask_world
from tests.servers import RunningServer, counted, running_server
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.server.auth import stored_namespace
from kvtide.server.http.connections import account_of, host_of
from kvtide.server.logs import ACCESS_LOGGER, AUDIT_LOGGER
from kvtide.server.scheduler import SchedulerSettings
from kvtide.server.settings import ServerLimits
from kvtide.tier import ObjectInfo
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.bench.services import wait_until


@pytest.mark.parametrize("policy", ["lottery", "vtc"])
def test_small_object_passes_many_large_ones_of_another_address_on_an_open_server(policy: str) -> None:
    # Drawn by addresses the small one waits for a few, with one queue for all 20.
    sending, limits = SchedulerSettings(policy=policy, slots=1, tenant_slots_max=1), ServerLimits(stall_s_max=60)
    finished: list[str] = []

    def read(server: RunningServer, number: int, address: str) -> None:
        """Read as a client of another address would."""
        connection = HTTPConnection(server.address.host, server.address.port, timeout=30, source_address=(address, 0))
        connection.request("GET", path_of(number))
        assert len(connection.getresponse().read()) > 0
        finished.append(address)
        connection.close()

    with running_server(sending=sending, limits=limits) as server, ThreadPoolExecutor(21) as readers:
        for number, size in ((1, 1 << 20), (2, 50_000), (3, 16 << 20)):
            put(server, number, size)
        with stalled(server, head("GET", path_of(3)), lambda: counted(server, "kvtide_unsent_bytes")):
            for number, address in [(1, "127.0.0.2")] * 20 + [(2, "127.0.0.3")]:
                readers.submit(read, server, number, address)
            wait_until(lambda: counted(server, "kvtide_waiting_sends") == 21, "all to wait")
    assert len(finished) == 21
    assert finished.index("127.0.0.3") < 18


def test_strangers_and_malformed_heads_leave_lines_with_their_address(tmp_path: Path) -> None:
    with logged(ACCESS_LOGGER, tmp_path / "access") as lines, running_server(grants=GRANTS) as server:
        assert b" 400 " in exchange(server, b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
        assert b" 401 " in exchange(server, head("GET", path_of(1), Connection="close"))
        wait_until(lambda: len(lines()) == 2, "both lines")
        found = {line["route"]: (line["address"], line["status"]) for line in lines()}
        metrics = ask(server, "GET", "/metrics")[1].decode()
    assert found == {"malformed": ("127.0.0.1", 400), "object": ("127.0.0.1", 401)}
    assert 'kvtide_requests_total{route="malformed",status="400"} 1.0' in metrics


def test_log_that_strangers_fill_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    limits = ServerLimits(stranger_log_lines_s_max=5, stranger_requests_s_max=1000)
    with logged(ACCESS_LOGGER, tmp_path / "access") as lines, running_server(grants=GRANTS, limits=limits) as server:
        started_s = time.monotonic()
        with server.connect() as sock:
            for _ in range(300):
                sock.sendall(head("GET", path_of(1)))
                assert b" 401 " in sock.recv(1000)
        room = 5 + 5 * (time.monotonic() - started_s)
        ask(server, "GET", path_of(1))
    written = [line for line in lines() if "status" in line]
    assert sum(line["status"] == 401 for line in written) <= room + 1
    # Who was let in has room of his own, and nothing is left out unsaid.
    assert [line["tenant"] for line in written if line["status"] == 404] == ["victim"]
    assert sum(line.get("left_out_strangers", 0) for line in lines()) == 301 - len(written)


def test_who_changed_what_is_on_record_and_nothing_else(tmp_path: Path) -> None:
    name = object_id(1).namespace.hex()
    with logged(AUDIT_LOGGER, tmp_path / "audit") as lines, running_server(grants=GRANTS) as server:
        ask(server, "PUT", path_of(1), body=object_bytes(1))
        ask(server, "GET", path_of(1))
        ask(server, "DELETE", path_of(1), Kvtide_Reason="corrupt")
        ask(server, "DELETE", path_of(1), who="attacker")
        ask(server, "PUT", f"/v1/records/generation/{name}", body=b"1")
        ask(server, "PUT", "/v1/records/alias/chat", body=b"no namespace")
        found = [(line["tenant"], line["address"], line["change"]) for line in lines()]
    assert found == [
        ("victim", "127.0.0.1", f"deleted {path_of(1).removeprefix('/v1/')}: corrupt"),
        ("victim", "127.0.0.1", f"wrote generation/{name}: 1"),
    ]


def test_accounts_of_addresses_are_those_that_tell_clients_apart() -> None:
    # A listener on `::` sees IPv4 clients in IPv6 clothes: one account for all of them would be nobody's share.
    assert [
        account_of(host_of((host, 1))) for host in ("::ffff:10.0.0.1", "10.0.0.1", "2001:db8::5:1", "2001:db8::6:1")
    ] == ["@10.0.0.1", "@10.0.0.1", "@2001:db8::", "@2001:db8::"]
    assert account_of(host_of("")) == "@unix"


# Listings go through everybody's objects: in slices, each of which waits for its tenant's turn.

OBJECT = path_of(1)
SPACE = OBJECT.rpartition("/")[0]


@pytest.mark.parametrize("path", ["/v1", SPACE])
def test_listing_goes_in_slices_and_no_further_than_somebody_waits_for_it(path: str) -> None:
    is_over, yielded = threading.Event(), 0

    def endless() -> Iterator[ObjectInfo]:
        nonlocal yielded
        while not is_over.is_set():
            yielded += 1
            yield ObjectInfo(ObjectId(Namespace(bytes(32)), BlockKey(yielded.to_bytes(32, "big"))), 1, 0.0)

    with running_server(grants=GRANTS) as server:
        ask(server, "PUT", OBJECT, body=object_bytes(1))
        server.store.objects = endless  # type: ignore[method-assign]
        assert ask(server, "GET", path, "attacker", Kvtide_Deadline_Ms="2000")[0].status == 504
        ask(server, "GET", OBJECT)
        before = yielded
        time.sleep(0.2)
        went_on = yielded - before
        is_over.set()
    assert before > 0 and went_on <= 512


def test_listing_over_several_slices_is_whole_and_in_order() -> None:
    ids = [ObjectId(stored_namespace("victim", object_id(1).namespace), object_id(n).key) for n in range(2000)]
    others = [ObjectId(Namespace(bytes(32)), object_id(n).key) for n in range(2000)]
    mixed = [ObjectInfo(each, 7, 0.0) for pair in zip(ids, others, strict=True) for each in pair]
    with running_server(grants=GRANTS) as server:
        server.store.objects = lambda: iter(mixed)  # type: ignore[method-assign]
        first = json.loads(ask(server, "GET", SPACE)[1])["objects"]
        rest = json.loads(ask(server, "GET", f"{SPACE}?after={first[-1]['key']}")[1])["objects"]
    assert [each["key"] for each in first + rest] == sorted(each.key.hex() for each in ids)


# Names that somebody makes up: they displace nobody's.


def test_made_up_tenants_leave_named_ones_their_labels() -> None:
    with running_server(grants=(*GRANTS, granted("relay", on_behalf_of=["*"]))) as server:
        ask(server, "PUT", OBJECT, body=object_bytes(1))
        metrics = server.service.metrics
        for number in range(100):
            metrics.count(metrics.sent, f"junk-{number}", 1)
        ask(server, "GET", OBJECT, "victim")
        ask(server, "PUT", OBJECT, "second", object_bytes(1))
        assert metrics.label("second") == "second"
        assert all(counted(server, "kvtide_received_bytes_total", tenant=name) for name in ("victim", "second"))
        assert counted(server, "kvtide_sent_bytes_total", tenant="(others)")


def test_made_up_tenants_have_no_rate_of_their_own() -> None:
    relay = granted("relay", on_behalf_of=["*", "known"])
    with running_server(grants=(*GRANTS, relay), limits=ServerLimits(tenant_requests_s_max=0.2)) as server:
        junk = [ask(server, "GET", "/v1", "relay", Kvtide_Tenant=f"junk-{n}")[0].status for n in range(20)]
        assert 429 in junk
        assert ask(server, "GET", "/v1", "relay", Kvtide_Tenant="known")[0].status == 200
    with running_server(limits=ServerLimits(tenant_requests_s_max=0.2)) as server:
        assert 429 in [ask(server, "GET", "/v1", "", Kvtide_Tenant=f"junk-{n}")[0].status for n in range(20)]


def test_what_is_brought_from_another_region_takes_a_buffer(world: World) -> None:
    east, west = world.regions
    put(east, 1)
    buffers = west.service.buffers
    all_of_them = buffers.take(west.settings.limits.buffer_bytes_max)
    assert all_of_them is not None
    assert ask_world(west, "GET", 1, Force_Latest="1")[0].status == 503
    buffers.give_back(all_of_them)
    assert ask_world(west, "GET", 1, Force_Latest="1")[1] == object_bytes(1)
