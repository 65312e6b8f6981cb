"""The contract of a tier. `testing.tier_suite` checks it for every implementation.

A miss is None or False. TierUnavailable is for a tier that can't serve at all; the cache makes it a miss.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from kvtide.evict import Hint, States
from kvtide.index import ListedBlock
from kvtide.outcomes import Decided
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

__all__ = [
    "Batched",
    "Buffer",
    "FilePart",
    "Lender",
    "LentObject",
    "Replacing",
    "Reporting",
    "WrappedTier",
    "is_lender",
]

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


class ObjectInfo(NamedTuple):
    """One object as a listing shows it. `last_use_s` is wall time, for people."""

    id: ObjectId
    size: int
    last_use_s: float


class Tier(Protocol):
    """Stores whole objects under their ids. Safe to use from several threads between `open` and `close`."""

    @property
    def name(self) -> str:
        """Return the tier's name in statistics and logs."""

    def open(self) -> None:
        """Take the resources. TierUnavailable if that can't be done."""

    def close(self) -> None:
        """Give the resources back. Idempotent."""

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether the object is here now. A hint: it may be gone at the next call."""

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read the object's bytes from `offset` on into `buffer` and return how many were read.

        None for an absent object. Fewer bytes than the buffer holds means that the object ended. Unverified: the
        caller checks what it got. ValueError for a negative offset.
        """

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store an object; visible only once it is whole. False if it was not stored.

        An object that is here already is kept: equal ids mean equal content. TierFull if there is no room.
        """

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove an object. False if it was not here."""

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return why the object was removed last, if the tier remembers."""

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is here, in no particular order; objects may come and go meanwhile."""

    def stats(self) -> TierStats:
        """Return the counters."""


@runtime_checkable
class Batched(Protocol):
    """A tier for which many look-ups take hardly longer than one."""

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Return how many leading ones of these objects are here now. A lower bound: the next may be here too."""

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Tell of each of these objects whether it is here now."""


@runtime_checkable
class Recorded(Protocol):
    """A tier whose objects outlive the process and are cheap to list with their parents."""

    def records(self) -> Iterator[ListedBlock]:
        """Yield every object with its parent, in no particular order. Not a use of the objects."""


@runtime_checkable
class Forcible(Protocol):
    """A tier that looks in all regions for an id that wants the latest; tiers of one machine have only copies."""

    looks_in_regions: bool


@runtime_checkable
class Noting(Protocol):
    """A tier that remembers what engines decided, or tells who does."""

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Add to the counts of tokens. TierUnavailable if they are lost."""


@runtime_checkable
class Checked(Protocol):
    """A tier that can check its own accounting."""

    def check(self) -> None:
        """AssertionError if anything is lost or counted wrong. Call it while nobody uses the tier."""


@runtime_checkable
class Replacing(Protocol):
    """A tier in which another form of an object, of the same meaning, can take its place."""

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Replace an object. False if it was not here or not replaced: what was here then stays, or is a miss.

        A reader gets bytes of one form or of the other, in ranges of both if it reads several: sections tell.
        """


@runtime_checkable
class Reporting(Protocol):
    """A tier that tells what it evicts or deletes by itself; what other processes remove is found out by reading."""

    def report_to(self, on_removed: OnRemoved) -> None:
        """Call this from now on, from any thread and under the tier's own locks: it must not call the tier."""


@runtime_checkable
class Evicting(Protocol):
    """A tier that offers what it evicts."""

    def offer_to(self, offer: Offer) -> None:
        """Call this from now on before an object is evicted, under the tier's own locks: it must not call the tier."""


@runtime_checkable
class Ordered(Protocol):
    """A tier whose objects leave in an order that can be told of requests."""

    @property
    def hears_requests(self) -> bool:
        """Tell whether `note_request` matters."""

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        """Note that a prompt asks for these objects, all of its full blocks. True if its advice is taken."""


@runtime_checkable
class Advised(Protocol):
    """A tier elsewhere that passes advice on to whoever orders its objects."""

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        """Pass a prompt's advice on. TierUnavailable if it is lost."""


class Observer(Protocol):
    """Hears where objects are; tiers are numbered as they stand in the stack, the fastest 0.

    Called from any thread, possibly under a tier's locks: it must not call the stack.
    """

    def placed(self, object_id: ObjectId, tier: int, size: int) -> None:
        """An object of so many bytes was stored in a tier."""

    def removed(self, object_id: ObjectId, tier: int) -> None:
        """An object is no longer in a tier."""


@runtime_checkable
class AdmittingTier(Protocol):
    """A tier that takes only what deserves a place."""

    def would_admit(self, object_id: ObjectId, size: int) -> bool:
        """Tell whether an object deserves a place now."""


class Removals:
    """The last REMEMBERED_MAX reasons. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: OrderedDict[ObjectId, str] = OrderedDict()

    def note(self, object_id: ObjectId, reason: str) -> None:
        """Remember a reason, and forget the oldest one if there are too many."""
        with self._lock:
            self._reasons[object_id] = reason
            self._reasons.move_to_end(object_id)
            while len(self._reasons) > REMEMBERED_MAX:
                self._reasons.popitem(last=False)

    def reason(self, object_id: ObjectId) -> str | None:
        """Return the reason, or None if it was never known or is forgotten."""
        with self._lock:
            return self._reasons.get(object_id)


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


@runtime_checkable
class Lender(Protocol):
    """A tier that lends objects."""

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend an object; None if it is not here. A use of the object, as `get_into` is."""

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend an object if that needs no waiting for a disk; None says nothing about others, and counts nothing."""


class LendingTier(Tier, Lender, Protocol):
    """A tier that lends objects."""


@cache
def _lends(kind: type) -> bool:
    return issubclass(kind, Lender)


def is_lender(tier: Tier) -> TypeGuard[LendingTier]:
    """Tell whether a tier lends. Its class is asked once: a look at the protocol takes a tenth of a small GET."""
    return _lends(type(tier))


class WrappedTier:
    """Passes everything on. Subclasses see each transfer and look-up before it happens, in `before`."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    @property
    def name(self) -> str:
        """Return the wrapped tier's name."""
        return self.tier.name

    def before(self, verb: str, size: int) -> None:
        """Called before a verb (`contains`, `get`, `put`, `delete`) with the bytes of the caller's buffer."""

    def open(self) -> None:
        """Open the wrapped tier."""
        self.tier.open()

    def close(self) -> None:
        """Close the wrapped tier."""
        self.tier.close()

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the wrapped tier."""
        self.before("contains", 0)
        return self.tier.contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the wrapped tier."""
        self.before("get", len(buffer))
        return self.tier.get_into(object_id, buffer, offset)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store in the wrapped tier."""
        self.before("put", len(buffer))
        return self.tier.put_from(object_id, buffer)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove from the wrapped tier."""
        self.before("delete", 0)
        return self.tier.delete(object_id, reason)

    def report_to(self, on_removed: OnRemoved) -> None:
        """Pass it on if the wrapped tier reports."""
        if isinstance(self.tier, Reporting):
            self.tier.report_to(on_removed)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Ask the wrapped tier."""
        return self.tier.removed_reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """List the wrapped tier."""
        return self.tier.objects()

    def stats(self) -> TierStats:
        """Return the wrapped tier's counters."""
        return self.tier.stats()
