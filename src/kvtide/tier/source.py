"""Where a load takes its bytes from: ranges of objects, handed over as they come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvtide.clock import Clock
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.tier.base import Tier
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, StoredObject, header_and_table_bytes, parse_header

# Takes the next bytes of a range, valid during the call only; False if no more are wanted. Called with none while a
# source waits, to be asked that.
Take = Callable[[memoryview], bool]

_log = logging.getLogger(__name__)


class Source(Protocol):
    """A place that has the objects. Several threads read from it at once."""

    @property
    def name(self) -> str:
        """Return the source's name in logs and counters."""

    def read(self, object_id: ObjectId, start: int, stop: int, take: Take, deadline_s: float) -> bool:
        """Hand bytes [start, stop) to `take` in order, as they come, until it says False or `deadline_s` on the clock.

        False if the object, or a byte of the range, is not there. TierUnavailable if the read comes to an early end:
        what was taken counts.
        """


class TierSource:
    """Any tier as a source, read in slices: what one slice has brought counts, whatever becomes of the next."""

    def __init__(self, tier: Tier, clock: Clock, slice_bytes: int = 1 << 20) -> None:
        if slice_bytes < 1:
            raise ValueError(f"a slice has at least one byte, got {slice_bytes}")
        self._tier = tier
        self._clock = clock
        self._slice_bytes = slice_bytes

    @property
    def name(self) -> str:
        """Return the tier's name."""
        return self._tier.name

    def read(self, object_id: ObjectId, start: int, stop: int, take: Take, deadline_s: float) -> bool:
        """Hand bytes [start, stop) to `take`, a slice at a time."""
        buffer = memoryview(bytearray(min(self._slice_bytes, stop - start)))
        while start < stop:
            if self._clock.monotonic_s() >= deadline_s:
                raise TierUnavailable(f"{self.name}: the deadline passed at byte {start} of {object_id}")
            wanted = min(len(buffer), stop - start)
            came = self._tier.get_into(object_id, buffer[:wanted], start)
            if not came:
                return False
            start += came
            if not take(buffer[:came]):
                break
        return True


def read_heads(
    sources: Sequence[Source], ids: Sequence[ObjectId], clock: Clock, wait_s: float, requests_max: int
) -> list[StoredObject]:
    """Read header and section table of the leading objects that are there, in as few round trips as can be.

    Objects of one run have tables of one size: the first tells it. The list ends before an object that no source has
    or that is not whole.
    """
    deadline_s = clock.monotonic_s() + wait_s
    first = _any_head(sources, ids[0], HEADER_BYTES, deadline_s) if ids else None
    if first is None:
        return []
    with ThreadPoolExecutor(requests_max, thread_name_prefix="kvtide-heads") as pool:
        rest = pool.map(lambda object_id: _any_head(sources, object_id, len(first.head), deadline_s), ids[1:])
        return [first, *_leading(rest)]


def _leading(heads: Iterable[StoredObject | None]) -> Iterator[StoredObject]:
    for head in heads:
        if head is None:
            return
        yield head


def _any_head(sources: Sequence[Source], object_id: ObjectId, size: int, deadline_s: float) -> StoredObject | None:
    for source in sources:
        try:
            head = _read_head(source, object_id, size, deadline_s)
            if head is not None:
                return head
        except (TierUnavailable, CorruptPayload) as error:
            _log.debug("no header of %s: %s", object_id, error)
    return None


def _read_head(source: Source, object_id: ObjectId, size: int, deadline_s: float) -> StoredObject | None:
    data = bytearray()

    def take(part: memoryview) -> bool:
        data.extend(part)
        return True

    if not source.read(object_id, 0, size, take, deadline_s):
        return None
    if (wanted := header_and_table_bytes(data)) > len(data):
        source.read(object_id, len(data), wanted, take, deadline_s)
    return parse_header(bytes(data), object_id)
