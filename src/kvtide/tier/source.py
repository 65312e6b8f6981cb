"""Ranges of objects, handed over as they come: any tier is a source of them.

Invariant: a byte that was handed over is not asked for again by the same read, at whichever server or tier it goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.tier.breaker import until
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, StoredObject, header_and_table_bytes, parse_header
from kvtide.wire.ranges import RANGES_MAX

__all__ = ["RangeSource", "read_heads"]

# Takes the next bytes of a range, valid during the call only; False if no more are wanted. Called with none while a
# source waits, to be asked that.
Take = Callable[[memoryview], bool]

# A tier that answers whole reads is read in slices: one is lost if it breaks off.
SLICE_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class Sliceable(Protocol):
    """The one verb of a tier that is read in slices."""

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """See `Tier`."""


@runtime_checkable
class RangeSource(Protocol):
    """A tier that hands over bytes as they come. Safe to use from several threads."""

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand bytes [start, stop) to `take` in order until it says False; wait as `tier.breaker.until` says.

        False if the object, or a byte of the range, is not there. TierUnavailable if the read comes to an early end:
        what was taken counts.
        """


class RangeRead(NamedTuple):
    """A range of an object: where it begins, and memory for its bytes, one at least."""

    offset: int
    buffer: memoryview


@runtime_checkable
class RangesSource(Sliceable, Protocol):
    """A tier for which many ranges of an object cost hardly more round trips than one."""

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read ranges that ascend and lie apart, each as `get_into` reads one; return how many bytes of each came.

        At most RANGES_MAX. None for an absent object. One that is replaced meanwhile may give bytes of both forms.
        """


def read_ranges(tier: Sliceable, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
    """Do what `RangesSource` does with any tier and any number: one after the other where it takes no more at once."""
    many = tier.get_ranges_into if isinstance(tier, RangesSource) else partial(_one_by_one, tier)
    sizes = list[int]()
    for at in range(0, len(ranges), RANGES_MAX):
        some = ranges[at : at + RANGES_MAX]
        came = many(object_id, some) if len(some) > 1 else _one_by_one(tier, object_id, some)
        if came is None:
            return None
        sizes += came
    return sizes


def _one_by_one(tier: Sliceable, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
    sizes = list[int]()
    for offset, buffer in ranges:
        size = tier.get_into(object_id, buffer, offset)
        if size is None:
            return None
        sizes.append(size)
    return sizes


# Reads on from a position up to the end of a range; else as `read_range`.
ReadOn = Callable[[int, Take], bool]


def read_from_any(
    reads: Iterable[ReadOn], start: int, stop: int, take: Take, note: Callable[[int, Exception], None]
) -> bool:
    """Read a range from the first place that has it, going on at the next where one breaks off; else as `read_range`.

    note: told of each fault, and at which place.
    """
    position, is_wanted, problem = start, True, ""

    def taking(part: memoryview) -> bool:
        nonlocal position, is_wanted
        position += len(part)
        is_wanted = take(part)
        return is_wanted

    for number, read_on in enumerate(reads):
        try:
            if read_on(position, taking):
                return True
        except (TierUnavailable, OSError, MemoryError) as error:
            if is_wanted and position < stop:
                note(number, error)
                problem = str(error)
        if not is_wanted or position == stop:
            return True
    if problem:
        raise TierUnavailable(f"broke off at byte {position}: {problem}")
    return False


def read_range(tier: RangeSource | Sliceable, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
    """Read a range from any tier, in slices from one that does not hand over bytes as they come."""
    if isinstance(tier, RangeSource):
        return tier.read_range(object_id, start, stop, take)
    buffer = memoryview(bytearray(min(SLICE_BYTES, stop - start)))
    while start < stop:
        came = tier.get_into(object_id, buffer[: stop - start], start)
        if not came:
            return False
        start += came
        if not take(buffer[:came]):
            break
    return True


def read_range_of_any(
    tiers: Sequence[RangeSource | Sliceable],
    object_id: ObjectId,
    start: int,
    stop: int,
    take: Take,
    note: Callable[[int, Exception], None],
) -> bool:
    """Do `read_from_any` with tiers."""
    reads = [lambda at, take, tier=tier: read_range(tier, object_id, at, stop, take) for tier in tiers]
    return read_from_any(reads, start, stop, take, note)


def read_heads(
    source: RangeSource, ids: Sequence[ObjectId], deadline_s: float, requests_max: int
) -> list[StoredObject]:
    """Read header and section table of the leading objects that are there, in as few round trips as can be.

    Objects of one run have tables of one size: the first tells it. The list ends before an object that is absent or not
    whole, and at `deadline_s` on the monotonic clock.
    """
    first = _read_head(source, ids[0], HEADER_BYTES, deadline_s) if ids else None
    if first is None:
        return []
    with ThreadPoolExecutor(requests_max, thread_name_prefix="kvtide-heads") as pool:
        rest = pool.map(lambda object_id: _read_head(source, object_id, len(first.head), deadline_s), ids[1:])
        return [first, *_leading(rest)]


def _leading(heads: Iterable[StoredObject | None]) -> Iterator[StoredObject]:
    for head in heads:
        if head is None:
            return
        yield head


def _read_head(source: RangeSource, object_id: ObjectId, size: int, deadline_s: float) -> StoredObject | None:
    data = bytearray()

    def take(part: memoryview) -> bool:
        data.extend(part)
        return True

    try:
        with until(deadline_s):
            if not source.read_range(object_id, 0, size, take):
                return None
            if (wanted := header_and_table_bytes(data)) > len(data):
                source.read_range(object_id, len(data), wanted, take)
        return parse_header(bytes(data), object_id)
    except (TierUnavailable, CorruptPayload) as error:
        _log.debug("no header of %s: %s", object_id, error)
        return None
