"""One segment file of the log: finding its records, appending to it, reading from it.

Invariant: a record's header page is written after its body, so a header that stands there has its whole body.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvtide.tier.base import Buffer, FilePart, LentObject
from kvtide.tier.buffers import ALIGN_BYTES, Recycler, aligned_buffer, copy_bytes, is_aligned
from kvtide.tier.files import Files
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, ObjectLabel

_RECORD_MAGIC = b"\x89KVREC\r\n"
_SEGMENT_MAGIC = b"\x89KVSEG\r\n"
_VERSION = 2
_HEADER_BYTES = 256
# Of headers that are read.
_FORM = (_VERSION, _HEADER_BYTES)
_RECORD = struct.Struct("<8sHHI32s32s16sQQQQQ32sI68s")
_SEGMENT = struct.Struct("<8sHHIQQQ200s")
_CHECKED_BYTES = 240
# The checksum in a header page: equal ones are of equal headers.
_SEAL = slice(_CHECKED_BYTES, _HEADER_BYTES)
# The end of the year 9999: times after it are a clock's fault.
_WALL_S_MAX = 253_402_300_799.0

assert _RECORD.size == _CHECKED_BYTES
assert _SEGMENT.size == _CHECKED_BYTES


class RecordState(IntEnum):
    """The state of a record: whether its object may be served. The numbers are stored."""

    LIVE = 1
    REMOVED = 2


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """One record: whose object it holds, where it stands and how long the object is."""

    id: ObjectId
    label: ObjectLabel
    segment: int
    sequence: int
    offset: int
    size: int
    stored_ms: int
    state: RecordState = RecordState.LIVE


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """One segment file. `removals` counts records marked removed, so that a checkpoint shows its age."""

    number: int
    created_ms: int
    removals: int


def align_up(size: int) -> int:
    """Return the next multiple of ALIGN_BYTES."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def record_bytes(size: int) -> int:
    """Return the bytes that a record of an object of this size takes: a header page and whole pages of body."""
    return ALIGN_BYTES + align_up(size)


def stamp_ms(wall_s: float) -> int:
    """Return a wall time as headers have it, in milliseconds; before 1970 is 1970, after 9999 its end."""
    return int(min(max(0.0, wall_s), _WALL_S_MAX) * 1000)


def pack_record_header(header: RecordHeader) -> bytes:
    """Return the record's header page."""
    names = (header.id.key, header.id.namespace, header.label.codec)
    place = (header.segment, header.sequence, header.offset, header.size, header.stored_ms)
    origin = (header.label.parent, header.label.start)
    return _page(_RECORD.pack(_RECORD_MAGIC, *_FORM, header.state, *names, *place, *origin, b""))


def _page(fields: bytes) -> bytes:
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(ALIGN_BYTES, b"\0")


def record_state(page: memoryview, expected: RecordHeader) -> RecordState | None:
    """Return the state of the expected record by its header page; None if it is not what stands here."""
    found = parse_record_header(page, expected.segment, expected.offset)
    return found.state if found is not None and replace(found, state=expected.state) == expected else None


def parse_record_header(page: Buffer, segment: int, offset: int) -> RecordHeader | None:
    """Return the record header at this place; None if there is none or anything is off."""
    fields = _whole_fields(page, _RECORD, _RECORD_MAGIC)
    if fields is None or fields[1:3] != _FORM:
        return None
    state, key, namespace, codec, number, sequence, at, size, stored_ms, parent, start = fields[3:14]
    # No file is so long that what follows would be no offset.
    if (number, at) != (segment, offset) or size >> 48 or state not in RecordState.__members__.values():
        return None
    object_id = ObjectId(Namespace(namespace), BlockKey(key))
    label = ObjectLabel(codec, parent, start)
    return RecordHeader(object_id, label, number, sequence, at, size, stored_ms, RecordState(state))


def pack_segment_header(header: SegmentHeader) -> bytes:
    """Return the segment's first page."""
    return _page(_SEGMENT.pack(_SEGMENT_MAGIC, *_FORM, 0, header.number, header.created_ms, header.removals, b""))


def parse_segment_header(page: Buffer) -> SegmentHeader | None:
    """Return the segment header; None if anything is off."""
    fields = _whole_fields(page, _SEGMENT, _SEGMENT_MAGIC)
    return None if fields is None or fields[1:3] != _FORM else SegmentHeader(*fields[4:7])


def _whole_fields(page: Buffer, layout: struct.Struct, magic: bytes) -> tuple[Any, ...] | None:
    view = memoryview(page)
    if len(view) < _HEADER_BYTES or view[: len(magic)] != magic:
        return None
    return layout.unpack_from(view) if xxhash.xxh3_128_digest(view[:_CHECKED_BYTES]) == view[_SEAL] else None


# Bodies that are not page-aligned in memory pass through buffers of this size; the last two pages take ends.
STAGING_BYTES = 1 << 20
_NAME = re.compile(r"([0-9]{12})\.seg")


class Scan(NamedTuple):
    """The records that a segment holds from `start` on. The next record would begin at `tail`."""

    header: SegmentHeader | None
    records: list[RecordHeader]
    tail: int


def segment_name(number: int) -> str:
    """Return a segment's file name."""
    return f"{number:012d}.seg"


def segment_number(name: str) -> int | None:
    """Return the number in a segment's file name; None for a file that is not ours."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def scan_segment(files: Files, path: Path | str, number: int, tail: int | None = None) -> Scan:
    """Find the records of a segment, or those after a known `tail`, by their headers alone; removed ones too.

    Where a header is damaged or was never written, the search goes on at the next written page that holds one. Not so
    behind a known tail: while a log is followed, a body lies there before its header does. A segment of another version
    has none.
    """
    with files.opened(path, os.O_RDONLY) as descriptor:
        # Headers are far apart: reading ahead would fetch bodies.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        page = bytearray(ALIGN_BYTES)
        files.read_full(descriptor, [memoryview(page)], 0)
        header, fields = parse_segment_header(page), _whole_fields(page, _SEGMENT, _SEGMENT_MAGIC)
        is_of_other_version = fields is not None and fields[1] != _VERSION
        records = [] if is_of_other_version else list(_records(files, descriptor, number, tail))
        # Cut by somebody: a record whose end is missing can't be read.
        length = files.length(path) if records else 0
        while records and records[-1].offset + record_bytes(records[-1].size) > length:
            records.pop()
    end = records[-1].offset + record_bytes(records[-1].size) if records else tail or ALIGN_BYTES
    return Scan(header if header and header.number == number else None, records, end)


def _records(files: Files, descriptor: int, number: int, tail: int | None) -> Iterator[RecordHeader]:
    page = bytearray(ALIGN_BYTES)
    offset, last_sequence = tail or ALIGN_BYTES, -1
    gap, is_gap_sure = -1, False
    while files.read_full(descriptor, [memoryview(page)], offset) == ALIGN_BYTES:
        header = parse_record_header(page, number, offset)
        if header is not None and header.sequence > last_sequence:
            if offset != gap >= 0 and not is_gap_sure:
                # What a living writer was writing when we passed has its header by now, before any later one.
                offset, is_gap_sure = gap, True
                continue
            last_sequence, gap, is_gap_sure = header.sequence, -1, False
            offset += record_bytes(header.size)
            yield header
            continue
        if tail is not None and page.count(0) == ALIGN_BYTES:
            return
        gap = offset if gap < 0 else gap
        data = files.next_data(descriptor, offset + ALIGN_BYTES)
        if data is None:
            return
        offset = data // ALIGN_BYTES * ALIGN_BYTES


@dataclass(slots=True)
class SegmentWriter:
    """The segment that a tier appends to, under the kernel's lock until it is closed or its process dies."""

    files: Files
    path: str
    header: SegmentHeader
    size: int
    direct: int
    cached: int
    tail: int = ALIGN_BYTES
    sequence: int = 0

    @classmethod
    def create(cls, files: Files, path: str, header: SegmentHeader, size: int) -> SegmentWriter:
        """Make a segment file with all its space reserved. OSError, and no file, if that can't be done."""
        with ExitStack() as failing:
            cached = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            failing.callback(files.close, cached)
            failing.callback(files.unlink, path)
            # Given back before the name goes: others may hold the file open.
            failing.callback(files.truncate, cached, 0)
            is_locked = files.try_lock(cached)
            assert is_locked, "a new segment is locked by somebody else"
            files.allocate(cached, size)
            direct = files.open_direct(path, os.O_WRONLY)
            failing.callback(files.close, direct)
            files.write_full(cached, [pack_segment_header(header)], 0)
            failing.pop_all()
        return cls(files, path, header, size, direct, cached)

    def append(
        self, object_id: ObjectId, body: Buffer, label: ObjectLabel, now_ms: int, staging: memoryview
    ) -> CatalogEntry:
        """Write a record at the tail: its body, then its header. OSError leaves it invisible."""
        header = RecordHeader(object_id, label, self.header.number, self.sequence, self.tail, len(body), now_ms)
        assert self.tail + record_bytes(header.size) <= self.size
        view, at = memoryview(body), self.tail + ALIGN_BYTES
        if is_aligned(view):
            whole = len(view) // ALIGN_BYTES * ALIGN_BYTES
            parts = [view[:whole], _padded(staging, view[whole:])] if whole < len(view) else [view]
            self.files.write_full(self.direct, [part for part in parts if len(part)], at)
        else:
            for start in range(0, len(view), STAGING_BYTES):
                piece = _padded(staging, view[start : start + STAGING_BYTES])
                self.files.write_full(self.direct, [piece], at + start)
        # Around the page cache too: the first direct read would have to wait for a dirty page to be written.
        page = staging[:ALIGN_BYTES]
        page[:] = pack_record_header(header)
        self.files.write_full(self.direct, [page], self.tail)
        self.tail += record_bytes(header.size)
        self.sequence += 1
        return CatalogEntry(header, now_ms, seal=bytes(page[_SEAL]))

    def close(self) -> int:
        """Give back the space after the last record, and the lock. A segment without records is removed.

        What the segment holds is on the disk for good then, so that a power failure costs at most open segments.
        Return where its records end, 0 if it holds none or is lost.
        """
        try:
            if not self.files.is_here(self.cached, self.path, self.size):
                return 0
            if self.sequence == 0:
                self.files.truncate(self.cached, 0)
                self.files.unlink(self.path)
                return 0
            self.files.truncate(self.cached, self.tail)
            self.files.sync(self.cached)
            return self.tail
        finally:
            self.files.close(self.direct)
            # Children that were forked meanwhile have the file open too.
            self.files.unlock(self.cached)
            self.files.close(self.cached)


def _padded(staging: memoryview, piece: Buffer) -> memoryview:
    """Copy bytes to the beginning of `staging`, and zeros up to the end of their last page; return these pages."""
    size, end = len(piece), align_up(len(piece))
    copy_bytes(staging[:size], piece)
    staging[size:end] = bytes(end - size)
    return staging[:end]


@dataclass(slots=True, eq=False)
class CatalogEntry:
    """One copy of an object. `uses` counts readings since the copy was written or last passed over by eviction.

    `seal` is the checksum of its live header as it was last seen, so that a read need not parse the header again.
    """

    header: RecordHeader
    last_use_ms: int
    uses: int = 0
    seal: bytes = b""


class RecordReader:
    """Lends records, and reads them into callers' buffers: page-aligned ones directly, others through `staging`."""

    def __init__(self, files: Files, opened: OpenSegments, staging: Recycler) -> None:
        self._files, self._opened, self._staging = files, opened, staging
        # For a header and the page that an object ends in; as many as there ever were readers at once.
        self._ends: deque[memoryview] = deque()

    def read(self, entry: CatalogEntry, buffer: memoryview, offset: int) -> RecordState | None:
        """Fill `buffer` with the object's bytes from `offset` on and tell the state of the record that they are of.

        None if another record than the expected one, or none, is there whole. The buffer may hold no more than the
        object has from `offset` on.
        """
        header = entry.header
        assert offset + len(buffer) <= header.size
        try:
            ends = self._ends.pop()
        except IndexError:
            ends = aligned_buffer(2 * ALIGN_BYTES)
        try:
            segment = self._opened.take(header.segment)
            self._read(segment.descriptor, header.offset, ends, buffer, offset)
            seal = bytes(ends[_SEAL])
            if seal == entry.seal:
                return RecordState.LIVE
            state = record_state(ends[:ALIGN_BYTES], header)
            if state is RecordState.LIVE:
                entry.seal = seal
            return state
        except (OSError, EOFError) as error:
            # Whatever it was: the next read shall meet a file opened again.
            self._opened.drop(header.segment)
            if isinstance(error, FileNotFoundError | EOFError):
                return None
            raise
        finally:
            self._ends.append(ends)

    def _read(self, descriptor: int, at: int, ends: memoryview, buffer: memoryview, offset: int) -> None:
        page, last = ends[:ALIGN_BYTES], ends[ALIGN_BYTES:]
        body, whole = at + ALIGN_BYTES, len(buffer) // ALIGN_BYTES * ALIGN_BYTES
        if offset % ALIGN_BYTES or not is_aligned(buffer):
            self._read_parts(descriptor, [page], at)
            self._read_staged(descriptor, body, buffer, offset)
            return
        parts = [buffer[:whole], last] if whole < len(buffer) else [buffer]
        if offset:
            self._read_parts(descriptor, [page], at)
            self._read_parts(descriptor, parts, body + offset)
        else:
            # Most reads: one call takes the header and the body.
            self._read_parts(descriptor, [page, *parts], at)
        copy_bytes(buffer[whole:], last[: len(buffer) - whole])

    def _read_staged(self, descriptor: int, body: int, buffer: memoryview, offset: int) -> None:
        scratch, done = self._staging.take(STAGING_BYTES), 0
        while done < len(buffer):
            lead = (offset + done) % ALIGN_BYTES
            count = min(len(buffer) - done, len(scratch) - lead)
            piece = scratch[: align_up(lead + count)]
            self._read_parts(descriptor, [piece], body + offset + done - lead)
            copy_bytes(buffer[done : done + count], piece[lead : lead + count])
            done += count

    def _read_parts(self, descriptor: int, parts: list[memoryview], offset: int) -> None:
        wanted = sum(map(len, parts))
        came = self._files.read_full(descriptor, list(filter(len, parts)), offset)
        if came != wanted:
            raise EOFError(f"the segment ends at {offset + came}, a record goes to {offset + wanted}")

    def lend(self, expected: RecordHeader, can_wait: bool) -> tuple[RecordState | None, LentObject | None]:
        """Return the state of the record at this place, as `read` has it, and, if it is live, its body to be sent.

        Without `can_wait` nothing but the page cache is read; the state is None if that is not enough.
        """
        try:
            descriptor = self._files.open(self._opened.path(expected.segment), os.O_RDONLY)
        except FileNotFoundError:
            return None, None
        state, pages = None, memoryview(bytearray(ALIGN_BYTES + min(HEADER_BYTES, expected.size)))
        try:
            read = self._files.read_full if can_wait else self._files.read_cached
            if read(descriptor, [pages], expected.offset) == len(pages):
                state = record_state(pages[:ALIGN_BYTES], expected)
        finally:
            if state is not RecordState.LIVE:
                self._files.close(descriptor)
        if state is not RecordState.LIVE:
            return state, None
        place, release = FilePart(descriptor, expected.offset + ALIGN_BYTES), partial(self._files.close, descriptor)
        return state, LentObject(expected.size, bytes(pages[ALIGN_BYTES:]), (), place, release)


OPEN_MAX = 64


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A file open for reading; it is closed once nobody holds this any more."""

    files: Files
    descriptor: int

    def __del__(self) -> None:
        self.files.close(self.descriptor)


class OpenSegments:
    """Opens files at first use and keeps OPEN_MAX; those opened first go first. Safe to use from several threads."""

    def __init__(self, files: Files, path: Callable[[int], str]) -> None:
        self.path = path
        self._files = files
        self._lock = threading.Lock()
        self._held: dict[int, OpenSegment] = {}

    def take(self, number: int) -> OpenSegment:
        """Return the segment's file. OSError as opening has."""
        held = self._held.get(number)
        # A store that was removed, or made again under the same name, is not the one that we have open.
        if held is not None and not self._files.is_unlinked(held.descriptor):
            return held
        self.drop(number)
        opened = OpenSegment(self._files, self._files.open_direct(self.path(number), os.O_RDONLY))
        with self._lock:
            if len(self._held) >= OPEN_MAX:
                del self._held[next(iter(self._held))]
            self._held[number] = opened
        return opened

    def drop(self, number: int) -> None:
        """Open this segment again at its next use."""
        with self._lock:
            self._held.pop(number, None)

    def close(self) -> None:
        """Drop all files."""
        with self._lock:
            self._held.clear()
