"""Which objects the segment log holds and where: the in-memory index. It does no I/O.

Invariant: an object's bytes are counted once, those of its newest copy, however many the log has.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.tier.record import RecordHeader
from kvtide.types import BlockKey, ObjectId

if TYPE_CHECKING:
    from kvtide.tier.disk.eviction import GivenUp


@dataclass(slots=True, eq=False)
class CatalogEntry:
    """One copy of an object. `uses` counts readings since the copy was written or last passed over by eviction.

    `seal` is the checksum of its live header as it was last seen, so that a read need not parse the header again.
    """

    header: RecordHeader
    last_use_ms: int
    uses: int = 0
    seal: bytes = b""


class Catalog:
    """Entries by object and by segment. Safe to use from several threads."""

    def __init__(self, order: GivenUp | None = None) -> None:
        """order: what ranks the objects, from when their first copy is known until the last one is not."""
        self._order = order
        self._lock = threading.Lock()
        self._by_id: dict[ObjectId, list[CatalogEntry]] = {}
        self._by_segment: dict[int, dict[int, CatalogEntry]] = {}
        self._used_bytes = 0
        # Whether a checkpoint would say something new; whoever loads or saves one clears it.
        self.is_changed = False

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all objects."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, object_id: ObjectId) -> bool:
        return object_id in self._by_id

    def add(self, entry: CatalogEntry) -> None:
        """Note a copy. What was known at its place is forgotten; the newest copy is found first."""
        header = entry.header
        with self._lock:
            places = self._by_segment.setdefault(header.segment, {})
            if header.offset in places:
                self._remove(places[header.offset])
            self._by_segment.setdefault(header.segment, {})[header.offset] = entry
            copies = self._by_id.setdefault(header.id, [])
            if self._order is not None and not copies:
                parent = header.label.parent if header.label.start else header.id.namespace
                self._order.enter(header.id, BlockKey(parent), header.size)
            self._used_bytes += header.size - (copies[-1].header.size if copies else 0)
            copies.append(entry)
            self.is_changed = True

    def find(self, object_id: ObjectId) -> CatalogEntry | None:
        """Return a copy of the object, or None."""
        with self._lock:
            copies = self._by_id.get(object_id)
            return copies[-1] if copies else None

    def place_of(self, object_id: ObjectId) -> tuple[int, int] | None:
        """Return the segment of an object's newest copy, and its bytes there."""
        entry = self.find(object_id)
        return None if entry is None else (entry.header.segment, entry.header.size)

    def copies(self, object_id: ObjectId) -> list[CatalogEntry]:
        """Return every copy of the object."""
        with self._lock:
            return list(self._by_id.get(object_id, ()))

    def note_use(self, entry: CatalogEntry, now_ms: int) -> None:
        """Note that a copy was read."""
        with self._lock:
            entry.uses += 1
            if self._order is not None:
                self._order.note_use(entry.header.id)
            entry.last_use_ms = now_ms
            self.is_changed = True

    def remove(self, entry: CatalogEntry) -> None:
        """Forget a copy; one that is not known any more is ignored."""
        with self._lock:
            if self._by_segment.get(entry.header.segment, {}).get(entry.header.offset) is entry:
                self._remove(entry)

    def _remove(self, entry: CatalogEntry) -> None:
        self.is_changed = True
        header = entry.header
        places = self._by_segment[header.segment]
        del places[header.offset]
        if not places:
            del self._by_segment[header.segment]
        copies = self._by_id[header.id]
        self._used_bytes -= copies[-1].header.size
        copies.remove(entry)
        if copies:
            self._used_bytes += copies[-1].header.size
        else:
            del self._by_id[header.id]
            if self._order is not None:
                self._order.leave(header.id)

    def in_segment(self, number: int) -> list[CatalogEntry]:
        """Return a segment's entries in the order of their offsets."""
        with self._lock:
            places = self._by_segment.get(number, {})
            return [places[offset] for offset in sorted(places)]

    def drop_segment(self, number: int) -> list[ObjectId]:
        """Forget a segment's entries and return the objects that have no copy left."""
        with self._lock:
            entries = list(self._by_segment.get(number, {}).values())
            for entry in entries:
                self._remove(entry)
            return [entry.header.id for entry in entries if entry.header.id not in self._by_id]

    def newest(self) -> list[CatalogEntry]:
        """Return one entry for each object."""
        with self._lock:
            return [copies[-1] for copies in self._by_id.values()]

    def check(self) -> None:
        """AssertionError if the two views or the sum disagree."""
        with self._lock:
            by_id = [entry for copies in self._by_id.values() for entry in copies]
            by_segment = [entry for places in self._by_segment.values() for entry in places.values()]
            assert {id(entry) for entry in by_id} == {id(entry) for entry in by_segment}
            assert len(by_id) == len(by_segment)
            assert self._used_bytes == sum(copies[-1].header.size for copies in self._by_id.values())
            assert all(self._by_segment.values()) and all(self._by_id.values())
