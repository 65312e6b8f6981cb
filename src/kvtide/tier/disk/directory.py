"""The segment files of a store directory: what others did to them, and the lock for making and removing them.

Invariant: segments are made, shortened and removed under the directory's lock only, which dies with its holder.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvtide.errors import TierUnavailable
from kvtide.tier.base import OnRemoved
from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.tier.disk.catalog import Catalog
from kvtide.tier.disk.segment import (
    CatalogEntry,
    OpenSegments,
    RecordHeader,
    RecordState,
    Scan,
    SegmentHeader,
    SegmentWriter,
    pack_record_header,
    pack_segment_header,
    parse_segment_header,
    record_state,
    scan_segment,
    segment_name,
    segment_number,
)
from kvtide.tier.files import FileInfo, Files
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

_MAGIC = b"\x89KVCHK\r\n"
_VERSION = 2
_HEADER = struct.Struct("<8sHHIQ")
_SEGMENT = struct.Struct("<QQQQQ")
_ENTRY = struct.Struct("<32s32s16s32sIQQQQQ")
_CHECKSUM_BYTES = 16
JOURNAL_BYTES_MAX = 1 << 20


class SegmentSummary(NamedTuple):
    """A segment as it was scanned: all records before `tail` are in `entries` unless they were removed."""

    header: SegmentHeader
    tail: int
    entries: list[CatalogEntry]


def pack_checkpoint(summaries: list[SegmentSummary]) -> bytes:
    """Return the file's bytes."""
    parts = [_HEADER.pack(_MAGIC, _VERSION, 0, len(summaries), sum(len(item.entries) for item in summaries))]
    for header, tail, entries in summaries:
        parts.append(_SEGMENT.pack(header.number, header.created_ms, header.removals, tail, len(entries)))
    for entry in chain.from_iterable(summary.entries for summary in summaries):
        record = entry.header
        names = (record.id.namespace, record.id.key, *record.label)
        fields = (record.sequence, record.offset, record.size, record.stored_ms, entry.last_use_ms)
        parts.append(_ENTRY.pack(*names, *fields))
    body = b"".join(parts)
    return xxhash.xxh3_128_digest(body) + body


def parse_checkpoint(data: bytes) -> list[SegmentSummary]:
    """Return what a checkpoint says; nothing if anything in it is off."""
    body = memoryview(data)[_CHECKSUM_BYTES:]
    if len(body) < _HEADER.size or xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        return []
    magic, version, _, segment_count, entry_count = _HEADER.unpack_from(body)
    entries_at = _HEADER.size + segment_count * _SEGMENT.size
    if (magic, version, len(body)) != (_MAGIC, _VERSION, entries_at + entry_count * _ENTRY.size):
        return []
    segments = list(_SEGMENT.iter_unpack(body[_HEADER.size : entries_at]))
    if sum(fields[4] for fields in segments) != entry_count:
        return []
    found = _ENTRY.iter_unpack(body[entries_at:])
    summaries = []
    for number, created_ms, removals, tail, count in segments:
        entries = []
        for namespace, key, codec, parent, start, *place, last_use_ms in islice(found, count):
            object_id, label = ObjectId(Namespace(namespace), BlockKey(key)), ObjectLabel(codec, parent, start)
            entries.append(CatalogEntry(RecordHeader(object_id, label, number, *place), last_use_ms))
        summaries.append(SegmentSummary(SegmentHeader(number, created_ms, removals), tail, entries))
    return summaries


class RemovalJournal:
    """Appends lines: time, reason, namespace and key. The older half goes before the file passes its bound."""

    def __init__(self, path: Path, bytes_max: int = JOURNAL_BYTES_MAX) -> None:
        self._path, self._bytes_max, self._files = path, bytes_max, Files()

    def append(self, object_ids: Iterable[ObjectId], reason: str, wall_s: float) -> None:
        """Note removals, the last ones if all don't fit. OSError if the file can't be written."""
        lines = [f"{wall_s:.0f} {reason} {item.namespace.hex()} {item.key.hex()}\n".encode() for item in object_ids]
        if not lines:
            return
        # Half of the bound at once, so that the file with them stays under it after it has been halved.
        data = b"".join(lines[-max(1, self._bytes_max // 2 // len(lines[0])) :])
        if self._files.length(self._path) + len(data) > self._bytes_max:
            lines_now = self._files.content(self._path, self._bytes_max).splitlines(keepends=True)
            self._files.save(self._path, b"".join(lines_now[len(lines_now) // 2 :]))
        with self._files.opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
            os.write(descriptor, data)

    def reason(self, object_id: ObjectId) -> str | None:
        """Return the last noted reason for this object, or None."""
        try:
            data = self._files.content(self._path, self._bytes_max).decode("ascii", errors="replace")
        except OSError:
            return None
        found = re.findall(rf"^\S+ (\S+) \S+ {object_id.key.hex()}$", data, re.MULTILINE)
        return found[-1] if found else None


_log = logging.getLogger(__name__)

# The directory is locked while segments are made and removed: milliseconds, unless a process was stopped meanwhile.
LOCK_TRIES_MAX = 500
LOCK_RETRY_S = 0.01
SCAN_THREADS = 4
# Faults of this process, not of the file that it wanted to open.
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def side_file_bytes_max(bytes_max: int) -> int:
    """Return the bound of each file beside the segments; there are four: journal, checkpoint, a new one of each."""
    return max(ALIGN_BYTES, min(16 << 20, bytes_max // 256))


@dataclass(slots=True)
class SegmentState:
    """The known state of a segment: records before `tail` are in the catalog; `size` is what it takes on the disk."""

    header: SegmentHeader | None
    tail: int
    length: int
    size: int
    is_mine: bool = False


class SegmentDirectory:
    """Keeps the catalog in step with the directory. `refresh` may be called from several threads."""

    def __init__(self, root: Path, bytes_max: int, files: Files, catalog: Catalog, on_lost: OnRemoved) -> None:
        self.folder = root / "segments"
        self.segments: dict[int, SegmentState] = {}
        self.opened = OpenSegments(files, self.path)
        self._folder_name = str(self.folder)
        self._root, self._checkpoint = root, root / "checkpoint"
        self._checkpoint_bytes_max = side_file_bytes_max(bytes_max)
        self._files, self._catalog, self._on_lost = files, catalog, on_lost
        # Objects that others removed with their segments, before we know whether they put copies elsewhere.
        self._lost: list[ObjectId] = []
        self._lock = threading.Lock()
        self._descriptor, self._number_max = -1, 0

    def open(self) -> None:
        """Learn what the directory holds, without writing. OSError if it can't be used at all."""
        self._descriptor = self._files.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        self._load_checkpoint()
        self._catalog.is_changed = False
        with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="kvtide-disk") as workers:
            self.refresh(workers.map)

    def close(self) -> None:
        """Forget everything."""
        if self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = -1
        for number in list(self.segments):
            self._forget(number)
        self._lost.clear()
        self.opened.close()

    def path(self, number: int) -> str:
        """Return a segment's path."""
        return f"{self._folder_name}/{segment_name(number)}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock against other processes. TierUnavailable if it can't be had in time.

        Threads of one process are not kept apart by it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._files.is_here(self._descriptor, self._root):
            # Somebody removed or moved the whole directory: what stands there now is a new one.
            # Opened first: the number of a closed one is soon somebody else's.
            known, self._descriptor = self._descriptor, self._files.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
            self._files.close(known)
        pause = threading.Event()
        for _ in range(LOCK_TRIES_MAX):
            if self._files.try_lock(self._descriptor):
                break
            pause.wait(LOCK_RETRY_S)
        else:
            raise TierUnavailable(f"{self._root} is locked for more than {LOCK_TRIES_MAX * LOCK_RETRY_S:.0f} s")
        try:
            yield
        finally:
            self._files.unlock(self._descriptor)

    def used_bytes(self) -> int:
        """Return what all segments take on the disk, as of the last refresh."""
        return sum(segment.size for segment in list(self.segments.values()))

    def create(self, size: int, created_ms: int) -> SegmentWriter:
        """Make a segment that this process appends to, and so does not scan. OSError if that can't be done."""
        # No segment has had it as far as we know.
        number = self._number_max = max([self._number_max, *self.segments]) + 1
        header = SegmentHeader(number, created_ms, 0)
        writer = SegmentWriter.create(self._files, self.path(number), header, size)
        with self._lock:
            self.segments[number] = SegmentState(header, ALIGN_BYTES, size, size, is_mine=True)
        return writer

    def retire(self, writer: SegmentWriter) -> None:
        """Close a segment of this process; one that has no records is removed."""
        number, tail = writer.header.number, writer.tail if writer.sequence else 0
        try:
            tail = writer.close()
        finally:
            with self._lock:
                if not tail:
                    self._forget(number)
                elif segment := self.segments.get(number):
                    segment.is_mine = False
                    segment.tail = segment.length = segment.size = tail

    def refresh(self, scan_each: Callable[..., Iterable[Scan | None]] = map) -> None:
        """Learn of segments and records that others added, and of segments that they removed."""
        with self._lock:
            grown, seen, found = list[tuple[int, FileInfo]](), set[int](), list[FileInfo]()
            with suppress(FileNotFoundError):
                found = sorted(self._files.listing(self.folder))
            for info in found:
                if (number := segment_number(info.name)) is None:
                    continue
                # Names that something else has can't be had either.
                self._number_max = max(self._number_max, number)
                if info.is_regular:
                    seen.add(number)
                    if self._has_changed(number, info):
                        grown.append((number, info))
            for number in self.segments.keys() - seen:
                self._forget(number)
            scans = list(scan_each(lambda item: self._scan(*item), grown))
            for (number, info), scan in zip(grown, scans, strict=True):
                if scan is None:
                    continue
                # Of what stands before its tail the first header tells the age.
                header = known.header if (known := self.segments.get(number)) else scan.header
                self.segments[number] = SegmentState(header, min(scan.tail, info.length), info.length, info.size)
                for record in scan.records:
                    if record.state is RecordState.LIVE:
                        self._catalog.add(CatalogEntry(record, record.stored_ms))
            lost, self._lost = self._lost, []
        if lost:
            self._on_lost(lost)

    def _has_changed(self, number: int, info: FileInfo) -> bool:
        """Tell whether a segment is to be scanned. One that somebody cut is forgotten first: its tail is gone."""
        known = self.segments.get(number)
        if known is not None and not known.is_mine and info.length < known.tail:
            self._forget(number)
            known = None
        if known is None:
            return True
        known.length, known.size = info.length, info.size
        return not known.is_mine and known.length > known.tail

    def _scan(self, number: int, info: FileInfo) -> Scan | None:
        known = self.segments.get(number)
        tail = max(ALIGN_BYTES, known.tail) if known else None
        try:
            scan = scan_segment(self._files, self.path(number), number, tail)
            if known and known.header and scan.header and known.header.created_ms != scan.header.created_ms:
                # Removed, and made again by somebody who had not seen that number.
                self._forget(number)
                scan = scan_segment(self._files, self.path(number), number)
            return scan
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _OWN_FAULTS:
                raise
            _log.warning("segment %s can't be read, what it holds is missed: %s", self.path(number), error)
            # Without a header no checkpoint names it; up to its end it is not tried again.
            return Scan(None, [], info.length)

    def _forget(self, number: int) -> None:
        # Whoever evicts it may have been faster.
        self.segments.pop(number, None)
        self.opened.drop(number)
        self._lost.extend(self._catalog.drop_segment(number))

    def seal_abandoned(self) -> None:
        """Learn what others did, and give back space that killed writers had reserved. Call it under the lock."""
        self.refresh()
        for number, segment in self.segments.copy().items():
            if segment.is_mine or segment.length <= segment.tail:
                continue
            try:
                with self.unused_segment(number) as descriptor:
                    if descriptor is not None:
                        self._files.truncate(descriptor, segment.tail)
                        segment.length = segment.size = segment.tail
            except OSError as error:
                _log.debug("left segment %d as it is: %s", number, error)

    @contextmanager
    def unused_segment(self, number: int) -> Iterator[int | None]:
        """Open a segment for writing that no living process appends to; None if one does, or it is another user's."""
        try:
            descriptor = self._files.open(self.path(number), os.O_RDWR)
        except PermissionError:
            yield None
            return
        try:
            yield descriptor if self._files.try_lock(descriptor) else None
        finally:
            self._files.close(descriptor)

    def remove_empty(self, number: int) -> None:
        """Remove a segment that has been shortened to nothing. OSError leaves it known as one that takes no space."""
        if segment := self.segments.get(number):
            segment.length = segment.size = 0
        self._files.unlink(self.path(number))
        self._forget(number)

    def mark_removed(self, expected: RecordHeader) -> None:
        """Rewrite a record's header, if it stands there, as that of a removed one. Call it under the lock."""
        page = memoryview(bytearray(ALIGN_BYTES))
        with suppress(FileNotFoundError), self._files.opened(self.path(expected.segment), os.O_RDWR) as descriptor:
            # First: a checkpoint with another count is older than this removal, whatever becomes of it.
            self._files.read_full(descriptor, [page], 0)
            if (header := parse_segment_header(page)) is not None:
                counted = replace(header, removals=header.removals + 1)
                self._files.write_full(descriptor, [pack_segment_header(counted)], 0)
                with self._lock:
                    # Another's removal that we have not seen must show: our checkpoint has what it removed.
                    if (segment := self.segments.get(header.number)) and segment.header == header:
                        segment.header = counted
            self._files.read_full(descriptor, [page], expected.offset)
            if record_state(page, expected) is RecordState.LIVE:
                removed = replace(expected, state=RecordState.REMOVED)
                self._files.write_full(descriptor, [pack_record_header(removed)], expected.offset)

    def save_checkpoint(self) -> None:
        """Write the catalog beside the segments unless it is too large. Call it under the lock. OSError if it fails."""
        with self._lock:
            summaries = [
                SegmentSummary(segment.header, segment.tail, self._catalog.in_segment(number))
                for number, segment in self.segments.items()
                if segment.header is not None
            ]
        data = pack_checkpoint(summaries)
        if len(data) <= self._checkpoint_bytes_max:
            self._files.save(self._checkpoint, data)
            self._catalog.is_changed = False

    def _load_checkpoint(self) -> None:
        try:
            data = self._files.content(self._checkpoint, self._checkpoint_bytes_max)
        except OSError as error:
            _log.debug("the checkpoint is not used: %s", error)
            return
        for summary in parse_checkpoint(data):
            number, page = summary.header.number, bytearray(ALIGN_BYTES)
            try:
                with self._files.opened(self.path(number), os.O_RDONLY) as descriptor:
                    self._files.read_full(descriptor, [memoryview(page)], 0)
            except OSError as error:
                _log.debug("segment %d is scanned: %s", number, error)
                continue
            if parse_segment_header(page) == summary.header:
                self.segments[number] = SegmentState(summary.header, summary.tail, summary.tail, summary.tail)
                for entry in summary.entries:
                    self._catalog.add(entry)
