"""The disk tier: objects in a segment log that several processes may share (docs/format.md, "Segment log").

Invariant: a read is answered only from a record whose header names the object asked for; the content's checksums are
the consumer's to check, so that no byte is hashed twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.evict import EvictionOrder, Hint, States
from kvtide.tier.base import Buffer, IsPinned, LentObject, ObjectInfo, Offer, OwnTier
from kvtide.tier.disk.directory import JOURNAL_BYTES_MAX, RemovalJournal, side_file_bytes_max
from kvtide.tier.disk.log import SegmentLog
from kvtide.tier.disk.segment import CatalogEntry, RecordState, stamp_ms
from kvtide.tier.files import Files
from kvtide.types import BlockKey, ObjectId, TierStats
from kvtide.wire import ObjectLabel

_log = logging.getLogger(__name__)

# A copy may be evicted or moved between look-up and read; after so many times the object counts as absent.
READ_TRIES_MAX = 3


class DiskTier(OwnTier):
    """A store directory of at most `bytes_max` on the disk; whole segments are evicted."""

    name = "disk"
    can_lend = True

    def __init__(
        self,
        root: Path,
        bytes_max: int,
        clock: Clock,
        is_pinned: IsPinned,
        files: Files | None = None,
        order_of: Callable[[Clock], EvictionOrder] | None = None,
    ) -> None:
        """order_of: makes what ranks objects, by the clock that it is given.

        Without it the oldest segment goes, and what was used in it since may stay.
        """
        super().__init__(bytes_max, clock)
        self.root = root
        self._journal = RemovalJournal(root / "removed.log", min(JOURNAL_BYTES_MAX, side_file_bytes_max(bytes_max)))
        told = (self._note_evicted, self._note_lost)
        self._log = SegmentLog(root, bytes_max, clock, is_pinned, *told, files or Files(), order_of)
        self.hears_requests = order_of is not None

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        """Note a prompt; what its advice is worth is found when something must go, so none counts as taken."""
        order, keys = self._log.given_up, [*map(attrgetter("key"), object_ids)]
        if order is not None:
            order.note(order.hear_request, object_ids[0].namespace, keys, hint, states, weight=len(keys))
        return False

    def offer_to(self, offer: Offer) -> None:
        self._log.offer = offer

    def open(self) -> None:
        """Make the directory if need be and learn what it holds.

        TierUnavailable if it is no directory or can't be made; one that can only be read opens.
        """
        self._open(is_writable=True)

    def open_read_only(self) -> None:
        """Learn what the directory holds, to look at it: nothing is made or written. TierUnavailable if it can't be."""
        self._open(is_writable=False)

    def _open(self, is_writable: bool) -> None:
        try:
            self._log.open(is_writable)
        except OSError as error:
            raise TierUnavailable(f"store directory {self.root} can't be used: {error}") from error

    def close(self) -> None:
        """Give back the space reserved for more records and save the checkpoint."""
        try:
            self._log.close()
        except (OSError, TierUnavailable) as error:
            # The store is whole without it; the next open scans.
            _log.debug("closed %s without a checkpoint: %s", self.root, error)

    def contains(self, object_id: ObjectId) -> bool:
        with self._serving("look up"):
            return self._log.contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the object's record, directly into a page-aligned buffer if `offset` is a multiple of a page."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        with self._serving("read"):
            for entry in self._copies(object_id):
                size = max(0, min(len(buffer), entry.header.size - offset))
                state = self._log.read(entry, buffer[:size], min(offset, entry.header.size))
                if self._is_live(entry, state):
                    return size
        return None

    def lend(self, object_id: ObjectId, can_wait: bool = True) -> LentObject | None:
        """Lend the object's place in its segment, to be sent from the page cache. It ends early if it is evicted."""
        with self._serving("read"):
            known = None if can_wait else self._log.catalog.find(object_id)
            for entry in self._copies(object_id) if can_wait else filter(None, [known]):
                state, lent = self._log.lend(entry, can_wait)
                if (can_wait or lent is not None) and self._is_live(entry, state):
                    return lent
        return None

    def _copies(self, object_id: ObjectId) -> Iterator[CatalogEntry]:
        """Yield places of the object until one was good, READ_TRIES_MAX at most; then count a miss."""
        for _ in range(READ_TRIES_MAX):
            entry = self._log.find(object_id)
            if entry is None:
                break
            yield entry
        self._note(is_hit=False)

    def _is_live(self, entry: CatalogEntry, state: RecordState | None) -> bool:
        """Count a hit; a place at which the object is no longer is forgotten."""
        if state is not RecordState.LIVE:
            _log.debug("%s is no longer at its place: %s", entry.header.id, state)
            self._log.catalog.remove(entry)
            self._log.refresh()
            self._note_lost([entry.header.id])
            return False
        self._log.catalog.note_use(entry, stamp_ms(self._clock.wall_s()))
        with self._lock:
            self._hits += 1
        return True

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        if len(buffer) > self._bytes_max:
            raise self._too_large(object_id, len(buffer))
        with self._serving("write"):
            if not self._log.knows(object_id):
                self._log.append(object_id, buffer)
        return True

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        with self._serving("write"):
            return self._log.replace(object_id, buffer)

    def _note_evicted(self, object_ids: list[ObjectId]) -> None:
        self._evictions += len(object_ids)
        self._note_removals(object_ids, "evicted")

    def _note_lost(self, object_ids: Sequence[ObjectId]) -> None:
        """Tell of what others removed, of which there may be another copy."""
        if gone := [each for each in object_ids if self._log.catalog.find(each) is None]:
            self._on_removed(gone)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Mark the object removed in the log, for every process, and note why."""
        with self._serving("delete"):
            is_removed = self._log.mark_removed(object_id)
        if is_removed:
            self._note_removals([object_id], reason)
        return is_removed

    def _note_removals(self, object_ids: Sequence[ObjectId], reason: str) -> None:
        self._on_removed(object_ids)
        try:
            self._journal.append(object_ids, reason, self._clock.wall_s())
        except OSError as error:
            _log.debug("removal not noted: %s", error)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return the reason in the journal, which all processes on this directory share."""
        return self._journal.reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield every object in the log. Last use is known of this process's reads and those before it opened."""
        for entry in self._listed():
            yield ObjectInfo(entry.header.id, entry.header.size, entry.last_use_ms / 1000)

    def parents(self) -> Iterator[tuple[ObjectId, BlockKey]]:
        for entry in sorted(self._listed(), key=lambda entry: entry.header.label.start):
            # What was no object when it came has no label.
            if entry.header.label != ObjectLabel():
                yield entry.header.id, BlockKey(entry.header.label.parent)

    def _listed(self) -> list[CatalogEntry]:
        with self._serving("list"):
            self._log.refresh()
        return self._log.catalog.newest()

    def stats(self) -> TierStats:
        """Return the counters; bytes are those of the objects, without headers and reserved space."""
        with self._serving("list"):
            self._log.refresh()
        return self._stats(len(self._log.catalog), self._log.catalog.used_bytes)

    def check(self) -> None:
        self._log.catalog.check()

    @contextmanager
    def _serving(self, verb: str) -> Iterator[None]:
        """Make TierUnavailable of the system's faults."""
        try:
            yield
        except OSError as error:
            fault = TierUnavailable(f"can't {verb} in store directory {self.root}: {error}")
            self._note_fault(fault)
            raise fault from error
