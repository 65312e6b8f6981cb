"""Several tiers as one, fastest first (device, memory, disk, remote): reads take the first that has the object.

The slowest tier that writes go to at once has everything, so that evicting from a faster one writes nothing. Faster
tiers take what their ranking lets in: an object that is worth more than the least of what they have.

Invariant: a fault of one tier never hides what another one holds; it is counted and logged once per tier and kind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvtide.evict import Hint, Ranking, RecencyRanking, States
from kvtide.index import ListedBlock
from kvtide.outcomes import Decided
from kvtide.tier.background import Background, Demoter, Prefetcher
from kvtide.tier.base import Buffer, LentObject, ObjectInfo, Observer, RangeRead, Take, Tier
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.tier.faults import TIER_FAULTS, FaultGuard
from kvtide.tier.source import read_range_of_any, read_ranges
from kvtide.tier.stack.generations import Generations
from kvtide.types import DIGEST_BYTES, NamedId, Namespace, ObjectId, TierStats

if TYPE_CHECKING:
    from kvtide.tier.stack.invalidation import Invalidations

_log = logging.getLogger(__name__)

# A prompt that is new costs one look-up; one that is known costs one for every so many blocks.
LOOK_UPS_MAX = 256
# The first reading of an object is on somebody's critical path, and most objects are never read again.
USES_BEFORE_PROMOTION = 2
# What waits to be written to tiers that are written in the background, counted once for each of them.
WRITE_BACK_BYTES_MAX = 256 << 20
CLOSE_S_MAX = 30.0
# A follower reads for itself if the leader takes longer.
FOLLOW_S_MAX = 30.0

# What a reader returns: how many bytes are in the buffer, None for a miss.
Read = Callable[[], int | None]


def wants_latest(object_id: ObjectId) -> bool:
    """True if only a server that has looked in all regions may answer for this id."""
    return isinstance(object_id, NamedId) and object_id.is_latest


@dataclass(slots=True, eq=False)
class _Follower:
    buffer: memoryview
    done: threading.Event = field(default_factory=threading.Event)
    has_left: bool = False
    was_served: bool = False
    size: int | None = None


class SingleFlight:
    """Reads that are under way, by object, generation, whether it is to be the latest, and offset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[tuple[ObjectId, int, bool, int], list[_Follower]] = {}

    def read(self, object_id: ObjectId, buffer: memoryview, offset: int, read: Read) -> int | None:
        """Run `read`, which fills `buffer`, or wait for another caller's that brings these bytes too.

        A read that fails fails for its caller alone; followers then read for themselves.
        """
        # A read of an earlier generation is no answer for a later one, nor one of any copy for the latest.
        generation = object_id.name.generation if isinstance(object_id, NamedId) else 0
        name = (object_id, generation, wants_latest(object_id), offset)
        with self._lock:
            followers = self._followers.get(name)
            if followers is None:
                followers = self._followers[name] = []
                follower = None
            else:
                follower = _Follower(buffer)
                followers.append(follower)
        if follower is not None:
            return self._follow(follower, read)
        came: int | None = None
        is_read = False
        try:
            came = read()
            is_read = True
        finally:
            with self._lock:
                del self._followers[name]
                for each in followers:
                    if is_read and not each.has_left:
                        _serve(each, buffer, came)
                    each.done.set()
        return came

    def _follow(self, follower: _Follower, read: Read) -> int | None:
        follower.done.wait(FOLLOW_S_MAX)
        with self._lock:
            follower.has_left = True
        return follower.size if follower.was_served else read()


def _serve(follower: _Follower, buffer: memoryview, came: int | None) -> None:
    if came is None:
        follower.was_served = True
        return
    wanted = len(follower.buffer)
    if came == len(buffer) and wanted > came:
        # The object may be longer than the leader's buffer.
        return
    follower.size = min(wanted, came)
    copy_bytes(follower.buffer[: follower.size], buffer[: follower.size])
    follower.was_served = True


@dataclass(slots=True, eq=False)
class _Place:
    """A tier of the stack, its number from the fastest on, and a name that no other has."""

    tier: Tier
    number: int
    label: str


class TierStack(Tier):
    """A tier made of tiers. One that fails to open is left out, the others serve.

    `ranking` is told of every use; give the same one to the tiers that admit and evict by it. Of the tiers, those in
    `write_back` are written by a background thread after `put_from` has returned; those in `demote_to` get only what
    the slowest of the others that can tell evicts. `invalidations` are followed while the stack is open.
    """

    name = "stack"
    can_lend = can_replace = True

    def __init__(
        self,
        tiers: Sequence[Tier],
        ranking: Ranking | None = None,
        write_back: Sequence[Tier] = (),
        demote_to: Sequence[Tier] = (),
        invalidations: Invalidations | None = None,
    ) -> None:
        if not tiers:
            raise ValueError("a stack needs at least one tier, got none")
        late = [*write_back, *demote_to]
        if not all(tier in tiers for tier in late) or all(tier in late for tier in tiers):
            raise ValueError(f"write_back and demote_to are some of the tiers, never all, got {len(late)}")
        # `memory`, `http-1`, `http-2` for one of memory and two servers.
        names = [tier.name for tier in tiers]
        self.tier_names = [
            f"{name}-{names[: number + 1].count(name)}" if names.count(name) > 1 else name
            for number, name in enumerate(names)
        ]
        self._places = [_Place(*each) for each in zip(tiers, range(len(tiers)), self.tier_names, strict=True)]
        self._open: list[_Place] = []
        # Of those that are written at once: it has everything.
        self._slowest: _Place | None = None
        self._ranking = ranking or RecencyRanking()
        self.hears_requests = any(tier.hears_requests for tier in tiers)
        self._write_back = list(write_back)
        self._late = late
        self._demote_to = list(demote_to)
        self._invalidations = invalidations
        self._generations = invalidations.generations if invalidations is not None else Generations(())
        self.is_valid = self._generations.is_valid
        self._observer: Observer | None = None
        # A tier's fault becomes a miss of that tier.
        self.guard = FaultGuard(TIER_FAULTS)
        self.demoter = Demoter(self._demote_evicted)
        self._flight = SingleFlight()
        self._prefetcher = Prefetcher(self._bring_ahead)
        self._writer = Background(1, "kvtide-write-back", WRITE_BACK_BYTES_MAX)

    def named(self, object_id: ObjectId, is_latest: bool = False) -> ObjectId:
        """Return the id with its namespace's present generation, if invalidations are followed."""
        return object_id if self._invalidations is None else self._generations.named(object_id, is_latest)

    def _present(self, object_id: ObjectId) -> ObjectId | None:
        return object_id if self._invalidations is None else self._generations.present(object_id)

    @property
    def open_tiers(self) -> dict[str, Tier]:
        """Return the tiers that serve, by name."""
        return {place.label: place.tier for place in self._open}

    def observe(self, observer: Observer) -> None:
        """Tell it from now on where objects are. Call it before `open`."""
        self._observer = observer
        for place in self._places:
            place.tier.report_to(partial(self._note_removed, place.number))

    def _note_removed(self, number: int, object_ids: Sequence[ObjectId]) -> None:
        if self._observer is not None:
            for object_id in object_ids:
                self._observer.removed(object_id, number)

    def open(self) -> None:
        """Open every tier. One that can't be opened is logged and left out; with none left, everything is a miss."""
        self._prefetcher.open()
        self._writer.open()
        for place in self._places:
            try:
                place.tier.open()
                self._open.append(place)
            except (*TIER_FAULTS, RuntimeError) as error:  # the last: no thread to be had
                self.guard.note("open", error, place.label)
        self._slowest = next((place for place in reversed(self._open) if place.tier not in self._late), None)
        self.demoter.open()
        evicting = [place.tier for place in self._open if place.tier not in self._late and place.tier.is_own]
        if self._demote_to and evicting:
            evicting[-1].offer_to(lambda object_id, *rest: self.demoter.offer(self.named(object_id), *rest))
        if self._invalidations is not None:
            try:
                self._invalidations.open([place.tier for place in self._open])
            except RuntimeError as error:
                _log.warning("can't learn what is invalidated, own tiers stay as they are: %s", error)

    def _demote_evicted(self, object_id: ObjectId, data: bytearray) -> None:
        for place in self._open:
            if place.tier in self._demote_to and not self._has(place, object_id):
                self._put_all([place], object_id, data)

    def close(self) -> None:
        """Write what waits to be written, for at most CLOSE_S_MAX, and close every tier. Idempotent.

        Work that a tier does not come back from is left behind after as long again for each kind.
        """
        if self._invalidations is not None:
            self._invalidations.close()
        self.flush(CLOSE_S_MAX)
        self.demoter.close(CLOSE_S_MAX)
        for workers in (self._prefetcher, self._writer):
            workers.close()
            workers.wait(CLOSE_S_MAX)
        for place in self._places:
            place.tier.close()
        self._open = []

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tiers that are written in the background have everything. False if that took too long."""
        return self._writer.wait(timeout_s)

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        """Tell tiers in whose order prefixes count that a prompt asks for these objects, its blocks in order.

        Tiers elsewhere hear what it advises in the background, unless too much waits. True if a tier takes the advice.
        """
        is_taken, named = False, list(object_ids)
        if self._invalidations is not None:
            named, *states = ([self.named(each) for each in ids] for ids in (object_ids, *states))
        for place in self._open if named else ():
            tier = place.tier
            if tier.hears_requests:
                is_taken |= tier.note_request(named, hint, states)
            if hint is not None and tier.takes_advice and self._writer.reserve(DIGEST_BYTES * len(named)):
                advise = partial(self.guard, "advise", partial(tier.advise, named, hint), None, place.label)
                is_taken |= self._writer.submit(advise, DIGEST_BYTES * len(named))
        return is_taken

    def _has(self, place: _Place, object_id: ObjectId) -> bool:
        return self.guard("look up", partial(place.tier.contains, object_id), False, place.label)

    def contains(self, object_id: ObjectId) -> bool:
        return next(self.places(object_id), None) is not None

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Tell of each object whether any tier has it now; each tier is asked for what none before it has."""
        if any(wants_latest(each) for each in object_ids):
            return [self.contains(each) for each in object_ids]
        named = [self.named(each) for each in object_ids]
        absent, here = [each for each in named if self.is_valid(each)], set[ObjectId]()
        for place in self._open if absent else ():
            look_up = partial(place.tier.contains_each, absent)
            found = self.guard("look up", look_up, [False] * len(absent), place.label)
            here |= {each for each, is_here in zip(absent, found, strict=True) if is_here}
            absent = [each for each in absent if each not in here]
        return [each in here for each in named]

    def places(self, object_id: ObjectId, stop: int | None = None) -> Iterator[int]:
        """Yield the numbers, below `stop`, of the tiers that have the object now, the fastest first, asked in turn."""
        present = self._present(object_id)
        for place in self._allowed(present) if present is not None else ():
            if (stop is None or place.number < stop) and self._has(place, present or object_id):
                yield place.number

    def _allowed(self, object_id: ObjectId) -> list[_Place]:
        """Return the tiers that may answer for the id: a copy of this machine is never the latest."""
        return [each for each in self._open if each.tier.looks_in_regions] if wants_latest(object_id) else self._open

    def run_places(self, object_ids: Sequence[ObjectId]) -> list[int]:
        """Return the fastest tier of each object of the longest leading run that is here now."""
        found: list[int] = []
        while len(found) < len(object_ids):
            number = next(self.places(object_ids[len(found)]), None)
            if number is None:
                break
            found.append(number)
            place = self._places[number]
            if place.tier.is_batched:
                following = object_ids[len(found) : len(found) + LOOK_UPS_MAX]
                count = self.guard("look up", partial(place.tier.count_leading, following), 0, place.label)
                found += [next(self.places(object_id, number), number) for object_id in following[:count]]
        return found

    def is_near(self, object_id: ObjectId) -> bool:
        """True if the fastest of several tiers has the object now: reading it waits for none of the others."""
        return len(self._open) > 1 and self._open[0] in self._allowed(object_id) and self._has(self._open[0], object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the first tier that has the object; callers that want it at the same time cause one slow read."""
        present = self._present(object_id)
        if present is None:
            return None
        uses = self._ranking.note_use(present) if offset == 0 else 0
        if self._prefetcher.queued:
            self._prefetcher.discard(present)
        places = self._allowed(present)
        for place in places[:1]:
            read_first = partial(place.tier.get_into, present, buffer, offset)
            size = self.guard("read", read_first, None, place.label)
            if size is not None or len(places) == 1:
                return size
        read = partial(self._read_slow, places, present, buffer, offset, uses >= USES_BEFORE_PROMOTION)
        return self._flight.read(present, buffer, offset, read) if places else None

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range from the first tier that has it, going on at the next where one breaks off."""
        present = self._present(object_id)
        if present is None:
            return False
        if start == 0:
            self._ranking.note_use(present)
        places = self._allowed(present)

        def note(position: int, error: Exception) -> None:
            self.guard.note("read", error, places[position].label)

        return read_range_of_any([place.tier for place in places], present, start, stop, take, note)

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        present = self._present(object_id)
        for place in self._allowed(present) if present is not None else ():
            read = partial(read_ranges, place.tier, present or object_id, ranges)
            sizes = self.guard("read", read, None, place.label)
            if sizes is not None:
                return sizes
        return None

    def keep_above(self, object_id: ObjectId, data: Buffer) -> bool:
        """Copy an object that was read from a tier to the faster ones that admit it. True if one has it now."""
        object_id = self.named(object_id)
        stop = next(self.places(object_id), 0)
        faster = [place for place in self._open if place.number < stop and place.tier not in self._late]
        return self._put_all(_admitting(faster, object_id, len(data)), object_id, data)

    def _read_slow(
        self, places: Sequence[_Place], object_id: ObjectId, buffer: memoryview, offset: int, is_promoted: bool
    ) -> int | None:
        """Read from the tiers behind the first one; copy up what was read whole, if it is to be and deserves it."""
        for position, place in enumerate(places[1:], 1):
            size = self.guard("read", partial(place.tier.get_into, object_id, buffer, offset), None, place.label)
            if size is not None:
                if is_promoted and offset == 0 and size < len(buffer):
                    self._put_all(_admitting(places[:position], object_id, size), object_id, buffer[:size])
                return size
        return None

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object from the first tier that has it and lends; what is used again is copied up afterwards."""
        return self._lend(object_id, lambda tier: tier.lend(object_id))

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object from the first tier that has it and need not wait."""
        return self._lend(object_id, lambda tier: tier.lend_at_once(object_id))

    def _lend(self, object_id: ObjectId, lend: Callable[[Tier], LentObject | None]) -> LentObject | None:
        for position, place in enumerate(self._open):
            lent = self.guard("read", partial(lend, place.tier), None, place.label) if place.tier.can_lend else None
            if lent is not None:
                if self._ranking.note_use(object_id) >= USES_BEFORE_PROMOTION and position:
                    self.prefetch([object_id], lent.size)
                return lent
        return None

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store in the slowest tier that is written at once, and in faster ones that admit it. True if one has it.

        Tiers that are written in the background follow; if too many bytes wait for them, the caller waits too.
        """
        object_id = self.named(object_id)
        self._ranking.note_use(object_id)
        is_stored = False
        for place in self._open:
            if place.tier in self._write_back:
                is_stored |= self._put_later(place, object_id, buffer)
            elif place is self._slowest or (
                place.tier not in self._late and place.tier.would_admit(object_id, len(buffer))
            ):
                is_stored |= self._put(place, object_id, buffer, partial(place.tier.put_from, object_id, buffer))
        return is_stored

    def _put_all(self, places: Sequence[_Place], object_id: ObjectId, buffer: Buffer) -> bool:
        is_stored = False
        for place in places:
            is_stored |= self._put(place, object_id, buffer, partial(place.tier.put_from, object_id, buffer))
        return is_stored

    def _put(self, place: _Place, object_id: ObjectId, buffer: Buffer, write: Callable[[], bool]) -> bool:
        """Write to a tier, unless the object's namespace was invalidated since the id was named."""
        follows = self._invalidations is not None
        with self._generations.landing(object_id, place.tier) if follows else nullcontext(True) as may_land:
            is_stored = may_land and self.guard("write", write, False, place.label)
        if is_stored and self._observer is not None:
            self._observer.placed(object_id, place.number, len(buffer))
        return is_stored

    def _put_later(self, place: _Place, object_id: ObjectId, buffer: Buffer) -> bool:
        size, put = len(buffer), partial(self._put_all, [place], object_id)
        # A copy: the bytes are the caller's again when this returns.
        is_left = self._writer.reserve(size) and self._writer.submit(partial(put, bytes(buffer)), size)
        return not is_left and put(buffer)

    def prefetch(self, object_ids: Sequence[ObjectId], size_max: int) -> int:
        """Bring the next objects of a matched run into the faster tiers in the background, in order.

        Returns how many were queued: the bound is PREFETCH_MAX. Objects larger than `size_max` are not brought, nor
        are those that no faster tier would admit, or that somebody has begun to read meanwhile.
        """
        return self._prefetcher.queue(object_ids, size_max) if len(self._open) > 1 else 0

    def _bring_ahead(self, object_id: ObjectId, size_max: int) -> None:
        if _admitting(self._open[:-1], object_id, size_max):
            self.promote(object_id, size_max)

    def promote(self, object_id: ObjectId, size_max: int) -> bool:
        """Copy an object of at most `size_max` bytes up as far as it is admitted. True if the fastest tier has it."""
        object_id = self.named(object_id)
        if not self._open or self._has(self._open[0], object_id):
            return bool(self._open)
        view = aligned_buffer(size_max + 1)
        self._flight.read(object_id, view, 0, partial(self._read_slow, self._open, object_id, view, 0, True))
        return self._has(self._open[0], object_id)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        return True in [
            self.guard("delete", partial(place.tier.delete, object_id, reason), False, place.label)
            for place in self._open
        ]

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Replace an object in every tier that can, slowest first: none brings the old one back. True if one did.

        Those that can't and are written in the background are told of it as of a new one.
        """
        object_id, is_replaced = self.named(object_id), False
        for place in reversed(self._open):
            if place.tier.can_replace:
                is_replaced |= self._put(place, object_id, buffer, partial(place.tier.replace, object_id, buffer))
        for place in self._open:
            if place.tier in self._write_back and not place.tier.can_replace:
                self._put_later(place, object_id, buffer)
        return is_replaced

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Have every tier that remembers decisions, or tells who does, add to its counts."""
        for place in self._open:
            self.guard("note", partial(place.tier.note_decisions, namespace, counts), None, place.label)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return the reason of the slowest tier that knows one: it had the object last."""
        reasons = (place.tier.removed_reason(object_id) for place in reversed(self._open))
        return next((reason for reason in reasons if reason is not None), None)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield each object once, as the fastest tier that has it lists it."""
        seen: set[ObjectId] = set()
        for place in self._open:
            for info in place.tier.objects():
                if info.id not in seen:
                    if place is not self._open[-1]:
                        seen.add(info.id)
                    yield info

    def records_by_tier(self) -> Iterator[tuple[int, Iterator[ListedBlock]]]:
        """Yield the tiers, by number, with what each keeps over a restart."""
        for place in self._open:
            yield place.number, place.tier.records()

    def tier_stats(self, names: Collection[str] | None = None) -> list[TierStats]:
        """Return each open tier's counters, with the faults that this stack saw; of these names alone, if given.

        Tiers of other machines ask these what they hold.
        """
        asked = [(place.label, place.tier.stats()) for place in self._open if names is None or place.label in names]
        faults = self.guard.counts.all()
        return [msgspec.structs.replace(stats, name=label, faults=faults[label]) for label, stats in asked]

    def check(self) -> None:
        """AssertionError if a tier's accounting is off. Call it while nobody uses the stack."""
        for place in self._open:
            place.tier.check()

    def stats(self) -> TierStats:
        """Return the sums over the tiers; an object in two tiers counts twice."""
        return TierStats.sum_of(self.name, self.tier_stats())


def _admitting(places: Sequence[_Place], object_id: ObjectId, size: int) -> list[_Place]:
    return [place for place in places if place.tier.would_admit(object_id, size)]
