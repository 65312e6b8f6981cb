"""The contract of a tier. `testing.tier_suite` checks it for every implementation.

A miss is None or False. TierUnavailable is for a tier that can't serve at all; the cache makes it a miss.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable, WrongServer
from kvtide.evict import EvictionOrder, Hint, Recent, States
from kvtide.outcomes import Decided
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

# Takes the next bytes of a range, valid during the call only; False if no more are wanted. Called with none while a
# source waits, to be asked that.
Take = Callable[[memoryview], bool]

# A tier that answers whole reads is read in slices: one is lost if it breaks off.
SLICE_BYTES = 1 << 18
# URLs of pools of servers.
POOL_SCHEMES = ("pool", "pool+file", "pool+dns", "pool+etcd", "pool+etcds")

Buffer = bytes | bytearray | memoryview
# Asked before a victim is chosen: a block in use is never evicted.
IsPinned = Callable[[BlockKey], bool]
# Told of objects that are no longer in a tier.
OnRemoved = Callable[[Sequence[ObjectId]], None]
# Fills a buffer of the object's size with its bytes. False if they can't be had any more.
Fill = Callable[[memoryview], bool]
# Called with an object that is about to be evicted, its size, and how to copy it.
Offer = Callable[[ObjectId, int, Fill], None]
REMEMBERED_MAX = 4096
_PLACE = re.compile(r"(?:\[([^][/?#@,\s]+)\]|([^][/?#@,\s]+)):([0-9]{1,5})")


def host_and_port(text: str) -> tuple[str, int]:
    """Return both parts of HOST:PORT, the host without brackets and in ASCII. ValueError for anything else."""
    found = _PLACE.fullmatch(text)
    try:
        # A name that has no such form would fail at each call.
        host = (found[1] or found[2]).encode("idna").decode() if found else ""
    except UnicodeError:
        host = ""
    if not found or not host or not 0 < int(found[3]) < 1 << 16:
        raise ValueError(f"expected HOST:PORT with a host's name or address and a port from 1 to 65535, got {text!r}")
    return host, int(found[3])


class ObjectInfo(NamedTuple):
    """One object as a listing shows it. `last_use_s` is wall time, for people."""

    id: ObjectId
    size: int
    last_use_s: float


class FilePart(NamedTuple):
    """An object's place in an open file."""

    descriptor: int
    offset: int


@dataclass(frozen=True, slots=True)
class LentObject:
    """An object of `size` bytes, in `file` or, without one, in `views`. `head` are its first bytes, 256 if it has them.

    Read it only. `release` gives it back; call it once.
    """

    size: int
    head: bytes
    views: Sequence[memoryview]
    file: FilePart | None
    release: Callable[[], None]


class RangeRead(NamedTuple):
    """A range of an object: where it begins, and memory for its bytes, one at least."""

    offset: int
    buffer: memoryview


class Tier:
    """Stores whole objects under their ids. Safe to use from several threads between `open` and `close`.

    The first half is every tier's own. In the second half the defaults are those of a tier that can't do it, and
    `testing.tier_suite` holds a tier to what it says it can.
    """

    name = "tier"
    # The tier keeps the objects itself, on this machine: `report_to` and `offer_to` have an effect.
    is_own = False
    # Many look-ups take hardly longer than one: `count_leading`.
    is_batched = False
    can_lend = False
    # `note_request` may matter to the order in which objects leave.
    hears_requests = False
    can_replace = False
    takes_advice = False
    # A stack sends only what the tiers in front evict.
    takes_evicted = False
    # An id that wants the latest is looked for in all regions; tiers of one machine have only copies.
    looks_in_regions = False

    def open(self) -> None:
        """Take the resources. TierUnavailable if that can't be done."""

    def close(self) -> None:
        """Give the resources back. Idempotent."""

    def contains(self, object_id: ObjectId) -> bool:
        """True if the object is here now. A hint: it may be gone at the next call."""
        raise NotImplementedError

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read the object's bytes from `offset` on into `buffer` and return how many were read.

        None for an absent object. Fewer bytes than the buffer holds means that the object ended. Unverified: the
        caller checks what it got. ValueError for a negative offset.
        """
        raise NotImplementedError

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store an object; visible only once it is whole. False if it was not stored.

        An object that is here already is kept: equal ids mean equal content. TierFull if there is no room.
        """
        raise NotImplementedError

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove an object. False if it was not here."""
        raise NotImplementedError

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return why the object was removed last, if the tier remembers."""
        return None

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is here, in no particular order; objects may come and go meanwhile."""
        raise NotImplementedError

    def stats(self) -> TierStats:
        """Return the counters."""
        raise NotImplementedError

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Tell of each of these objects whether it is here now."""
        return [self.contains(each) for each in object_ids]

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Return how many leading objects are here now. A lower bound: the next may be here too."""
        found = self.contains_each(object_ids) if self.is_batched else map(self.contains, object_ids)
        return next((count for count, is_here in enumerate(found) if not is_here), len(object_ids))

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand bytes [start, stop) to `take` in order until it says False; wait as `tier.breaker.until` says.

        False if the object, or a byte of the range, is not there. TierUnavailable if the read comes to an early end:
        what was taken counts.
        """
        buffer = memoryview(bytearray(min(SLICE_BYTES, stop - start)))
        while start < stop:
            came = self.get_into(object_id, buffer[: stop - start], start)
            if not came:
                return False
            start += came
            if not take(buffer[:came]):
                break
        return True

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read ranges that ascend and lie apart, each as `get_into` reads one; return how many bytes of each came.

        At most RANGES_MAX. None for an absent object. One that is replaced meanwhile may give bytes of both forms.
        """
        sizes = list[int]()
        for offset, buffer in ranges:
            size = self.get_into(object_id, buffer, offset)
            if size is None:
                return None
            sizes.append(size)
        return sizes

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Replace an object by another form of the same meaning, if the tier `can_replace`.

        False if it was not here or not replaced: what was here then stays, or is a miss. A reader gets bytes of one
        form or of the other, in ranges of both if it reads several: sections tell.
        """
        return False

    def lend(self, object_id: ObjectId, can_wait: bool = True) -> LentObject | None:
        """Lend an object; None if it is not here, or the tier can't. A use of the object, as `get_into` is.

        can_wait: for a disk. Without it None says nothing about the object, and counts nothing.
        """
        return None

    def parents(self) -> Iterator[tuple[ObjectId, BlockKey]]:
        """Yield every object that outlives the process with its parent, parents first. Not a use."""
        return iter(())

    def report_to(self, on_removed: OnRemoved) -> None:
        """Call this whenever the tier evicts or deletes, from any thread and under its own locks: it must not call it.

        What other processes remove is found out by reading.
        """

    def offer_to(self, offer: Offer) -> None:
        """Call this from now on before an object is evicted, under the tier's own locks: it must not call the tier."""

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        """Note that a prompt asks for these objects, all of its full blocks. True if its advice is taken."""
        return False

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        """Pass a prompt's advice on to whoever orders the objects elsewhere. TierUnavailable if it is lost."""

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Add to what engines decided, counts of tokens. TierUnavailable if they are lost."""

    def would_admit(self, object_id: ObjectId, size: int) -> bool:
        """True if an object deserves a place now."""
        return True

    def check(self) -> None:
        """AssertionError if anything is lost or counted wrong. Call it while nobody uses the tier."""


class DeviceMemory(Protocol):
    """A device of the engine's that has memory to spare."""

    def tier(self, bytes_max: int, clock: Clock, is_pinned: IsPinned, order: EvictionOrder) -> Tier:
        """Return a tier of so many bytes in it, not yet opened."""


class CountingTier(Tier):
    """Counts the hits, misses and faults of this process, and remembers why it removed objects. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The last reasons, set under the lock.
        self._removals: Recent[ObjectId, str] = Recent(REMEMBERED_MAX)
        self._hits = self._misses = self._faults = 0

    def removed_reason(self, object_id: ObjectId) -> str | None:
        return self._removals.get(object_id)

    def _note(self, is_hit: bool) -> None:
        with self._lock:
            self._hits += is_hit
            self._misses += not is_hit

    def _note_fault(self, error: BaseException) -> None:
        """Count an error, unless it sends us to another server."""
        with self._lock:
            self._faults += not isinstance(error, WrongServer)

    @contextmanager
    def _faults_noted(self) -> Iterator[None]:
        try:
            yield
        except TierUnavailable as error:
            self._note_fault(error)
            raise


class OwnTier(CountingTier):
    """Keeps objects on this machine, at most `bytes_max`, and says what leaves."""

    is_own = can_replace = True

    def __init__(self, bytes_max: int, clock: Clock) -> None:
        super().__init__()
        if bytes_max <= 0:
            raise ValueError(f"bytes_max of the {self.name} tier must be positive, got {bytes_max}")
        self._bytes_max = bytes_max
        self._clock = clock
        self._evictions = 0
        self._on_removed: OnRemoved = lambda object_ids: None
        self._offer: Offer = lambda object_id, size, fill: None

    def report_to(self, on_removed: OnRemoved) -> None:
        self._on_removed = on_removed

    def offer_to(self, offer: Offer) -> None:
        self._offer = offer

    def _too_large(self, object_id: ObjectId, size: int) -> TierFull:
        return TierFull(f"{object_id} has {size} bytes, the {self.name} tier may hold {self._bytes_max}")

    def _stats(self, objects: int, used_bytes: int) -> TierStats:
        counts = (self._hits, self._misses, self._evictions, self._faults)
        return TierStats(self.name, objects, used_bytes, self._bytes_max, *counts)


class WrappedTier(Tier):
    """Passes everything on."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.is_own = tier.is_own

    def open(self) -> None:
        self.tier.open()

    def close(self) -> None:
        self.tier.close()

    def contains(self, object_id: ObjectId) -> bool:
        return self.tier.contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        return self.tier.get_into(object_id, buffer, offset)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        return self.tier.put_from(object_id, buffer)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        return self.tier.delete(object_id, reason)

    def report_to(self, on_removed: OnRemoved) -> None:
        self.tier.report_to(on_removed)

    def offer_to(self, offer: Offer) -> None:
        self.tier.offer_to(offer)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        return self.tier.removed_reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        return self.tier.objects()

    def stats(self) -> TierStats:
        return self.tier.stats()
