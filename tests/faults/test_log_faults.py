"""The segment log under faults: never a wrong byte, never a lost record that was committed and not damaged itself."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.faults.conftest import Tally
from tests.faults.files import FAULT_KINDS, FaultyFiles, UnsyncedFiles
from tests.faults.writers import append_objects, heard, writing
from tests.store.test_cache import Collector, fill, metas_of
from tests.stores import disk_bytes, open_disk, stored_records
from tests.suites import block_meta, smooth_bits
from tests.suites.tier_suite import object_bytes, object_id, put_all, read_all

from kvtide.block import BlockLayout, KVDtype
from kvtide.clock import ManualClock, SystemClock
from kvtide.codec import CodecRegistry
from kvtide.codec.base import RawCodec
from kvtide.config import Limits
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.evict.policies import policy_named
from kvtide.index import RadixIndex
from kvtide.store.cache import Cache, cache_for
from kvtide.store.load import MissReason, Whole
from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.segment import (
    RecordHeader,
    SegmentHeader,
    pack_record_header,
    pack_segment_header,
    record_bytes,
    segment_name,
)
from kvtide.tier.files import Files
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId
from kvtide.wire import ObjectLabel, pack_object, parse_object

pytestmark = pytest.mark.timeout(3600)

SEED = 20250611
KILLS = 60
FLIPS = 2000
LAYOUT = BlockLayout(layers=2, tokens=32, kv_heads=2, head_dim=32, dtype=KVDtype.FLOAT32)


@pytest.mark.parametrize("bytes_max", [1 << 34, 16 << 20], ids=["roomy", "evicting"])
def test_killed_writer_loses_nothing_that_it_committed(
    bytes_max: int, tmp_path: Path, tally: Tally, fault_factor: int
) -> None:
    # By number: the size, and whether it was never to be removed.
    rng, committed, store = random.Random(SEED), dict[int, tuple[int, bool]](), tmp_path / "store"
    for kill in range(KILLS // 2 * fault_factor):
        if kill % 10 == 0:
            shutil.rmtree(store, ignore_errors=True)
            committed = {}
        with writing(append_objects, store, bytes_max, kill * 10_000, rng.randrange(1 << 30)) as (writer, hears):
            time.sleep(rng.uniform(0.0, 0.1))
            writer.kill()
            committed |= dict(heard(hears))
        tier = open_disk(store, bytes_max, UnsyncedFiles())
        found = {number: read_all(tier, number, 200_001) for number in committed}
        tier.close()
        contents = {number: object_bytes(number, size) for number, (size, _) in committed.items()}
        kept = [number for number, (_, stays) in committed.items() if stays and bytes_max > 1 << 30]
        tally.judge("kill", found, contents, kept, f"seed {SEED}, kill {kill}")
        assert disk_bytes(store) <= bytes_max + (1 << 20)


@pytest.fixture
def real_store(quick_path: Path) -> tuple[Path, dict[ObjectId, bytes]]:
    """A closed store with three objects that carry their checksums."""
    contents = {}
    for position in range(3):
        meta = block_meta(LAYOUT, seed=position)
        packed = pack_object(meta, "raw-1", RawCodec().encode(meta, smooth_bits(LAYOUT, position)))
        contents[meta.id] = bytes(packed)
    tier = open_disk(quick_path / "store", 1 << 24, UnsyncedFiles())
    for each, data in contents.items():
        tier.put_from(each, data)
    tier.close()
    return quick_path / "store", contents


def served(store: Path, contents: dict[ObjectId, bytes]) -> dict[ObjectId, bytes | None]:
    """What a consumer would use of each object: all of it, after its checks, or nothing."""
    tier, found = open_disk(store, 1 << 24, UnsyncedFiles()), dict[ObjectId, bytes | None]()
    for each, data in contents.items():
        buffer = memoryview(bytearray(len(data) + 1))
        found[each] = None
        with suppress(CorruptPayload):
            if (count := tier.get_into(each, buffer)) is not None:
                parse_object(buffer[:count], each).sections()
                found[each] = bytes(buffer[:count])
    tier.close()
    return found


def test_write_torn_at_any_page_is_a_miss(real_store: tuple[Path, dict[ObjectId, bytes]], tally: Tally) -> None:
    """Both ways: body without header, as a kill leaves it; header with part of the body, as a power failure may."""
    store, contents = real_store
    (store / "checkpoint").unlink()
    victim = next(record for record in stored_records(store) if record.header.sequence == 1)
    image, start = victim.path.read_bytes(), victim.header.offset
    stop = start + record_bytes(victim.header.size)
    for cut in range(start + ALIGN_BYTES, stop + 1, ALIGN_BYTES):
        for has_header in (False, True):
            torn = bytearray(image)
            torn[cut:stop] = bytes(stop - cut)
            if not has_header:
                torn[start : start + ALIGN_BYTES] = bytes(ALIGN_BYTES)
            victim.path.write_bytes(torn)
            (store / "checkpoint").unlink(missing_ok=True)
            found = served(store, contents)
            kept = contents.keys() - {victim.header.id}
            tally.judge("torn", found, contents, kept, f"cut at {cut}, header {has_header}")
            assert (found[victim.header.id] is not None) == (has_header and cut == stop)


def test_flipped_bit_is_never_served(
    real_store: tuple[Path, dict[ObjectId, bytes]], tally: Tally, fault_factor: int
) -> None:
    store, contents = real_store
    records, rng = stored_records(store), random.Random(SEED)
    segment, checkpoint = records[0].path, store / "checkpoint"
    images = {path: path.read_bytes() for path in (segment, checkpoint)}
    headers = [record.header.offset for record in records]
    for flip in range(FLIPS * fault_factor):
        # A third each: the checkpoint, a checked header, anywhere in the segment.
        path = checkpoint if flip % 3 == 0 else segment
        start, stop = (rng.choice([0, *headers]), 256) if flip % 3 == 1 else (0, len(images[path]))
        position = start + rng.randrange(stop)
        damaged = bytearray(images[path])
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        if flip % 2 and path == segment:
            checkpoint.unlink()
        found = served(store, contents)
        hit = {
            header.id
            for header in (record.header for record in records)
            if path == segment and 0 <= position - header.offset < record_bytes(header.size)
        }
        why = f"seed {SEED}, flip {flip}: {path.name} at {position}"
        tally.judge("flip", found, contents, contents.keys() - hit, why)
        for each, image in images.items():
            each.write_bytes(image)


def scenario(tier: DiskTier) -> set[int]:
    """Do a bit of everything and return the numbers of the objects that were stored."""
    stored = set()
    for number in range(14):
        try:
            if tier.put_from(object_id(number), object_bytes(number, 30_000)):
                stored.add(number)
            read_all(tier, number // 2, 30_001)
            if number in {3, 9}:
                tier.delete(object_id(number), "removed")
        except TierUnavailable:
            continue
    return stored


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_failing_system_call_is_a_miss(kind: str, quick_path: Path, tally: Tally) -> None:
    """The n-th call fails, for every n that there is; then the store still works."""
    for nth in range(10_000):
        store, files = quick_path / str(nth), FaultyFiles(kind, nth)
        tier, stored = DiskTier(store, 320_000, ManualClock(1000.0), lambda key: False, files), set()
        try:
            tier.open()
            stored = scenario(tier)
        except TierUnavailable:
            assert not stored
        tier.close()
        after = open_disk(store, 320_000, UnsyncedFiles())
        found = {number: read_all(after, number, 30_001) for number in range(14)}
        kept = [number for number in stored if after.removed_reason(object_id(number)) is None]
        assert after.put_from(object_id(99), object_bytes(99)) and read_all(after, 99) == object_bytes(99)
        after.check()
        after.close()
        assert disk_bytes(store) <= 320_000 + 16_384
        shutil.rmtree(store)
        if not files.failed:
            assert nth > 15, "the scenario makes more calls than that"
            return
        contents = {number: object_bytes(number, 30_000) for number in found}
        tally.judge(kind, found, contents, kept, f"{kind} at call {nth}, {files.failed}")
    pytest.fail("the scenario has no end")


def test_full_disk_gives_up_the_oldest_and_nothing_wrong(small_disk: Callable[[str], Path], tally: Tally) -> None:
    disk, objects = small_disk("size=8m"), 200
    tier = open_disk(disk / "store", files=UnsyncedFiles())
    (disk / "ballast").write_bytes(bytes(2 << 20))
    put_all(tier, range(objects), 100_000)
    for reader in (tier, open_disk(disk / "store", files=UnsyncedFiles())):
        found = {number: read_all(reader, number, 100_001) for number in range(objects)}
        contents = {number: object_bytes(number, 100_000) for number in found}
        tally.judge("full", found, contents, range(objects - 30, objects), "the newest stay")


def test_ten_gigabytes_of_segments_open_in_a_second(tmp_path: Path) -> None:
    """By headers alone, without a checkpoint: bodies are holes."""
    segments, records, size = 40, 64, (4 << 20) - ALIGN_BYTES
    folder = tmp_path / "segments"
    folder.mkdir()
    for number in range(1, segments + 1):
        with (folder / segment_name(number)).open("wb") as file:
            file.write(pack_segment_header(SegmentHeader(number, 0, 0)))
            for sequence in range(records):
                offset = ALIGN_BYTES + sequence * record_bytes(size)
                file.seek(offset)
                each = object_id(number * 1000 + sequence)
                file.write(pack_record_header(RecordHeader(each, ObjectLabel(), number, sequence, offset, size, 0)))
            file.truncate(offset + record_bytes(size))
    started_s = time.monotonic()
    tier = open_disk(tmp_path, 64 << 30, UnsyncedFiles())
    open_s = time.monotonic() - started_s
    assert tier.stats().objects == segments * records
    assert tier.stats().used_bytes > 10e9
    print(f"opened {segments * records} records in {open_s:.3f} s")
    assert open_s < 10


def test_cap_holds_at_every_moment(tmp_path: Path) -> None:
    """Five times the cap by four threads while two read: the disk never takes more than the cap."""
    bytes_max, threads, wrong, is_done = 32 << 20, 4, [], threading.Event()
    tier = open_disk(tmp_path / "store", bytes_max, UnsyncedFiles())

    def write(thread: int) -> None:
        rng = random.Random(SEED + thread)
        written = number = 0
        while written < 5 * bytes_max // threads:
            size = rng.randrange(50_000, 1_500_000)
            tier.put_from(object_id(thread * 1000 + number), object_bytes(thread * 1000 + number, size))
            written += size
            number += 1

    def read(reader: int) -> None:
        rng = random.Random(SEED - reader)
        while not is_done.is_set():
            number = rng.randrange(threads) * 1000 + rng.randrange(60)
            data = read_all(tier, number, 1_500_000)
            if data is not None and data != object_bytes(number, len(data)):
                wrong.append(number)

    workers = [threading.Thread(target=write, args=(thread,)) for thread in range(threads)]
    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in [*workers, *readers]:
        thread.start()
    used_max = 0
    while any(worker.is_alive() for worker in workers):
        used_max = max(used_max, disk_bytes(tmp_path / "store"))
        time.sleep(0.002)
    used_max = max(used_max, disk_bytes(tmp_path / "store"))
    is_done.set()
    for thread in [*workers, *readers]:
        thread.join()
    assert wrong == []
    assert tier.stats().evictions > 0
    tier.check()
    print(f"at most {used_max} bytes of {bytes_max} on the disk")
    # The directories themselves are pages too.
    assert bytes_max // 2 < used_max <= bytes_max + 3 * ALIGN_BYTES


def test_slow_disk_keeps_the_deadline(tmp_path: Path) -> None:
    """Some reads come at once, then one takes ten minutes: the load ends at its deadline with what came, all right."""
    is_over, left = threading.Event(), iter(range(8))

    class SlowFiles(Files):
        def preadv(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
            if next(left, None) is None:
                is_over.wait(600)
            return super().preadv(descriptor, parts, offset)

    metas = metas_of(LAYOUT, 20)
    with cache_for(str(tmp_path), RawCodec()) as writer:
        contents = fill(writer, metas)
    tiers = TierStack([DiskTier(tmp_path, 1 << 30, ManualClock(0.0), lambda key: False, SlowFiles())])
    clock = SystemClock()
    index = RadixIndex(clock, policy_named("lru"), 100)
    with Cache(tiers, index, RawCodec(), CodecRegistry(), clock, Limits(load_threads=1)) as cache:
        sink = Collector()
        report = cache.load(metas, Whole(sink), deadline_s=2.0)
        is_over.set()
        assert report.reason is MissReason.DEADLINE
        assert 0 < report.blocks < 20
        assert all(np.array_equal(sink.blocks[position], contents[position]) for position in range(report.blocks))
