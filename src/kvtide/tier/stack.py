"""Several tiers as one, fastest first: reads take the first that has the object, writes go to all.

What is read a second time from a slower tier is copied up: the first reading of an object is on somebody's critical
path, and most objects are never read again.

Invariant: a fault of one tier never hides what another one holds; it is counted and logged once per tier and kind.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Buffer, ObjectInfo, Tier, TierStats
from kvtide.types import ObjectId

__all__ = ["TierStack"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Objects whose first reading is remembered.
READ_ONCE_MAX = 65536


class TierStack:
    """A tier made of tiers. One that fails to open is left out, the others serve."""

    name = "stack"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        if not tiers:
            raise ValueError("a stack needs at least one tier, got none")
        self._tiers = list(tiers)
        self._open: list[Tier] = []
        self._lock = threading.Lock()
        self._faults: dict[str, int] = {tier.name: 0 for tier in tiers}
        self._logged: set[tuple[str, str]] = set()
        self._read_once: OrderedDict[ObjectId, bool] = OrderedDict()

    def open(self) -> None:
        """Open every tier. One that can't be opened is logged and left out; with none left, everything is a miss."""
        for tier in self._tiers:
            try:
                tier.open()
                self._open.append(tier)
            except TierUnavailable as error:
                self._note_fault(tier, "open", error)

    def close(self) -> None:
        """Close every tier."""
        for tier in self._tiers:
            tier.close()
        self._open = []

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether any tier has the object now."""
        return any(self._ask(tier, "contains", partial(tier.contains, object_id), False) for tier in self._open)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the first tier that has the object; one read whole for the second time is copied up."""
        for position, tier in enumerate(self._open):
            size = self._ask(tier, "read", partial(tier.get_into, object_id, buffer, offset), None)
            if size is not None:
                if position and offset == 0 and size < len(buffer) and self._is_second_read(object_id):
                    self._put_all(self._open[:position], object_id, buffer[:size])
                return size
        return None

    def _is_second_read(self, object_id: ObjectId) -> bool:
        with self._lock:
            if self._read_once.pop(object_id, False):
                return True
            self._read_once[object_id] = True
            if len(self._read_once) > READ_ONCE_MAX:
                self._read_once.popitem(last=False)
            return False

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store in every tier. True if at least one has it now."""
        return self._put_all(self._open, object_id, buffer)

    def _put_all(self, tiers: Sequence[Tier], object_id: ObjectId, buffer: Buffer) -> bool:
        stored = [self._ask(tier, "write", partial(tier.put_from, object_id, buffer), False) for tier in tiers]
        return any(stored)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove from every tier."""
        deleted = [self._ask(tier, "delete", partial(tier.delete, object_id, reason), False) for tier in self._open]
        return any(deleted)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return the reason of the slowest tier that knows one: it had the object last."""
        for tier in reversed(self._open):
            reason = tier.removed_reason(object_id)
            if reason is not None:
                return reason
        return None

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield each object once, as the fastest tier that has it lists it."""
        seen: set[ObjectId] = set()
        for tier in self._open:
            for info in tier.objects():
                if info.id not in seen:
                    seen.add(info.id)
                    yield info

    def tier_stats(self) -> list[TierStats]:
        """Return each open tier's counters, with the faults that this stack saw."""
        return [tier.stats()._replace(faults=self._faults[tier.name]) for tier in self._open]

    def stats(self) -> TierStats:
        """Return the sums over the tiers; an object in two tiers counts twice."""
        sums = (sum(column) for column in zip(*(stats[1:] for stats in self.tier_stats()), strict=True))
        return TierStats(self.name, *sums) if self._open else TierStats(self.name, *[0] * 7)

    def _ask(self, tier: Tier, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        try:
            return action()
        except TierUnavailable as error:
            self._note_fault(tier, verb, error)
            return fallback

    def _note_fault(self, tier: Tier, verb: str, error: TierUnavailable) -> None:
        kind = (tier.name, "full" if isinstance(error, TierFull) else verb)
        with self._lock:
            self._faults[tier.name] += 1
            is_first = kind not in self._logged
            self._logged.add(kind)
        if is_first:
            _log.warning("%s tier: %s; served as misses, further faults of this kind are only counted", kind[0], error)
