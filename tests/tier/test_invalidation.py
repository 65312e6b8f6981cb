"""What servers declare invalid leaves an engine's own memory and disk, also if it was away."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import RunningServer, running_server
from tests.stores import nothing_pinned, open_memory, opened
from tests.suites.tier_suite import made_object, object_bytes, object_id, read_all

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.codec import LosslessCodec
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.store import PendingBlock
from kvtide.store.cache import cache_for
from kvtide.store.load import level_meta
from kvtide.tier import background, stack_of
from kvtide.tier.base import Buffer, WrappedTier
from kvtide.tier.disk.tier import DiskTier
from kvtide.tier.http.records import raise_generation, records_clients
from kvtide.tier.http.tier import http_tier
from kvtide.tier.pool.membership import StaticMembership, server_at
from kvtide.tier.pool.placement import PoolMap
from kvtide.tier.pool.tier import PoolTier
from kvtide.tier.stack import TierStack
from kvtide.tier.stack.invalidation import Invalidations, SharedInvalidations
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId
from kvtide_lab.bench.services import wait_until
from kvtide_lab.wrapped import Counting

SPACE = object_id(1).namespace
OTHER = ObjectId(Namespace(b"\x5a" * 32), object_id(1).key)
CLOCK = SystemClock()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start waits for is the first answer, however busy the machine is."""
    monkeypatch.setattr("kvtide.tier.stack.invalidation._FIRST_S_MAX", 30.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tiers=(f"disk://{tmp_path}/server",)) as running:
        yield running


def engine(server: RunningServer, tmp_path: Path) -> TierStack:
    return stack_of(f"disk://{tmp_path}/own {server.url}", Limits(), CLOCK, nothing_pinned)


def store(stack: TierStack, *ids: ObjectId) -> None:
    for name in ids:
        assert stack.put_from(name, made_object(name, bytes(100)))


def invalidate(*servers: RunningServer) -> None:
    clients = [client for server in servers for client in records_clients(server.url, CLOCK)]
    for client in clients:
        client.open()
    raise_generation(clients, SPACE.hex())
    for client in clients:
        client.close()


def test_a_running_engine_loses_what_was_invalidated_and_nothing_else(server: RunningServer, tmp_path: Path) -> None:
    with opened(engine(server, tmp_path)) as stack:
        store(stack, object_id(1), object_id(2), OTHER)
        invalidate(server)
        stack._invalidations.refresh()
        assert not any(stack.contains(each) for each in (object_id(1), object_id(2)))
        assert list(stack.places(OTHER)) == [0, 1, 2]
        store(stack, object_id(1))
        stack._invalidations.refresh()
        assert list(stack.places(object_id(1))) == [0, 1, 2], "what is stored afterwards stays"


def test_an_engine_that_was_away_learns_it_when_it_starts(server: RunningServer, tmp_path: Path) -> None:
    with opened(engine(server, tmp_path)) as stack:
        store(stack, object_id(1), OTHER)
    invalidate(server)
    with opened(engine(server, tmp_path)) as stack:
        assert not stack.contains(object_id(1))
        assert stack.contains(OTHER)
        store(stack, object_id(1))
    with opened(engine(server, tmp_path)) as stack:
        assert list(stack.places(object_id(1))) == [1, 2], "dealt with once"


@pytest.mark.parametrize("noted", [b"", b"{", b"[1]", b'{"a": "b"}', b"\xff\x00", b'{"\xff": 1}'])
def test_a_note_that_cannot_be_read_removes_too_much(server: RunningServer, tmp_path: Path, noted: bytes) -> None:
    invalidate(server)
    with opened(engine(server, tmp_path)) as stack:
        store(stack, object_id(1), OTHER)
    (tmp_path / "own" / "invalidated").write_bytes(noted)
    with opened(engine(server, tmp_path)) as stack:
        assert list(stack.places(object_id(1))) == [2], "only the server, which knows what it has"
        assert list(stack.places(OTHER)) == [1, 2]


def test_a_server_that_is_down_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stack = stack_of(f"disk://{tmp_path}/own http://127.0.0.1:9", Limits(), CLOCK, nothing_pinned)
    with caplog.at_level(logging.WARNING, "kvtide.tier.stack.invalidation"):
        stack.open()
    store(stack, object_id(1))
    assert list(stack.places(object_id(1))) == [0, 1]
    stack.close()
    assert sum(record.name == "kvtide.tier.stack.invalidation" for record in caplog.records) == 1, "said once"


def test_asking_goes_on_after_an_error_that_nobody_expected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_ERROR_WAIT_S", 0.01)
    asked, calls = threading.Event(), iter((KeyError("lost"), None))

    def ask() -> float:
        error = next(calls)
        if error is not None:
            raise error
        asked.set()
        return 60.0

    repeater = background.Repeater(ask, "kvtide-test")
    repeater.open()
    assert asked.wait(10.0)
    repeater.close()
    assert "kvtide-test goes on" in caplog.text and "KeyError" in caplog.text


class _Stubborn(Counting):
    """Refuses to delete until told otherwise."""

    is_stubborn = True

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        if self.is_stubborn:
            raise TierUnavailable("can't delete now")
        return super().delete(object_id, reason)


def test_what_could_not_be_removed_is_tried_again(server: RunningServer) -> None:
    tier = _Stubborn(open_memory())
    tier.put_from(object_id(1), object_bytes(1))
    invalidate(server)
    invalidations = Invalidations(lambda: records_clients(server.url, CLOCK), [tier], None, CLOCK)
    invalidations.open([tier])
    assert tier.contains(object_id(1))
    with pytest.raises(TierUnavailable):
        invalidations.refresh()
    tier.is_stubborn = False
    invalidations.refresh()
    assert not tier.contains(object_id(1))
    invalidations.close()


def test_one_server_of_two_is_enough(server: RunningServer) -> None:
    tier = open_memory()
    tier.put_from(object_id(1), object_bytes(1))
    invalidate(server)
    url = f"pool://127.0.0.1:9,{server.address}"
    invalidations = Invalidations(lambda: records_clients(url, CLOCK), [tier], None, CLOCK)
    invalidations.open([tier])
    assert not tier.contains(object_id(1))
    invalidations.close()


def test_servers_that_took_the_place_of_all_others_are_asked(server: RunningServer) -> None:
    tier, urls = open_memory(), iter(["http://127.0.0.1:9", server.url])
    tier.put_from(object_id(1), object_bytes(1))
    invalidate(server)
    invalidations = Invalidations(lambda: records_clients(next(urls), CLOCK), [tier], None, CLOCK)
    invalidations.open([tier])
    assert tier.contains(object_id(1))
    invalidations.refresh()
    assert not tier.contains(object_id(1))
    invalidations.close()


def test_a_stack_without_servers_asks_nobody(tmp_path: Path) -> None:
    assert stack_of(f"disk://{tmp_path}/own", Limits(), CLOCK, nothing_pinned)._invalidations is None


# An invalidation is final: nothing that was on its way while a namespace was invalidated is served afterwards.


def test_engine_that_has_not_heard_stores_nothing_that_another_on_its_disk_has_removed(
    server: RunningServer, tmp_path: Path
) -> None:
    with opened(engine(server, tmp_path)) as late:
        with opened(engine(server, tmp_path)) as early:
            invalidate(server)
            early._invalidations.refresh()
        old = late.named(object_id(1))
        assert not late._places[1].tier.contains(old) and late._invalidations is not None
        late.put_from(old, made_object(object_id(1), bytes(100)))
    # Both have ended; the file says that all of it was dealt with.
    with opened(engine(server, tmp_path)) as again:
        assert not again._places[1].tier.contains(object_id(1))
        store(again, object_id(1))
        assert again.contains(object_id(1))


def test_engine_whose_servers_are_silent_hears_of_an_invalidation_from_another_on_its_disk(
    server: RunningServer, tmp_path: Path
) -> None:
    disk = DiskTier(tmp_path / "own", 8 << 20, CLOCK, nothing_pinned)
    deaf = Invalidations(list, [disk], tmp_path / "own" / "invalidated", CLOCK)
    with opened(TierStack([disk], invalidations=deaf)) as late, opened(engine(server, tmp_path)) as early:
        store(late, object_id(1))
        invalidate(server)
        early._invalidations.refresh()
        deaf.refresh()
        assert not late.contains(object_id(1))
        store(late, object_id(1))


ONE = object_id(1)
WAIT_S = 20.0
# Of one key; their content says which is which.
OLD, NEW = (made_object(ONE, bytes([fill]) * 100) for fill in (1, 2))


def test_bytes_land_beside_each_other_but_not_while_an_invalidation_begins(tmp_path: Path) -> None:
    shared = SharedInvalidations(tmp_path, CLOCK)
    with shared.landing(ONE) as may_land, shared.landing(ONE) as may_land_too:
        assert may_land and may_land_too
        # As a child has them that was forked meanwhile.
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        children = [os.dup(int(link.name)) for link in links if link.readlink().parent == tmp_path]
    assert children
    with shared._alone(SPACE.hex()[0]), shared.landing(ONE) as may_land:
        assert not may_land
    for child in children:
        os.close(child)


class Held(WrappedTier):
    """Stops one call in the middle until it is let go: a read after its bytes came, a write before they go."""

    def __init__(self, tier: Any, verb: str) -> None:
        super().__init__(tier)
        self.verb = verb
        self.is_held = False
        self.arrived, self.let_go = threading.Event(), threading.Event()

    def _stop(self, verb: str) -> None:
        if self.is_held and verb == self.verb:
            self.is_held = False
            self.arrived.set()
            assert self.let_go.wait(WAIT_S)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        size = super().get_into(object_id, buffer, offset)
        self._stop("get")
        return size

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        self._stop("put")
        return super().put_from(object_id, buffer)


class Engine:
    """An engine's tiers in front of servers, closed by `end`; `held` is the one whose calls can be stopped."""

    def __init__(self, end: ExitStack, own: list[Any], remote: list[Any], urls: list[str], **options: Any) -> None:
        clients = [client for url in urls for client in records_clients(url, CLOCK)]
        self.invalidations = Invalidations(lambda: clients, own, None, CLOCK)
        self.stack = TierStack([*own, *remote], invalidations=self.invalidations, **options)
        self.stack.open()
        end.callback(self.stack.close)

    def read(self) -> bytes | None:
        return read_all(self.stack, 1, 4096)

    def invalidate(self, server: RunningServer) -> None:
        invalidate(server)
        self.invalidations.refresh()

    def meanwhile(self, held: Held, act: Callable[[], object], then: Callable[[], object]) -> None:
        """Do something while another thread's call is held, then let that go on to its end."""
        held.is_held = True
        thread = threading.Thread(target=act)
        thread.start()
        assert held.arrived.wait(WAIT_S)
        then()
        held.let_go.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("way", ["read twice", "prefetched"])
def test_copy_on_its_way_up_is_not_served(server: RunningServer, tmp_path: Path, way: str, stack: ExitStack) -> None:
    held = Held(http_tier(server.url, CLOCK), "get")
    disk = DiskTier(tmp_path / "own", 8 << 20, CLOCK, nothing_pinned)
    engine = Engine(stack, [open_memory(), disk], [held], [server.url])
    held.tier.put_from(ONE, OLD)
    if way == "read twice":
        engine.stack._ranking.note_use(ONE)

    def act() -> None:
        if way == "read twice":
            engine.read()
        else:
            engine.stack.prefetch([ONE], 4096)
            wait_until(lambda: engine.stack._prefetcher.wait(1.0), "the prefetcher")

    engine.meanwhile(held, act, lambda: engine.invalidate(server))
    assert engine.read() is None
    assert not engine.stack.contains(ONE)
    assert engine.stack.put_from(ONE, NEW)
    assert engine.read() == NEW


def test_a_read_that_began_afterwards_does_not_share_one_from_before(server: RunningServer, stack: ExitStack) -> None:
    held = Held(http_tier(server.url, CLOCK), "get")
    engine = Engine(stack, [open_memory()], [held], [server.url])
    held.tier.put_from(ONE, OLD)
    came: list[bytes | None] = []
    second = threading.Thread(target=lambda: came.append(engine.read()))

    def then() -> None:
        engine.invalidate(server)
        second.start()
        # It answers by itself, or waits for the first one: that must not be.
        second.join(1.0)

    engine.meanwhile(held, engine.read, then)
    second.join(WAIT_S)
    assert came == [None]


def test_what_was_evicted_before_does_not_come_back_by_the_server(server: RunningServer, stack: ExitStack) -> None:
    held = Held(http_tier(server.url, CLOCK), "put")
    engine = Engine(stack, [open_memory(1 << 20)], [held], [server.url], demote_to=[held])
    engine.stack.put_from(ONE, OLD)

    def act() -> None:
        for number in range(10, 2000):
            engine.stack.put_from(object_id(number), bytes(4096))
            if held.arrived.is_set():
                break
        engine.stack.demoter.wait(WAIT_S)

    # The engine has not heard of it yet: the server alone can refuse.
    engine.meanwhile(held, act, lambda: invalidate(server))
    with opened(http_tier(server.url, CLOCK)) as fresh:
        assert not fresh.contains(ONE), "stored under the new generation"


def test_what_is_invalidated_while_it_is_evicted_is_not_sent_as_new(server: RunningServer, stack: ExitStack) -> None:
    remote = http_tier(server.url, CLOCK)
    engine = Engine(stack, [own := open_memory()], [remote], [server.url], demote_to=[remote])

    def fill(view: memoryview) -> bool:
        engine.invalidate(server)
        view[:] = OLD
        return True

    own._offer(ONE, len(OLD), fill)
    assert engine.stack.demoter.wait(WAIT_S)
    assert not remote.contains(engine.stack.named(ONE))


def test_a_block_from_before_is_not_stored_as_one_from_after(server: RunningServer, stack: ExitStack) -> None:
    engine = Engine(stack, [open_memory()], [http_tier(server.url, CLOCK)], [server.url])
    invalidate(server)
    engine.stack.put_from(ONE, OLD)
    engine.invalidations.refresh()
    assert engine.read() is None


def test_a_coarser_level_is_of_the_generation_of_its_block() -> None:
    named = NamedId.of(ONE, Name("", SPACE, 3), is_latest=True)
    meta = BlockMeta(named, BlockKey(SPACE), 0, BlockLayout(1, 1, 1, 1, KVDtype.FLOAT16), "made up")
    level = level_meta(meta, 1).id
    assert isinstance(level, NamedId) and level != named
    assert (level.name, level.is_latest) == (named.name, True)


def test_other_form_of_an_invalidated_block_does_not_replace_a_new_one(server: RunningServer, stack: ExitStack) -> None:
    engine = Engine(stack, [open_memory()], [], [server.url])
    engine.stack.put_from(ONE, OLD)
    named = engine.stack.named(ONE)
    engine.invalidate(server)
    engine.stack.put_from(ONE, NEW)
    assert not engine.stack.replace(named, OLD), "packed anew from what was read before"
    assert engine.read() == NEW


def test_a_repair_of_a_pool_does_not_bring_an_invalidated_block_back(tmp_path: Path, stack: ExitStack) -> None:
    with running_server(tiers=(f"disk://{tmp_path}/a",)) as one, running_server(tiers=(f"disk://{tmp_path}/b",)) as two:
        servers = {str(each.address): each for each in (one, two)}
        held = {name: Held(http_tier(each.url, CLOCK), "put") for name, each in servers.items()}
        pool = PoolTier(
            StaticMembership(PoolMap(0, tuple(server_at(name) for name in sorted(servers)))),
            lambda server: held[server.address],
            "",
            CLOCK,
        )
        engine = Engine(stack, [open_memory()], [pool], [one.url, two.url])
        lacking = held[str(two.address)]
        held[str(one.address)].tier.put_from(ONE, OLD)
        # The owner that has sent less is asked first: the one that lacks it.
        pool._loads[str(one.address)] = 10**9

        engine.meanwhile(lacking, engine.read, lambda: invalidate(one, two))
        engine.stack.close()
        with opened(http_tier(two.url, CLOCK)) as fresh:
            assert not fresh.contains(ONE)


def test_a_server_that_lost_its_records_serves_nothing_older(server: RunningServer, stack: ExitStack) -> None:
    engine = Engine(stack, [open_memory()], [http_tier(server.url, CLOCK)], [server.url])
    engine.stack.put_from(ONE, OLD)
    engine.invalidate(server)
    server.records._records.clear()
    assert engine.read() is None, "the old object is at generation 0"
    assert engine.stack.put_from(ONE, NEW)
    assert server.records.generation("", SPACE) == 1, "the engine knows better"


def test_block_that_waits_to_be_stored_is_no_hit_now(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_for(server.url, LosslessCodec())
    stored, may_store = threading.Event(), threading.Event()
    monkeypatch.setattr(cache._placer, "store", lambda block: (stored.set(), may_store.wait(WAIT_S)))
    layout = BlockLayout(1, 1, 1, 1, KVDtype.FLOAT16)
    with cache:
        meta = BlockMeta(cache.tiers.named(ONE), BlockKey(SPACE), 0, layout, "made up")
        assert cache.store([PendingBlock(meta, lambda: lambda: np.zeros(layout.shape, layout.bits_dtype))]) == 1
        assert stored.wait(WAIT_S)
        assert cache.access.queued(ONE) is not None
        invalidate(server)
        cache.tiers._invalidations.refresh()
        assert cache.access.queued(ONE) is None
        may_store.set()
