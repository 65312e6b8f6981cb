from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.store.load.sources import AnyOf, MadeSource, made_objects, parsed

from kvtide.clock import SystemClock
from kvtide.store.load.backfill import BYTES_MAX, Backfill, PartialLoad
from kvtide.types import ObjectId
from kvtide.wire.receiver import Receiver

OBJECTS = made_objects(3)
OBJECT_BYTES = sum(map(len, OBJECTS.values()))
HEAD_BYTES = parsed(OBJECTS)[0].entries[0].offset
BASE_STOP = parsed(OBJECTS)[0].entries[1].offset + 1500


def left_of(objects: dict[ObjectId, bytes], blocks: tuple[int, ...] = (0, 1, 2)) -> PartialLoad:
    """What a load leaves that had time for the bases."""
    receivers = [Receiver(stored) for stored in parsed(objects)]
    for block, data in enumerate(objects.values()):
        receivers[block].offer_bytes(HEAD_BYTES, data[HEAD_BYTES:BASE_STOP])
    return PartialLoad(receivers, blocks)


class Store:
    def __init__(self) -> None:
        self.objects: dict[ObjectId, bytes] = {}

    def put(self, object_id: ObjectId, data: bytes) -> bool:
        self.objects[object_id] = data
        return True


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def keeper_of(stack: ExitStack, *sources: MadeSource, bytes_max: int = BYTES_MAX) -> tuple[Backfill, Store]:
    store = Store()
    keeper = Backfill(AnyOf(*sources), store.put, SystemClock(), bytes_max)
    stack.callback(keeper.check)
    stack.callback(keeper.close)
    return keeper, store


def test_refinements_that_came_late_are_kept_and_no_byte_comes_twice(stack: ExitStack) -> None:
    source = MadeSource(OBJECTS)
    keeper, store = keeper_of(stack, source)
    assert keeper.offer(left_of(OBJECTS, (1, 2)))
    assert keeper.flush(10)
    assert store.objects == dict(list(OBJECTS.items())[1:])
    assert source.served_bytes == keeper.stats().received_bytes == 2 * 7000
    assert keeper.stats()[:2] == (2, 0)


def test_dead_source_is_replaced_and_what_nobody_has_is_dropped(stack: ExitStack) -> None:
    absent = next(iter(OBJECTS))
    dying, spare = MadeSource(OBJECTS, cut_bytes=600), MadeSource(OBJECTS)
    dying.is_down = True
    del spare.objects[absent]
    keeper, store = keeper_of(stack, dying, spare)
    assert keeper.offer(left_of(OBJECTS))
    assert keeper.flush(10)
    assert set(store.objects) == set(OBJECTS) - {absent}
    assert keeper.stats()[:2] == (2, 1)


def test_reads_that_break_off_go_on_where_they_stopped(stack: ExitStack) -> None:
    source = MadeSource(OBJECTS, cut_bytes=600)
    keeper, store = keeper_of(stack, source)
    assert keeper.offer(left_of(OBJECTS))
    assert keeper.flush(10)
    assert (store.objects, source.served_bytes) == (OBJECTS, 3 * 7000)


def test_damaged_object_is_not_kept(stack: ExitStack) -> None:
    object_id, data = next(iter(OBJECTS.items()))
    damaged = {**OBJECTS, object_id: data[:-1] + bytes([data[-1] ^ 1])}
    keeper, store = keeper_of(stack, MadeSource(damaged))
    assert keeper.offer(left_of(OBJECTS))
    assert keeper.flush(10)
    assert set(store.objects) == set(OBJECTS) - {object_id}


def test_load_has_the_link_alone(stack: ExitStack) -> None:
    source = MadeSource(OBJECTS)
    keeper, store = keeper_of(stack, source)
    with keeper.paused():
        assert keeper.offer(left_of(OBJECTS))
        assert not keeper.flush(0.1)
        assert source.served_bytes == 0
    assert keeper.flush(10)
    assert store.objects == OBJECTS


def test_what_waits_is_bounded(stack: ExitStack) -> None:
    keeper, store = keeper_of(stack, MadeSource(OBJECTS), bytes_max=OBJECT_BYTES)
    small, _ = keeper_of(stack, MadeSource(OBJECTS), bytes_max=OBJECT_BYTES - 1)
    with keeper.paused():
        assert keeper.offer(left_of(OBJECTS))
        assert not keeper.offer(left_of(OBJECTS))
        keeper.check()
    assert not small.offer(left_of(OBJECTS))
    assert keeper.flush(10)
    assert (len(store.objects), keeper.stats().dropped, small.stats().dropped) == (3, 3, 3)


def test_closing_ends_a_read_and_takes_no_more(stack: ExitStack) -> None:
    source, others = MadeSource(OBJECTS, bytes_per_s=1e4), set(threading.enumerate())
    keeper, store = keeper_of(stack, source)
    assert keeper.offer(left_of(OBJECTS))
    keeper.close()
    assert not keeper.offer(left_of(OBJECTS))
    assert store.objects == {}
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "kvtide-keep"]
    keeper.close()
