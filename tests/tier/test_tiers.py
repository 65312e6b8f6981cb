"""Tiers in memory and on disk; lists of runs; what all remote tiers share."""

import math
import socketserver
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, product, takewhile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.processes import resident_bytes
from tests.servers import Responder, answering, listening, running_server, tier_on
from tests.stores import nothing_pinned, open_disk, open_memory, opened
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, put_all, read_all

from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import ManualClock, SystemClock
from kvtide.config import Limits
from kvtide.errors import TierFull, TierUnavailable
from kvtide.evict.ranking import RankedOrder, Ranking, RecencyRanking, ScoreRanking
from kvtide.tier import Tier
from kvtide.tier.breaker import Breaker
from kvtide.tier.buffers import Recycler, aligned_buffer, is_aligned, recycled_buffer, touch
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.directory import JOURNAL_BYTES_MAX, RemovalJournal
from kvtide.tier.http import PeerSettings
from kvtide.tier.http.tier import http_tier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.ram.memory import Arena, Span, frame_bytes_for
from kvtide.tier.stack import TierStack
from kvtide.tier.stack.tier import LOOK_UPS_MAX
from kvtide.tier.url import open_tier
from kvtide.types import BlockKey, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import pack_object
from kvtide_lab.bench.services import wait_until
from kvtide_lab.wrapped import Counting


class TestMemory(TierSuite):
    @pytest.fixture
    def tier(self, clock: ManualClock) -> Iterator[Tier]:
        with opened(MemoryTier(TIER_BYTES, clock, nothing_pinned)) as tier:
            yield tier


class TestDisk(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        with opened(DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)) as tier:
            yield tier
        assert list(tmp_path.glob("*.part")) == []


def test_pinned_object_is_never_evicted(local_url: str, clock: ManualClock) -> None:
    # Room for two objects and half of a third; on the disk each has a segment of its own.
    size = 40_000
    limits = Limits(memory_bytes_max=100_000, disk_bytes_max=140_000)
    tier = open_tier(local_url, limits, clock, lambda key: key == object_id(0).key)
    tier.open()
    put_all(tier, range(4), size)
    assert [n for n in range(4) if tier.contains(object_id(n))] == [0, 3]
    assert read_all(tier, 0) == object_bytes(0, size)
    with pytest.raises(TierFull, match="in use"):
        tier.put_from(object_id(9), object_bytes(9, 2 * size))


def test_object_larger_than_the_tier_is_refused(local_url: str, clock: ManualClock) -> None:
    tier = open_tier(local_url, Limits(memory_bytes_max=10, disk_bytes_max=10), clock, nothing_pinned)
    tier.open()
    with pytest.raises(TierFull, match="may hold 10"):
        tier.put_from(object_id(1), object_bytes(1))


def test_files_that_are_not_segments_are_passed_over(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    tier.put_from(object_id(1), object_bytes(1))
    for name in ("readme.seg", "000000000002.txt", "00000000000x.seg", "000000000009.seg"):
        (tmp_path / "segments" / name).write_text("hello")
    assert [info.id for info in tier.objects()] == [object_id(1)]


def test_bounds_that_make_no_sense_are_refused(tmp_path: Path, clock: ManualClock) -> None:
    positive = partial(pytest.raises, ValueError, match="positive")
    # No lock waits for 8e10 s.
    for bound, name in product((0, -1, 8e10, math.inf, "8 GiB"), ("memory_bytes_max", "close_s_max")):
        with positive():
            Limits(**{name: bound})  # type: ignore[arg-type]
    for value in (0, -1):
        with pytest.raises(ValueError, match="half_life"):
            Ranking(value)
        with positive():
            MemoryTier(value, clock, nothing_pinned)
        with positive():
            DiskTier(tmp_path, value, clock, nothing_pinned)
    for frame_bytes in (0, 100, -PAGE):
        with pytest.raises(ValueError, match="multiple"):
            MemoryTier(PAGE, clock, nothing_pinned, frame_bytes=frame_bytes)
    with pytest.raises(ValueError, match="at least one tier"):
        TierStack([])
    memory = open_memory()
    for last in (memory, open_memory()):
        with pytest.raises(ValueError, match="written_last"):
            TierStack([memory], written_last=[last])


def test_journal_keeps_its_bound_and_the_newest_lines(tmp_path: Path) -> None:
    journal = RemovalJournal(tmp_path / "removed.log")
    journal.append([object_id(0)], "evicted", 1.0)
    for number in range(1, 8000):
        journal.append([object_id(number)], "corrupt", 1.0)
    assert (tmp_path / "removed.log").stat().st_size <= JOURNAL_BYTES_MAX
    assert journal.reason(object_id(7999)) == "corrupt"
    assert journal.reason(object_id(0)) is None


def test_parents_come_first_and_are_no_use(tmp_path: Path, layout: BlockLayout) -> None:
    tier = open_disk(tmp_path)
    metas = [BlockMeta(object_id(number), object_id(number - 1).key, 16 * number, layout, "test") for number in (2, 1)]
    for meta in metas:
        tier.put_from(meta.id, pack_object(meta, "raw-1", [Section(SectionId(SectionKind.DATA, 0, 0, 1), b"x")]))
    tier.put_from(object_id(3), b"not an object")
    before = {info.id: info.last_use_s for info in tier.objects()}
    assert list(tier.parents()) == [(meta.id, meta.parent) for meta in reversed(metas)]
    assert {info.id: info.last_use_s for info in tier.objects()} == before
    assert tier.stats().hits == 0


PAGE = 4096


def test_memory_that_is_read_is_not_given_to_another_object() -> None:
    tier = open_memory(2 * PAGE)
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
    tier = open_memory(2 * PAGE)
    tier.put_from(object_id(1), object_bytes(1))
    tier.put_from(object_id(2), object_bytes(2))
    with tier.lease(object_id(1)):
        tier.put_from(object_id(3), object_bytes(3))
    assert [n for n in (1, 2, 3) if tier.contains(object_id(n))] == [1, 3]


def test_lent_memory_can_not_be_written() -> None:
    tier = open_memory(PAGE)
    tier.put_from(object_id(1), object_bytes(1))
    with tier.lease(object_id(1)) as views, pytest.raises(TypeError, match="read-only"):
        assert views is not None
        views[0][0] = 0


def test_object_laid_into_scattered_frames_is_read_from_any_offset() -> None:
    tier = open_memory(7 * PAGE)
    put_all(tier, range(7))
    for number in (1, 3, 5):
        tier.delete(object_id(number), "removed")
    content = object_bytes(9, 2 * PAGE + 100)
    tier.put_from(object_id(9), content)
    for offset in (0, 1, PAGE - 1, PAGE, 2 * PAGE + 50, 2 * PAGE + 100, 5 * PAGE):
        buffer = memoryview(bytearray(PAGE + 7))
        size = tier.get_into(object_id(9), buffer, offset)
        assert bytes(buffer[:size]) == content[offset : offset + PAGE + 7]


def test_closed_tier_finds_and_stores_nothing() -> None:
    tier = open_memory(2 * PAGE)
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


def test_objects_that_differ_by_some_bytes_have_each_other_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.buffers._recycler", Recycler(8 << 20))
    first = recycled_buffer((3 << 20) - 5)
    first[:4] = b"left"
    del first
    again = recycled_buffer((3 << 20) - 9)
    assert (len(again), bytes(again[:4])) == ((3 << 20) - 9, b"left")
    assert is_aligned(again)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_touched_memory_is_there_and_keeps_what_it_held() -> None:
    memory = aligned_buffer(64 << 20)
    memory[:5] = b"bytes"
    touch(memory, lambda: False)
    before = resident_bytes(memory)
    touch(memory, lambda: True)
    assert resident_bytes(memory) - before > 48 << 20
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


# A run is looked up in few questions, and its answer is what single look-ups give.

IDS = [object_id(number) for number in range(12)]


class Remote(Counting):
    is_batched = True

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        self.before("count_leading")
        return sum(1 for _ in takewhile(self.tier.contains, object_ids))

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        self.before("contains_each")
        return [self.tier.contains(each) for each in object_ids]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 2)), min_size=12, max_size=12), st.sets(st.integers(0, 2)))
def test_run_ends_where_no_tier_has_the_next(held: list[set[int]], batched: set[int]) -> None:
    plain = [MemoryTier(1 << 16, SystemClock(), nothing_pinned) for _ in range(3)]
    with opened(TierStack([Remote(tier) if number in batched else tier for number, tier in enumerate(plain)])) as stack:
        for number, tiers in enumerate(held):
            for tier in tiers:
                plain[tier].put_from(IDS[number], b"x")
        expected = [min(tiers) for tiers in takewhile(bool, held)]
        assert stack.run_places(IDS) == expected


def test_long_run_behind_memory_takes_few_questions() -> None:
    near, far = open_memory(), open_memory(8 << 20)
    remote = Remote(far)
    with opened(TierStack([near, remote])) as stack:
        ids = [object_id(number) for number in range(2 * LOOK_UPS_MAX)]
        for number, each in enumerate(ids[:-5]):
            far.put_from(each, object_bytes(number, 100))
        near.put_from(ids[3], object_bytes(3, 100))
        remote.calls.clear()
        assert stack.run_places(ids) == [1, 1, 1, 0] + [1] * (len(ids) - 9)
        assert sum(remote.calls.values()) <= 6


# The parts of the remote tier that need no server, and what it makes of answers that are off.


def test_breaker_opens_tries_once_and_closes(clock: ManualClock) -> None:
    breaker = Breaker(2, 5.0, clock, 2.0)
    breaker.note_fault()
    assert breaker.allows()
    breaker.note_fault()
    assert breaker.is_open and not breaker.allows()
    clock.advance(5.0)
    assert breaker.allows() and not breaker.allows()
    breaker.note_fault()
    clock.advance(4.9)
    assert not breaker.allows(), "a trial that failed keeps it open"
    clock.advance(0.1)
    assert breaker.allows()
    clock.advance(6.9)
    assert not breaker.allows(), "the one that tries may still come back"
    clock.advance(0.1)
    assert breaker.allows(), "it hangs"
    breaker.note_success()
    assert breaker.allows() and not breaker.is_open


PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %s\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nhello",
        PART % (b"0-4/5", 5, b"hell"),
        PART % (b"1-5/6", 5, b"hello"),
        PART % (b"0-4/9", 5, b"hello"),
        PART % (b"0-3/4", 5, b"hello"),
        PART % (b"0-199/200", 200, b"x" * 200),
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 99999999\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_answer_that_is_off_is_a_fault_and_a_miss_upstairs(answer: bytes) -> None:
    with answering(answer, closes=True) as url:
        tier = http_tier(url, SystemClock())
        with opened(TierStack([tier])) as stack:
            buffer = memoryview(bytearray(100))
            with pytest.raises(TierUnavailable):
                tier.get_into(object_id(1), buffer)
            assert stack.get_into(object_id(1), buffer) is None
            assert tier.stats().faults >= 1
            tier.check()


def test_answer_behind_an_announcement_is_the_answer() -> None:
    announced = b"".join(b"HTTP/1.1 %d Wait\r\n\r\n" % status for status in (100, 102, 103))
    with answering(announced + PART % (b"0-4/5", 5, b"hello")) as url, opened(http_tier(url, SystemClock())) as tier:
        buffer = memoryview(bytearray(5))
        assert (tier.get_into(object_id(1), buffer), bytes(buffer)) == (5, b"hello")


def test_answer_without_a_bottom_hides_no_other_tier() -> None:
    body = b'{"x": ' + 100_000 * b"["
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as url:
        remote = http_tier(url, SystemClock())
        with opened(TierStack([open_memory(), remote], demote_to=[remote])) as stack:
            stack.put_from(object_id(1), object_bytes(1))
            assert stack.contains_each([object_id(1), object_id(2)]) == [True, False]
            assert stack.tier_stats()[1].faults == 1


def test_nobody_listening_is_a_fault_for_every_verb() -> None:
    with opened(http_tier("http://127.0.0.1:1", SystemClock())) as tier:
        for action in (
            lambda: tier.contains(object_id(1)),
            lambda: tier.get_into(object_id(1), memoryview(bytearray(1))),
            lambda: tier.put_from(object_id(1), object_bytes(1)),
            lambda: tier.delete(object_id(1), "removed"),
            lambda: list(tier.objects()),
        ):
            with pytest.raises(TierUnavailable):
                action()
        assert tier.removed_reason(object_id(1)) is None
        assert tier.stats().objects == 0


def test_dead_replica_keeps_no_object_that_is_removed() -> None:
    with running_server() as dead, running_server() as other, opened(tier_on(dead, other)) as tier:
        assert tier.put_from(object_id(1), object_bytes(1))
        dead.stop()
        with pytest.raises(TierUnavailable):
            tier.delete(object_id(1), "corrupt")
        assert not other.store.contains(object_id(1))


def test_call_that_finds_no_free_connection_is_no_fault_of_the_server() -> None:
    may_end = threading.Event()

    class Slow(socketserver.StreamRequestHandler):
        """Sends a range byte by byte."""

        def handle(self) -> None:
            while self.rfile.readline().strip():
                continue
            self.wfile.write(PART % (b"0-999/1000", 1000, b""))
            for _ in range(1000):
                self.wfile.write(b"x")
                may_end.wait(0.02)

    settings = PeerSettings(connections_max=1, tries_max=1, faults_max=1)
    with listening(Slow) as port, ThreadPoolExecutor(1) as threads:
        tier = http_tier(f"http://127.0.0.1:{port}", SystemClock(), settings, operation_s_max=1.0, bytes_s_min=10)
        with opened(tier):
            read = threads.submit(read_all, tier, 1, 1000)
            wait_until(lambda: tier._peers[0]._lent == 1, "the connection to be in use")
            with pytest.raises(TierUnavailable, match="connections are in use"):
                tier.contains(object_id(1))
            assert not tier._peers[0].breaker.is_open
            may_end.set()
            assert read.result() == b"x" * 1000


@pytest.mark.parametrize(("name", "key"), [("zz", "a" * 64), ("a" * 64, "zz"), ("a" * 64, ""), ("a" * 64, "a" * 64)])
def test_listing_that_is_odd_or_has_no_end_is_a_fault(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.http.tier.LIST_MAX", 1)

    class Odd(Responder):
        """Says the same of every part."""

        def do_GET(self) -> None:
            is_part = "?" in self.path
            said = {"objects": [{"key": key, "size": 1, "last_use_s": 0}]} if is_part else {"namespaces": [name]}
            self.reply(200, msgspec.json.encode({**said, "tier": None}))

    with listening(Odd) as port, opened(http_tier(f"http://127.0.0.1:{port}", SystemClock())) as tier:
        listed = islice(tier.objects(), 9)
        with pytest.raises(TierUnavailable, match=r"hex digits|lists"):
            list(listed)
