import fcntl
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import xxhash
from tests.stores import disk_bytes, open_disk, opened, stored_records
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, put_all, read_all

from kvtide.clock import ManualClock
from kvtide.errors import TierUnavailable
from kvtide.evict import order_named
from kvtide.tier import Tier
from kvtide.tier.buffers import ALIGN_BYTES, aligned_buffer
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.directory import parse_checkpoint
from kvtide.tier.disk.segment import (
    STAGING_BYTES,
    RecordHeader,
    RecordState,
    Scan,
    SegmentHeader,
    pack_record_header,
    pack_segment_header,
    parse_record_header,
    parse_segment_header,
    record_bytes,
    scan_segment,
    segment_name,
)
from kvtide.tier.files import FileInfo, Files
from kvtide.types import ObjectId
from kvtide.wire import ObjectLabel

GOLDEN = Path(__file__).parent.parent / "golden" / "segment-2.seg"


class CachedFiles(Files):
    """A file system that refuses to go around its page cache, at opening or at the first transfer."""

    def __init__(self, refuses_at_open: bool) -> None:
        self._refuses_at_open = refuses_at_open
        self.refused = 0

    def open(self, path: Path | str, flags: int) -> int:
        if flags & os.O_DIRECT and self._refuses_at_open:
            self.refused += 1
            raise OSError(22, "Invalid argument")
        return super().open(path, flags)

    def _check(self, descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            self.refused += 1
            raise OSError(22, "Invalid argument")

    def preadv(self, descriptor: int, parts: object, offset: int) -> int:
        self._check(descriptor)
        return super().preadv(descriptor, parts, offset)  # type: ignore[arg-type]

    def pwritev(self, descriptor: int, parts: object, offset: int) -> int:
        self._check(descriptor)
        return super().pwritev(descriptor, parts, offset)  # type: ignore[arg-type]


class Counted(Files):
    reads = written_bytes = 0

    def preadv(self, descriptor: int, parts: object, offset: int) -> int:
        self.reads += 1
        return super().preadv(descriptor, parts, offset)  # type: ignore[arg-type]

    def pwritev(self, descriptor: int, parts: object, offset: int) -> int:
        written = super().pwritev(descriptor, parts, offset)  # type: ignore[arg-type]
        self.written_bytes += written
        return written


@pytest.mark.parametrize("refuses_at_open", [True, False])
class TestThroughThePageCache(TierSuite):
    @pytest.fixture
    def files(self, refuses_at_open: bool) -> CachedFiles:
        return CachedFiles(refuses_at_open)

    @pytest.fixture
    def tier(self, tmp_path: Path, files: CachedFiles) -> Tier:
        return open_disk(tmp_path, TIER_BYTES, files)

    def test_direct_transfers_are_tried_first(self, tier: Tier, files: CachedFiles) -> None:
        self.test_put_then_get_gives_same_bytes(tier)
        assert files.refused > 0


SIZES = [1, ALIGN_BYTES - 1, ALIGN_BYTES, STAGING_BYTES, STAGING_BYTES + 5, 3 * STAGING_BYTES + 7]


@pytest.mark.parametrize("size", SIZES)
def test_any_range_of_any_size_is_read_into_any_buffer(size: int, tmp_path: Path) -> None:
    tier, content = open_disk(tmp_path, 32 << 20), object_bytes(1, size)
    source = aligned_buffer(size)
    source[:] = content
    tier.put_from(object_id(1), source)
    tier.put_from(object_id(2), content)
    for number in (1, 2):
        for offset in {0, 1, ALIGN_BYTES, size // 2, max(0, size - 1)}:
            for shift in (0, 1):
                buffer = aligned_buffer(size + 2)[shift : shift + size + 1]
                count = tier.get_into(object_id(number), buffer, offset)
                assert bytes(buffer[:count]) == content[offset:]
                assert not any(buffer[count:])


def test_checkpoint_saves_the_scan_and_a_lost_one_does_no_harm(tmp_path: Path) -> None:
    with opened(open_disk(tmp_path, 64 << 20)) as writer:
        put_all(writer, range(50))
    for has_checkpoint, reads_max in ((True, 10), (False, 100)):
        files = Counted()
        if not has_checkpoint:
            (tmp_path / "checkpoint").unlink()
        reader = open_disk(tmp_path, 64 << 20, files)
        assert files.reads < reads_max
        assert reader.stats().objects == 50
        assert read_all(reader, 49) == object_bytes(49)


def test_removal_outlives_an_older_checkpoint(tmp_path: Path) -> None:
    with opened(open_disk(tmp_path, TIER_BYTES)) as tier:
        put_all(tier, (1, 2))
    checkpoint = (tmp_path / "checkpoint").read_bytes()
    with opened(open_disk(tmp_path, TIER_BYTES)) as remover:
        assert remover.delete(object_id(1), "removed")
    (tmp_path / "checkpoint").write_bytes(checkpoint)
    assert sum(len(summary.entries) for summary in parse_checkpoint(checkpoint)) == 2
    assert [info.id for info in open_disk(tmp_path, TIER_BYTES).objects()] == [object_id(2)]


def test_checkpoint_of_who_missed_a_removal_is_not_believed(tmp_path: Path) -> None:
    put_all(writer := open_disk(tmp_path), (1, 2))
    writer.close()
    one, other = open_disk(tmp_path), open_disk(tmp_path)
    for tier, number in ((other, 1), (one, 2)):
        tier.delete(object_id(number), "removed")
    other.close()
    one.close()
    assert not open_disk(tmp_path).contains(object_id(1))


def test_checkpoint_of_who_followed_past_a_removal_is_not_believed(tmp_path: Path) -> None:
    writer, follower = open_disk(tmp_path), open_disk(tmp_path)
    put_all(writer, [1])
    assert follower.contains(object_id(1))
    writer.delete(object_id(1), "removed")
    put_all(writer, [2])
    assert follower.contains(object_id(2))
    writer.close()
    follower.close()
    assert [info.id for info in open_disk(tmp_path).objects()] == [object_id(2)]


def test_removal_is_seen_by_a_tier_that_knows_the_object(tmp_path: Path) -> None:
    early, late = open_disk(tmp_path, TIER_BYTES), open_disk(tmp_path, TIER_BYTES)
    early.put_from(object_id(1), object_bytes(1))
    assert read_all(late, 1) == object_bytes(1)
    assert late.delete(object_id(1), "corrupt")
    assert read_all(early, 1) is None
    assert early.removed_reason(object_id(1)) == "corrupt"
    assert early.put_from(object_id(1), object_bytes(1)) and read_all(late, 1) == object_bytes(1)


def test_segment_made_again_under_its_number_is_another_one(tmp_path: Path) -> None:
    with opened(open_disk(tmp_path)) as first:
        put_all(first, (1, 2))
    late = open_disk(tmp_path)
    with opened(open_disk(tmp_path)) as remover:
        assert remover.delete(object_id(1), "removed") and remover.delete(object_id(2), "removed")
    put_all(open_disk(tmp_path, clock=ManualClock(2000.0)), (3, 4, 5))
    assert {info.id for info in late.objects()} == {object_id(3), object_id(4), object_id(5)}
    late.check()


def test_every_copy_of_an_object_is_removed(tmp_path: Path) -> None:
    one, other = open_disk(tmp_path, TIER_BYTES), open_disk(tmp_path, TIER_BYTES)
    for tier in (one, other):
        tier.put_from(object_id(1), object_bytes(1))
    assert len(stored_records(tmp_path)) == 2
    assert one.delete(object_id(1), "removed")
    assert stored_records(tmp_path) == []


class BeforeTheLock(Files):
    """Does something once, when the directory is locked first."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = [then]

    def try_lock(self, descriptor: int, is_shared: bool = False) -> bool:
        while self.then:
            self.then.pop()()
        return super().try_lock(descriptor, is_shared)


def test_replaced_object_has_no_older_copy_of_another_process_left(tmp_path: Path) -> None:
    one, other = open_disk(tmp_path), open_disk(tmp_path)
    # From now on it has a segment, and looks for nothing to store more.
    put_all(one, [2])
    for tier in (other, one):
        tier.put_from(object_id(1), b"coarse" * 50)
    assert one.replace(object_id(1), b"fine" * 50)
    later = open_disk(tmp_path)
    assert read_all(later, 1) == b"fine" * 50
    assert len(later._log.catalog.copies(object_id(1))) == 1


def test_object_that_two_processes_replace_at_once_stays(tmp_path: Path) -> None:
    files = BeforeTheLock(lambda: None)
    other, one = open_disk(tmp_path), open_disk(tmp_path, files=files)
    for number, tier in enumerate((other, one), 1):
        # From now on it has a segment, and locks the folder to remove copies alone.
        put_all(tier, [number])
    files.then.append(lambda: other.replace(object_id(1), b"other" * 50))
    one.replace(object_id(1), b"fine" * 50)
    assert read_all(open_disk(tmp_path), 1) == b"other" * 50


def test_newest_of_two_copies_is_read_however_the_folder_is_listed_and_older_ones_go(tmp_path: Path) -> None:
    class Turned(Files):
        def listing(self, folder: Path) -> list[FileInfo]:
            return sorted(super().listing(folder), reverse=True)

    bytes_max, new, offered = 16 << 20, b"new" * 6000, list[ObjectId]()
    with opened(open_disk(tmp_path, bytes_max)) as first:
        put_all(first, range(1, 11), 20_000)
        # As one that was killed while it replaced it.
        first._log.append(object_id(2), new)
    open_disk(tmp_path, bytes_max)._log.append(object_id(1), new)
    tier = open_disk(tmp_path, bytes_max, Turned(), order_of=partial(order_named, "lru", bytes_max=bytes_max))
    tier.offer_to(lambda name, size, fill: offered.append(name))
    for number in range(100, 900):
        assert read_all(tier, 1) == new
        put_all(tier, [number], 20_000)
    assert len(tier._log.catalog.copies(object_id(1))) == 1
    assert [offered.count(object_id(number)) for number in (1, 2)] == [0, 1]


def test_removing_everything_frees_the_disk(tmp_path: Path) -> None:
    with opened(open_disk(tmp_path, 64 << 20)) as tier:
        put_all(tier, range(8), 900_000)
    tier = open_disk(tmp_path, 64 << 20)
    for number in range(8):
        tier.delete(object_id(number), "removed")
    assert disk_bytes(tmp_path) < 100_000


@pytest.mark.parametrize("is_open", [True, False])
def test_segment_somebody_appends_to_is_not_evicted_nor_anything_used_for_it(tmp_path: Path, is_open: bool) -> None:
    order_of = partial(order_named, "lru", bytes_max=TIER_BYTES)
    other, tier = open_disk(tmp_path, TIER_BYTES), open_disk(tmp_path, TIER_BYTES, order_of=order_of)
    other.put_from(object_id(1000), object_bytes(1000, 50_000))
    # As a child has it that was forked meanwhile.
    child = os.dup(other._log._writer.cached)
    if not is_open:
        other.close()
    for number in range(60):
        put_all(tier, [number], 50_000)
        assert read_all(tier, number % 5) is not None
    assert tier.stats().evictions > 0
    assert read_all(tier, 1000) == (object_bytes(1000, 50_000) if is_open else None)
    other.close()
    os.close(child)


def test_hot_object_moves_when_its_segment_is_evicted(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 16 << 20)
    for number in range(400):
        tier.put_from(object_id(number), object_bytes(number, 50_000))
        assert read_all(tier, 0) == object_bytes(0, 50_000)
    assert tier.removed_reason(object_id(1)) == "evicted"
    assert tier.removed_reason(object_id(0)) is None
    tier.check()


@pytest.mark.parametrize("events_max", [1 << 16, 16])
def test_disk_with_policy_writes_little_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events_max: int) -> None:
    monkeypatch.setattr("kvtide.tier.disk.catalog.EVENTS_MAX", events_max)
    files, bytes_max, size = Counted(), 16 << 20, 20_000
    order_of = partial(order_named, "lru", bytes_max=bytes_max)
    tier = open_disk(tmp_path, bytes_max, files, order_of=order_of)
    rng = random.Random(3)
    for number in range(1500):
        tier.put_from(object_id(number), object_bytes(number, size))
        # Used ones lie everywhere, so that no segment is of cold ones alone.
        used = object_id(rng.randrange(number + 1))
        if tier.contains(used):
            tier.get_into(used, memoryview(bytearray(size)))
    assert tier.stats().evictions > 700
    # Half of a segment would move if it went once the other half is given up.
    assert files.written_bytes < 1.25 * 1500 * record_bytes(size)
    tier.check()


def test_object_evicted_by_another_process_is_a_miss(tmp_path: Path) -> None:
    early, late = open_disk(tmp_path, TIER_BYTES), open_disk(tmp_path, TIER_BYTES)
    put_all(early, (0, 1), 50_000)
    put_all(late, range(2, 60), 50_000)
    assert read_all(early, 0) is None
    assert read_all(early, 59) == object_bytes(59, 50_000)


def test_reserved_space_is_given_back_at_close_and_after_a_kill(tmp_path: Path) -> None:
    with opened(open_disk(tmp_path / "closed", 1 << 30)) as tier:
        tier.put_from(object_id(1), object_bytes(1))
        assert disk_bytes(tmp_path / "closed") > 8 << 20
    assert disk_bytes(tmp_path / "closed") < 100_000
    code = "import sys; from pathlib import Path; from tests.tier.test_log import *; "
    code += "open_disk(Path(sys.argv[1]), 1 << 30).put_from(object_id(1), object_bytes(1)); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "killed")], check=False, cwd=GOLDEN.parent.parent.parent)
    assert disk_bytes(tmp_path / "killed") > 8 << 20
    assert read_all(open_disk(tmp_path / "killed"), 1) == object_bytes(1)
    assert disk_bytes(tmp_path / "killed") < 100_000


def test_what_another_process_stored_and_sealed_while_we_opened_is_not_cut_off(tmp_path: Path) -> None:
    put_all(writer := open_disk(tmp_path), [1])

    def go_on() -> None:
        writer.put_from(object_id(2), object_bytes(2))
        writer.close()

    tier = open_disk(tmp_path, files=BeforeTheLock(go_on))
    assert [read_all(tier, number) for number in (1, 2)] == [object_bytes(1), object_bytes(2)]


def files_open_in(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [name for name in (str(link.readlink()) for link in links) if name.startswith(f"{folder}/")]


def test_locked_directory_is_given_up_and_a_segment_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.disk.directory.LOCK_TRIES_MAX", 3)
    tier = open_disk(tmp_path, TIER_BYTES)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(TierUnavailable, match="locked"):
        tier.put_from(object_id(1), object_bytes(1))
    fcntl.flock(held, fcntl.LOCK_UN)
    assert tier.put_from(object_id(1), object_bytes(1))
    assert files_open_in(tmp_path)
    fcntl.flock(held, fcntl.LOCK_EX)
    tier.close()
    assert not files_open_in(tmp_path)
    os.close(held)
    assert read_all(open_disk(tmp_path, TIER_BYTES), 1) == object_bytes(1)


def test_directory_that_can_not_be_opened_anew_closes_nobody_else_s_file(tmp_path: Path) -> None:
    class Scarce(Files):
        """No more descriptors are to be had for folders."""

        is_scarce = False

        def open(self, path: Path | str, flags: int) -> int:
            if self.is_scarce and flags & os.O_DIRECTORY:
                raise OSError(24, "Too many open files")
            return super().open(path, flags)

    files = Scarce()
    tier = open_disk(tmp_path / "store", TIER_BYTES, files)
    shutil.rmtree(tmp_path / "store")
    files.is_scarce = True
    with pytest.raises(TierUnavailable, match="Too many"):
        tier.put_from(object_id(1), object_bytes(1))
    files.is_scarce = False
    # One of them has the number that was free.
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(64)]
    assert tier.put_from(object_id(1), object_bytes(1))
    assert all(os.path.samestat(os.fstat(other), tmp_path.stat()) for other in others)
    for other in others:
        os.close(other)


def several_segments(folder: Path) -> DiskTier:
    """A tier that knows segments of somebody who has ended."""
    with opened(open_disk(folder, 2 << 20)) as writer:
        put_all(writer, range(20), 50_000)
    tier = open_disk(folder, 2 << 20)
    assert len(tier._log._directory.segments) > 5
    return tier


def test_segments_another_thread_evicts_are_forgotten_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = several_segments(tmp_path)
    directory = tier._log._directory
    shutil.rmtree(directory.folder)
    drop = directory.opened.drop

    def evicted_meanwhile(number: int) -> None:
        directory.segments.clear()
        drop(number)

    monkeypatch.setattr(directory.opened, "drop", evicted_meanwhile)
    assert not tier.contains(object_id(99))


def test_what_is_evicted_while_another_thread_looks_is_told(tmp_path: Path) -> None:
    class Watched(Files):
        def truncate(self, descriptor: int, length: int) -> None:
            os.ftruncate(descriptor, length)
            list(tier.objects())

    several_segments(tmp_path).close()
    tier, gone = open_disk(tmp_path, 2 << 20, Watched()), list[ObjectId]()
    tier.report_to(gone.extend)
    before = {info.id for info in tier.objects()}
    put_all(tier, range(20, 40), 50_000)
    left = before - {info.id for info in tier.objects()}
    assert left and left <= set(gone) and tier.stats().evictions == len(gone)


def test_segments_that_others_make_are_learnt_of_while_a_policy_chooses(tmp_path: Path) -> None:
    order_of = partial(order_named, "lru", bytes_max=2 << 20)
    several_segments(tmp_path).close()
    tier = open_disk(tmp_path, 2 << 20, order_of=order_of)
    segments, has_ended = tier._log._directory.segments, threading.Event()
    state = next(iter(segments.values()))
    segments |= dict.fromkeys(range(1000, 6000), state)

    def learn() -> None:
        while not has_ended.is_set():
            # One step each time: between two of them the other thread may go on.
            if segments.pop(1 << 30, None) is None:
                segments[1 << 30] = state

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    learner = threading.Thread(target=learn)
    learner.start()
    try:
        for _ in range(200):
            tier._log._candidates(frozenset(), frozenset())
    finally:
        sys.setswitchinterval(interval_s)
        has_ended.set()
        learner.join()


def golden_pages() -> list[bytes]:
    label = ObjectLabel(b"lossless-1".ljust(16, b"\0"), object_id(0).key, 768)
    record = RecordHeader(object_id(1), label, 7, 3, 8192, 123_456, 1_700_000_000_123)
    removed = RecordHeader(object_id(2), ObjectLabel(), 7, 4, 139_264, 1, 0, RecordState.REMOVED)
    segment = SegmentHeader(7, 1_700_000_000_000, 1)
    return [pack_segment_header(segment), pack_record_header(record), pack_record_header(removed)]


def test_headers_are_those_of_the_golden_file() -> None:
    golden = GOLDEN.read_bytes()
    assert b"".join(page[:256] for page in golden_pages()) == golden
    segment = parse_segment_header(golden[:256])
    assert segment is not None and (segment.number, segment.removals) == (7, 1)
    record = parse_record_header(golden[256:512], 7, 8192)
    assert record is not None and (record.id, record.size, record.sequence) == (object_id(1), 123_456, 3)
    assert (record.label.parent, record.label.start) == (object_id(0).key, 768)


def test_segment_of_another_version_is_given_up_without_a_search(tmp_path: Path) -> None:
    first = bytearray(golden_pages()[0])
    first[8] = 1
    first[240:256] = xxhash.xxh3_128_digest(first[:240])
    (tmp_path / "segments").mkdir()
    path = tmp_path / "segments" / segment_name(7)
    path.write_bytes(first + golden_pages()[1] + bytes(1 << 20))
    assert scan_segment(Files(), path, 7) == Scan(None, [], ALIGN_BYTES)
    tier = open_disk(tmp_path, TIER_BYTES)
    assert tier.stats().objects == 0
    assert path.stat().st_size == ALIGN_BYTES


def test_body_before_its_header_is_not_searched_where_the_log_is_followed(tmp_path: Path) -> None:
    segment, record = golden_pages()[:2]
    path, body, files = tmp_path / segment_name(7), b"body" * 65536, Counted()
    path.write_bytes(segment + bytes(2 * ALIGN_BYTES) + body)
    assert scan_segment(files, path, 7, 2 * ALIGN_BYTES).records == []
    assert files.reads == 2
    path.write_bytes(segment + bytes(ALIGN_BYTES) + record + body)
    assert [each.offset for each in scan_segment(files, path, 7, 2 * ALIGN_BYTES).records] == [2 * ALIGN_BYTES]


def test_record_written_during_the_search_for_the_next_one_is_found(tmp_path: Path) -> None:
    class Written(Files):
        """The writer goes on while a reader searches its body for a header."""

        def next_data(self, descriptor: int, offset: int) -> int | None:
            path.write_bytes(first + pack_record_header(other) + bytes(ALIGN_BYTES))
            return super().next_data(descriptor, offset)

    label = ObjectLabel(b"raw-1".ljust(16, b"\0"), object_id(0).key, 0)
    one = RecordHeader(object_id(1), label, 7, 0, ALIGN_BYTES, ALIGN_BYTES, 1)
    other = RecordHeader(object_id(2), label, 7, 1, 3 * ALIGN_BYTES, ALIGN_BYTES, 1)
    segment, body = pack_segment_header(SegmentHeader(7, 1, 0)), b"b" * ALIGN_BYTES
    first = segment + pack_record_header(one) + body
    path = tmp_path / segment_name(7)
    path.write_bytes(segment + bytes(ALIGN_BYTES) + body)
    assert scan_segment(Written(), path, 7).records == [one, other]


def test_forged_record_that_is_longer_than_any_file_is_none(tmp_path: Path) -> None:
    forged = RecordHeader(object_id(1), ObjectLabel(), 7, 0, ALIGN_BYTES, (1 << 63) - 1, 1)
    path = tmp_path / segment_name(7)
    path.write_bytes(pack_segment_header(SegmentHeader(7, 1, 0)) + pack_record_header(forged))
    assert scan_segment(Files(), path, 7).records == []


def test_record_behind_a_damaged_header_is_found_once(tmp_path: Path) -> None:
    segment, record, _ = golden_pages()
    path = tmp_path / segment_name(7)
    path.write_bytes(segment + b"damaged!" * 512 + record + bytes(140_000))
    assert [each.offset for each in scan_segment(Files(), path, 7).records] == [2 * ALIGN_BYTES]


@pytest.mark.parametrize("place", [(8, 8192), (7, 4096)])
def test_record_header_at_another_place_is_none(place: tuple[int, int]) -> None:
    assert parse_record_header(golden_pages()[1], *place) is None


@pytest.mark.parametrize("parse", [parse_segment_header, lambda page: parse_record_header(page, 7, 8192)])
def test_header_with_any_flipped_bit_or_cut_is_none(parse: Callable[[bytes], object]) -> None:
    page = next(page for page in golden_pages() if parse(page))
    for bit in range(256 * 8):
        damaged = bytearray(page)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse(bytes(damaged)) is None
    assert parse(page[:255]) is None
