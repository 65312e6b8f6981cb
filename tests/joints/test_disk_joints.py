"""The disk tier in an odd world: foreign entries, full disks, stores damaged under a live process, wrong clocks."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from tests.store.test_cache import Collector, OpenCache, fill, ids, metas_of
from tests.stores import disk_bytes, nothing_pinned, open_disk, stored_records
from tests.suites import namespace
from tests.suites.tier_suite import object_bytes, object_id, put_all, read_all

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import ManualClock
from kvtide.errors import TierFull
from kvtide.store.cache import Cache
from kvtide.store.load import Whole
from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.segment import segment_name
from kvtide.tier.files import Files
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import pack_object

pytestmark = pytest.mark.timeout(60)
DISK_BYTES = 4 << 20
# 16 KB each, raw.
BIG = BlockLayout(layers=2, tokens=16, kv_heads=4, head_dim=16, dtype=KVDtype.FLOAT32)


def filled(store: Path, objects: int = 6) -> None:
    """A closed store of so many objects, each in a segment of its own, without a checkpoint."""
    tier = open_disk(store, DISK_BYTES)
    put_all(tier, range(objects), 60_000)
    tier.close()
    (store / "checkpoint").unlink()


def found(tier: DiskTier, numbers: range) -> list[int]:
    """Which of these objects are served, each with its own bytes."""
    served = {number: read_all(tier, number) for number in numbers}
    assert all(data in (None, object_bytes(number, 60_000)) for number, data in served.items())
    return [number for number, data in served.items() if data is not None]


ODD: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
    "socket": lambda path: os.mknod(path, 0o140600),
}


@pytest.mark.parametrize("name", ["segments/000000000003.seg", "checkpoint", "removed.log", "checkpoint.part"])
@pytest.mark.parametrize("kind", ODD)
def test_entry_that_is_no_regular_file_is_ignored(name: str, kind: str, tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    ODD[kind](tmp_path / name)
    tier = open_disk(tmp_path, DISK_BYTES)
    lost = {2} if name.startswith("segments") else set()
    assert found(tier, range(6)) == [number for number in range(6) if number not in lost]
    assert tier.put_from(object_id(9), object_bytes(9, 60_000)) and found(tier, range(9, 10)) == [9]
    assert tier.delete(object_id(9), "removed")
    tier.removed_reason(object_id(9))
    tier.close()


def test_odd_entry_under_the_next_number_stops_no_writer(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    os.mkfifo(tmp_path / "segments" / segment_name(3))
    tier = open_disk(tmp_path, DISK_BYTES)
    assert tier.put_from(object_id(9), object_bytes(9))


def test_root_may_be_a_link(tmp_path: Path) -> None:
    filled(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert found(open_disk(tmp_path / "link", DISK_BYTES), range(6)) == list(range(6))


class BadSegment(Files):
    """One segment can't be opened, or its bytes can't be read."""

    def __init__(self, name: str, code: int) -> None:
        self._name, self._code = name, code
        self._descriptors: set[int] = set()

    def open(self, path: Path | str, flags: int) -> int:
        if str(path).endswith(self._name) and self._code == errno.EACCES:
            raise PermissionError(self._code, os.strerror(self._code))
        descriptor = super().open(path, flags)
        (self._descriptors.add if str(path).endswith(self._name) else self._descriptors.discard)(descriptor)
        return descriptor

    def preadv(self, descriptor: int, parts: object, offset: int) -> int:
        if descriptor in self._descriptors:
            raise OSError(self._code, os.strerror(self._code))
        return super().preadv(descriptor, parts, offset)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_one_unreadable_segment_costs_that_segment(code: int, tmp_path: Path) -> None:
    filled(tmp_path)
    tier = open_disk(tmp_path, DISK_BYTES, BadSegment(segment_name(3), code))
    assert found(tier, range(6)) == [0, 1, 3, 4, 5]
    # Eviction passes it over.
    put_all(tier, range(10, 200), 60_000)
    assert found(tier, range(199, 200)) == [199]
    assert disk_bytes(tmp_path) <= DISK_BYTES + 3 * ALIGN_BYTES
    tier.close()
    if code == errno.EACCES:
        assert found(open_disk(tmp_path, DISK_BYTES), range(2, 3)) == [2], "whoever may read it still finds it"


class SmallDisk(Files):
    """A disk of so many bytes or files, of which others may take all that becomes free."""

    def __init__(self, store: Path, bytes_max: int, code: int = errno.ENOSPC, files_max: int = 10_000) -> None:
        self._store, self._bytes_max, self._code, self._files_max = store, bytes_max, code, files_max
        self.has_greedy_neighbour = False

    def _check(self, size: int, files: int) -> None:
        held = list((self._store / "segments").glob("*.seg"))
        used = sum(path.stat().st_size for path in held)
        if self.has_greedy_neighbour or used + size > self._bytes_max or len(held) + files > self._files_max:
            raise OSError(self._code, os.strerror(self._code))

    def open(self, path: Path | str, flags: int) -> int:
        if flags & os.O_CREAT and str(path).endswith(".seg"):
            self._check(0, 1)
        return super().open(path, flags)

    def allocate(self, descriptor: int, size: int) -> None:
        self._check(size, 0)
        super().allocate(descriptor, size)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("files_max", [10_000, 5])
def test_disk_smaller_than_the_cap_keeps_the_newest(code: int, files_max: int, tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 1 << 30, SmallDisk(tmp_path, 1 << 20, code, files_max))
    put_all(tier, range(60), 60_000)
    kept = found(tier, range(60))
    assert kept[-1] == 59 and len(kept) >= min(4, files_max - 1)
    assert tier.stats().evictions > 0
    tier.check()


def test_what_others_take_of_a_full_disk_does_not_empty_the_cache(tmp_path: Path) -> None:
    disk, clock = SmallDisk(tmp_path, 1 << 20), ManualClock(1000.0)
    tier = open_disk(tmp_path, DISK_BYTES, disk, clock)
    put_all(tier, range(10), 60_000)
    disk.has_greedy_neighbour = True
    for number in range(100, 120):
        with pytest.raises(TierFull):
            tier.put_from(object_id(number), object_bytes(number, 60_000))
    assert len(found(tier, range(10))) >= 7
    disk.has_greedy_neighbour = False
    clock.advance(60.0)
    assert tier.put_from(object_id(100), object_bytes(100, 60_000)) and found(tier, range(100, 101)) == [100]


def restored(cache: Cache, metas: list[BlockMeta]) -> int:
    """Ask as an engine does, then store what was not restored; how many blocks came."""
    matched = cache.match(ids(metas))
    count = cache.load(metas[:matched], Whole(Collector())).blocks
    if count < len(metas):
        fill(cache, metas[count:])
    return count


@pytest.mark.parametrize("damage", ["segments removed", "segments cut", "one segment removed"])
def test_store_damaged_under_a_live_process_heals_at_the_next_store(
    damage: str, tmp_path: Path, layout: BlockLayout, open_cache: OpenCache
) -> None:
    store, metas = tmp_path / "store", metas_of(layout, 6)
    fill(open_cache(store), metas)
    cache = open_cache(store, memory_bytes_max=1)
    assert restored(cache, metas) == 6
    segments = sorted((store / "segments").glob("*.seg"))
    if damage == "segments removed":
        shutil.rmtree(store / "segments")
    elif damage == "one segment removed":
        segments[0].unlink()
    else:
        for path in segments:
            os.truncate(path, 2 * ALIGN_BYTES)
    restored(cache, metas)
    assert restored(cache, metas) == 6, "one re-store heals all of its blocks"
    assert open_cache(store).match(ids(metas)) == 6


def test_store_moved_under_a_live_process_is_made_anew(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "store", DISK_BYTES)
    tier.put_from(object_id(1), object_bytes(1))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert tier.put_from(object_id(2), object_bytes(2))
    assert read_all(open_disk(tmp_path / "store", DISK_BYTES), 2) == object_bytes(2)
    assert read_all(open_disk(tmp_path / "elsewhere", DISK_BYTES), 1) == object_bytes(1)


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_own_segment_damaged_while_it_is_written_is_left(damage: str, tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 64 << 20)
    put_all(tier, range(3), 60_000)
    path = tmp_path / "segments" / segment_name(1)
    path.unlink() if damage == "removed" else os.truncate(path, ALIGN_BYTES)
    assert not any(tier.contains(object_id(number)) for number in range(3)), "stale entries don't count as stored"
    put_all(tier, range(3), 60_000)
    assert found(tier, range(3)) == [0, 1, 2]
    tier.close()
    assert found(open_disk(tmp_path, 64 << 20), range(3)) == [0, 1, 2]


def test_record_that_its_segment_is_too_short_for_is_not_listed(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    os.truncate(tmp_path / "segments" / segment_name(1), 4 * ALIGN_BYTES)
    tier = open_disk(tmp_path, DISK_BYTES)
    assert not tier.contains(object_id(0)) and list(tier.objects()) == []


@pytest.mark.parametrize("bytes_max", [65_000, 100_000, 250_000])
def test_prompt_longer_than_the_disk_keeps_its_beginning(bytes_max: int, open_cache: OpenCache) -> None:
    """Also behind what was there before, when it is stored again, and over a restart."""
    cache = open_cache(codec="raw", memory_bytes_max=1, disk_bytes_max=bytes_max)
    other = [replace(meta, id=object_id(number), start=0) for number, meta in enumerate(metas_of(BIG, 4))]
    metas = metas_of(BIG, 20)
    fill(cache, other)
    for _ in range(2):
        fill(cache, metas)
        held = [cache.tiers.contains(meta.id) for meta in metas]
        run = len(list(takewhile(bool, held)))
        room = (bytes_max - 4 * ALIGN_BYTES) // (7 * ALIGN_BYTES)
        assert run == sum(held) >= room, "a leading run, and no block behind it"
    assert not any(cache.tiers.contains(meta.id) for meta in other), "older prompts went first"
    assert open_cache(codec="raw", memory_bytes_max=1, disk_bytes_max=bytes_max).match(ids(metas)) == run


def test_other_prompt_takes_the_place_of_one_that_was_refused_its_end(open_cache: OpenCache) -> None:
    cache = open_cache(codec="raw", memory_bytes_max=1, disk_bytes_max=100_000)
    first, second = metas_of(BIG, 8), metas_of(BIG, 8, namespace("another"))
    fill(cache, first)
    fill(cache, second)
    assert cache.tiers.contains(second[0].id) and not cache.tiers.contains(first[0].id)
    fill(cache, first)
    assert cache.tiers.contains(first[0].id)


def test_parents_that_go_in_circles_end(tmp_path: Path) -> None:
    """Labels are foreign bytes: each may name the other as its parent."""
    tier = open_disk(tmp_path, 100_000)
    for number in range(8):
        meta = BlockMeta(object_id(number), object_id(number ^ 1).key, 16, BIG, "test")
        section = Section(SectionId(SectionKind.DATA, 0, 0, 2), bytes(16_000))
        assert tier.put_from(meta.id, pack_object(meta, "raw-1", [section]))


@pytest.mark.parametrize("wall_s", [-1e6, -1e300, 1e300, float("inf"), float("nan")])
def test_clock_that_no_field_holds_costs_nothing(wall_s: float, tmp_path: Path) -> None:
    tier = open_disk(tmp_path, DISK_BYTES, clock=ManualClock(wall_s))
    assert tier.put_from(object_id(1), object_bytes(1)) and read_all(tier, 1) == object_bytes(1)
    tier.delete(object_id(2), "removed")
    tier.close()
    assert (tmp_path / "checkpoint").exists()
    assert read_all(open_disk(tmp_path, DISK_BYTES), 1) == object_bytes(1)


def test_look_writes_nothing(tmp_path: Path) -> None:
    """Not even where a killed process left reserved space, or the checkpoint is gone."""
    filled(tmp_path)
    os.truncate(tmp_path / "segments" / segment_name(6), 1 << 20)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    tier = DiskTier(tmp_path, DISK_BYTES, ManualClock(1000.0), nothing_pinned)
    tier.open_read_only()
    assert found(tier, range(6)) == list(range(6))
    tier.close()
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
    assert len(stored_records(tmp_path)) == 6
