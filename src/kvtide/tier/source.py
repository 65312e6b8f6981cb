"""Ranges of objects, handed over as they come: any tier is a source of them.

Invariant: a byte that was handed over is not asked for again by the same read, at whichever server or tier it goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Protocol

from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.tier.base import RangeRead, Take, Tier
from kvtide.tier.breaker import until
from kvtide.types import RANGES_MAX, ObjectId
from kvtide.wire import HEADER_BYTES, StoredObject, header_and_table_bytes, parse_header

_log = logging.getLogger(__name__)


class RangeSource(Protocol):
    """The one verb of a tier that a streamed load takes."""

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """See `Tier`."""


def read_ranges(tier: Tier, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
    """Read any number of ranges as `Tier.get_ranges_into` reads some."""
    sizes = list[int]()
    for at in range(0, len(ranges), RANGES_MAX):
        some = ranges[at : at + RANGES_MAX]
        # One range is cheapest as a plain read.
        came = tier.get_ranges_into(object_id, some) if len(some) > 1 else Tier.get_ranges_into(tier, object_id, some)
        if came is None:
            return None
        sizes += came
    return sizes


def read_from_any(
    reads: Iterable[Callable[[int, int, Take], bool]],
    start: int,
    stop: int,
    take: Take,
    note: Callable[[int, Exception], None],
) -> bool:
    """Do `Tier.read_range` of one object at the first place, going on at the next where one breaks off.

    reads: `Tier.read_range` at each place. `note` hears each fault.
    """
    position, is_wanted, problem = start, True, ""

    def taking(part: memoryview) -> bool:
        nonlocal position, is_wanted
        position += len(part)
        is_wanted = take(part)
        return is_wanted

    for number, read_on in enumerate(reads):
        try:
            if read_on(position, stop, taking):
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
        return [first, *filter(None, takewhile(bool, rest))]


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
