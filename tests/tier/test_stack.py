from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.wrapped import Slow

from kvtide.clock import ManualClock
from kvtide.errors import TierUnavailable
from kvtide.evict import Ranking, ScoreRanking
from kvtide.evict.ranking import RankedOrder, RecencyRanking
from kvtide.testing.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, read_all
from kvtide.tier import Tier
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide_lab.bench.services import wait_until
from kvtide_lab.wrapped import Counting

PAGE = 4096


def nothing_pinned(key: bytes) -> bool:
    return False


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


class TestStackOfMemoryAndDisk(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        ranking = ScoreRanking(lambda each: 1.0)
        memory = MemoryTier(200_000, clock, nothing_pinned, RankedOrder(ranking))
        stack = TierStack([memory, DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)], ranking)
        stack.open()
        yield stack
        memory.check()
        stack.close()

    # Two tiers hold an object each: what they count together is theirs to say.
    test_second_put_keeps_first_object = None  # type: ignore[assignment]
    test_bytes_stay_under_the_cap = None  # type: ignore[assignment]


class TestStackThatTellsATierLast(TierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        remote = NamedMemory("remote", TIER_BYTES)
        stack = TierStack([NamedMemory("memory", TIER_BYTES), remote], written_last=[remote])
        stack.open()
        yield stack
        stack.close()

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
    for number in range(10):
        stack.put_from(object_id(number), object_bytes(number))
    assert slow.bytes["put"] == 10 * 1000
    for number in range(10):
        for _ in range(3):
            assert read_all(stack, number) == object_bytes(number)
    assert memory.stats().evictions > 0
    assert slow.bytes["put"] == 10 * 1000


def test_object_that_is_worth_less_than_the_least_in_memory_is_not_admitted() -> None:
    important = (object_id(0), object_id(1))
    stack, memory, _ = stack_of_two(ScoreRanking(lambda each: 8.0 if each in important else 1.0, half_life=None))
    for number in range(3):
        stack.put_from(object_id(number), object_bytes(number))
    for _ in range(5):
        assert read_all(stack, 2) == object_bytes(2)
    assert in_memory(memory) == [0, 1]
    for _ in range(4):
        read_all(stack, 2)
    assert in_memory(memory) == [1, 2]


@pytest.mark.parametrize(("ranking", "kept"), [(RecencyRanking, [2, 3]), (Ranking, [0, 1])])
def test_policies_keep_what_their_names_say(ranking: Callable[[], Ranking], kept: list[int]) -> None:
    stack, memory, _ = stack_of_two(ranking())
    for number in range(4):
        stack.put_from(object_id(number), object_bytes(number))
        for _ in range(5 if number < 2 else 2):
            read_all(stack, number)
    assert in_memory(memory) == kept


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


@pytest.mark.parametrize("half_life", [0.0, -1.0])
def test_half_life_that_is_none_is_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life"):
        Ranking(half_life)


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
    stack, results = TierStack([NamedMemory("memory", TIER_BYTES), slow]), []
    stack.open()
    disk.put_from(object_id(1), object_bytes(1))

    def request(size: int) -> None:
        results.append(read_all(stack, 1, size))

    threads = [threading.Thread(target=request, args=(5000 - index,)) for index in range(10)]
    for thread in threads:
        thread.start()
    wait_until(lambda: [each.followers for each in stack._flight._under_way.values()] == [9], "all to ask")
    gate.is_open.set()
    for thread in threads:
        thread.join()
    assert results == [object_bytes(1)] * 10
    assert slow.calls["get"] == 1


def test_request_for_more_than_the_one_under_way_reads_for_itself() -> None:
    slow = Slow(NamedMemory("disk", TIER_BYTES), time.sleep, latency_s=0.2)
    stack, results = TierStack([NamedMemory("memory", TIER_BYTES), slow]), {}
    stack.open()
    slow.put_from(object_id(1), object_bytes(1))
    threads = [
        threading.Thread(target=lambda size=size: results.update({size: read_all(stack, 1, size)}))
        for size in (100, 2000)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert results == {100: object_bytes(1)[:100], 2000: object_bytes(1)}


def test_read_that_fails_fails_alone() -> None:
    class FailsFirst(NamedMemory):
        calls = 0

        def get_into(self, *arguments: object) -> int | None:
            self.calls += 1
            is_first = self.calls == 1
            time.sleep(0.2)
            if is_first:
                raise RuntimeError("a bug")
            return super().get_into(*arguments)  # type: ignore[arg-type]

    disk, results = FailsFirst("disk", TIER_BYTES), []
    stack = TierStack([NamedMemory("memory", TIER_BYTES), disk])
    stack.open()
    disk.put_from(object_id(1), object_bytes(1))

    def request() -> None:
        try:
            results.append(read_all(stack, 1))
        except RuntimeError:
            results.append(b"failed")

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert sorted(results, key=str) == sorted([b"failed", *[object_bytes(1)] * 3], key=str)


def test_prefetched_run_is_read_from_memory() -> None:
    stack, memory, slow = stack_of_two(RecencyRanking(), pages=8)
    for number in range(5):
        slow.put_from(object_id(number), object_bytes(number))
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
    for number in range(1, 9):
        disk.put_from(object_id(number), object_bytes(number))
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
    readers = [threading.Thread(target=read_all, args=(stack, number)) for number in range(1, 9)]
    for reader in readers:
        reader.start()
        assert gate.arrived.acquire(timeout=10)
    assert sum(read_all(stack, 0) == object_bytes(0) for _ in range(1000)) == 1000
    assert not gate.arrived.acquire(blocking=False)
    assert sum(reader.is_alive() for reader in readers) == 8
    gate.is_open.set()
    for reader in readers:
        reader.join()
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


def test_tier_that_fails_never_hides_the_next_one() -> None:
    class Broken(NamedMemory):
        def get_into(self, *arguments: object) -> int | None:
            raise TierUnavailable("cable cut")

    last = NamedMemory("disk", TIER_BYTES)
    stack = TierStack([NamedMemory("memory", TIER_BYTES), Broken("middle", TIER_BYTES), last])
    stack.open()
    last.put_from(object_id(1), object_bytes(1))
    assert read_all(stack, 1) == object_bytes(1)
    assert [stats.faults for stats in stack.tier_stats()] == [0, 1, 0]


@pytest.mark.parametrize("is_foreign", [True, False])
def test_tier_that_is_written_last_is_one_of_several(is_foreign: bool) -> None:
    memory = NamedMemory("memory", PAGE)
    with pytest.raises(ValueError, match="written_last"):
        TierStack([memory], written_last=[NamedMemory("memory", PAGE) if is_foreign else memory])
