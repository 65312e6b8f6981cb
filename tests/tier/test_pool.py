"""The pool on real servers of this process: placement, redirection, moved blocks, members that come and go."""

import base64
import platform
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from socketserver import BaseRequestHandler

import msgspec
import pytest
from tests.servers import Responder, RunningServer, counted, hints_heard, listening, running_server
from tests.stores import opened
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, put_all, read_all

from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.evict import Hint
from kvtide.outcomes import Choice, Decided, Why
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier
from kvtide.tier.breaker import until
from kvtide.tier.pool import Member
from kvtide.tier.pool.membership import DnsMembership, FileMembership, Watcher, membership_of, server_at
from kvtide.tier.pool.placement import Placement, PlacementKind, PoolMap, PoolServer
from kvtide.tier.pool.tier import PoolTier, pool_tier
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier
from kvtide_lab.bench.services import wait_until
from kvtide_lab.sim.pool import next_map

OBJECTS = 60


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no dead server; those refuse connections at once."""
    monkeypatch.setattr("kvtide.tier.pool.tier.OPERATION_S_MAX", 20.0)


class Pool:
    """Servers and the file that holds their map."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.path = folder / "pool.json"
        self.servers: dict[str, RunningServer] = {}
        self.map = PoolMap(0, (server_at("nobody:1"),))

    def start(self, name: str) -> PoolServer:
        """Start a server, which is not in the map yet."""
        member = Member(PoolServer(name, "unused:1"), FileMembership(self.path))
        server = self._stack.enter_context(running_server(member))
        member.open()
        self._stack.callback(member.close)
        self.servers[name] = server
        return PoolServer(name, str(server.address))

    def publish(self, new: PoolMap) -> None:
        """Replace the map, and wait until every server has it."""
        self.map = new
        aside = self.path.with_suffix(".new")
        aside.write_bytes(msgspec.json.encode(new))
        aside.rename(self.path)
        members = [server.service._member for server in self.servers.values()]
        wait_until(
            lambda: all(each and each.placement and each.placement.map.epoch == new.epoch for each in members),
            "the map",
        )

    def join(self, *names: str) -> None:
        self.publish(next_map(self.map, [*self.map.servers, *map(self.start, names)]))

    def held(self, name: str) -> set[int]:
        """Which of the numbered objects a server has."""
        listed = {info.id for info in self.servers[name].store.objects()}
        return {number for number in range(OBJECTS) if object_id(number) in listed}


@pytest.fixture
def pool(tmp_path: Path, stack: ExitStack) -> Pool:
    pool = Pool(tmp_path, stack)
    pool.publish(PoolMap(1, tuple(pool.start(f"server-{number}") for number in range(4)), 2))
    return pool


@pytest.fixture
def tier(pool: Pool) -> Iterator[PoolTier]:
    with opened(pool_tier(f"pool+file://{pool.path}", SystemClock())) as tier:
        yield tier


def fill(tier: Tier) -> None:
    put_all(tier, range(OBJECTS))


def kept_by(pool: Pool, position: int) -> set[int]:
    """Which of the numbered objects the map gives to a server."""
    placement = Placement(pool.map)
    return {number for number in range(OBJECTS) if position in placement.owners(object_id(number).key)}


def wrong_or_missing(tier: Tier) -> list[int]:
    return [number for number in range(OBJECTS) if read_all(tier, number) != object_bytes(number)]


def settled(tier: PoolTier) -> None:
    assert tier._repairer.wait(20), "repairs"


class TestPool(TierSuite):
    @pytest.fixture(params=["rendezvous", "mod"])
    def tier(self, request: pytest.FixtureRequest) -> Iterator[Tier]:
        limits = ServerLimits(memory_bytes_max=TIER_BYTES)
        with running_server(limits=limits) as one, running_server(limits=limits) as two:
            url = f"pool://{one.address},{two.address}?kind={request.param}"
            with opened(open_tier(url, Limits(), SystemClock(), lambda key: False)) as tier:
                yield tier


def test_dead_server_costs_no_hit(pool: Pool, tier: PoolTier, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tier)
    assert [pool.held(server.name) for server in pool.map.servers] == [kept_by(pool, at) for at in range(4)]
    assert tier.stats().objects == OBJECTS
    ids = [object_id(number) for number in range(OBJECTS + 3)]
    stack = TierStack([tier])
    stack._open = stack._places
    assert tier.count_leading(ids) == OBJECTS
    pool.servers["server-1"].stop()
    assert tier.count_leading(ids) == OBJECTS, "the second owners have them"
    assert wrong_or_missing(tier) == [] and tier.put_from(object_id(99), object_bytes(99))
    assert tier.stats().faults > 0
    pool.join("server-4")
    wait_until(lambda: tier.epoch == 2, "the map")
    assert len(stack.run_places(ids)) == OBJECTS, "and what the new owner lacks is where it was"
    monkeypatch.delattr("kvtide.tier.http.tier.HttpTier.contains")
    assert tier.contains_each(ids) == [True] * OBJECTS + [False] * 3, "without a round trip for each"


def test_silent_server_keeps_nobody_beyond_the_deadline_and_hides_no_copy(stack: ExitStack) -> None:
    silent, server = socket.create_server(("127.0.0.1", 0)), stack.enter_context(running_server())
    put_all(server.store, range(OBJECTS))
    url, ids = f"pool://127.0.0.1:{silent.getsockname()[1]},{server.address}", [*map(object_id, range(OBJECTS))]
    with silent, opened(pool_tier(url, SystemClock())) as tier:
        started_s = time.monotonic()
        with until(started_s + 4):
            assert tier.count_leading(ids) == OBJECTS and all(tier.contains_each(ids)) and tier.contains(ids[0])
            assert tier.put_from(object_id(99), object_bytes(99))
        assert time.monotonic() - started_s < 10


def test_what_is_stored_while_the_process_ends_reaches_both_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits, made = SystemClock(), Limits(memory_bytes_max=TIER_BYTES), list[Tier]()

    def connect(server: PoolServer) -> Tier:
        made.append(open_tier("memory://", limits, clock, lambda key: False))
        return made[-1]

    with opened(PoolTier(membership_of("pool://127.0.0.1:1,127.0.0.1:2"), connect, "", clock)) as tier:
        # As an `atexit` finds it, where a cache that was not closed stores what waits.
        monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
        assert tier.put_from(object_id(1), object_bytes(1))
        assert [each.contains(object_id(1)) for each in made] == [True, True]


def test_reads_are_shared_between_both_owners(pool: Pool, tier: PoolTier) -> None:
    tier.put_from(object_id(1), object_bytes(1))
    before = {name: server.store.stats().hits for name, server in pool.servers.items()}
    for _ in range(20):
        assert read_all(tier, 1) == object_bytes(1)
    hits = [server.store.stats().hits - before[name] for name, server in pool.servers.items()]
    assert sorted(hits)[-2:] == [10, 10]


def test_joined_server_gets_its_share_by_reads(pool: Pool, tier: PoolTier) -> None:
    fill(tier)
    pool.join("server-4")
    wait_until(lambda: tier.epoch == 2, "the map")
    for _ in range(4):
        assert wrong_or_missing(tier) == []
        settled(tier)
    assert pool.held("server-4") == kept_by(pool, 4)
    assert 0 < tier.repairs <= 1.15 / 5 * 2 * OBJECTS


def test_server_that_left_is_asked_once_more(pool: Pool, tier: PoolTier) -> None:
    fill(tier)
    pool.publish(next_map(pool.map, [each for each in pool.map.servers if each.name not in {"server-1", "server-2"}]))
    wait_until(lambda: tier.epoch == 2, "the map")
    assert wrong_or_missing(tier) == []
    settled(tier)
    for name in ("server-1", "server-2"):
        pool.servers[name].stop()
    assert wrong_or_missing(tier) == []


def test_what_engines_decided_is_told_to_one_server_that_lives(pool: Pool, tier: PoolTier) -> None:
    pool.servers[min(pool.servers)].stop()
    tier.note_decisions(object_id(1).namespace, {Decided(Choice.LOAD, Why.IN_TIME): 16})

    def told() -> list[float]:
        return sorted(counted(each, "kvtide_prompt_tokens_total", decision="load") for each in pool.servers.values())

    wait_until(lambda: told() == [0, 0, 0, 16], "the server to count")


def test_advice_is_told_to_each_server_that_looks_blocks_of_the_prompt_up(pool: Pool, tier: PoolTier) -> None:
    pool.servers[min(pool.servers)].stop()
    with opened(TierStack([tier])) as stack:
        assert stack.note_request([object_id(number) for number in range(OBJECTS)], Hint(is_last=True))
        assert stack._adviser.wait(20)
        assert sorted(hints_heard(server) for server in pool.servers.values()) == [0, 1, 1, 1]


@pytest.mark.parametrize("looks_first", [True, False])
def test_old_map_is_found_out_by_redirection(pool: Pool, tier: PoolTier, looks_first: bool) -> None:
    """The client's own look at the map is held back: a server must tell."""
    tier._watcher.stop()
    pool.join("server-4", "server-5")
    while looks_first and tier.epoch == 1:
        assert not any(tier.contains(object_id(number)) for number in range(OBJECTS))
    fill(tier)
    assert tier.epoch == 2
    assert wrong_or_missing(tier) == []
    assert not looks_first or pool.held("server-4") == kept_by(pool, 4)


def test_server_of_this_machine_is_read_through_its_socket(pool: Pool, tmp_path: Path) -> None:
    """All four have it; the near one is read, and nothing of that goes over its port."""
    near = tmp_path / "near"
    with running_server(socket_path=near) as server:
        here = PoolServer("near", "127.0.0.1:9", host=platform.node(), socket_path=str(near))
        pool.publish(PoolMap(2, (here, *pool.map.servers), 5))
        with opened(pool_tier(f"pool+file://{pool.path}", SystemClock())) as tier:
            assert tier.put_from(object_id(1), object_bytes(1))
            for _ in range(5):
                assert read_all(tier, 1) == object_bytes(1)
            assert server.store.stats().hits >= 5
            assert sum(other.store.stats().hits for other in pool.servers.values()) == 0
    assert not near.exists()


def test_pool_without_any_server_is_unavailable() -> None:
    with opened(pool_tier("pool://127.0.0.1:9,127.0.0.1:10", SystemClock())) as tier:
        with pytest.raises(TierUnavailable):
            read_all(tier, 1)
        with pytest.raises(TierUnavailable):
            tier.put_from(object_id(1), object_bytes(1))


def map_bytes(epoch: int, *places: str) -> bytes:
    return msgspec.json.encode(PoolMap(epoch, tuple(map(server_at, places))))


def test_map_that_can_not_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, seen = tmp_path / "pool.json", list[int]()
    watcher = Watcher(FileMembership(path), lambda pool: seen.append(pool.epoch))
    for content in (None, b"{", map_bytes(3, "a:1"), b"x", map_bytes(2, "a:1")):
        if content is not None:
            path.write_bytes(content)
        watcher.refresh()
    assert seen == [3]
    assert len(caplog.records) == 2


def test_names_addresses_are_servers() -> None:
    answers: list[Sequence[str]] = [("10.0.0.2", "10.0.0.1"), ("10.0.0.1", "10.0.0.2"), ("::1", "10.0.0.1")]

    def resolve(host: str, port: int, type: int) -> list[object]:
        return [(None, type, 0, "", (address, port)) for address in answers.pop(0)]

    source = DnsMembership("pool.example", 7421, 2, PlacementKind.RENDEZVOUS, resolve)
    maps = [source.read() for _ in range(3)]
    assert [each.epoch for each in maps] == [1, 1, 2]
    assert [server.address for server in maps[2].servers] == ["10.0.0.1:7421", "[::1]:7421"]


def test_etcds_that_are_frozen_or_gone_are_left_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.pool.membership.REQUEST_S_MAX", 0.5)
    is_over = threading.Event()
    server = base64.b64encode(msgspec.json.encode(server_at("h:1"))).decode()
    body = f'{{"header": {{"revision": "7"}}, "kvs": [{{"key": "", "value": "{server}"}}]}}'.encode()

    class Frozen(BaseRequestHandler):
        def handle(self) -> None:
            is_over.wait(20)

    class Answering(Responder):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(200, body)

    with listening(Frozen) as first, listening(Answering) as second:
        source = membership_of(f"pool+etcd://127.0.0.1:{first},127.0.0.1:9,127.0.0.1:{second}/pool")
        pool = source.read()
        is_over.set()
    assert (pool.epoch, pool.servers) == (7, (server_at("h:1"),))


BAD = "host host:0 a:1,a:1 a:1?replicas=0 a:1?kind=ring a:1?nope=1"
BAD_URLS = ["pool://", *(f"pool://{rest}" for rest in BAD.split()), "pool+file://host/x", "pool+dns://name"]


@pytest.mark.parametrize("url", [*BAD_URLS, "pool+etcd://a:2379"])
def test_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        pool_tier(url, SystemClock())


def test_one_source_gives_client_and_server_one_map() -> None:
    url = "pool://b:2,a:1,c:3?replicas=3&kind=mod"
    assert membership_of(url).read() == membership_of(url).read()
    assert [server.name for server in membership_of(url).read().servers] == ["a:1", "b:2", "c:3"]


@pytest.mark.parametrize("bad", ["nowhere", "h:0", "h/x:1", "a..b:1", f"{'h' * 64}:1"])
def test_map_with_a_server_that_can_not_be_one_is_none(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_bytes(map_bytes(1, "h:1").replace(b'"address":"h:1"', b'"address":"%s"' % bad.encode()))
    with opened(TierStack([pool_tier(f"pool+file://{path}", SystemClock())])) as stack:
        assert read_all(stack, 1) is None
        assert stack.tier_stats()[0].faults == 1


def test_map_that_can_not_be_used_now_is_used_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that joins while the file with our token is being replaced."""
    path, token = tmp_path / "pool.json", tmp_path / "token"
    token.write_text("secret")
    path.write_bytes(map_bytes(1, "127.0.0.1:9"))
    with opened(pool_tier(f"pool+file://{path}?token_file={token}", SystemClock())) as tier:
        token.unlink()
        aside = tmp_path / "new"
        aside.write_bytes(map_bytes(2, "127.0.0.1:9", "127.0.0.1:10"))
        aside.rename(path)
        wait_until(lambda: "token" in caplog.text, "the map to be refused")
        assert tier.epoch == 1
        token.write_text("secret")
        wait_until(lambda: tier.epoch == 2, "the map")


ODD = ["{}", "[]", "", '{"x": ' + 100_000 * "[", "\xff", '{"header": null}', '{"header": {"revision": "x"}}']
KVS = ["{}", '{"key": "A"}', '{"key": 1}', "null"]


@pytest.mark.parametrize("answer", [*ODD, *(f'{{"header": {{"revision": "1"}}, "kvs": [{kv}]}}' for kv in KVS)])
def test_answer_of_etcd_that_is_off_changes_nothing(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = membership_of("pool+etcd://h:1/pool")
    monkeypatch.setattr(source, "_open", lambda *_: BytesIO(answer.encode("latin-1")))
    Watcher(source, lambda pool: pytest.fail("no map")).refresh()
