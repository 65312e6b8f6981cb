"""The objects that the segment log holds and their places (`Catalog`), and those of them that may leave it.

The ancestors of what is being stored stay (`Lineage`); where an order ranks the objects, the segment goes that has most
of what leaves first (`GivenUp`). It does no I/O.
Invariants: an object's bytes are counted once, those of its newest copy, however many the log has. An object that was
given up is still read until its segment goes; a use takes it back.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import NamedTuple

from kvtide.clock import Clock, ManualClock
from kvtide.evict import EvictionOrder, Hint, Recent, States
from kvtide.tier.disk.segment import CatalogEntry, RecordHeader, record_bytes
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

# A segment goes when this share of its bytes was given up; the rest moves where there is room.
_GIVEN_UP_SHARE = 0.75
REFUSED_MAX = 4096
# What an order has not heard of yet, a request counting as many as it asks for.
EVENTS_MAX = 1 << 16


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

    def add(self, entry: CatalogEntry) -> None:
        """Note a copy. What was known at its place is forgotten; the newest copy is found first."""
        header = entry.header
        with self._lock:
            if known := self._by_segment.get(header.segment, {}).get(header.offset):
                self._remove(known)
            self._by_segment.setdefault(header.segment, {})[header.offset] = entry
            copies = self._by_id.setdefault(header.id, [])
            if self._order is not None and not copies:
                self._order.note(self._order.hear_enter, header)
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
                self._order.note(self._order.hear_use, entry.header.id)
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
                self._order.note(self._order.hear_leave, header.id)

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
                self._order.check(self._by_id.keys())


class Lineage:
    """Follows parents through a catalog, across the last REFUSED_MAX blocks that were refused. Its owner locks.

    Example: blocks A, B, C of a prompt are stored, D found no room and was refused. The ancestors of E, whose parent is
    D, are A, B and C all the same, because what was refused is remembered with its ancestors.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._refused: Recent[ObjectId, frozenset[BlockKey]] = Recent(REFUSED_MAX)

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


class _Ranked(NamedTuple):
    """An object's parent and size as it entered, and the segment where its bytes count as given up, if it is known."""

    parent: BlockKey
    size: int
    segment: int | None = None


class _Event(NamedTuple):
    """A call that the order is to hear, when it was, and as how many it counts."""

    at_s: float
    hear: Callable[..., object]
    words: tuple[object, ...]
    weight: int


class GivenUp:
    """An order, and the objects that it gave up already. Safe to use from several threads.

    What happens is noted, and the order hears of it once a segment has to go, as if it were then; of what is more than
    EVENTS_MAX before. So nobody who reads waits for it, and it takes no memory until the disk is full.
    """

    def __init__(self, order_of: Callable[[Clock], EvictionOrder], clock: Clock) -> None:
        """order_of: makes the order, by a clock that says when it was what the order hears of."""
        self._clock = clock
        self._then = ManualClock(clock.monotonic_s())
        self._order = order_of(self._then)
        self._lock = threading.RLock()
        # Never held for long, whatever the order has to hear; events are heard one by one, in their order.
        self._noting = threading.Lock()
        self._events = deque[_Event]()
        self._events_weight = 0
        # The disk was full once: the order knows what is here, or is told it now.
        self._is_full = self._is_filling = False
        self._given_up: dict[ObjectId, _Ranked] = {}
        self._entered: dict[ObjectId, _Ranked] = {}
        # Of each segment, the bytes of records that were given up: counted as they come and go, since a full disk asks
        # for every few blocks.
        self._bytes = Counter[int]()

    def __contains__(self, object_id: ObjectId) -> bool:
        return object_id in self._given_up

    def note(self, hear: Callable[..., object], *words: object, weight: int = 1) -> None:
        """Note what one of the methods `hear_…` is to be called with."""
        with self._noting:
            self._events.append(_Event(self._clock.monotonic_s(), hear, words, weight))
            self._events_weight += weight
            is_over = self._events_weight > EVENTS_MAX and not self._is_filling
        if is_over:
            self._replay(EVENTS_MAX)

    def _replay(self, left: int) -> None:
        """Have the order hear of what was noted first, until `left` is left; of nothing before the disk is full."""
        while self._events_weight > left:
            with self._lock:
                with self._noting:
                    if self._events_weight <= left:
                        break
                    event = self._events.popleft()
                    self._events_weight -= event.weight
                if self._is_full:
                    self._then.advance(max(0.0, event.at_s - self._then.monotonic_s()))
                    event.hear(*event.words)

    def hear_request(self, namespace: Namespace, keys: Sequence[BlockKey], hint: Hint | None, states: States) -> None:
        """Take back what a request asks for."""
        self._order.note_request(namespace, keys, hint, states)
        rows = (ObjectId(namespace, key) for key in keys)
        for object_id in chain(rows, *states) if self._given_up else ():
            self._take_back(object_id)

    def hear_use(self, object_id: ObjectId) -> None:
        """Take back an object that was read."""
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

    def hear_enter(self, header: RecordHeader) -> None:
        """Rank an object, unless it is."""
        if header.id in self._entered:
            return
        parent = BlockKey(header.label.parent if header.label.start else header.id.namespace)
        self._entered[header.id] = _Ranked(parent, header.size)
        self._order.enter(header.id, parent, header.size)

    def hear_leave(self, object_id: ObjectId) -> None:
        """Forget an object."""
        if self._entered.pop(object_id, None) is not None and self._dropped(object_id) is None:
            self._order.leave(object_id)

    def catch_up(self, newest: Callable[[], Sequence[CatalogEntry]]) -> None:
        """Have the order hear of all that was noted. newest: all that is here, those that came before that too."""
        if not self._is_full:
            with self._noting:
                self._is_filling = True
                noted = {word.id for event in self._events for word in event.words if isinstance(word, RecordHeader)}
            # Without the lock: the catalog, which is asked, calls here under its own.
            for entry in sorted(newest(), key=lambda entry: entry.last_use_ms):
                if entry.header.id not in noted:
                    with self._lock:
                        self.hear_enter(entry.header)
            self._is_full, self._is_filling = True, False
        self._replay(0)
        with self._lock:
            self._then.advance(max(0.0, self._clock.monotonic_s() - self._then.monotonic_s()))

    def segments(
        self, sizes: dict[int, int], find: Callable[[ObjectId], CatalogEntry | None], may_go: Callable[[ObjectId], bool]
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

    def check(self, here: Collection[ObjectId]) -> None:
        """AssertionError if other objects are ranked than are here, or other bytes count as given up than were."""
        counted = Counter[int]()
        with self._lock:
            self._replay(0)
            assert self._entered.keys() == (here if self._is_full else set())
            for each in self._given_up.values():
                if each.segment is not None:
                    counted[each.segment] += record_bytes(each.size)
            assert counted == self._bytes
