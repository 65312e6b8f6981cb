"""The objects that the segment log holds and their places (`Catalog`), and those of them that may leave it.

The ancestors of what is being stored stay (`Lineage`); where an order ranks the objects, the segment goes that has most
of what leaves first (`GivenUp`). It does no I/O.
Invariants: an object's bytes are counted once, those of its newest copy, however many the log has. An object that was
given up is still read until its segment goes; a use takes it back.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from kvtide.evict import EvictionOrder, Hint, States
from kvtide.tier.disk.segment import CatalogEntry, record_bytes
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

# A segment goes when this share of its bytes was given up; the rest moves where there is room.
_GIVEN_UP_SHARE = 0.75
REFUSED_MAX = 4096


class Catalog:
    """Entries by object and by segment. Safe to use from several threads."""

    def __init__(self, order: GivenUp | None = None) -> None:
        """order: what ranks the objects, from when their first copy is known until the last one is not."""
        self._order = order
        self._lock = threading.Lock()
        self._by_id: dict[ObjectId, list[CatalogEntry]] = {}
        self._by_segment: dict[int, dict[int, CatalogEntry]] = {}
        # Of all objects, without older copies.
        self.used_bytes = 0
        # Whether a checkpoint would say something new; whoever loads or saves one clears it.
        self.is_changed = False

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
            self.used_bytes += header.size - (copies[-1].header.size if copies else 0)
            copies.append(entry)
            self.is_changed = True

    def find(self, object_id: ObjectId) -> CatalogEntry | None:
        """Return a copy of the object, or None."""
        with self._lock:
            copies = self._by_id.get(object_id)
            return copies[-1] if copies else None

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
        self.used_bytes -= copies[-1].header.size
        copies.remove(entry)
        if copies:
            self.used_bytes += copies[-1].header.size
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
            assert self.used_bytes == sum(copies[-1].header.size for copies in self._by_id.values())
            assert all(self._by_segment.values()) and all(self._by_id.values())
            if self._order is not None:
                self._order.check()


class Lineage:
    """Follows parents through a catalog, across the last REFUSED_MAX blocks that were refused. Its owner locks.

    Example: blocks A, B, C of a prompt are stored, D found no room and was refused. The ancestors of E, whose parent is
    D, are A, B and C all the same, because what was refused is remembered with its ancestors.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._refused: OrderedDict[ObjectId, frozenset[BlockKey]] = OrderedDict()

    def ancestors(self, namespace: Namespace, label: ObjectLabel) -> frozenset[BlockKey]:
        """Return the keys of the stored blocks before the one that this label is of."""
        found: set[BlockKey] = set()
        while label.start > 0:
            parent = ObjectId(namespace, BlockKey(label.parent))
            entry = self._catalog.find(parent)
            if entry is None:
                refused = self._refused.get(parent, frozenset())
                return refused.union(found) if found else refused
            # Starts fall, so that this ends whatever labels say.
            if entry.header.label.start >= label.start:
                break
            found.add(parent.key)
            label = entry.header.label
        return frozenset(found)

    def note_refused(self, object_id: ObjectId, ancestors: frozenset[BlockKey]) -> None:
        """Remember a block that found no room, so that those after it don't push out its ancestors."""
        if ancestors:
            self._refused[object_id] = ancestors
            self._refused.move_to_end(object_id)
            while len(self._refused) > REFUSED_MAX:
                self._refused.popitem(last=False)


class _Ranked(NamedTuple):
    """An object's parent and size as it entered, and the segment where its bytes count as given up, if it is known."""

    parent: BlockKey
    size: int
    segment: int | None = None


class GivenUp:
    """An order, and the objects that it gave up already. Safe to use from several threads."""

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._lock = threading.RLock()
        self._given_up: dict[ObjectId, _Ranked] = {}
        self._entered: dict[ObjectId, _Ranked] = {}
        # Of each segment, the bytes of records that were given up: counted as they come and go, since a full disk asks
        # for every few blocks.
        self._bytes = Counter[int]()

    def __contains__(self, object_id: ObjectId) -> bool:
        return object_id in self._given_up

    def note_request(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        hint: Hint | None = None,
        states: States = (),
    ) -> bool:
        """Note a request, and take back what it asks for."""
        with self._lock:
            is_taken = self._order.note_request(namespace, keys, hint, states)
            rows = (ObjectId(namespace, key) for key in keys)
            for object_id in chain(rows, *states) if self._given_up else ():
                self._take_back(object_id)
            return is_taken

    def note_use(self, object_id: ObjectId) -> None:
        """Note a read, and take the object back."""
        with self._lock:
            self._take_back(object_id)
            self._order.note_use(object_id)

    def _take_back(self, object_id: ObjectId) -> None:
        found = self._dropped(object_id)
        if found is not None:
            self._order.enter(object_id, found.parent, found.size)

    def _dropped(self, object_id: ObjectId) -> _Ranked | None:
        """Count an object as given up no more; return it, None if it was not."""
        found = self._given_up.pop(object_id, None)
        if found is not None and found.segment is not None:
            self._bytes[found.segment] -= record_bytes(found.size)
            if not self._bytes[found.segment]:
                del self._bytes[found.segment]
        return found

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Rank an object."""
        with self._lock:
            self._entered[object_id] = _Ranked(parent, size)
            self._order.enter(object_id, parent, size)

    def leave(self, object_id: ObjectId) -> None:
        """Forget an object."""
        with self._lock:
            self._entered.pop(object_id, None)
            if self._dropped(object_id) is None:
                self._order.leave(object_id)

    def segments(
        self,
        sizes: dict[int, int],
        find: Callable[[ObjectId], CatalogEntry | None],
        may_go: Callable[[ObjectId], bool],
    ) -> list[int]:
        """Give up objects until a segment is due; return the segments that have any, those with most first.

        sizes: the bytes of each segment that may go.
        """

        def share(number: int) -> float:
            return self._bytes[number] / sizes[number]

        with self._lock:
            is_due = any(share(number) >= _GIVEN_UP_SHARE for number in self._bytes.keys() & sizes)
        leaving = self._order.victims(may_go)
        try:
            while not is_due:
                with self._lock:
                    gone = next(leaving, None)
                    if gone is None:
                        break
                    self._given_up[gone] = self._entered[gone]
                # Never while the lock is held: the catalog, which finds it, calls here under its own.
                entry = find(gone)
                with self._lock:
                    # A use may have taken it back meanwhile.
                    if entry is not None and gone in self._given_up:
                        number = entry.header.segment
                        self._given_up[gone] = self._given_up[gone]._replace(segment=number)
                        self._bytes[number] += record_bytes(self._given_up[gone].size)
                        is_due = number in sizes and share(number) >= _GIVEN_UP_SHARE
        finally:
            with self._lock:
                leaving.close()
        with self._lock:
            return sorted(self._bytes.keys() & sizes, key=lambda number: -share(number))

    def check(self) -> None:
        """AssertionError if other bytes count as given up than were."""
        counted = Counter[int]()
        with self._lock:
            for each in self._given_up.values():
                if each.segment is not None:
                    counted[each.segment] += record_bytes(each.size)
            assert counted == self._bytes
