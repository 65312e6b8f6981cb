"""The segment log: records appended to one's own segment, found and read in everybody's, evicted a segment at a time.

Invariants: a process appends only to its own segment, which the kernel locks for it; segments and the files beside
them never take more than `bytes_max` on the disk, because space is reserved before anything is written to it; storing
a block never evicts the blocks before it in its prompt.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from kvtide.clock import Clock
from kvtide.errors import TierFull
from kvtide.evict import EvictionOrder
from kvtide.tier.base import Buffer, IsPinned, LentObject, Offer, OnRemoved
from kvtide.tier.buffers import ALIGN_BYTES, Recycler, aligned_buffer
from kvtide.tier.disk.catalog import Catalog, GivenUp, Lineage
from kvtide.tier.disk.directory import SegmentDirectory, side_file_bytes_max
from kvtide.tier.disk.segment import (
    STAGING_BYTES,
    CatalogEntry,
    RecordReader,
    RecordState,
    SegmentWriter,
    align_up,
    record_bytes,
    stamp_ms,
)
from kvtide.tier.files import Files
from kvtide.types import BlockKey, ObjectId
from kvtide.wire import ObjectLabel

_log = logging.getLogger(__name__)

# Memory for transfers that are not aligned which waits for the next one.
_STAGING_BYTES_MAX = 8 * STAGING_BYTES
SEGMENT_BYTES_MAX = 1 << 30
# One segment is this part of the cap, so that evicting one costs little of the cache.
SEGMENTS_MIN = 64
_SIDE_FILES = 4
# What says that the disk has no more room: bytes or files, of all or of ours.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Where evicting made no room, others fill the disk. They get no more than a segment of the cache in so long.
FULL_PAUSE_S = 60.0


@dataclass(eq=False, repr=False)
class SegmentLog:
    """Objects in segments. Safe to use from several threads; one of them writes at a time. Faults are OSError."""

    root: InitVar[Path]
    bytes_max: InitVar[int]
    _clock: Clock
    _is_pinned: IsPinned
    _on_evicted: Callable[[list[ObjectId]], None]
    _on_lost: OnRemoved
    _files: Files
    order_of: InitVar[Callable[[Clock], EvictionOrder] | None]

    def __post_init__(self, root: Path, bytes_max: int, order_of: Callable[[Clock], EvictionOrder] | None) -> None:
        self.given_up = GivenUp(order_of, self._clock) if order_of is not None else None
        self.catalog = Catalog(self.given_up)
        self._directory = SegmentDirectory(root, bytes_max, self._files, self.catalog, self._on_lost)
        # Learns what other processes did.
        self.refresh = self._directory.refresh
        self._segments_bytes_max = bytes_max - _SIDE_FILES * side_file_bytes_max(bytes_max)
        self._segment_bytes = max(4 * ALIGN_BYTES, min(align_up(bytes_max // SEGMENTS_MIN), SEGMENT_BYTES_MAX))
        # Called with what is about to be evicted; the disk tier sets it.
        self.offer: Offer = lambda object_id, size, fill: None
        self._lineage = Lineage(self.catalog)
        self._full_until_s = -math.inf
        self._is_open = self._is_writable = False
        self._write_lock = threading.RLock()
        self._writer: SegmentWriter | None = None
        # Of the writer; readers have their own.
        self._staging = aligned_buffer(STAGING_BYTES)
        self._reader = RecordReader(self._files, self._directory.opened, Recycler(_STAGING_BYTES_MAX))

    def open(self, is_writable: bool) -> None:
        """Learn what the directory holds. OSError if it can't be used; one that can only be read opens.

        Without `is_writable` nothing is made or written, then or at `close`.
        """
        with ExitStack() as failing:
            failing.callback(self._stop)
            if is_writable:
                self._directory.folder.mkdir(parents=True, exist_ok=True)
            self._directory.open()
            if is_writable:
                with self._write_lock, self._directory.locked():
                    self._directory.seal_abandoned()
            failing.pop_all()
        self._is_open, self._is_writable = True, is_writable

    def close(self) -> None:
        """Give back reserved space, save the checkpoint, forget everything. Idempotent. OSError after all is closed."""
        with self._write_lock:
            if not self._is_open:
                return
            with ExitStack() as ending:
                ending.callback(self._stop)
                # Where the directory stays locked the segment is given back all the same.
                ending.callback(self._retire_writer)
                if self._is_writable:
                    with self._directory.locked():
                        self._retire_writer()
                        if self.catalog.is_changed:
                            self._directory.save_checkpoint()

    def _stop(self) -> None:
        self._directory.close()
        self._is_open = self._is_writable = False

    def knows(self, object_id: ObjectId) -> bool:
        """Tell whether a record of the object that we know of is still there, by its segment's length."""
        if (entry := self.catalog.find(object_id)) is None:
            return False
        header = entry.header
        return self._files.length(self._directory.path(header.segment)) >= header.offset + record_bytes(header.size)

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether the object is here, looking at what other processes did if we don't know it."""
        if self.knows(object_id):
            return True
        self.refresh()
        return self.knows(object_id)

    def find(self, object_id: ObjectId) -> CatalogEntry | None:
        """Return where the object is, looking at what other processes did if we don't know it."""
        if (entry := self.catalog.find(object_id)) is not None:
            return entry
        self.refresh()
        return self.catalog.find(object_id)

    def read(self, entry: CatalogEntry, buffer: memoryview, offset: int) -> RecordState | None:
        """Do `RecordReader.read`. None if the copy was evicted or its header is damaged."""
        assert self._is_open, "read before open"
        return self._reader.read(entry, buffer, offset)

    def lend(self, entry: CatalogEntry, can_wait: bool) -> tuple[RecordState | None, LentObject | None]:
        """Do `RecordReader.lend` of a copy."""
        return self._reader.lend(entry.header, can_wait)

    def append(self, object_id: ObjectId, body: Buffer) -> CatalogEntry:
        """Store an object. TierFull if there is no room."""
        with self._write_lock:
            label = ObjectLabel.of(body)
            return self._append_to(self._writer_for(record_bytes(len(body)), object_id, label), object_id, body, label)

    def _append_to(self, writer: SegmentWriter, object_id: ObjectId, body: Buffer, label: ObjectLabel) -> CatalogEntry:
        try:
            entry = writer.append(object_id, body, label, stamp_ms(self._clock.wall_s()), self._staging)
        except OSError:
            # What stands after the tail now is unknown: nothing may follow it.
            self._retire_writer()
            raise
        self.catalog.add(entry)
        return entry

    def _writer_for(self, need: int, object_id: ObjectId, label: ObjectLabel) -> SegmentWriter:
        writer = self._writer
        has_room = writer is not None and writer.size - writer.tail >= need
        if writer is not None and has_room and self._files.is_here(writer.cached, writer.path, writer.size):
            return writer
        with self._directory.locked():
            self._retire_writer()
            self._directory.seal_abandoned()
            ancestors = self._lineage.ancestors(object_id.namespace, label)
            try:
                writer = self._writer = self._new_writer(ALIGN_BYTES + need, ancestors)
            except TierFull:
                self._lineage.note_refused(object_id, ancestors)
                raise
            if self._excess(self._segment_bytes) > 0:
                # The next segment will need room: make it now, while hot records can move to the new one.
                self._evict_one(ancestors, writer, writer.size - writer.tail - need)
            return writer

    def _retire_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._directory.retire(writer)

    def _new_writer(self, need: int, ancestors: frozenset[BlockKey]) -> SegmentWriter:
        if need > self._segments_bytes_max:
            raise TierFull(f"a record of {need} bytes does not fit into {self._segments_bytes_max} bytes of segments")
        # A disk smaller than the cap gets segments that are as small a part of it.
        disk_bytes = self._directory.used_bytes() + self._files.free_bytes(self._directory.folder)
        size = max(need, min(self._segment_bytes, align_up(disk_bytes // SEGMENTS_MIN), self._segments_bytes_max))
        while (excess := self._excess(size)) > 0 and self._evict_oldest(ancestors):
            pass
        if size - max(0, excess) < need:
            raise TierFull(f"no room for {need} bytes in {self._directory.folder}: all is in use, or of this prompt")
        return self._create(size - max(0, excess) // ALIGN_BYTES * ALIGN_BYTES, need, ancestors)

    def _create(self, size: int, need: int, ancestors: frozenset[BlockKey]) -> SegmentWriter:
        """Make a segment; a smaller one where the disk has no more room, then one in the place of the oldest."""
        wanted, before = size, self._directory.used_bytes()
        while True:
            try:
                return self._directory.create(size, stamp_ms(self._clock.wall_s()))
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                now_s, freed = self._clock.monotonic_s(), before - self._directory.used_bytes()
                if size > need:
                    size = max(align_up(size // 2), need)
                elif now_s >= self._full_until_s and freed < 2 * need and self._evict_oldest(ancestors):
                    size = max(need, min(wanted, before - self._directory.used_bytes()))
                else:
                    if freed:
                        self._full_until_s = now_s + FULL_PAUSE_S
                    raise TierFull(f"can't reserve {need} bytes: {error}") from error

    def _excess(self, size: int) -> int:
        return self._directory.used_bytes() + size - self._segments_bytes_max

    def _evict_oldest(self, ancestors: frozenset[BlockKey]) -> bool:
        return self._evict_one(ancestors) or self._evict_one(ancestors, is_forced=True)

    def _evict_one(
        self,
        ancestors: frozenset[BlockKey],
        writer: SegmentWriter | None = None,
        room: int = 0,
        is_forced: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> bool:
        """Remove the oldest segment that may go; what is pinned or hot in it moves to `writer` if there is room.

        The ancestors of what is being stored count as pinned. A segment that is mostly hot is passed over once and
        counts as cold from then on, unless `is_forced`. One with pinned records that can't move stays, and so do those
        that others have `kept`. False if none could go.
        """
        for number in self._candidates(ancestors, kept):
            if (segment := self._directory.segments.get(number)) is None or segment.is_mine:
                continue
            pinned, rest = list[CatalogEntry](), list[CatalogEntry]()
            for entry in self.catalog.in_segment(number):
                # A copy that was replaced is not moved: it would be the newest.
                if entry is self.catalog.find(entry.header.id):
                    (pinned if self._is_held(ancestors, entry.header.id) else rest).append(entry)
            given_up = self.given_up
            hot = [each for each in rest if (each.uses if given_up is None else each.header.id not in given_up)]
            if _bytes_of(pinned) > room:
                continue
            if self.given_up is None and not is_forced and 2 * _bytes_of(hot) > segment.size:
                for entry in hot:
                    entry.uses = 0
                continue
            wanted = pinned + sorted(hot, key=lambda entry: -entry.uses)
            taken = accumulate(record_bytes(entry.header.size) for entry in wanted)
            keep = [entry for entry, size in zip(wanted, taken, strict=True) if size <= room]
            if self._remove_segment(number, writer, keep):
                return True
            if self.given_up is not None:
                # However much of it was given up, others have to go.
                return self._evict_one(ancestors, writer, room, is_forced, kept | {number})
        return False

    def _candidates(self, ancestors: frozenset[BlockKey], kept: frozenset[int]) -> list[int]:
        """Return the segments in the order in which they go: oldest first, or those with most that was given up."""
        # A copy, made in one step: others' segments are learnt of meanwhile.
        known = {number: found for number, found in self._directory.segments.copy().items() if number not in kept}
        if self.given_up is None:
            return sorted(known)
        # No share of what somebody has emptied and not removed.
        sizes = {number: found.size for number, found in known.items() if found.size and not found.is_mine}
        self.given_up.catch_up(self.catalog.newest)
        ranked = self.given_up.segments(sizes, self.catalog.find, lambda each: not self._is_held(ancestors, each))
        return [*dict.fromkeys([*ranked, *sorted(known)])]

    def _is_held(self, ancestors: frozenset[BlockKey], object_id: ObjectId) -> bool:
        return object_id.key in ancestors or self._is_pinned(object_id.key)

    def _remove_segment(self, number: int, writer: SegmentWriter | None, keep: list[CatalogEntry]) -> bool:
        try:
            with self._directory.unused_segment(number) as descriptor:
                if descriptor is None:
                    return False
                if writer is not None:
                    for entry in keep:
                        body = aligned_buffer(entry.header.size)
                        if self._copy_out(entry, body):
                            moved = self._append_to(writer, entry.header.id, body, entry.header.label)
                            moved.last_use_ms = entry.last_use_ms
                for entry in self.catalog.in_segment(number):
                    copies = self.catalog.copies(entry.header.id)
                    if entry in copies[-1:] and {copy.header.segment for copy in copies} == {number}:
                        self.offer(entry.header.id, entry.header.size, partial(self._copy_out, entry))
                # First: a look-up of another thread forgets what was shortened, and tells nobody.
                self._on_evicted(self.catalog.drop_segment(number))
                # Free at once, whoever has the file open, also if its name should stay.
                self._files.truncate(descriptor, 0)
                self._directory.remove_empty(number)
        except FileNotFoundError:
            self.refresh()
        return True

    def _copy_out(self, entry: CatalogEntry, buffer: memoryview) -> bool:
        try:
            return self.read(entry, buffer, 0) is RecordState.LIVE
        except OSError as error:
            _log.debug("%s is lost with its segment: %s", entry.header.id, error)
            return False

    def mark_removed(self, object_id: ObjectId) -> bool:
        """Remove every copy of an object, for all processes. False if there was none."""
        with self._write_lock, self._directory.locked():
            self.refresh()
            copies = self.catalog.copies(object_id)
            self._remove_copies(copies)
            return bool(copies)

    def replace(self, object_id: ObjectId, body: Buffer) -> bool:
        """Put `body` in place of an object's copies, for all processes; they go once it stands there and was read back.

        False, and nothing changed, if there was no copy or what was written can't be read back. Who reads meanwhile has
        the old bytes or the new ones; after a crash both may be here, and the newest that is whole is read.
        """
        with self._write_lock:
            if self.catalog.find(object_id) is None:
                return False
            entry = self.append(object_id, body)
            written = aligned_buffer(len(body))
            with self._directory.locked():
                # Now: another process that replaced it meanwhile has removed ours, and its own is to stay.
                is_good = self.read(entry, written, 0) is RecordState.LIVE and written == memoryview(body)
                # Of other processes too, and what was moved for room meanwhile.
                self.refresh()
                self._remove_copies([each for each in self.catalog.copies(object_id) if (each is entry) != is_good])
            return is_good

    def _remove_copies(self, copies: list[CatalogEntry]) -> None:
        for entry in copies:
            self._directory.mark_removed(entry.header)
            self.catalog.remove(entry)
        for number in {entry.header.segment for entry in copies}:
            segment = self._directory.segments.get(number)
            if segment and not segment.is_mine and not self.catalog.in_segment(number):
                self._remove_segment(number, None, [])


def _bytes_of(entries: list[CatalogEntry]) -> int:
    return sum(record_bytes(entry.header.size) for entry in entries)
