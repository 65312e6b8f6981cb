"""Members of a pool in a real etcd, and how its servers are reached: under TLS, where they advertise."""

import json
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
from tests.processes import etcd_words
from tests.server.worlds import ask, path_of
from tests.servers import running_server
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id, read_all

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.server.settings import TlsSettings
from kvtide.tier.pool import Member
from kvtide.tier.pool.membership import EtcdMembership, StaticMembership, Watcher, membership_of
from kvtide.tier.pool.placement import Placement, PlacementKind, PoolMap, PoolServer
from kvtide.tier.pool.tier import pool_tier, server_urls
from kvtide_lab.bench.services import BenchService, free_ports, started, wait_until


def test_pool_of_servers_under_tls_is_used_by_one_url(certificates: Path) -> None:
    tls = TlsSettings(cert_file=certificates / "server.pem", key_file=certificates / "server.key")
    with running_server(tls=tls) as one, running_server(tls=tls) as other:
        places = ",".join(str(server.address) for server in (one, other))
        url = f"pool://{places}?scheme=https&ca_file={certificates / 'ca.pem'}"
        with opened(pool_tier(url, SystemClock())) as tier:
            assert tier.put_from(object_id(1), object_bytes(1))
            assert read_all(tier, 1) == object_bytes(1)
        assert all(each.startswith("https://") for each in server_urls(url))


def test_who_asks_the_wrong_server_is_sent_to_https_where_that_is_spoken() -> None:
    servers = tuple(PoolServer(name, f"{name}:7421", scheme="https") for name in "abc")
    pool = PoolMap(1, servers, replicas=1)
    owner = servers[Placement(pool).owners(object_id(1).key)[0]]
    member = Member(next(each for each in servers if each != owner), StaticMembership(pool))
    with running_server(member) as server:
        member.open()
        answer, _ = ask(server, "GET", 1)
        member.close()
    assert (answer.status, answer.headers["Location"]) == (307, f"https://{owner.address}{path_of(1)}")


@pytest.fixture(scope="module")
def tls_etcd(certificates: Path) -> Iterator[BenchService]:
    with started(lambda port, folder: etcd_words(port, folder, certificates)) as service:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        for path, words in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            url = f"https://127.0.0.1:{service.port}/v3/auth/{path}"
            request = urllib.request.Request(url, json.dumps(words).encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10, context=context).close()
        yield service


def tls_source(tls_etcd: BenchService, certificates: Path, user: Path | None) -> EtcdMembership:
    options = f"etcd_ca_file={certificates / 'ca.pem'}" + (f"&etcd_user_file={user}" if user else "")
    found = membership_of(f"pool+etcds://127.0.0.1:{tls_etcd.port}/pool?{options}")
    assert isinstance(found, EtcdMembership)
    return found


def test_etcd_under_tls_lets_its_user_in_and_nobody_else(
    tls_etcd: BenchService, certificates: Path, tmp_path: Path
) -> None:
    user = tmp_path / "user"
    user.write_text("root:secret\n")
    member = Registered(tls_source(tls_etcd, certificates, user), "a", scheme="https")
    reader = tls_source(tls_etcd, certificates, user)
    wait_until(lambda: servers_of(reader) == (member.server,), "the server in the map")
    # A token that etcd takes no longer is asked for anew.
    reader._token = "over.1"
    assert servers_of(reader) == (member.server,)
    with pytest.raises(TierUnavailable):
        tls_source(tls_etcd, certificates, None).read()
    member.leave()


@pytest.mark.parametrize("options", ["?etcd_ca_file=/absent", "?etcd_user_file=/absent", "?scheme=ftp"])
def test_bad_ways_to_reach_a_pool_are_an_error_at_once(options: str) -> None:
    with pytest.raises(ValueError, match=r"etcd|scheme"):
        membership_of(f"pool+etcd://127.0.0.1:1/pool{options}")


def test_server_of_a_pool_must_be_reached_by_others_and_may_advertise_where(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", "0.0.0.0:0", "--open-to-all"]
    pool = ["--pool", f"pool+file://{tmp_path / 'pool.json'}"]
    ran = subprocess.run([*words, *pool], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, "--advertise" in ran.stderr, ran.stderr.count("\n")) == (2, True, 1)
    with subprocess.Popen([*words, *pool, "--advertise", "https://node-a:7421"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and b" on " in process.stdout.readline()
        process.terminate()


# Members in a real etcd: leases, faults.


@pytest.fixture(scope="module")
def etcd() -> Iterator[BenchService]:
    with started(etcd_words) as service:
        yield service


def source(etcd: BenchService, prefix: str) -> EtcdMembership:
    return EtcdMembership([f"127.0.0.1:{etcd.port}"], prefix, 2, PlacementKind.RENDEZVOUS)


class Registered:
    def __init__(self, members: EtcdMembership, name: str = "only", scheme: Literal["http", "https"] = "http") -> None:
        self.server = PoolServer(name, f"{name}:7421", scheme=scheme)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=members.register, args=(self.server, self._stop))
        self._thread.start()

    def leave(self) -> None:
        self._stop.set()
        self._thread.join()


def servers_of(reader: EtcdMembership) -> tuple[PoolServer, ...]:
    """Return the servers in etcd's map, none where there is no map."""
    try:
        return reader.read().servers
    except ValueError:
        return ()


def test_members_come_and_go_and_everybody_sees_one_map(etcd: BenchService) -> None:
    maps: list[PoolMap] = []
    watcher = Watcher(source(etcd, "come-and-go"), maps.append)
    watcher.open()
    try:
        members = [Registered(source(etcd, "come-and-go"), f"server-{number}") for number in range(3)]
        wait_until(lambda: bool(maps) and len(maps[-1].servers) == 3, "three members")
        assert source(etcd, "come-and-go").read().servers == maps[-1].servers
        assert [server.name for server in maps[-1].servers] == ["server-0", "server-1", "server-2"]
        members[1].leave()
        wait_until(lambda: len(maps[-1].servers) == 2, "one to leave")
        for member in members:
            member.leave()
    finally:
        watcher.close()
    epochs = [each.epoch for each in maps]
    assert epochs == sorted(set(epochs))


def test_dead_member_is_gone_with_its_lease(etcd: BenchService) -> None:
    reader = source(etcd, "dead")
    lease = reader._call("/v3/lease/grant", {"TTL": 3}, dict)["ID"]
    value = b'{"name":"dead","address":"dead:1"}'
    reader._call("/v3/kv/put", {"key": b"dead/dead", "value": value, "lease": lease}, dict)
    assert len(servers_of(reader)) == 1
    wait_until(lambda: not servers_of(reader), "the lease to end")


def test_second_server_of_a_name_that_ends_at_once_takes_nobody_out(etcd: BenchService, stack: ExitStack) -> None:
    reader = source(etcd, "twice")
    stack.callback(Registered(source(etcd, "twice")).leave)
    wait_until(lambda: len(servers_of(reader)) == 1, "the first")
    second = Registered(source(etcd, "twice"), scheme="https")
    wait_until(lambda: servers_of(reader)[0].scheme == "https", "the second")
    second.leave()
    wait_until(lambda: len(servers_of(reader)) == 1, "the first again")


def test_unrelated_changes_leave_the_epoch(etcd: BenchService) -> None:
    reader = source(etcd, "still")
    member = Registered(source(etcd, "still"))
    wait_until(lambda: len(servers_of(reader)) == 1, "the member")
    before = reader.read()
    reader._call("/v3/kv/put", {"key": b"other", "value": b"1"}, dict)
    assert reader.read() == before
    member.leave()


def test_no_endpoint_is_unavailable() -> None:
    reader = EtcdMembership([f"127.0.0.1:{free_ports(1)[0]}"], "x", 2, PlacementKind.RENDEZVOUS)
    with pytest.raises(TierUnavailable, match="can be reached"):
        reader.read()
