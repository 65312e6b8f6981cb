from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.clock import ManualClock
from kvtide.errors import TierFull
from kvtide.evict.ranking import RankedOrder, Ranking, RecencyRanking, ScoreRanking
from kvtide.testing.tier_suite import object_bytes, object_id, read_all
from kvtide.tier.buffers import Recycler, aligned_buffer, is_aligned, touch
from kvtide.tier.ram import MemoryTier
from kvtide.tier.ram.memory import Arena, Span, frame_bytes_for
from kvtide.types import BlockKey

PAGE = 4096


def open_memory(pages: int) -> MemoryTier:
    tier = MemoryTier(pages * PAGE, ManualClock(0.0), lambda key: False)
    tier.open()
    return tier


def test_memory_that_is_read_is_not_given_to_another_object() -> None:
    tier = open_memory(2)
    tier.put_from(object_id(1), object_bytes(1, 2 * PAGE))
    with tier.lease(object_id(1)) as views:
        assert views is not None
        tier.delete(object_id(1), "removed")
        with pytest.raises(TierFull, match="in use"):
            tier.put_from(object_id(2), object_bytes(2))
        assert b"".join(views) == object_bytes(1, 2 * PAGE)
        tier.check()
    assert tier.put_from(object_id(2), object_bytes(2))
    tier.check()


def test_object_in_a_lease_is_not_evicted() -> None:
    tier = open_memory(2)
    tier.put_from(object_id(1), object_bytes(1))
    tier.put_from(object_id(2), object_bytes(2))
    with tier.lease(object_id(1)):
        tier.put_from(object_id(3), object_bytes(3))
    assert [n for n in (1, 2, 3) if tier.contains(object_id(n))] == [1, 3]


def test_lent_memory_can_not_be_written() -> None:
    tier = open_memory(1)
    tier.put_from(object_id(1), object_bytes(1))
    with tier.lease(object_id(1)) as views, pytest.raises(TypeError, match="read-only"):
        assert views is not None
        views[0][0] = 0


def test_object_laid_into_scattered_frames_is_read_from_any_offset() -> None:
    tier = open_memory(7)
    for number in range(7):
        tier.put_from(object_id(number), object_bytes(number))
    for number in (1, 3, 5):
        tier.delete(object_id(number), "removed")
    content = object_bytes(9, 2 * PAGE + 100)
    tier.put_from(object_id(9), content)
    for offset in (0, 1, PAGE - 1, PAGE, 2 * PAGE + 50, 2 * PAGE + 100, 5 * PAGE):
        buffer = memoryview(bytearray(PAGE + 7))
        size = tier.get_into(object_id(9), buffer, offset)
        assert bytes(buffer[:size]) == content[offset : offset + PAGE + 7]


def test_closed_tier_finds_and_stores_nothing() -> None:
    tier = open_memory(2)
    tier.put_from(object_id(1), object_bytes(1))
    tier.close()
    assert read_all(tier, 1) is None
    assert not tier.put_from(object_id(1), object_bytes(1))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_frame_is_lost_or_taken_twice(steps: list[tuple[bool, int]]) -> None:
    arena, taken = Arena(32 * PAGE, PAGE), list[list[Span]]()
    for is_take, size in steps:
        if is_take or not taken:
            fits = arena.frames_of(size) <= arena.free_frames
            runs = arena.take(size)
            assert (runs is not None) == fits
            taken += [runs] if runs else []
        else:
            arena.give_back(taken.pop(size % len(taken)))
        arena.check([run for runs in taken for run in runs])


@pytest.mark.parametrize(
    ("bytes_max", "frame_bytes"), [(1, PAGE), (1 << 20, PAGE), (1 << 30, 64 << 10), (1 << 40, 64 << 10)]
)
def test_frames_are_pages_in_small_tiers_and_larger_in_large_ones(bytes_max: int, frame_bytes: int) -> None:
    assert frame_bytes_for(bytes_max) == frame_bytes


@pytest.mark.parametrize("size", [1, 100, PAGE, 5 << 20])
def test_buffers_begin_at_a_page(size: int) -> None:
    assert is_aligned(aligned_buffer(size)) and len(aligned_buffer(size)) == size
    assert not is_aligned(aligned_buffer(PAGE)[1:])


def test_recycled_memory_has_one_holder_at_a_time_and_a_bound() -> None:
    recycler = Recycler(3 * PAGE)
    first = recycler.take(2 * PAGE)
    first[:] = b"a" * len(first)
    part = first[PAGE:]
    del first
    other = recycler.take(2 * PAGE)
    other[:] = b"b" * len(other)
    assert bytes(part) == b"a" * PAGE
    del part
    again = recycler.take(2 * PAGE)
    assert is_aligned(again)
    assert bytes(again) == b"a" * len(again), "new memory in place of what nobody holds"
    del other, again
    assert bytes(recycler.take(2 * PAGE)) != bytes(2 * PAGE)
    held = [recycler.take(PAGE) for _ in range(5)]
    del held
    assert sum(map(len, recycler._free)) <= 3 * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_touched_memory_is_there_and_keeps_what_it_held() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE

    memory = aligned_buffer(64 << 20)
    memory[:5] = b"bytes"
    touch(memory, lambda: False)
    before = resident_bytes()
    touch(memory, lambda: True)
    assert resident_bytes() - before > 48 << 20
    assert bytes(memory[:6]) == b"bytes\0"


def test_rankings_order_as_their_names_say() -> None:
    recency, frequency = RecencyRanking(), Ranking()
    score = ScoreRanking(lambda each: 10.0 if each == object_id(2) else 1.0, half_life=None)
    for number in (1, 1, 1, 2, 2, 3):
        for ranking in (recency, frequency, score):
            ranking.note_use(object_id(number))
    orders = []
    for ranking in (recency, frequency, score):
        order = RankedOrder(ranking)
        for number in (3, 1, 2):
            order.enter(object_id(number), BlockKey(bytes(32)), 1)
        leaving = order.victims(lambda each: True)
        orders.append([next(n for n in (1, 2, 3) if object_id(n) == each) for each in leaving])
    assert orders == [[1, 2, 3], [3, 2, 1], [3, 1, 2]]


def test_order_sees_uses_since_an_object_entered_and_forgets_who_left() -> None:
    ranking = Ranking()
    order = RankedOrder(ranking)
    for number in range(200):
        order.enter(object_id(number), BlockKey(bytes(32)), 1)
        ranking.note_use(object_id(number))
    ranking.note_use(object_id(0))
    for number in range(1, 199):
        order.leave(object_id(number))
    assert not list(order.victims(lambda each: False)) and len(order) == 2
    assert list(order.victims(lambda each: True)) == [object_id(199), object_id(0)]


@pytest.mark.parametrize("frame_bytes", [0, 100, -PAGE])
def test_frame_that_is_no_page_is_refused(frame_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        MemoryTier(PAGE, ManualClock(0.0), lambda key: False, frame_bytes=frame_bytes)
