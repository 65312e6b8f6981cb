"""Several tiers as one, fastest first (device, memory, disk, remote): reads take the first that has the object.

The slowest tier that writes go to at once has everything, so that evicting from a faster one writes nothing. Faster
tiers take what their ranking lets in: an object that is worth more than the least of what they have.

Invariant: a fault of one tier never hides what another one holds; it is counted and logged once per tier and kind.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvtide.errors import TierFull, TierUnavailable
from kvtide.evict import Hint, Ranking, RecencyRanking, States
from kvtide.index import ListedBlock
from kvtide.outcomes import Decided
from kvtide.tier.background import Background, Demoter
from kvtide.tier.base import Buffer, LentObject, ObjectInfo, Observer, RangeRead, Take, Tier
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.tier.source import read_range_of_any, read_ranges
from kvtide.tier.stack.generations import Generations
from kvtide.types import DIGEST_BYTES, NamedId, Namespace, ObjectId, TierStats, wants_latest

if TYPE_CHECKING:
    from kvtide.tier.stack.invalidation import Invalidations


_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# What a tier says itself, and what it meets where memory or descriptors are short.
TIER_FAULTS = (TierUnavailable, OSError, MemoryError)
# A prompt that is new costs one look-up; one that is known costs one for every so many blocks.
LOOK_UPS_MAX = 256


def run_places(
    object_ids: Sequence[ObjectId],
    places: Callable[[ObjectId, int | None], Iterator[int]],
    tiers: Sequence[Tier],
    ask: Callable[[Tier, str, Callable[[], int], int], int],
) -> list[int]:
    """Return the fastest tier of each object of the longest leading run that is in some tier.

    `places` yields the numbers of an object's tiers, the fastest first, of those before a number; `ask` runs an action
    on a tier, or gives its last argument if that fails.
    """
    found: list[int] = []
    while len(found) < len(object_ids):
        number = next(places(object_ids[len(found)], None), None)
        if number is None:
            break
        found.append(number)
        if tiers[number].is_batched:
            following = object_ids[len(found) : len(found) + LOOK_UPS_MAX]
            count = ask(tiers[number], "contains", partial(tiers[number].count_leading, following), 0)
            found += [next(places(object_id, number), number) for object_id in following[:count]]
    return found


def contained(object_ids: Sequence[ObjectId], tiers: Sequence[Tier], faults: TierFaults) -> list[bool]:
    """Tell of each object whether one of the tiers has it now; each tier is asked for what none before it has."""
    present = [False] * len(object_ids)
    for tier in tiers:
        numbers = [number for number, is_here in enumerate(present) if not is_here]
        asked = [object_ids[number] for number in numbers]
        if not asked:
            break
        found = faults.ask(tier, "contains", partial(tier.contains_each, asked), [False] * len(asked))
        for number, is_here in zip(numbers, found, strict=True):
            present[number] = is_here
    return present


def labels_of(tiers: Sequence[Tier]) -> list[str]:
    """Return a name for each tier that no other has: `memory`, `http-1`, `http-2` for one of memory and two servers."""
    names = [tier.name for tier in tiers]
    return [
        f"{name}-{names[: position + 1].count(name)}" if names.count(name) > 1 else name
        for position, name in enumerate(names)
    ]


class TierFaults:
    """Counts by tier. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._lock = threading.Lock()
        self._labels = dict(zip(map(id, tiers), labels_of(tiers), strict=True))
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def label(self, tier: Tier) -> str:
        """Return the name that tells a tier from the others."""
        return self._labels[id(tier)]

    def count(self, tier: Tier) -> int:
        """Return how many faults a tier had."""
        return self._counts[self.label(tier)]

    def ask(self, tier: Tier, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run an action of a tier; `fallback` if it is unavailable."""
        try:
            return action()
        except TIER_FAULTS as error:
            self.note(tier, verb, error)
            return fallback

    def note(self, tier: Tier, verb: str, error: Exception) -> None:
        """Count a fault."""
        kind = (self.label(tier), "full" if isinstance(error, TierFull) else verb)
        with self._lock:
            self._counts[kind[0]] += 1
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            _log.warning("%s tier: %s; served as misses, further faults of this kind are only counted", kind[0], error)


# A follower reads for itself if the leader takes longer.
FOLLOW_S_MAX = 30.0

# What a reader returns: how many bytes are in the buffer, None for a miss.
Read = Callable[[], int | None]
PREFETCH_THREADS = 2
PREFETCH_MAX = 64


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


class Prefetcher:
    """A queue of at most PREFETCH_MAX objects, and the threads that bring them."""

    def __init__(self, bring: Callable[[ObjectId, int], None]) -> None:
        self._bring = bring
        self._background = Background(PREFETCH_THREADS, "kvtide-prefetch")
        self.open, self.close, self.wait = self._background.open, self._background.close, self._background.wait
        self._lock = threading.Lock()
        self._queued: set[ObjectId] = set()

    def discard(self, object_id: ObjectId) -> None:
        """Forget an object that somebody reads now."""
        if self._queued:
            with self._lock:
                self._queued.discard(object_id)

    def queue(self, object_ids: Sequence[ObjectId], size_max: int) -> int:
        """Queue objects of at most `size_max` bytes, in order; return how many there was room for."""
        count = 0
        for object_id in object_ids:
            with self._lock:
                if len(self._queued) >= PREFETCH_MAX:
                    return count
                if object_id in self._queued:
                    continue
                self._queued.add(object_id)
                if not self._background.submit(partial(self._run, object_id, size_max)):
                    self._queued.discard(object_id)
                    return count
            count += 1
        return count

    def _run(self, object_id: ObjectId, size_max: int) -> None:
        with self._lock:
            if object_id not in self._queued:
                return
            self._queued.discard(object_id)
        self._bring(object_id, size_max)


# The first reading of an object is on somebody's critical path, and most objects are never read again.
USES_BEFORE_PROMOTION = 2
# What waits to be written to tiers that are written in the background, counted once for each of them.
WRITE_BACK_BYTES_MAX = 256 << 20
CLOSE_S_MAX = 30.0


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
        self._tiers = list(tiers)
        self._ranking = ranking or RecencyRanking()
        self._write_back = list(write_back)
        self._late = late
        self._demote_to = list(demote_to)
        self._invalidations = invalidations
        self._generations = invalidations.generations if invalidations is not None else Generations(())
        self.named, self.is_valid = self._generations.named, self._generations.is_valid
        self.demoter = Demoter(self._demote_evicted)
        self._open: list[Tier] = []
        self.open_tiers: dict[str, Tier] = {}
        self._observer: Observer | None = None
        self._faults = TierFaults(tiers)
        self.tier_names = [self._faults.label(tier) for tier in tiers]
        self._ask = self._faults.ask
        self._flight = SingleFlight()
        self._prefetcher = Prefetcher(self._bring_ahead)
        self._writer = Background(1, "kvtide-write-back", WRITE_BACK_BYTES_MAX)

    def observe(self, observer: Observer) -> None:
        """Tell it from now on where objects are. Call it before `open`."""
        self._observer = observer
        for position, tier in enumerate(self._tiers):
            tier.report_to(partial(self._note_removed, position))

    def _note_removed(self, position: int, object_ids: Sequence[ObjectId]) -> None:
        if self._observer is not None:
            for object_id in object_ids:
                self._observer.removed(object_id, position)

    def open(self) -> None:
        """Open every tier. One that can't be opened is logged and left out; with none left, everything is a miss."""
        self._prefetcher.open()
        self._writer.open()
        for tier in self._tiers:
            try:
                tier.open()
                self._open.append(tier)
            except (*TIER_FAULTS, RuntimeError) as error:  # the last: no thread to be had
                self._faults.note(tier, "open", error)
        self.open_tiers = {self._faults.label(tier): tier for tier in self._open}
        self.demoter.open()
        evicting = [tier for tier in self._open if tier not in self._late and tier.is_own]
        if self._demote_to and evicting:
            evicting[-1].offer_to(lambda object_id, *rest: self.demoter.offer(self.named(object_id), *rest))
        if self._invalidations is not None:
            try:
                self._invalidations.open(self._open)
            except RuntimeError as error:
                _log.warning("can't learn what is invalidated, own tiers stay as they are: %s", error)

    def _demote_evicted(self, object_id: ObjectId, data: bytearray) -> None:
        for tier in self._demote_to:
            if not self._ask(tier, "contains", partial(tier.contains, object_id), False):
                self._put_all([tier], object_id, data)

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
        for tier in self._tiers:
            tier.close()
        self._open = []

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tiers that are written in the background have everything. False if that took too long."""
        return self._writer.wait(timeout_s)

    @property
    def hears_requests(self) -> bool:
        """Tell whether requests matter to a tier."""
        return any(tier.hears_requests for tier in self._open)

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        """Tell tiers in whose order prefixes count that a prompt asks for these objects, its blocks in order.

        Tiers elsewhere hear what it advises in the background, unless too much waits. True if a tier takes the advice.
        """
        is_taken, (named, *states) = False, ([self.named(each) for each in ids] for ids in (object_ids, *states))
        for tier in self._open if named else ():
            if tier.hears_requests:
                is_taken |= tier.note_request(named, hint, states)
            if hint is not None and tier.takes_advice and self._writer.reserve(DIGEST_BYTES * len(named)):
                advise = partial(self._ask, tier, "advise", partial(tier.advise, named, hint), None)
                is_taken |= self._writer.submit(advise, DIGEST_BYTES * len(named))
        return is_taken

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether any tier has the object now."""
        return next(self.places(object_id), None) is not None

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Tell of each object whether any tier has it now; each tier is asked for what none before it has."""
        if any(wants_latest(each) for each in object_ids):
            return [self.contains(each) for each in object_ids]
        named = [self.named(each) for each in object_ids]
        valid = [each for each in named if self.is_valid(each)]
        here = dict(zip(valid, contained(valid, self._open, self._faults), strict=True))
        return [here.get(each, False) for each in named]

    def places(self, object_id: ObjectId, stop: int | None = None) -> Iterator[int]:
        """Yield the numbers, below `stop`, of the tiers that have the object now, the fastest first, asked in turn."""
        object_id, stop = self.named(object_id), None if stop is None else self._open.index(self._tiers[stop])
        for tier in self._allowed(object_id, self._open[:stop]) if self.is_valid(object_id) else ():
            if self._ask(tier, "contains", partial(tier.contains, object_id), False):
                yield self._tiers.index(tier)

    def _allowed(self, object_id: ObjectId, tiers: Sequence[Tier]) -> Sequence[Tier]:
        """Return those of the tiers that may answer for the id: a copy of this machine is never the latest."""
        return [tier for tier in tiers if tier.looks_in_regions] if wants_latest(object_id) else tiers

    def run_places(self, object_ids: Sequence[ObjectId]) -> list[int]:
        """Return the fastest tier of each object of the longest leading run that is here now."""
        return run_places(object_ids, self.places, self._tiers, self._ask)

    def is_near(self, object_id: ObjectId) -> bool:
        """Tell whether the fastest of several tiers has the object now: reading it waits for none of the others."""
        tiers = self._allowed(object_id, self._open[:1]) if len(self._open) > 1 else []
        return any(self._ask(tier, "contains", partial(tier.contains, object_id), False) for tier in tiers)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the first tier that has the object; callers that want it at the same time cause one slow read."""
        object_id = self.named(object_id)
        if not self.is_valid(object_id):
            return None
        uses = self._ranking.note_use(object_id) if offset == 0 else 0
        self._prefetcher.discard(object_id)
        tiers = self._allowed(object_id, self._open)
        for tier in tiers[:1]:
            size = self._ask(tier, "read", partial(tier.get_into, object_id, buffer, offset), None)
            if size is not None or len(tiers) == 1:
                return size
        read = partial(self._read_slow, tiers, object_id, buffer, offset, uses >= USES_BEFORE_PROMOTION)
        return self._flight.read(object_id, buffer, offset, read) if tiers else None

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range from the first tier that has it, going on at the next where one breaks off."""
        object_id = self.named(object_id)
        if not self.is_valid(object_id):
            return False
        if start == 0:
            self._ranking.note_use(object_id)
        tiers = self._allowed(object_id, self._open)
        note = lambda position, error: self._faults.note(tiers[position], "read", error)  # noqa: E731
        return read_range_of_any(tiers, object_id, start, stop, take, note)

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read from the first tier that has the object."""
        object_id = self.named(object_id)
        tiers = self._allowed(object_id, self._open) if self.is_valid(object_id) else ()
        reads = (self._ask(tier, "read", partial(read_ranges, tier, object_id, ranges), None) for tier in tiers)
        return next((sizes for sizes in reads if sizes is not None), None)

    def keep_above(self, object_id: ObjectId, data: Buffer) -> bool:
        """Copy an object that was read from a tier to the faster ones that admit it. True if one has it now."""
        object_id = self.named(object_id)
        place = next(self.places(object_id), 0)
        faster = [tier for tier in self._open if tier in self._tiers[:place] and tier not in self._late]
        return self._put_all(self._admitting(faster, object_id, len(data)), object_id, data)

    def _read_slow(
        self, tiers: Sequence[Tier], object_id: ObjectId, buffer: memoryview, offset: int, is_promoted: bool
    ) -> int | None:
        """Read from the tiers behind the first one; copy up what was read whole, if it is to be and deserves it."""
        for position, tier in enumerate(tiers[1:], 1):
            size = self._ask(tier, "read", partial(tier.get_into, object_id, buffer, offset), None)
            if size is not None:
                if is_promoted and offset == 0 and size < len(buffer):
                    self._put_all(self._admitting(tiers[:position], object_id, size), object_id, buffer[:size])
                return size
        return None

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object from the first tier that has it and lends; what is used again is copied up afterwards."""
        return self._lend(object_id, lambda tier: tier.lend(object_id))

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend the object from the first tier that has it and need not wait."""
        return self._lend(object_id, lambda tier: tier.lend_at_once(object_id))

    def _lend(self, object_id: ObjectId, lend: Callable[[Tier], LentObject | None]) -> LentObject | None:
        for position, tier in enumerate(self._open):
            lent = self._ask(tier, "read", partial(lend, tier), None) if tier.can_lend else None
            if lent is not None:
                if self._ranking.note_use(object_id) >= USES_BEFORE_PROMOTION and position:
                    self.prefetch([object_id], lent.size)
                return lent
        return None

    def _admitting(self, tiers: Sequence[Tier], object_id: ObjectId, size: int) -> list[Tier]:
        return [tier for tier in tiers if tier.would_admit(object_id, size)]

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store in the slowest tier that is written at once, and in faster ones that admit it. True if one has it.

        Tiers that are written in the background follow; if too many bytes wait for them, the caller waits too.
        """
        object_id = self.named(object_id)
        self._ranking.note_use(object_id)
        at_once = [tier for tier in self._open if tier not in self._late]
        faster = self._admitting(at_once[:-1], object_id, len(buffer))
        is_stored = self._put_all([*faster, *at_once[-1:]], object_id, buffer)
        for tier in self._open:
            if tier in self._write_back:
                is_stored = self._put_later(tier, object_id, buffer) or is_stored
        return is_stored

    def _put_all(self, tiers: Sequence[Tier], object_id: ObjectId, buffer: Buffer) -> bool:
        return True in [self._put(tier, object_id, buffer, partial(tier.put_from, object_id, buffer)) for tier in tiers]

    def _put(self, tier: Tier, object_id: ObjectId, buffer: Buffer, write: Callable[[], bool]) -> bool:
        """Write to a tier, unless the object's namespace was invalidated since the id was named."""
        with self._generations.landing(object_id, tier) as may_land:
            is_stored = may_land and self._ask(tier, "write", write, False)
        if is_stored and self._observer is not None:
            self._observer.placed(object_id, self._tiers.index(tier), len(buffer))
        return is_stored

    def _put_later(self, tier: Tier, object_id: ObjectId, buffer: Buffer) -> bool:
        size, put = len(buffer), partial(self._put_all, [tier], object_id)
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
        if self._admitting(self._open[:-1], object_id, size_max):
            self.promote(object_id, size_max)

    def promote(self, object_id: ObjectId, size_max: int) -> bool:
        """Copy an object of at most `size_max` bytes up as far as it is admitted. True if the fastest tier has it."""
        first, object_id = self._open[0] if self._open else None, self.named(object_id)
        if first is None or self._ask(first, "contains", partial(first.contains, object_id), False):
            return first is not None
        view = aligned_buffer(size_max + 1)
        self._flight.read(object_id, view, 0, partial(self._read_slow, self._open, object_id, view, 0, True))
        return self._ask(first, "contains", partial(first.contains, object_id), False)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove from every tier."""
        return True in [
            self._ask(each, "delete", partial(each.delete, object_id, reason), False) for each in self._open
        ]

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Replace an object in every tier that can, slowest first: none brings the old one back. True if one did.

        Those that can't and are written in the background are told of it as of a new one.
        """
        object_id = self.named(object_id)
        able = [tier for tier in reversed(self._open) if tier.can_replace]
        done = [self._put(tier, object_id, buffer, partial(tier.replace, object_id, buffer)) for tier in able]
        for tier in self._open:
            if tier in self._write_back and tier not in able:
                self._put_later(tier, object_id, buffer)
        return True in done

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Have every tier that remembers decisions, or tells who does, add to its counts."""
        for tier in self._open:
            self._ask(tier, "note", partial(tier.note_decisions, namespace, counts), None)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return the reason of the slowest tier that knows one: it had the object last."""
        reasons = (tier.removed_reason(object_id) for tier in reversed(self._open))
        return next((reason for reason in reasons if reason is not None), None)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield each object once, as the fastest tier that has it lists it."""
        seen: set[ObjectId] = set()
        for tier in self._open:
            for info in tier.objects():
                if info.id not in seen:
                    if tier is not self._open[-1]:
                        seen.add(info.id)
                    yield info

    def records_by_tier(self) -> Iterator[tuple[int, Iterator[ListedBlock]]]:
        """Yield the tiers that keep objects over a restart, by number, with what each has."""
        for tier in self._open:
            yield self._tiers.index(tier), tier.records()

    def tier_stats(self, names: Collection[str] | None = None) -> list[TierStats]:
        """Return each open tier's counters, with the faults that this stack saw; of these names alone, if given.

        Tiers of other machines ask these what they hold.
        """
        asked = [tier for tier in self._open if names is None or self._faults.label(tier) in names]
        named = [(tier.stats(), self._faults.label(tier), self._faults.count(tier)) for tier in asked]
        return [msgspec.structs.replace(stats, name=name, faults=faults) for stats, name, faults in named]

    def check(self) -> None:
        """AssertionError if a tier's accounting is off. Call it while nobody uses the stack."""
        for tier in self._open:
            tier.check()

    def stats(self) -> TierStats:
        """Return the sums over the tiers; an object in two tiers counts twice."""
        return TierStats.sum_of(self.name, self.tier_stats())
