"""Members in a real etcd: leases, watches, faults."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtide.errors import TierUnavailable
from kvtide.tier.pool import membership as membership_etcd
from kvtide.tier.pool.membership import EtcdMembership, Watcher
from kvtide.tier.pool.placement import PlacementKind, PoolMap, PoolServer
from kvtide_lab.bench.services import BenchService, free_ports, started, wait_until

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd; apt install etcd-server")


def etcd_words(port: int, folder: Path) -> Sequence[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_ports(1)[0]}"
    place = ["--listen-client-urls", client, "--advertise-client-urls", client]
    peers = ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    return ["etcd", "--data-dir", str(folder / "etcd"), *place, *peers]


@pytest.fixture(scope="module")
def etcd() -> Iterator[BenchService]:
    with started(etcd_words) as service:
        yield service


def source(etcd: BenchService, prefix: str = "pool", others: Sequence[str] = ()) -> EtcdMembership:
    return EtcdMembership([*others, f"127.0.0.1:{etcd.port}"], prefix, 2, PlacementKind.RENDEZVOUS)


class Registered:
    """A server that registers in a thread."""

    def __init__(self, etcd: BenchService, name: str, prefix: str) -> None:
        self.server = PoolServer(name, f"{name}:7421")
        self.stop = threading.Event()
        work = (self.server, self.stop)
        self._thread = threading.Thread(target=source(etcd, prefix).register, args=work)
        self._thread.start()

    def leave(self) -> None:
        self.stop.set()
        self._thread.join()


def test_members_come_and_go_and_everybody_sees_one_map(etcd: BenchService) -> None:
    maps: list[PoolMap] = []
    watcher = Watcher(source(etcd, "come-and-go"), maps.append)
    watcher.open()
    try:
        members = [Registered(etcd, f"server-{number}", "come-and-go") for number in range(3)]
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


def test_change_is_seen_by_watching_at_once(etcd: BenchService) -> None:
    reader = source(etcd, "watched")
    first = Registered(etcd, "first", "watched")
    wait_until(lambda: _count(reader) == 1, "the first")
    waiting = threading.Thread(target=reader.watch, args=(60.0,))
    waiting.start()
    second = Registered(etcd, "second", "watched")
    # Without a change it would go on for a minute.
    waiting.join(20)
    assert not waiting.is_alive()
    assert _count(reader) == 2
    first.leave()
    second.leave()


def _count(reader: EtcdMembership) -> int:
    try:
        return len(reader.read().servers)
    except ValueError:
        return 0


def test_dead_member_is_gone_with_its_lease(etcd: BenchService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_etcd, "LEASE_S", 3)
    reader = source(etcd, "dead")
    lease = reader._call("/v3/lease/grant", {"TTL": 3})["ID"]
    value = membership_etcd._b64(b'{"name":"dead","address":"dead:1"}')
    reader._call("/v3/kv/put", {"key": membership_etcd._b64(b"dead/dead"), "value": value, "lease": lease})
    assert _count(reader) == 1
    wait_until(lambda: _count(reader) == 0, "the lease to end")


def test_unrelated_changes_leave_the_epoch(etcd: BenchService) -> None:
    reader = source(etcd, "still")
    member = Registered(etcd, "only", "still")
    wait_until(lambda: _count(reader) == 1, "the member")
    before = reader.read()
    reader._call("/v3/kv/put", {"key": membership_etcd._b64(b"other"), "value": membership_etcd._b64(b"1")})
    assert reader.read() == before
    member.leave()


def test_next_endpoint_is_asked_when_one_is_down(etcd: BenchService) -> None:
    member = Registered(etcd, "only", "next")
    reader = source(etcd, "next", [f"127.0.0.1:{free_ports(1)[0]}"])
    wait_until(lambda: _count(reader) == 1, "the member")
    member.leave()


def test_no_endpoint_is_unavailable() -> None:
    reader = EtcdMembership([f"127.0.0.1:{free_ports(1)[0]}"], "x", 2, PlacementKind.RENDEZVOUS)
    with pytest.raises(TierUnavailable, match="can be reached"):
        reader.read()


def test_garbage_below_the_prefix_is_no_map(etcd: BenchService) -> None:
    reader = source(etcd, "garbage")
    reader._call("/v3/kv/put", {"key": membership_etcd._b64(b"garbage/x"), "value": membership_etcd._b64(b"hello")})
    with pytest.raises(ValueError, match="servers with different names"):
        reader.read()
