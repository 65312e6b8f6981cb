"""The segment files of a store directory: what others did to them, and the lock for making and removing them.

Invariant: segments are made, shortened and removed under the directory's lock only, which dies with its holder.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import TierUnavailable
from kvtide.tier.catalog import Catalog, Entry
from kvtide.tier.checkpoint import SegmentSummary, pack_checkpoint, parse_checkpoint
from kvtide.tier.files import FileInfo, Files
from kvtide.tier.opened import OpenSegments
from kvtide.tier.record import PAGE_BYTES, RecordState, SegmentHeader, parse_segment_header
from kvtide.tier.segment import Scan, scan_segment, segment_name, segment_number

__all__ = ["SegmentDirectory", "SegmentState", "side_file_bytes_max"]

_log = logging.getLogger(__name__)

# The directory is locked while segments are made and removed: milliseconds, unless a process was stopped meanwhile.
LOCK_TRIES_MAX = 500
LOCK_RETRY_S = 0.01


def side_file_bytes_max(bytes_max: int) -> int:
    """Return the bound of each file beside the segments; there are four: journal, checkpoint, a new one of each."""
    return max(PAGE_BYTES, min(16 << 20, bytes_max // 256))


@dataclass(slots=True)
class SegmentState:
    """What we know of a segment: records before `tail` are in the catalog; `size` is what it takes on the disk."""

    header: SegmentHeader | None
    tail: int
    length: int
    size: int
    is_mine: bool = False


class SegmentDirectory:
    """Keeps the catalog in step with the directory. `refresh` may be called from several threads."""

    def __init__(self, root: Path, bytes_max: int, files: Files, catalog: Catalog) -> None:
        self.folder = root / "segments"
        self.segments: dict[int, SegmentState] = {}
        self.opened = OpenSegments(files, self.path)
        self._folder_name = str(self.folder)
        self._root = root
        self._checkpoint = root / "checkpoint"
        self._checkpoint_bytes_max = side_file_bytes_max(bytes_max)
        self._files = files
        self._catalog = catalog
        self._lock = threading.Lock()
        self._descriptor = -1
        self._number_max = 0

    def open(self, workers: ThreadPoolExecutor) -> None:
        """Make the directory if need be and learn what it holds. OSError if it can't be used at all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            if not self.folder.is_dir():
                raise
        self._descriptor = self._files.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        self._load_checkpoint()
        self._catalog.is_changed = False
        self.refresh(workers)

    def close(self) -> None:
        """Forget everything."""
        if self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = -1
        for number in list(self.segments):
            self._forget(number)
        self.opened.close()

    def path(self, number: int) -> str:
        """Return a segment's path."""
        return f"{self._folder_name}/{segment_name(number)}"

    def next_number(self) -> int:
        """Return a number that no segment has had as far as we know."""
        self._number_max = max([self._number_max, *self.segments]) + 1
        return self._number_max

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock against other processes. TierUnavailable if it can't be had in time.

        Threads of one process are not kept apart by it.
        """
        if self._files.is_unlinked(self._descriptor):
            # Somebody removed the whole directory: what is made now is a new one.
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files.close(self._descriptor)
            self._descriptor = self._files.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
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

    def add_mine(self, header: SegmentHeader, size: int) -> None:
        """Note a new segment that this process appends to: it is not scanned."""
        with self._lock:
            self.segments[header.number] = SegmentState(header, PAGE_BYTES, size, size, is_mine=True)

    def release_mine(self, number: int, tail: int) -> None:
        """Note that nobody appends to one's segment any more; with a tail of 0 it has been removed."""
        with self._lock:
            segment = self.segments.get(number)
            if segment is not None and tail:
                segment.is_mine = False
                segment.tail = segment.length = segment.size = tail
            elif segment is not None:
                self._forget(number)

    def note_header(self, header: SegmentHeader) -> None:
        """Note what a segment's first page says now."""
        with self._lock:
            if header.number in self.segments:
                self.segments[header.number].header = header

    def refresh(self, workers: ThreadPoolExecutor | None = None) -> None:
        """Learn of segments and records that others added, and of segments that they removed."""
        with self._lock:
            numbered = [(segment_number(info.name), info) for info in self._listing()]
            infos = {number: info for number, info in numbered if number is not None}
            for number in self.segments.keys() - infos.keys():
                self._forget(number)
            grown = [
                (number, info) for number, info in infos.items() if number is not None and self._grew(number, info)
            ]
            if workers and len(grown) > 1:
                scans = list(workers.map(lambda item: self._scan(item[0]), grown))
            else:
                scans = [self._scan(number) for number, _ in grown]
            for (number, info), scan in zip(grown, scans, strict=True):
                if scan is not None:
                    self._note_scan(number, info, scan)

    def _listing(self) -> list[FileInfo]:
        try:
            return self._files.listing(self.folder)
        except FileNotFoundError:
            return []

    def _grew(self, number: int, info: FileInfo) -> bool:
        known = self.segments.get(number)
        if known is None:
            return True
        known.length, known.size = info.length, info.size
        return not known.is_mine and known.length > known.tail

    def _scan(self, number: int) -> Scan | None:
        known = self.segments.get(number)
        try:
            return scan_segment(self._files, self.path(number), number, known.tail if known else PAGE_BYTES)
        except FileNotFoundError:
            return None

    def _note_scan(self, number: int, info: FileInfo, scan: Scan) -> None:
        self.segments[number] = SegmentState(scan.header, scan.tail, info.length, info.size)
        for header in scan.records:
            if header.state is RecordState.LIVE:
                self._catalog.add(Entry(header, header.stored_ms))

    def _forget(self, number: int) -> None:
        del self.segments[number]
        self.opened.drop(number)
        self._catalog.drop_segment(number)

    def seal_abandoned(self) -> None:
        """Give back the space that killed writers had reserved. Call it under the lock; faults are passed over."""
        for number, segment in list(self.segments.items()):
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
        """Open a segment for writing that no living process appends to; None if one does. OSError as opening has."""
        descriptor = self._files.open(self.path(number), os.O_RDWR)
        try:
            yield descriptor if self._files.try_lock(descriptor) else None
        finally:
            self._files.close(descriptor)

    def remove_empty(self, number: int) -> None:
        """Remove a segment that has been shortened to nothing. OSError leaves it known as one that takes no space."""
        segment = self.segments.get(number)
        if segment is not None:
            segment.length = segment.size = 0
        self._files.unlink(self.path(number))
        self.segments.pop(number, None)
        self.opened.drop(number)

    def save_checkpoint(self) -> None:
        """Write the catalog beside the segments unless it is too large. Call it under the lock. OSError if it fails."""
        with self._lock:
            summaries = [
                SegmentSummary(segment.header, segment.tail, self._catalog.in_segment(number))
                for number, segment in self.segments.items()
                if segment.header is not None
            ]
        data = pack_checkpoint(summaries)
        if len(data) > self._checkpoint_bytes_max:
            return
        aside = self._checkpoint.with_suffix(".part")
        descriptor = self._files.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._files.write_full(descriptor, [data], 0)
            self._files.rename(aside, self._checkpoint)
        except OSError:
            self._files.unlink(aside)
            raise
        finally:
            self._files.close(descriptor)
        self._catalog.is_changed = False

    def _load_checkpoint(self) -> None:
        for summary in parse_checkpoint(self._read_checkpoint()):
            number = summary.header.number
            try:
                descriptor = self._files.open(self.path(number), os.O_RDONLY)
            except OSError:
                continue
            try:
                page = bytearray(PAGE_BYTES)
                self._files.read_full(descriptor, [memoryview(page)], 0)
            except OSError as error:
                _log.debug("segment %d is scanned: %s", number, error)
                continue
            finally:
                self._files.close(descriptor)
            if parse_segment_header(page) == summary.header:
                self.segments[number] = SegmentState(summary.header, summary.tail, summary.tail, summary.tail)
                self._catalog.add_all(summary.entries)

    def _read_checkpoint(self) -> bytes:
        try:
            descriptor = self._files.open(self._checkpoint, os.O_RDONLY)
        except OSError:
            return b""
        data = bytearray(self._checkpoint_bytes_max + 1)
        try:
            size = self._files.read_full(descriptor, [memoryview(data)], 0)
        except OSError as error:
            _log.debug("the checkpoint is not used: %s", error)
            return b""
        finally:
            self._files.close(descriptor)
        return bytes(data[:size])
