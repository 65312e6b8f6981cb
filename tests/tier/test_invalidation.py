"""What servers declare invalid leaves an engine's own memory and disk, also if it was away."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import RunningServer, running_server

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier import stack_of
from kvtide.tier.http.records import raise_generation, records_clients
from kvtide.tier.ram.memory import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.stack.invalidation import Invalidations
from kvtide.types import BlockKey, Namespace, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import pack_object
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
    return stack_of(f"disk://{tmp_path}/own {server.url}", Limits(), CLOCK, lambda key: False)


def store(stack: TierStack, *ids: ObjectId) -> None:
    for name in ids:
        meta = BlockMeta(name, BlockKey(name.namespace), 0, BlockLayout(1, 1, 1, 1, KVDtype.FLOAT16), "made up")
        packed = pack_object(meta, "raw-1", [Section(SectionId(SectionKind.DATA, 0, 0, 1), bytes(100))])
        assert stack.put_from(name, packed)


def invalidate(server: RunningServer) -> None:
    clients = records_clients(server.url, CLOCK)
    for client in clients:
        client.open()
    raise_generation(clients, SPACE.hex())
    for client in clients:
        client.close()


def refresh(stack: TierStack) -> None:
    assert stack._invalidations is not None
    stack._invalidations.refresh()


def test_a_running_engine_loses_what_was_invalidated_and_nothing_else(server: RunningServer, tmp_path: Path) -> None:
    stack = engine(server, tmp_path)
    stack.open()
    store(stack, object_id(1), object_id(2), OTHER)
    invalidate(server)
    refresh(stack)
    assert not any(stack.contains(each) for each in (object_id(1), object_id(2)))
    assert list(stack.places(OTHER)) == [0, 1, 2]
    store(stack, object_id(1))
    refresh(stack)
    assert list(stack.places(object_id(1))) == [0, 1, 2], "what is stored afterwards stays"
    stack.check()
    stack.close()


def test_an_engine_that_was_away_learns_it_when_it_starts(server: RunningServer, tmp_path: Path) -> None:
    stack = engine(server, tmp_path)
    stack.open()
    store(stack, object_id(1), OTHER)
    stack.close()
    invalidate(server)
    stack = engine(server, tmp_path)
    stack.open()
    assert not stack.contains(object_id(1))
    assert stack.contains(OTHER)
    store(stack, object_id(1))
    stack.close()
    stack = engine(server, tmp_path)
    stack.open()
    assert list(stack.places(object_id(1))) == [1, 2], "dealt with once"
    stack.close()


@pytest.mark.parametrize("noted", [b"", b"{", b"[1]", b'{"a": "b"}', b"\xff\x00"])
def test_a_note_that_cannot_be_read_removes_too_much(server: RunningServer, tmp_path: Path, noted: bytes) -> None:
    invalidate(server)
    stack = engine(server, tmp_path)
    stack.open()
    store(stack, object_id(1), OTHER)
    stack.close()
    (tmp_path / "own" / "invalidated").write_bytes(noted)
    stack = engine(server, tmp_path)
    stack.open()
    assert list(stack.places(object_id(1))) == [2], "only the server, which knows what it has"
    assert list(stack.places(OTHER)) == [1, 2]
    stack.close()


def test_a_server_that_is_down_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stack = stack_of(f"disk://{tmp_path}/own http://127.0.0.1:9", Limits(), CLOCK, lambda key: False)
    with caplog.at_level(logging.WARNING, "kvtide.tier.stack.invalidation"):
        stack.open()
    store(stack, object_id(1))
    assert list(stack.places(object_id(1))) == [0, 1]
    stack.close()
    assert sum(record.name == "kvtide.tier.stack.invalidation" for record in caplog.records) == 1, "said once"


class _Stubborn(Counting):
    """Refuses to delete until told otherwise."""

    is_stubborn = True

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        if self.is_stubborn:
            raise TierUnavailable("can't delete now")
        return super().delete(object_id, reason)


def test_what_could_not_be_removed_is_tried_again(server: RunningServer) -> None:
    tier = _Stubborn(MemoryTier(1 << 20, CLOCK, lambda key: False))
    tier.open()
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
    assert invalidations.removed == 1
    invalidations.close()
    tier.close()


def test_one_server_of_two_is_enough(server: RunningServer) -> None:
    tier = MemoryTier(1 << 20, CLOCK, lambda key: False)
    tier.open()
    tier.put_from(object_id(1), object_bytes(1))
    invalidate(server)
    url = f"pool://127.0.0.1:9,{server.address}"
    invalidations = Invalidations(lambda: records_clients(url, CLOCK), [tier], None, CLOCK)
    invalidations.open([tier])
    assert not tier.contains(object_id(1))
    invalidations.close()
    tier.close()


def test_a_stack_without_servers_asks_nobody(tmp_path: Path) -> None:
    assert stack_of(f"disk://{tmp_path}/own", Limits(), CLOCK, lambda key: False)._invalidations is None
