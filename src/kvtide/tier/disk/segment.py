"""One segment file of the log: finding its records, appending to it, reading from it.

Invariant: a record's header page is written after its body, so a header that stands there has its whole body.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvtide.tier.base import Buffer, FilePart, LentObject
from kvtide.tier.buffers import ALIGN_BYTES, BufferPool, aligned_buffer, copy_bytes, is_aligned
from kvtide.tier.files import Files
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, ObjectLabel

_RECORD_MAGIC = b"\x89KVREC\r\n"
_SEGMENT_MAGIC = b"\x89KVSEG\r\n"
_VERSION = 2
_RECORD = struct.Struct("<8sHHI32s32s16sQQQQQ32sI68s")
_SEGMENT = struct.Struct("<8sHHIQQQ200s")
_CHECKED_BYTES = 240
_HEADER_BYTES = 256
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
    fields = _RECORD.pack(
        _RECORD_MAGIC,
        _VERSION,
        _HEADER_BYTES,
        header.state,
        header.id.key,
        header.id.namespace,
        header.label.codec,
        header.segment,
        header.sequence,
        header.offset,
        header.size,
        header.stored_ms,
        header.label.parent,
        header.label.start,
        b"",
    )
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(ALIGN_BYTES, b"\0")


def header_seal(page: bytes | memoryview) -> bytes:
    """Return the checksum in a header page, unchecked: equal ones are of equal headers."""
    return bytes(page[_CHECKED_BYTES:_HEADER_BYTES])


def record_state(page: memoryview, expected: RecordHeader) -> RecordState | None:
    """Return the state of the expected record by its header page; None if it is not what stands here."""
    found = parse_record_header(page, expected.segment, expected.offset)
    return found.state if found is not None and replace(found, state=expected.state) == expected else None


def parse_record_header(page: bytes | bytearray | memoryview, segment: int, offset: int) -> RecordHeader | None:
    """Return the record header at this place; None if there is none or anything is off."""
    fields = _checked_fields(page, _RECORD, _RECORD_MAGIC)
    if fields is None:
        return None
    state, key, namespace, codec, number, sequence, at, size, stored_ms, parent, start = fields[3:14]
    if (number, at) != (segment, offset) or state not in RecordState.__members__.values():
        return None
    object_id = ObjectId(Namespace(namespace), BlockKey(key))
    label = ObjectLabel(codec, parent, start)
    return RecordHeader(object_id, label, number, sequence, at, size, stored_ms, RecordState(state))


def pack_segment_header(header: SegmentHeader) -> bytes:
    """Return the segment's first page."""
    fields = (_SEGMENT_MAGIC, _VERSION, _HEADER_BYTES, 0, header.number, header.created_ms, header.removals, b"")
    packed = _SEGMENT.pack(*fields)
    return (packed + xxhash.xxh3_128_digest(packed)).ljust(ALIGN_BYTES, b"\0")


def parse_segment_header(page: bytes | bytearray | memoryview) -> SegmentHeader | None:
    """Return the segment header; None if anything is off."""
    fields = _checked_fields(page, _SEGMENT, _SEGMENT_MAGIC)
    return None if fields is None else SegmentHeader(*fields[4:7])


def is_of_other_version(page: bytes | bytearray | memoryview) -> bool:
    """Tell whether this whole segment header is of a version that this code does not read."""
    return _is_whole(page, _SEGMENT_MAGIC) and _SEGMENT.unpack_from(page)[1] != _VERSION


def _checked_fields(
    page: bytes | bytearray | memoryview, layout: struct.Struct, magic: bytes
) -> tuple[Any, ...] | None:
    if not _is_whole(page, magic):
        return None
    fields = layout.unpack_from(page)
    return fields if fields[1:3] == (_VERSION, _HEADER_BYTES) else None


def _is_whole(page: bytes | bytearray | memoryview, magic: bytes) -> bool:
    view = memoryview(page)
    if len(view) < _HEADER_BYTES or view[: len(magic)] != magic:
        return False
    return xxhash.xxh3_128_digest(view[:_CHECKED_BYTES]) == view[_CHECKED_BYTES:_HEADER_BYTES]


# Bodies that are not page-aligned in memory pass through buffers of this size; the last two pages take ends.
STAGING_BYTES = 1 << 20
# Larger reads are cut into pieces of this size that run at once. The kernel keeps a disk busy with one call; smaller
# pieces read no faster and cost the switching of threads: 0.09 s of CPU for each GB in pieces of 4 MiB, 0.06 in one.
PIECE_BYTES = 16 << 20
_SUFFIX = ".seg"
_DIGITS = 12


class Scan(NamedTuple):
    """The records that a segment holds from `start` on. The next record would begin at `tail`."""

    header: SegmentHeader | None
    records: list[RecordHeader]
    tail: int


def segment_name(number: int) -> str:
    """Return a segment's file name."""
    return f"{number:0{_DIGITS}d}{_SUFFIX}"


def segment_number(name: str) -> int | None:
    """Return the number in a segment's file name; None for a file that is not ours."""
    digits = name.removesuffix(_SUFFIX)
    is_ours = len(digits) == _DIGITS and digits.isdecimal() and digits.isascii() and name.endswith(_SUFFIX)
    return int(digits) if is_ours else None


def scan_segment(files: Files, path: Path | str, number: int, tail: int | None = None) -> Scan:
    """Find the records of a segment, or those after a known `tail`, by their headers alone; removed ones too.

    Where a header is damaged or was never written, the search goes on at the next written page that holds one. Not so
    behind a known tail: while a log is followed, a body lies there before its header does. A segment of another version
    has none.
    """
    descriptor = files.open(path, os.O_RDONLY)
    try:
        # Headers are far apart: reading ahead would fetch bodies.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        page = bytearray(ALIGN_BYTES)
        files.read_full(descriptor, [memoryview(page)], 0)
        header = parse_segment_header(page)
        records = [] if is_of_other_version(page) else list(_records(files, descriptor, number, tail))
        # Cut by somebody: a record whose end is missing can't be read.
        length = files.length(path) if records else 0
        while records and records[-1].offset + record_bytes(records[-1].size) > length:
            records.pop()
    finally:
        files.close(descriptor)
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
        cached = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        direct = -1
        try:
            is_locked = files.try_lock(cached)
            assert is_locked, "a new segment is locked by somebody else"
            files.allocate(cached, size)
            direct = files.open_direct(path, os.O_WRONLY)
            files.write_full(cached, [pack_segment_header(header)], 0)
        except BaseException:
            # Given back before the name goes: others may hold the file open.
            files.truncate(cached, 0)
            files.unlink(path)
            if direct >= 0:
                files.close(direct)
            files.close(cached)
            raise
        return cls(files, path, header, size, direct, cached)

    def append(self, header: RecordHeader, body: Buffer, pool: BufferPool) -> bytes:
        """Write a record at the tail: its body, then its header. Return its seal. OSError leaves it invisible."""
        assert (header.offset, header.sequence, header.segment) == (self.tail, self.sequence, self.header.number)
        assert self.tail + record_bytes(header.size) <= self.size
        view = memoryview(body)
        with pool.lease() as staging:
            start = 0
            if is_aligned(view):
                start = len(view) // ALIGN_BYTES * ALIGN_BYTES
                parts: list[Buffer] = [view[:start], _tail_page(staging, view[start:])]
                self.files.write_full(self.direct, [part for part in parts if len(part)], self.tail + ALIGN_BYTES)
                start = len(view)
            while start < len(view):
                piece = view[start : start + STAGING_BYTES]
                copy_bytes(staging[: len(piece)], piece)
                end = align_up(len(piece))
                staging[len(piece) : end] = bytes(end - len(piece))
                self.files.write_full(self.direct, [staging[:end]], self.tail + ALIGN_BYTES + start)
                start += len(piece)
            # Around the page cache too: the first direct read would have to wait for a dirty page to be written.
            page = staging[-ALIGN_BYTES:]
            page[:] = pack_record_header(header)
            seal = bytes(page[_CHECKED_BYTES:_HEADER_BYTES])
            self.files.write_full(self.direct, [page], self.tail)
        self.tail += record_bytes(header.size)
        self.sequence += 1
        return seal

    def close(self) -> bool:
        """Give back the space after the last record, and the lock. A segment without records is removed.

        What the segment holds is on the disk for good then, so that a power failure costs at most open segments.
        False if it holds nothing, or is lost.
        """
        try:
            if not self.files.is_here(self.cached, self.path, self.size):
                return False
            if self.sequence == 0:
                self.files.truncate(self.cached, 0)
                self.files.unlink(self.path)
                return False
            self.files.truncate(self.cached, self.tail)
            self.files.sync(self.cached)
            return True
        finally:
            self.files.close(self.direct)
            self.files.close(self.cached)


def _tail_page(staging: memoryview, rest: memoryview) -> memoryview:
    """Return the page that holds the last bytes of a body and zeros; empty if the body ends at a page."""
    if not rest:
        return rest
    page = staging[-ALIGN_BYTES:]
    page[: len(rest)] = rest
    page[len(rest) :] = bytes(ALIGN_BYTES - len(rest))
    return page


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
    """Reads records into callers' buffers: page-aligned ones directly, others through staging buffers."""

    def __init__(self, files: Files, opened: OpenSegments, pool: BufferPool, workers: ThreadPoolExecutor) -> None:
        self._files = files
        self._opened = opened
        self._pool = pool
        self._workers = workers
        # For a header and the page that an object ends in; as many as there ever were readers at once.
        self._ends: deque[memoryview] = deque()

    def read(self, entry: CatalogEntry, buffer: memoryview, offset: int) -> RecordState | None:
        """Fill `buffer` with the object's bytes from `offset` on and tell the state of the record that they are of.

        None if another record than the expected one, or none, is there; EOFError if the file ends before it does. The
        buffer may hold no more than the object has from `offset` on.
        """
        header = entry.header
        assert offset + len(buffer) <= header.size
        segment = self._opened.take(header.segment)
        try:
            ends = self._ends.pop()
        except IndexError:
            ends = aligned_buffer(2 * ALIGN_BYTES)
        try:
            self._read(segment.descriptor, header.offset, ends, buffer, offset)
            seal = header_seal(ends)
            if seal == entry.seal:
                return RecordState.LIVE
            state = record_state(ends[:ALIGN_BYTES], header)
            if state is RecordState.LIVE:
                entry.seal = seal
            return state
        except (OSError, EOFError):
            # Whatever it was: the next read shall meet a file opened again.
            self._opened.drop(header.segment)
            raise
        finally:
            self._ends.append(ends)
            self._opened.give_back(segment)

    def _read(self, descriptor: int, at: int, ends: memoryview, buffer: memoryview, offset: int) -> None:
        page = ends[:ALIGN_BYTES]
        if offset % ALIGN_BYTES or not is_aligned(buffer):
            self._read_part(descriptor, [page], at)
            with self._pool.lease() as scratch:
                self._read_staged(descriptor, at + ALIGN_BYTES, buffer, offset, scratch)
        elif offset or len(buffer) % ALIGN_BYTES or len(buffer) > PIECE_BYTES:
            self._read_aligned(descriptor, at, page, buffer, offset, ends[ALIGN_BYTES:])
        else:
            # Most reads: one call, of whole pages.
            self._read_part(descriptor, [page, buffer], at)

    def _read_aligned(
        self, descriptor: int, at: int, page: memoryview, buffer: memoryview, offset: int, last: memoryview
    ) -> None:
        whole = len(buffer) // ALIGN_BYTES * ALIGN_BYTES
        last = last if whole < len(buffer) else last[:0]
        body = at + ALIGN_BYTES + offset
        starts = list(range(0, whole, PIECE_BYTES)) or [0]
        pieces = list[list[memoryview]]()
        for start in starts:
            pieces.append([buffer[start : min(start + PIECE_BYTES, whole)]])
        pieces[-1].append(last)
        if offset:
            self._read_part(descriptor, [page], at)
        else:
            # One call takes the header and the beginning of the body.
            pieces[0].insert(0, page)
            starts[0] = -ALIGN_BYTES
        if len(pieces) == 1:
            self._read_part(descriptor, pieces[0], body + starts[0])
        else:
            self._read_at_once(descriptor, pieces, [body + start for start in starts])
        copy_bytes(buffer[whole:], last[: len(buffer) - whole])

    def _read_at_once(self, descriptor: int, pieces: list[list[memoryview]], offsets: list[int]) -> None:
        others = [
            self._workers.submit(self._read_part, descriptor, piece, offset)
            for piece, offset in zip(pieces[1:], offsets[1:], strict=True)
        ]
        try:
            self._read_part(descriptor, pieces[0], offsets[0])
        finally:
            # The descriptor and the buffer are in use until all have ended.
            wait(others)
        for other in others:
            other.result()

    def _read_staged(self, descriptor: int, body: int, buffer: memoryview, offset: int, scratch: memoryview) -> None:
        done = 0
        while done < len(buffer):
            lead = (offset + done) % ALIGN_BYTES
            count = min(len(buffer) - done, len(scratch) - lead)
            piece = scratch[: align_up(lead + count)]
            self._read_part(descriptor, [piece], body + offset + done - lead)
            copy_bytes(buffer[done : done + count], piece[lead : lead + count])
            done += count

    def _read_part(self, descriptor: int, parts: list[memoryview], offset: int) -> None:
        wanted = sum(map(len, parts))
        came = self._files.read_full(descriptor, list(filter(len, parts)), offset)
        if came != wanted:
            raise EOFError(f"the segment ends at {offset + came}, a record goes to {offset + wanted}")


def lend_record(
    files: Files, path: str, expected: RecordHeader, can_wait: bool
) -> tuple[RecordState | None, LentObject | None]:
    """Return the state of the record at this place, as `RecordReader.read` has it, and, if it is live, its body.

    Without `can_wait` nothing but the page cache is read; the state is None if that is not enough.
    """
    descriptor = files.open(path, os.O_RDONLY)
    body = expected.offset + ALIGN_BYTES
    pages = memoryview(bytearray(ALIGN_BYTES + min(HEADER_BYTES, expected.size)))
    try:
        read = files.read_full if can_wait else files.read_cached
        is_whole = read(descriptor, [pages], expected.offset) == len(pages)
        state = record_state(pages[:ALIGN_BYTES], expected) if is_whole else None
    except BaseException:
        files.close(descriptor)
        raise
    if state is not RecordState.LIVE:
        files.close(descriptor)
        return state, None
    head, release = bytes(pages[ALIGN_BYTES:]), partial(files.close, descriptor)
    return state, LentObject(expected.size, head, (), FilePart(descriptor, body), release)


OPEN_MAX = 64


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A file and how many read from it now. One that is dropped is closed by the last of them."""

    number: int
    descriptor: int
    users: int = 1
    is_dropped: bool = False


class OpenSegments:
    """Opens files at first use and keeps them; those opened first go first. Safe to use from several threads."""

    def __init__(self, files: Files, path: Callable[[int], str]) -> None:
        self._files = files
        self._path = path
        self._lock = threading.Lock()
        self._held: dict[int, OpenSegment] = {}

    def take(self, number: int) -> OpenSegment:
        """Return the segment's file, open around the page cache, until it is given back. OSError as opening has."""
        with self._lock:
            held = self._held.get(number)
            if held is not None:
                held.users += 1
        if held is not None:
            # A store that was removed, or made again under the same name, is not the one that we have open.
            if not self._files.is_unlinked(held.descriptor):
                return held
            self.drop(number)
            self.give_back(held)
        opened = OpenSegment(number, self._files.open_direct(self._path(number), os.O_RDONLY))
        with self._lock:
            closable = [self._drop(number), self._drop(next(iter(self._held))) if len(self._held) >= OPEN_MAX else -1]
            self._held[number] = opened
        self._close(closable)
        return opened

    def give_back(self, segment: OpenSegment) -> None:
        """End the use of a file that `take` returned."""
        with self._lock:
            segment.users -= 1
            is_last = segment.is_dropped and not segment.users
        if is_last:
            self._files.close(segment.descriptor)

    def drop(self, number: int) -> None:
        """Close a segment's file if it is open, once nobody reads from it."""
        with self._lock:
            closable = [self._drop(number)]
        self._close(closable)

    def close(self) -> None:
        """Drop all files."""
        with self._lock:
            closable = [self._drop(number) for number in list(self._held)]
        self._close(closable)

    def _drop(self, number: int) -> int:
        """Forget a file. Return its descriptor if it is to be closed now, else -1."""
        held = self._held.pop(number, None)
        if held is None:
            return -1
        held.is_dropped = True
        return -1 if held.users else held.descriptor

    def _close(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            if descriptor >= 0:
                self._files.close(descriptor)
