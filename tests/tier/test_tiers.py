from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import ManualClock
from kvtide.config import Limits
from kvtide.errors import TierFull, TierUnavailable
from kvtide.testing.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, read_all
from kvtide.tier import Tier
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.directory import JOURNAL_BYTES_MAX, RemovalJournal
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import pack_object


def nothing_pinned(key: bytes) -> bool:
    return False


class TestMemory(TierSuite):
    @pytest.fixture
    def tier(self, clock: ManualClock) -> Iterator[Tier]:
        tier = MemoryTier(TIER_BYTES, clock, nothing_pinned)
        tier.open()
        yield tier
        tier.check()


class TestDisk(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        tier = DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)
        tier.open()
        yield tier
        tier.check()
        assert list(tmp_path.glob("*.part")) == []


class TestStackOfOne(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        tier = TierStack([DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)])
        tier.open()
        yield tier


def test_least_recently_used_object_goes_first(clock: ManualClock) -> None:
    tier = MemoryTier(3 * 4096, clock, nothing_pinned)
    tier.open()
    for number in range(3):
        tier.put_from(object_id(number), object_bytes(number))
    read_all(tier, 0)
    tier.put_from(object_id(3), object_bytes(3))
    assert [n for n in range(4) if tier.contains(object_id(n))] == [0, 2, 3]
    assert tier.removed_reason(object_id(1)) == "evicted"


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_pinned_object_is_never_evicted(kind: str, tmp_path: Path, clock: ManualClock) -> None:
    # Room for two objects and half of a third; on the disk each has a segment of its own.
    size = 40_000
    tier = open_tier(
        "memory://" if kind == "memory" else str(tmp_path),
        Limits(memory_bytes_max=100_000, disk_bytes_max=140_000),
        clock,
        lambda key: key == object_id(0).key,
    )
    tier.open()
    for number in range(4):
        tier.put_from(object_id(number), object_bytes(number, size))
    assert [n for n in range(4) if tier.contains(object_id(n))] == [0, 3]
    assert read_all(tier, 0) == object_bytes(0, size)
    with pytest.raises(TierFull, match="in use"):
        tier.put_from(object_id(9), object_bytes(9, 2 * size))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_object_larger_than_the_tier_is_refused(kind: str, tmp_path: Path, clock: ManualClock) -> None:
    url = "memory://" if kind == "memory" else str(tmp_path)
    tier = open_tier(url, Limits(memory_bytes_max=10, disk_bytes_max=10), clock, nothing_pinned)
    tier.open()
    with pytest.raises(TierFull, match="may hold 10"):
        tier.put_from(object_id(1), object_bytes(1))


def test_disk_store_is_warm_after_reopen(tmp_path: Path, clock: ManualClock) -> None:
    first = DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)
    first.open()
    first.put_from(object_id(1), object_bytes(1))
    first.close()
    second = DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)
    second.open()
    assert read_all(second, 1) == object_bytes(1)


def test_files_that_are_not_segments_are_passed_over(tmp_path: Path, clock: ManualClock) -> None:
    tier = DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)
    tier.open()
    tier.put_from(object_id(1), object_bytes(1))
    for name in ("readme.seg", "000000000002.txt", "00000000000x.seg", "000000000009.seg"):
        (tmp_path / "segments" / name).write_text("hello")
    assert [info.id for info in tier.objects()] == [object_id(1)]


def test_stack_writes_to_all_and_copies_up_on_second_use(tmp_path: Path, clock: ManualClock) -> None:
    memory = MemoryTier(TIER_BYTES, clock, nothing_pinned)
    disk = DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)
    stack = TierStack([memory, disk])
    stack.open()
    stack.put_from(object_id(1), object_bytes(1))
    assert memory.contains(object_id(1)) and disk.contains(object_id(1))
    memory.delete(object_id(1), "evicted")
    assert read_all(stack, 1) == object_bytes(1)
    assert memory.contains(object_id(1))


def test_stack_serves_from_the_next_tier_when_one_fails(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(MemoryTier):
        name = "broken"

        def get_into(self, *arguments: object) -> int | None:
            raise TierUnavailable("cable cut")

    stack = TierStack(
        [Broken(TIER_BYTES, clock, nothing_pinned), DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)]
    )
    stack.open()
    stack.put_from(object_id(1), object_bytes(1))
    for _ in range(3):
        assert read_all(stack, 1) == object_bytes(1)
    assert len([record for record in caplog.records if "cable cut" in record.message]) == 1
    assert stack.tier_stats()[0].faults == 3


def test_stack_needs_a_tier() -> None:
    with pytest.raises(ValueError, match="at least one tier"):
        TierStack([])


@pytest.mark.parametrize("url", ["", "ftp://x", "disk://host/path", "disk://"])
def test_bad_store_url_is_refused(url: str, clock: ManualClock) -> None:
    with pytest.raises(ValueError, match="store"):
        open_tier(url, Limits(), clock, nothing_pinned)


def test_url_and_bare_path_name_the_same_store(tmp_path: Path, clock: ManualClock) -> None:
    for url in (str(tmp_path / "a b"), f"disk://{tmp_path}/a%20b"):
        tier = open_tier(url, Limits(), clock, nothing_pinned)
        tier.open()
        tier.put_from(object_id(1), object_bytes(1))
    assert (tmp_path / "a b" / "segments").is_dir()
    assert not (tmp_path / "a%20b").exists()


@pytest.mark.parametrize("value", [0, -1])
def test_bounds_must_be_positive(value: int, tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(ValueError, match="positive"):
        Limits(memory_bytes_max=value)
    with pytest.raises(ValueError, match="positive"):
        MemoryTier(value, clock, nothing_pinned)
    with pytest.raises(ValueError, match="positive"):
        DiskTier(tmp_path, value, clock, nothing_pinned)


def test_journal_keeps_its_bound_and_the_newest_lines(tmp_path: Path) -> None:
    journal = RemovalJournal(tmp_path / "removed.log")
    journal.append([object_id(0)], "evicted", 1.0)
    for number in range(1, 8000):
        journal.append([object_id(number)], "corrupt", 1.0)
    assert (tmp_path / "removed.log").stat().st_size <= JOURNAL_BYTES_MAX
    assert journal.reason(object_id(7999)) == "corrupt"
    assert journal.reason(object_id(0)) is None


def test_parents_come_first_and_are_no_use(tmp_path: Path, clock: ManualClock, layout: BlockLayout) -> None:
    tier = DiskTier(tmp_path, TIER_BYTES, clock, nothing_pinned)
    tier.open()
    metas = [BlockMeta(object_id(number), object_id(number - 1).key, 16 * number, layout, "test") for number in (2, 1)]
    for meta in metas:
        tier.put_from(meta.id, pack_object(meta, "raw-1", [Section(SectionId(SectionKind.DATA, 0, 0, 1), b"x")]))
    tier.put_from(object_id(3), b"not an object")
    before = {info.id: info.last_use_s for info in tier.objects()}
    assert list(tier.parents()) == [(meta.id, meta.parent) for meta in reversed(metas)]
    assert {info.id: info.last_use_s for info in tier.objects()} == before
    assert tier.stats().hits == 0
