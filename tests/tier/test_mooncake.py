"""The Mooncake tier on real processes: a master, stores, and the client that the tier starts."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import pytest
from tests.processes import frozen
from tests.stores import opened

from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.errors import TierFull, TierUnavailable
from kvtide.testing.tier_suite import TierSuite, object_bytes, object_id, read_all
from kvtide.tier import Tier
from kvtide.tier.breaker import until
from kvtide.tier.mooncake import CLOSE_S_MAX, KEYS_MAX, LANES, START_S_MAX, MooncakeTier, parse_mooncake_url
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier
from kvtide_lab.bench.services import MooncakeServers, mooncake_folder, mooncake_servers, started, wait_until

needs_mooncake = pytest.mark.skipif(
    mooncake_folder() is None,
    reason="no Mooncake; pip install mooncake-transfer-engine-non-cuda, apt install libibverbs1",
)
CLOCK = SystemClock()
# A busy machine is no silent store.
PATIENT = "&wait_s_max=20"
# What the machine is busy with besides.
SPARE_S = 4.0


@pytest.fixture(scope="module")
def servers() -> Iterator[MooncakeServers]:
    with mooncake_servers(stores=2) as running:
        yield running


def at(url: str) -> AbstractContextManager[MooncakeTier]:
    return opened(MooncakeTier(url, CLOCK))


@pytest.fixture(scope="module")
def client(servers: MooncakeServers) -> Iterator[MooncakeTier]:
    """One for the suite: a client takes a second to start."""
    with at(servers.url + PATIENT) as tier:
        yield tier


@contextmanager
def emptied(servers: MooncakeServers, options: str = "") -> Iterator[MooncakeTier]:
    with at(servers.url + PATIENT + options) as tier:
        for info in list(tier.objects()):
            tier.delete(info.id, "removed")
        yield tier


def child_pid(tier: MooncakeTier) -> int:
    child = tier._client._child
    assert child is not None
    return child._process.pid


def is_stored(tier: Tier, number: int) -> bool:
    """Store and read an object; False if that can't be done now."""
    try:
        return tier.put_from(object_id(number), object_bytes(number)) and read_all(tier, number) == object_bytes(number)
    except TierUnavailable:
        return False


@needs_mooncake
class TestMooncake(TierSuite):
    @pytest.fixture
    def tier(self, client: MooncakeTier) -> Tier:
        if not client._client.is_connected():
            client.open()
        for info in list(client.objects()):
            client.delete(info.id, "removed")
        return client

    def test_prefixes_are_apart_and_foreign_keys_are_not_listed(self, tier: Tier, servers: MooncakeServers) -> None:
        with emptied(servers, "&prefix=other") as other:
            other.put_from(object_id(1), object_bytes(1))
            assert not tier.contains(object_id(1)) and list(tier.objects()) == []
            assert [info.id for info in other.objects()] == [object_id(1)]
            other.delete(object_id(1), "removed")

    def test_listing_goes_on_after_the_first_page(self, tier: Tier) -> None:
        for number in range(45):
            tier.put_from(object_id(number), object_bytes(number, 400 + number))
        assert {info.size for info in tier.objects()} == set(range(400, 445))
        assert tier.contains_each([object_id(n) for n in range(600)]) == [n < 45 for n in range(600)]

    def test_longest_prefix_fits_into_a_look_up(self, tier: Tier, servers: MooncakeServers) -> None:
        with emptied(servers, f"&prefix={'p' * 64}") as other:
            other.put_from(object_id(0), object_bytes(0))
            assert other.count_leading([object_id(0)] * 3 * KEYS_MAX) == 3 * KEYS_MAX
            assert other.delete(object_id(0), "removed")

    def test_object_longer_than_a_lane_is_read_in_pieces(self, tier: Tier, servers: MooncakeServers) -> None:
        data = object_bytes(1, 100_000)
        tier.put_from(object_id(1), data)
        with at(f"{servers.url}{PATIENT}&value_bytes_max=12288") as narrow:
            for offset, size in ((0, 100_001), (0, 100_000), (7, 12_288), (7, 12_289), (90_000, 20_000), (100_000, 5)):
                buffer = memoryview(bytearray(size))
                came = narrow.get_into(object_id(1), buffer, offset)
                assert came == len(data[offset : offset + size]) and buffer[:came] == data[offset : offset + size]
            with pytest.raises(TierFull, match="may have 12288"):
                narrow.put_from(object_id(2), object_bytes(2, 12_289))

    def test_another_form_takes_an_objects_place(self, tier: Any) -> None:
        assert not tier.replace(object_id(1), object_bytes(1))
        tier.put_from(object_id(1), object_bytes(1))
        for size in (2000, 700):
            assert tier.replace(object_id(1), object_bytes(1, size))
            assert read_all(tier, 1) == object_bytes(1, size)


@needs_mooncake
def test_each_store_has_a_copy(servers: MooncakeServers) -> None:
    with emptied(servers, "&replicas=2") as tier:
        assert is_stored(tier, 1)
        key = tier._key(object_id(1))
        place = f"http://127.0.0.1:{servers.admin_port}/batch_query_keys?keys={key}"
        with urllib.request.urlopen(place, timeout=5) as answer:
            copies = msgspec.json.decode(answer.read())["data"][key]["values"]
        assert len({copy["transport_endpoint_"] for copy in copies}) == 2


@needs_mooncake
def test_killed_store_costs_misses_and_no_wrong_bytes_and_all_is_back_within_5_s() -> None:
    size, wrong, faults_s = 200_000, list[int](), list[float]()
    stop = threading.Event()

    def work(tier: Tier, first: int) -> None:
        for number in range(first, first + 100_000):
            if stop.is_set():
                return
            try:
                # Few enough that there is room for all.
                tier.delete(object_id(number - 40), "removed")
                tier.put_from(object_id(number), object_bytes(number, size))
                for each in (number, number - 20):
                    found = read_all(tier, each)
                    if found is not None and found != object_bytes(each, size):
                        wrong.append(each)
            except TierUnavailable:
                faults_s.append(time.monotonic())
                # As the cache does not ask at once again.
                stop.wait(0.02)

    with mooncake_servers(stores=2, client_ttl_s=2) as servers, at(servers.url) as tier:
        threads = [threading.Thread(target=work, args=(tier, first)) for first in (1_000_000, 2_000_000)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        killed_s = time.monotonic()
        servers.stores[0].kill()
        time.sleep(6.0)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert faults_s and killed_s < faults_s[0], "the store was in use"
        print(f"back {faults_s[-1] - killed_s:.1f} s after the kill, {len(faults_s)} faults")
        assert faults_s[-1] - killed_s < 5.0
        assert servers.segments() == 1
        lost = [info.id for info in tier.objects()]
        assert all(tier.get_into(each, memoryview(bytearray(size + 1))) == size for each in lost[:50])


@needs_mooncake
def test_second_copy_is_served_once_the_master_has_forgotten_the_dead_store() -> None:
    with (
        mooncake_servers(stores=2, client_ttl_s=2) as servers,
        at(f"{servers.url}&replicas=2") as tier,
    ):
        for number in range(12):
            assert tier.put_from(object_id(number), object_bytes(number))
        servers.stores[0].kill()
        wait_until(lambda: servers.segments() == 1, "the master to forget it")
        assert [read_all(tier, number) for number in range(12)] == [object_bytes(number) for number in range(12)]


@needs_mooncake
def test_master_that_is_gone_is_a_miss_and_is_found_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    with mooncake_servers() as servers:
        servers.master.kill()
        stack = TierStack([MooncakeTier(servers.url, CLOCK)])
        stack.open()
        try:
            assert read_all(stack, 1) is None and not stack.put_from(object_id(1), object_bytes(1))
            assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
            for _ in range(2):
                servers.master.start()
                servers.master.wait_listening()
                wait_until(lambda: is_stored(stack, 1), "the tier and the store to find the master")
                # Gone again, in mid-use.
                servers.master.kill()
                began_s = time.monotonic()
                assert read_all(stack, 1) is None
                assert time.monotonic() - began_s < 2.0 + SPARE_S
        finally:
            stack.close()


@needs_mooncake
def test_master_that_hangs_while_a_tier_opens_holds_it_up_for_a_while_only() -> None:
    with mooncake_servers() as servers:
        began_s = time.monotonic()
        with frozen(servers.master.pid), at(servers.url) as tier:
            assert time.monotonic() - began_s < START_S_MAX + SPARE_S
            with pytest.raises(TierUnavailable):
                tier.contains(object_id(1))
            assert tier.stats().bytes_max == 0
        with at(servers.url) as tier:
            wait_until(lambda: is_stored(tier, 1), "the master to serve")


@needs_mooncake
@pytest.mark.parametrize("who", ["master", "store", "client"])
def test_who_hangs_keeps_nobody_beyond_the_deadline_and_heals(who: str) -> None:
    with mooncake_servers() as servers, at(f"{servers.url}&wait_s_max=1") as tier:
        data = object_bytes(1, 900_000)
        assert tier.put_from(object_id(1), data)
        pid = {"master": servers.master, "store": servers.stores[0]}.get(who)
        buffer = memoryview(bytearray(900_000))
        with frozen(pid.pid if pid else child_pid(tier)):
            for _ in range(2 * LANES):
                began_s = time.monotonic()
                with until(began_s + 0.2), pytest.raises(TierUnavailable):
                    tier.get_into(object_id(1), buffer)
                assert time.monotonic() - began_s < 0.2 + SPARE_S
            began_s = time.monotonic()
            with pytest.raises(TierUnavailable):
                tier.get_into(object_id(1), buffer)
            assert time.monotonic() - began_s < 1.0 + SPARE_S
        assert not any(buffer), "late bytes do not come to memory that its owner has back"
        wait_until(lambda: is_stored(tier, 2), f"the {who} to serve again")
        assert read_all(tier, 1) in (data, None)


@needs_mooncake
def test_client_that_dies_is_replaced(servers: MooncakeServers) -> None:
    with at(f"{servers.url}&wait_s_max=1") as tier:
        first = child_pid(tier)
        assert is_stored(tier, 1)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: is_stored(tier, 2), "another client")
        assert read_all(tier, 1) == object_bytes(1) and child_pid(tier) != first


@needs_mooncake
def test_nothing_stays_after_close(servers: MooncakeServers) -> None:
    with emptied(servers) as tier:
        pid = child_pid(tier)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < CLOSE_S_MAX + SPARE_S
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(TierUnavailable, match="not open"):
        tier.contains(object_id(1))


@needs_mooncake
def test_fork_asks_nothing_and_leaves_the_parents_client_alone(servers: MooncakeServers) -> None:
    with emptied(servers) as tier:
        tier.put_from(object_id(1), object_bytes(1))
        child = os.fork()
        if not child:
            status = 1
            try:
                tier.contains(object_id(1))
            except TierUnavailable:
                tier.close()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert read_all(tier, 1) == object_bytes(1)


@needs_mooncake
def test_store_without_room_evicts_or_refuses() -> None:
    with mooncake_servers(store_mb=16) as servers, at(servers.url + PATIENT) as tier:
        kept = full = 0
        for number in range(60):
            try:
                kept += tier.put_from(object_id(number), object_bytes(number, 500_000))
            except TierFull:
                full += 1
        assert kept > 10
        assert all(read_all(tier, n) in (None, object_bytes(n, 500_000)) for n in range(60))
        assert tier.stats().faults == full
        assert tier.stats().used_bytes <= tier.stats().bytes_max == 16 << 20


@needs_mooncake
def test_more_callers_than_lanes_wait_for_one(servers: MooncakeServers) -> None:
    with emptied(servers) as tier:
        tier.put_from(object_id(1), object_bytes(1, 500_000))
        found: list[bytes | None] = []
        readers = [threading.Thread(target=lambda: found.append(read_all(tier, 1))) for _ in range(4 * LANES)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert found == [object_bytes(1, 500_000)] * (4 * LANES)


@needs_mooncake
@pytest.mark.parametrize("is_web", [True, False])
def test_master_whose_http_is_none_has_no_figures_and_can_not_be_listed(servers: MooncakeServers, is_web: bool) -> None:
    with started(lambda port, folder: ["python3", "-m", "http.server", "--bind", "127.0.0.1", str(port)]) as web:
        other = web.port if is_web else servers.master.port
        with opened(
            MooncakeTier(f"mooncake://127.0.0.1:{servers.master.port}?admin={other}&prefix=web", CLOCK)
        ) as tier:
            assert is_stored(tier, 1)
            assert tier.stats().objects == 0
            with pytest.raises(TierUnavailable, match="admin"):
                list(tier.objects())


def test_url_is_read_whole() -> None:
    target = parse_mooncake_url("mooncake://a.b-c:7?prefix=p&replicas=3&protocol=rdma&devices=mlx5_0&wait_s_max=0.5")
    assert (target.host, target.port, str(target)) == ("a.b-c", 7, "mooncake://a.b-c:7")
    assert (target.options.prefix, target.options.replicas, target.options.devices) == ("p", 3, "mlx5_0")
    assert parse_mooncake_url("mooncake://a").port == 50051


BAD = (
    ":7000 h:x h:0 h:70000 h:1:2 a,b h/x h?nope=1 h?replicas=0 h?replicas=x h?value_bytes_max=0 h?prefix=a,b h?prefix="
)


@pytest.mark.parametrize("rest", ["", ":7000", *BAD.split(), "h?value_bytes_max=9999999999", "h?admin=0"])
def test_bad_url_is_refused_before_anything_is_started(rest: str) -> None:
    with pytest.raises(ValueError, match=r"mooncake://|expected|prefix"):
        open_tier(f"mooncake://{rest}", Limits(), CLOCK, lambda key: False)


def test_missing_package_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'kvtide\[mooncake\]'"):
        open_tier("mooncake://h", Limits(), CLOCK, lambda key: False)
