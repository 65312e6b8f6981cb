"""Stacks of tiers: what is read, moved up, given up, written back, and opened."""

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.servers import running_server
from tests.stores import Slow, nothing_pinned, open_disk, opened
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, put_all, read_all

from kvtide.clock import ManualClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.evict import Ranking, ScoreRanking
from kvtide.evict.ranking import RankedOrder, RecencyRanking
from kvtide.tier import Tier, stack_of
from kvtide.tier.base import Buffer
from kvtide.tier.breaker import until
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.segment import OPEN_MAX, OpenSegments
from kvtide.tier.files import Files
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.stack.tier import SingleFlight
from kvtide.tier.url import open_tier
from kvtide_lab.bench.services import wait_until
from kvtide_lab.wrapped import Counting

PAGE = 4096


class NamedMemory(MemoryTier):
    """Memory that stands for another place in a stack."""

    def __init__(self, name: str, bytes_max: int, ranking: Ranking | None = None) -> None:
        super().__init__(bytes_max, ManualClock(0.0), nothing_pinned, RankedOrder(ranking))
        self.name = name


class Gate:
    """A sleep that lasts until the gate is opened; it counts who waits."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.arrived = threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        self.arrived.release()
        assert self.is_open.wait(20)


class TestStackOfTwo(TierSuite):
    @pytest.fixture(params=["memory and disk", "one is told last"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        ranking, remote = ScoreRanking(lambda each: 1.0), NamedMemory("remote", TIER_BYTES)
        memory = MemoryTier(200_000, clock, nothing_pinned, RankedOrder(ranking))
        stack = TierStack([memory, DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)], ranking)
        if request.param == "one is told last":
            stack = TierStack([NamedMemory("memory", TIER_BYTES), remote], written_last=[remote])
        with opened(stack):
            yield stack

    # Two tiers hold an object each: what they count together is theirs to say.
    test_second_put_keeps_first_object = None  # type: ignore[assignment]
    test_bytes_stay_under_the_cap = None  # type: ignore[assignment]


def stack_of_two(ranking: Ranking, pages: int = 2) -> tuple[TierStack, MemoryTier, Counting]:
    """Memory for `pages` objects of a page before a large tier that counts."""
    memory, slow = NamedMemory("memory", pages * PAGE, ranking), Counting(NamedMemory("disk", 1000 * PAGE))
    stack = TierStack([memory, slow], ranking)
    stack.open()
    return stack, memory, slow


def in_memory(memory: MemoryTier) -> list[int]:
    return [number for number in range(10) if memory.contains(object_id(number))]


def test_eviction_from_memory_writes_nothing() -> None:
    stack, memory, slow = stack_of_two(RecencyRanking())
    put_all(stack, range(10))
    assert slow.bytes["put"] == 10 * 1000
    for number in range(10):
        for _ in range(3):
            assert read_all(stack, number) == object_bytes(number)
    assert memory.stats().evictions > 0
    assert slow.bytes["put"] == 10 * 1000


def test_object_that_is_worth_less_than_the_least_in_memory_is_not_admitted() -> None:
    important = (object_id(0), object_id(1))
    stack, memory, _ = stack_of_two(ScoreRanking(lambda each: 8.0 if each in important else 1.0, half_life=None))
    put_all(stack, range(3))
    for _ in range(5):
        assert read_all(stack, 2) == object_bytes(2)
    assert in_memory(memory) == [0, 1]
    for _ in range(4):
        read_all(stack, 2)
    assert in_memory(memory) == [1, 2]


@pytest.mark.parametrize(("half_life", "first_is_ahead"), [(None, True), (1000.0, True), (1.0, False)])
def test_what_was_used_often_long_ago_gives_way(half_life: float | None, first_is_ahead: bool) -> None:
    ranking = ScoreRanking(lambda each: 2.0, half_life)
    for number, uses in ((0, 20), (1, 12)):
        for _ in range(uses):
            ranking.note_use(object_id(number))
    assert (ranking.rank(object_id(0)) > ranking.rank(object_id(1))) == first_is_ahead
    assert ranking.rank(object_id(1)) > ranking.rank(object_id(2))


def test_ranks_never_fall_while_others_are_used() -> None:
    ranking = ScoreRanking(lambda each: 3.0, half_life=0.5)
    ranks = []
    for number in range(200):
        ranking.note_use(object_id(number % 7))
        ranks.append(ranking.rank(object_id(0)))
    assert ranks == sorted(ranks)


def test_first_reading_is_not_copied_up() -> None:
    stack, memory, _ = stack_of_two(RecencyRanking())
    stack._places[1].tier.put_from(object_id(1), object_bytes(1))
    read_all(stack, 1)
    assert in_memory(memory) == []
    read_all(stack, 1)
    assert in_memory(memory) == [1]


def test_part_of_an_object_is_never_copied_up() -> None:
    stack, memory, _ = stack_of_two(RecencyRanking())
    stack._places[1].tier.put_from(object_id(1), object_bytes(1))
    for _ in range(3):
        assert stack.get_into(object_id(1), memoryview(bytearray(500))) == 500
        assert stack.get_into(object_id(1), memoryview(bytearray(5000)), 10) == 990
    assert in_memory(memory) == []


def test_ten_requests_for_one_block_cause_one_read() -> None:
    gate, disk = Gate(), NamedMemory("disk", TIER_BYTES)
    slow = Counting(Slow(disk, gate, latency_s=1.0))
    with opened(TierStack([NamedMemory("memory", TIER_BYTES), slow])) as stack, ThreadPoolExecutor(10) as threads:
        disk.put_from(object_id(1), object_bytes(1))
        results = threads.map(lambda index: read_all(stack, 1, 5000 - index), range(10))
        wait_until(lambda: [each.followers for each in stack._flight._under_way.values()] == [9], "all to ask")
        gate.is_open.set()
    assert list(results) == [object_bytes(1)] * 10
    assert slow.calls["get"] == 1


def test_request_for_more_than_the_one_under_way_reads_for_itself() -> None:
    slow = Slow(NamedMemory("disk", TIER_BYTES), time.sleep, latency_s=0.2)
    results = []
    with opened(TierStack([NamedMemory("memory", TIER_BYTES), slow])) as stack, ThreadPoolExecutor(2) as threads:
        slow.put_from(object_id(1), object_bytes(1))
        for size in (100, 2000):
            results.append(threads.submit(read_all, stack, 1, size))
            time.sleep(0.05)
    assert [each.result() for each in results] == [object_bytes(1)[:100], object_bytes(1)]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), TierUnavailable("the first caller's deadline")])
def test_read_that_fails_fails_alone(error: Exception) -> None:
    class FailsFirst(NamedMemory):
        calls = 0

        def get_into(self, *arguments: object) -> int | None:
            self.calls += 1
            if self.calls == 1:
                wait_until(lambda: [each.followers for each in stack._flight._under_way.values()] == [3], "followers")
                raise error
            return super().get_into(*arguments)  # type: ignore[arg-type]

    disk = FailsFirst("disk", TIER_BYTES)
    with opened(TierStack([NamedMemory("memory", TIER_BYTES), disk])) as stack, ThreadPoolExecutor(4) as threads:
        disk.put_from(object_id(1), object_bytes(1))
        results = [threads.submit(read_all, stack, 1) for _ in range(4)]
    outcomes = [each.exception() or each.result() for each in results]
    # What the tier says becomes a miss, a bug shows.
    outcomes.remove(None if isinstance(error, TierUnavailable) else error)
    assert outcomes == [object_bytes(1)] * 3


def test_follower_waits_no_longer_than_its_caller() -> None:
    flight, has_begun, may_end = SingleFlight(), threading.Event(), threading.Event()

    def slow() -> int:
        has_begun.set()
        assert may_end.wait(10)
        return 1

    with ThreadPoolExecutor(1) as threads:
        leader = threads.submit(flight.read, object_id(1), memoryview(bytearray(1)), 0, slow)
        assert has_begun.wait(10)
        with until(time.monotonic() + 0.05):
            assert flight.read(object_id(1), memoryview(bytearray(1)), 0, lambda: 7) == 7
        may_end.set()
        assert leader.result() == 1


def test_prefetched_run_is_read_from_memory() -> None:
    stack, memory, slow = stack_of_two(RecencyRanking(), pages=8)
    put_all(slow, range(5))
    assert stack.prefetch([object_id(number) for number in range(5)], 2000) == 5
    wait_until(lambda: in_memory(memory) == [0, 1, 2, 3, 4], "the run to be there")
    before = slow.calls["get"]
    assert [read_all(stack, number) for number in range(5)] == [object_bytes(number) for number in range(5)]
    assert slow.calls["get"] == before == 5
    stack.close()


def test_prefetch_reads_nothing_that_no_faster_tier_would_take() -> None:
    ranking = ScoreRanking(lambda each: 1.0)
    stack, _, slow = stack_of_two(ranking, pages=1)
    stack.put_from(object_id(0), object_bytes(0))
    slow.put_from(object_id(1), object_bytes(1))
    stack.prefetch([object_id(1)], 2000)
    stack.close()
    assert slow.calls["get"] == 0


def stack_behind_gate(gate: Gate) -> tuple[TierStack, MemoryTier, MemoryTier]:
    """Memory before a tier that lets nobody read while the gate is closed."""
    memory, disk = NamedMemory("memory", 8 * PAGE), NamedMemory("disk", TIER_BYTES)
    stack = TierStack([memory, Slow(disk, gate, latency_s=1.0)])
    stack.open()
    put_all(disk, range(1, 9))
    return stack, memory, disk


def test_prefetch_leaves_what_is_being_read_to_its_reader() -> None:
    gate = Gate()
    stack, memory, _ = stack_behind_gate(gate)
    stack.prefetch([object_id(number) for number in range(1, 5)], 2000)
    reader = threading.Thread(target=read_all, args=(stack, 4))
    reader.start()
    for _ in range(3):
        assert gate.arrived.acquire(timeout=10)
    gate.is_open.set()
    reader.join()
    assert stack._prefetcher.wait(10)
    assert in_memory(memory) == [1, 2, 3]
    stack.close()


def test_close_does_not_wait_for_ever_for_a_tier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.stack.tier.CLOSE_S_MAX", 0.05)
    gate, has_closed = Gate(), threading.Event()
    stack, _, _ = stack_behind_gate(gate)
    stack.prefetch([object_id(number) for number in range(1, 6)], 2000)
    assert gate.arrived.acquire(timeout=10)
    closer = threading.Thread(target=lambda: (stack.close(), has_closed.set()))
    closer.start()
    assert has_closed.wait(10)
    gate.is_open.set()
    closer.join()


def test_slow_tier_delays_only_its_own_readers() -> None:
    """Eight readers hang in the slow tier while a thousand hits in the fast one are served: none of these waited."""
    gate = Gate()
    stack, memory, _ = stack_behind_gate(gate)
    memory.put_from(object_id(0), object_bytes(0))
    with ThreadPoolExecutor(8) as threads:
        readers = [threads.submit(read_all, stack, number) for number in range(1, 9)]
        assert all(gate.arrived.acquire(timeout=10) for _ in readers)
        assert sum(read_all(stack, 0) == object_bytes(0) for _ in range(1000)) == 1000
        assert not gate.arrived.acquire(blocking=False)
        assert not any(reader.done() for reader in readers)
        gate.is_open.set()
    stack.close()


def test_device_memory_and_disk_each_admit_by_rank() -> None:
    ranking = ScoreRanking(lambda each: 1.0)
    device, memory = NamedMemory("device", PAGE, ranking), NamedMemory("memory", 2 * PAGE, ranking)
    stack = TierStack([device, memory, NamedMemory("disk", 100 * PAGE)], ranking)
    stack.open()
    for number, uses in ((0, 2), (1, 4), (2, 9)):
        stack.put_from(object_id(number), object_bytes(number))
        for _ in range(uses):
            assert read_all(stack, number) == object_bytes(number)
    assert (in_memory(device), in_memory(memory)) == ([2], [1, 2])


# What falls out of the local tiers goes to the remote one, within a bound, and comes back from there.


def test_evicted_objects_go_to_the_slower_tier_alone(local_url: str, clock: ManualClock) -> None:
    local = open_tier(local_url, Limits(memory_bytes_max=400_000, disk_bytes_max=400_000), clock, nothing_pinned)
    remote = NamedMemory("remote", 10 << 20)
    with opened(TierStack([local, remote], demote_to=[remote])) as stack:
        put_all(stack, range(20), 50_000)
        assert stack.demoter.wait(10)
        stack.demoter.check()
        evicted = {number for number in range(20) if not local.contains(object_id(number))}
        assert evicted and all(remote.contains(object_id(number)) for number in evicted)
        for number in range(20):
            # What the copy of the one before has pushed out is on its way.
            assert stack.demoter.wait(20)
            assert read_all(stack, number) == object_bytes(number, 50_000)


def test_what_finds_no_room_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.stack.tier.DEMOTE_BYTES_MAX", 1000)
    go_on, sent = threading.Event(), []

    def put(name: object, data: Buffer) -> bool:
        assert go_on.wait(10)
        sent.append(len(data))
        return True

    local, remote = NamedMemory("memory", PAGE), NamedMemory("remote", PAGE)
    remote.put_from = put  # type: ignore[method-assign, assignment]
    stack = TierStack([local, remote], demote_to=[remote])
    stack.open()
    for number in range(5):
        local._offer(object_id(number), 400, lambda buffer: True)
    go_on.set()
    assert stack.demoter.wait(10)
    assert sent == [400, 400]
    stack.close()
    local._offer(object_id(9), 1, lambda buffer: True)
    assert sent == [400, 400]
    stack.demoter.check()


def test_object_that_can_not_be_copied_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = NamedMemory("memory", PAGE), NamedMemory("remote", PAGE)
    monkeypatch.setattr(local, "_copy_out", Mock(side_effect=MemoryError))
    with opened(TierStack([local, remote], demote_to=[remote])) as stack:
        put_all(stack, range(3))
        assert in_memory(local) == [2] and in_memory(remote) == []
        stack.demoter.check()


@pytest.mark.parametrize("scheme", ["http", "pool"])
def test_engine_keeps_locally_and_demotes_to_servers(scheme: str, tmp_path: Path, clock: ManualClock) -> None:
    with running_server() as server:
        limits = Limits(memory_bytes_max=200_000, disk_bytes_max=400_000)
        url = f"disk://{tmp_path} {scheme}://{server.address}?write=evicted"
        with opened(stack_of(url, limits, clock, nothing_pinned)) as stack:
            assert stack.tier_names == ["memory", "disk", scheme]
            stack.put_from(object_id(0), object_bytes(0, 50_000))
            assert server.store.stats().objects == 0
            put_all(stack, range(1, 20), 50_000)
            assert stack.demoter.wait(10)
            assert server.store.contains(object_id(0))
            assert read_all(stack, 0) == object_bytes(0, 50_000)


# Segments kept open for reading: few, closed once, and never those of a store that is gone.


class Watched(Files):
    def __init__(self) -> None:
        self.open_now: Counter[int] = Counter()
        self.opens = 0

    def open(self, path: Path | str, flags: int) -> int:
        descriptor = super().open(path, flags)
        self.open_now[descriptor] += 1
        self.opens += 1
        return descriptor

    def close(self, descriptor: int) -> None:
        assert self.open_now[descriptor] == 1, "closed twice"
        del self.open_now[descriptor]
        super().close(descriptor)


@pytest.fixture
def files() -> Watched:
    return Watched()


@pytest.fixture
def segments(tmp_path: Path, files: Watched) -> OpenSegments:
    for number in range(OPEN_MAX + 5):
        (tmp_path / str(number)).write_bytes(bytes(4096))
    return OpenSegments(files, lambda number: str(tmp_path / str(number)))


def test_file_is_opened_once_and_few_stay_open(segments: OpenSegments, files: Watched) -> None:
    for number in (0, 0, *range(OPEN_MAX + 5)):
        segments.take(number)
    assert files.opens == OPEN_MAX + 5
    assert len(files.open_now) == OPEN_MAX
    segments.close()
    assert not files.open_now


def test_file_in_use_stays_open_until_nobody_holds_it(segments: OpenSegments, files: Watched) -> None:
    first, second = segments.take(1), segments.take(1)
    segments.drop(1)
    del first
    assert os.fstat(second.descriptor).st_size == 4096
    del second
    assert not files.open_now


def test_file_that_was_removed_or_made_anew_is_not_read(segments: OpenSegments, files: Watched, tmp_path: Path) -> None:
    segments.take(1)
    (tmp_path / "1").unlink()
    with pytest.raises(FileNotFoundError):
        segments.take(1)
    (tmp_path / "1").write_bytes(bytes(8192))
    again = segments.take(1)
    assert os.fstat(again.descriptor).st_size == 8192
    assert len(files.open_now) == 1


def test_store_that_was_removed_is_no_longer_served(tmp_path: Path) -> None:
    files = Watched()
    tier = open_disk(tmp_path / "store", files=files)
    tier.put_from(object_id(1), object_bytes(1))
    assert read_all(tier, 1) == object_bytes(1)
    shutil.rmtree(tmp_path / "store")
    assert tier.get_into(object_id(1), memoryview(bytearray(10))) is None
    tier.close()
    assert not files.open_now
