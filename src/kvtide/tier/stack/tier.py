"""Several tiers as one, fastest first (device, memory, disk, remote): reads take the first that has the object.

The slowest tier that writes go to at once has everything, so that evicting from a faster one writes nothing. Faster
tiers take what their ranking lets in: an object that is worth more than the least of what they have.

Invariant: a fault of one tier never hides what another one holds; it is counted and logged once per tier and kind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvtide.clock import SystemClock
from kvtide.evict import Hint, Ranking, RecencyRanking, States
from kvtide.outcomes import Decided
from kvtide.tier.background import CLOSE_S_MAX, Background
from kvtide.tier.base import Buffer, Fill, LentObject, ObjectInfo, RangeRead, Take, Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.tier.faults import TIER_FAULTS, FaultGuard
from kvtide.tier.source import read_from_any, read_ranges
from kvtide.types import DIGEST_BYTES, BlockKey, NamedId, Namespace, ObjectId, TierStats

if TYPE_CHECKING:
    from kvtide.tier.stack.invalidation import Invalidations

_log = logging.getLogger(__name__)

# A prompt that is new costs one look-up; one that is known costs one for every so many blocks.
LOOK_UPS_MAX = 256
# The first reading of an object is on somebody's critical path, and most objects are never read again.
USES_BEFORE_PROMOTION = 2
# Names in advice that waits to be passed on.
ADVICE_BYTES_MAX = 16 << 20
# Evicted objects that wait for a slower tier; what finds no room is dropped.
DEMOTE_BYTES_MAX = 256 << 20
PREFETCH_THREADS = 2
PREFETCH_MAX = 64
# A follower reads for itself if the leader takes longer, or than its own caller waits.
FOLLOW_S_MAX = 30.0

# Told of an object that was stored in a tier, the tier's number from the fastest on, and the object's bytes.
_OnPlaced = Callable[[ObjectId, int, int], object]
# Told of an object that is no longer in a tier of this number.
_OnRemoved = Callable[[ObjectId, int], object]
# Whether bytes of an id may come to a tier; an invalidation waits until the context ends.
_Landing = Callable[[ObjectId, Tier], AbstractContextManager[bool]]
# The answer of a read where a tier failed and no other has the object.
_FAILED: int | None = -1
# What a reader returns: how many bytes are in the buffer, None for a miss, or _FAILED.
Read = Callable[[], int | None]


def _as_it_came(object_id: ObjectId, is_latest: bool = False) -> ObjectId:
    """Return the id: where no invalidations are followed none needs a generation, and what is here is the latest."""
    return object_id


def wants_latest(object_id: ObjectId) -> bool:
    """True if only a server that has looked in all regions may answer for this id."""
    return isinstance(object_id, NamedId) and object_id.is_latest


@dataclass(slots=True, eq=False)
class _Reading:
    """A read under way. Once `done`, `size` is what it returned, and `data` all that came if anybody waits for it."""

    done: threading.Event = field(default_factory=threading.Event)
    followers: int = 0
    size: int | None = _FAILED
    data: bytes = b""
    # There may be more than the reader had room for.
    is_cut: bool = False


class SingleFlight:
    """Reads that are under way, by object, generation, whether it is to be the latest, and offset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[ObjectId, int, bool, int], _Reading] = {}

    def read(self, object_id: ObjectId, buffer: memoryview, offset: int, read: Read) -> int | None:
        """Run `read`, which fills `buffer`, or wait for another caller's that brings these bytes too.

        A read that fails fails for its caller alone; those who waited then read for themselves.
        """
        # A read of an earlier generation is no answer for a later one, nor one of any copy for the latest.
        generation = object_id.name.generation if isinstance(object_id, NamedId) else 0
        name = (object_id, generation, wants_latest(object_id), offset)
        mine = _Reading()
        with self._lock:
            leading = self._under_way.setdefault(name, mine)
            leading.followers += leading is not mine
        if leading is not mine:
            return _follow(leading, buffer, read)
        try:
            mine.size = read()
        finally:
            with self._lock:
                del self._under_way[name]
            if mine.followers and mine.size is not None and mine.size != _FAILED:
                mine.data, mine.is_cut = bytes(buffer[: mine.size]), mine.size == len(buffer)
            mine.done.set()
        return mine.size


def _follow(leading: _Reading, buffer: memoryview, read: Read) -> int | None:
    wait_s = min(FOLLOW_S_MAX, caller_deadline_s() - SystemClock().monotonic_s())
    has_ended = leading.done.wait(max(0.0, wait_s))
    if not has_ended or leading.size == _FAILED or (leading.is_cut and len(buffer) > len(leading.data)):
        return read()
    if leading.size is None:
        return None
    size = min(len(buffer), leading.size)
    copy_bytes(buffer[:size], leading.data[:size])
    return size


@dataclass(slots=True, eq=False)
class _Place:
    """A tier of the stack, its number from the fastest on, and a name that no other has."""

    tier: Tier
    number: int
    label: str


class TierStack(Tier):
    """A tier made of tiers. One that fails to open is left out, the others serve.

    `ranking` is told of every use; give the same one to the tiers that admit and evict by it. Of the tiers, those in
    `written_last` stand last and are told of each object, and of replaced ones as of new ones; those in `demote_to` get
    only what the slowest of the others that can tell evicts. `invalidations` are followed while the stack is open.
    """

    name = "stack"
    can_lend = can_replace = hears_requests = True

    def __init__(
        self,
        tiers: Sequence[Tier],
        ranking: Ranking | None = None,
        written_last: Sequence[Tier] = (),
        demote_to: Sequence[Tier] = (),
        invalidations: Invalidations | None = None,
    ) -> None:
        if not tiers:
            raise ValueError("a stack needs at least one tier, got none")
        late = [*written_last, *demote_to]
        if not all(tier in tiers for tier in late) or all(tier in late for tier in tiers):
            raise ValueError(f"written_last and demote_to are some of the tiers, never all, got {len(late)}")
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
        self._late, self._written_last, self._demote_to = late, list(written_last), list(demote_to)
        self._invalidations = invalidations
        self.named: Callable[..., ObjectId] = _as_it_came
        self._present: Callable[[ObjectId], ObjectId | None] = _as_it_came
        self.is_valid: Callable[[ObjectId], bool] = lambda object_id: True
        self._landing: _Landing = lambda object_id, tier: nullcontext(True)
        if invalidations is not None:
            generations = invalidations.generations
            self.named, self._present = generations.named, generations.present
            self.is_valid, self._landing = generations.is_valid, generations.landing
        self._on_placed: _OnPlaced = lambda object_id, number, size: None
        self._on_removed: _OnRemoved = lambda object_id, number: None
        # How often a tier has told of some.
        self._removals = 0
        # A tier's fault becomes a miss of that tier.
        self.guard = FaultGuard(TIER_FAULTS)
        self.demoter = Background(1, "kvtide-demote", DEMOTE_BYTES_MAX)
        self._flight = SingleFlight()
        self._prefetcher = Background(PREFETCH_THREADS, "kvtide-prefetch", PREFETCH_MAX)
        # Those that nobody has begun to read since.
        self._ahead: set[ObjectId] = set()
        self._adviser = Background(1, "kvtide-advise", ADVICE_BYTES_MAX)

    @property
    def open_tiers(self) -> dict[str, Tier]:
        """Return the tiers that serve, by name."""
        return {place.label: place.tier for place in self._open}

    def observe(self, on_placed: _OnPlaced, on_removed: _OnRemoved) -> None:
        """Tell where objects are from now on, possibly under a tier's locks: neither may call the stack.

        Call it before `open`.
        """
        self._on_placed, self._on_removed = on_placed, on_removed
        for place in self._places:
            place.tier.report_to(partial(self._note_removed, place.number))

    def _note_removed(self, number: int, object_ids: Sequence[ObjectId]) -> None:
        self._removals += 1
        for object_id in object_ids:
            self._on_removed(object_id, number)

    def open(self) -> None:
        """Open every tier. One that can't be opened is logged and left out; with none left, everything is a miss."""
        self._prefetcher.open()
        self._adviser.open()
        for place in self._places:
            try:
                place.tier.open()
                self._open.append(place)
            except Exception as error:  # noqa: BLE001 - also what a server's odd answer makes of a client's library
                self.guard.note("open", error, place.label)
        self._slowest = next((place for place in reversed(self._open) if place.tier not in self._late), None)
        self.demoter.open()
        evicting = [place.tier for place in self._open if place.tier not in self._late and place.tier.is_own]
        if self._demote_to and evicting:
            evicting[-1].offer_to(self._demote)
        if self._invalidations is not None:
            try:
                self._invalidations.open([place.tier for place in self._open])
            except RuntimeError as error:
                _log.warning("can't learn what is invalidated, own tiers stay as they are: %s", error)

    def _demote(self, object_id: ObjectId, size: int, fill: Fill) -> None:
        """Copy an object that is about to be evicted, to be sent on. Under the lock of the tier."""
        # Before its bytes are taken: an invalidation meanwhile must not find them under the new generation.
        object_id = self.named(object_id)
        if self.demoter.reserve(size):
            data = self.guard("copy", partial(_filled, size, fill), None)
            if data is not None:
                self.demoter.submit(partial(self._send_evicted, object_id, data), size)
            else:
                self.demoter.release(size)

    def _send_evicted(self, object_id: ObjectId, data: bytearray) -> None:
        places = [each for each in self._open if each.tier in self._demote_to and not self._has(each, object_id)]
        self._put_all(places, object_id, data)

    def close(self) -> None:
        """Send on what was evicted, for at most CLOSE_S_MAX, and close every tier. Idempotent.

        Work that a tier does not come back from is left behind after as long again for each kind.
        """
        if self._invalidations is not None:
            self._invalidations.close()
        self.demoter.wait(CLOSE_S_MAX)
        self.demoter.close()
        for workers in (self._prefetcher, self._adviser):
            workers.close()
            workers.wait(CLOSE_S_MAX)
        for place in self._places:
            place.tier.close()
        self._open = []
        self._ahead.clear()

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        """Tell tiers in whose order prefixes count that a prompt asks for these objects, its blocks in order.

        Tiers elsewhere hear what it advises in the background, unless too much waits. True if a tier takes the advice.
        """
        is_taken = False
        named, *states = (list(map(self.named, ids)) for ids in (object_ids, *states))
        for place in self._open if named else ():
            tier = place.tier
            if tier.hears_requests:
                is_taken |= tier.note_request(named, hint, states)
            if hint is not None and tier.takes_advice and self._adviser.reserve(DIGEST_BYTES * len(named)):
                advise = partial(self.guard, "advise", partial(tier.advise, named, hint), None, place.label)
                is_taken |= self._adviser.submit(advise, DIGEST_BYTES * len(named))
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
            if (number := next(self.places(object_ids[len(found)]), None)) is None:
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
        self._ahead.discard(present)
        places = self._allowed(present)
        for place in places[:1]:
            read_first = partial(place.tier.get_into, present, buffer, offset)
            size = self.guard("read", read_first, None, place.label)
            if size is not None or len(places) == 1:
                return size
        read = partial(self._read_slow, places, present, buffer, offset, uses >= USES_BEFORE_PROMOTION)
        size = self._flight.read(present, buffer, offset, read) if places else None
        return None if size == _FAILED else size

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range from the first tier that has it, going on at the next where one breaks off."""
        present = self._present(object_id)
        if present is None:
            return False
        if start == 0:
            self._ranking.note_use(present)
        places = self._allowed(present)
        reads = [partial(place.tier.read_range, present) for place in places]
        return read_from_any(
            reads, start, stop, take, lambda at, error: self.guard.note("read", error, places[at].label)
        )

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
        absent: int | None = None
        for position, place in enumerate(places[1:], 1):
            size = self.guard("read", partial(place.tier.get_into, object_id, buffer, offset), _FAILED, place.label)
            if size == _FAILED:
                absent = _FAILED
            elif size is not None:
                if is_promoted and offset == 0 and size < len(buffer):
                    self._put_all(_admitting(places[:position], object_id, size), object_id, buffer[:size])
                return size
        return absent

    def lend(self, object_id: ObjectId, can_wait: bool = True) -> LentObject | None:
        """Lend the object from the first tier that has it and lends; what is used again is copied up afterwards."""
        for position, place in enumerate(self._open):
            lend = partial(place.tier.lend, object_id, can_wait)
            lent = self.guard("read", lend, None, place.label) if place.tier.can_lend else None
            if lent is not None:
                if self._ranking.note_use(object_id) >= USES_BEFORE_PROMOTION and position:
                    self.prefetch([object_id], lent.size)
                return lent
        return None

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store in the slowest tier that has everything, and in faster ones that admit it. True if a tier has it."""
        object_id = self.named(object_id)
        self._ranking.note_use(object_id)
        is_stored = False
        for place in self._open:
            is_due = place.tier in self._written_last or place is self._slowest
            if is_due or (place.tier not in self._late and place.tier.would_admit(object_id, len(buffer))):
                is_stored |= self._put(place, object_id, buffer)
        return is_stored

    def _put_all(self, places: Sequence[_Place], object_id: ObjectId, buffer: Buffer) -> bool:
        return True in [self._put(place, object_id, buffer) for place in places]

    def _put(self, place: _Place, object_id: ObjectId, buffer: Buffer, is_replaced: bool = False) -> bool:
        """Write to a tier, unless the object's namespace was invalidated since the id was named."""
        removals = self._removals
        write = partial(place.tier.replace if is_replaced else place.tier.put_from, object_id, buffer)
        with self._landing(object_id, place.tier) as may_land:
            is_stored = may_land and self.guard("write", write, False, place.label)
        if is_stored:
            self._on_placed(object_id, place.number, len(buffer))
            # Another thread may have evicted it, and said so, before this could be said.
            if self._removals != removals and place.tier.is_own and not self._has(place, object_id):
                self._on_removed(object_id, place.number)
        return is_stored

    def prefetch(self, object_ids: Sequence[ObjectId], size_max: int) -> int:
        """Bring the next objects of a matched run into the faster tiers in the background, in order.

        Returns how many were queued: the bound is PREFETCH_MAX. Objects larger than `size_max` are not brought, nor
        are those that no faster tier would admit, or that somebody has begun to read meanwhile.
        """
        count = 0
        for object_id in object_ids if len(self._open) > 1 else ():
            if object_id in self._ahead:
                continue
            if not self._prefetcher.reserve(1):
                break
            self._ahead.add(object_id)
            count += self._prefetcher.submit(partial(self._bring_ahead, object_id, size_max), 1)
        return count

    def _bring_ahead(self, object_id: ObjectId, size_max: int) -> None:
        if object_id not in self._ahead:
            return
        self._ahead.discard(object_id)
        object_id = self.named(object_id)
        if _admitting(self._open[:-1], object_id, size_max) and not self._has(self._open[0], object_id):
            view = aligned_buffer(size_max + 1)
            self._flight.read(object_id, view, 0, partial(self._read_slow, self._open, object_id, view, 0, True))

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        return True in [
            self.guard("delete", partial(place.tier.delete, object_id, reason), False, place.label)
            for place in self._open
        ]

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Replace an object in every tier that can, slowest first: none brings the old one back. True if one did."""
        object_id, is_replaced = self.named(object_id), False
        for place in reversed(self._open):
            if place.tier.can_replace:
                is_replaced |= self._put(place, object_id, buffer, is_replaced=True)
        told = [each for each in self._open if each.tier in self._written_last and not each.tier.can_replace]
        self._put_all(told, object_id, buffer)
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

    def parents_by_tier(self) -> Iterator[tuple[int, Iterator[tuple[ObjectId, BlockKey]]]]:
        """Yield the tiers, by number, with what each keeps over a restart."""
        for place in self._open:
            yield place.number, place.tier.parents()

    def tier_stats(self, names: Collection[str] | None = None) -> list[TierStats]:
        """Return each open tier's counters, with the faults that this stack saw; of these names alone, if given.

        Tiers of other machines ask these what they hold.
        """
        asked = [(place.label, place.tier.stats()) for place in self._open if names is None or place.label in names]
        faults = self.guard.counts.all()
        return [msgspec.structs.replace(stats, name=label, faults=faults[label]) for label, stats in asked]

    def check(self) -> None:
        for place in self._open:
            place.tier.check()

    def stats(self) -> TierStats:
        """Return the sums over the tiers; an object in two tiers counts twice."""
        return TierStats.sum_of(self.name, self.tier_stats())


def _filled(size: int, fill: Fill) -> bytearray | None:
    data = bytearray(size)
    return data if fill(memoryview(data)) else None


def _admitting(places: Sequence[_Place], object_id: ObjectId, size: int) -> list[_Place]:
    return [place for place in places if place.tier.would_admit(object_id, size)]
