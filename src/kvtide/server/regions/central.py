"""The centre's records as a region has them: asked for at intervals, at once where the latest is wanted, written there.

Invariant: everything that the centre wrote before `as_of_s` is in the region's records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.regions.records import Records
from kvtide.tier import LastingFault, Repeater
from kvtide.tier.records import RecordsClient, raise_to
from kvtide.wire.protocol import FORCE_HEADER, TENANT_HEADER, staleness_s
from kvtide.wire.records import Record, RecordName

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

POLL_S = 1.0
# Answers of the centre that are about what the client said.
_PASSED_ON = frozenset({400, 403, 404, 409, 412, 413, 429, 503, 507})


class CentralRecords:
    """Keeps a region's records like the centre's, from `open` to `close`."""

    def __init__(self, client: RecordsClient, records: Records, clock: Clock) -> None:
        self._client = client
        self._records = records
        self._clock = clock
        self._asking = Repeater(self._ask, "kvtide-records")
        # The version of the last change that is here. Asked for anew after a restart: that mends what a file lost.
        self._after = 0
        # When the centre was asked what is here, by the clock that never goes back; and for people, who read clocks.
        self._asked_s = float("-inf")
        # Wall time; None until the centre has answered once.
        self.as_of_s: float | None = None
        # Generations that the centre has lost.
        self._lost: list[Record] = []
        self._fault = LastingFault(_log, "the centre's records stay as they are")

    def open(self) -> None:
        """Begin to ask."""
        self._client.open()
        self._asking.open()

    def stop(self) -> None:
        """Ask for nothing more by itself. Does not wait."""
        self._asking.stop()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._asking.close()
        self._client.close()

    def _ask(self) -> float:
        with self._fault.caught(TierUnavailable, RequestRefused, OSError):
            self.refresh()
            self._give_back()
        return POLL_S

    def _give_back(self) -> None:
        """Tell a centre that lost its records the generations that are known here: no invalidation is undone."""
        while self._lost:
            record = self._lost[-1]
            name = RecordName(record.kind, record.name)
            try:
                raise_to(self._client, name, int(record.value), _whose(record.tenant))
            except RequestRefused as error:
                _log.warning("the centre does not take back the generation of %s: %s", record.name, error)
            self._lost.pop()

    def refresh(self) -> None:
        """Take over what the centre has written until now. TierUnavailable or RequestRefused if it can't be asked."""
        asked_s, as_of_s, after, is_whole = self._clock.monotonic_s(), self._clock.wall_s(), self._after, False
        while not is_whole:
            found = self._client.changes(after)
            if found.version < max(after, self._records.version):
                # It has lost its records, and its clock was set back besides.
                self._lost = self._records.begin_anew()
                self._after = after = 0
                found = self._client.changes(after)
            self._records.adopt(found.records)
            is_whole = found.is_whole or not found.records
            after = found.records[-1].version if found.records else after
        self._after = max(self._after, after)
        if asked_s > self._asked_s:
            self._asked_s, self.as_of_s = asked_s, as_of_s

    def require_latest(self) -> None:
        """Have everything that the centre has written before this call. RequestRefused (503) if that can't be."""
        try:
            self.refresh()
        except (TierUnavailable, RequestRefused, OSError) as error:
            raise RequestRefused(
                503, f"the latest state was asked for and can't be had: {error}", retry_after_s=1.0
            ) from error

    def write(self, tenant: str, name: RecordName, value: str, headers: Sequence[tuple[str, str]]) -> Record:
        """Let the centre write a record, then have it here.

        RequestRefused: 503 if the centre can't be asked, else what it answers.
        """
        written = self._asked(lambda: self._client.write(name, value, [*_whose(tenant), *headers]))
        return self._adopted(tenant, written)

    def remove(self, tenant: str, name: RecordName, headers: Sequence[tuple[str, str]]) -> Record | None:
        """Let the centre remove a record, then have that here; None if there was none. RequestRefused as in `write`."""
        removed = self._asked(lambda: self._client.remove(name, [*_whose(tenant), *headers]))
        return self._adopted(tenant, removed) if removed is not None else None

    def latest(self, tenant: str, name: RecordName) -> Record | None:
        """Return a record as the centre has it now, None if it has none. RequestRefused as in `write`."""
        found = self._asked(lambda: self._client.read(name, headers=_whose(tenant)))
        return msgspec.structs.replace(found, tenant=tenant) if found is not None else None

    def _adopted(self, tenant: str, record: Record) -> Record:
        record = msgspec.structs.replace(record, tenant=tenant)
        self._records.adopt([record])
        return record

    def _asked(self, ask: Callable[[], _Result]) -> _Result:
        try:
            return ask()
        except TierUnavailable as error:
            reason = f"records are written at the centre, which can't be asked: {error}"
            raise RequestRefused(503, reason, retry_after_s=1.0) from error
        except RequestRefused as error:
            if error.status in _PASSED_ON:
                raise
            # Between the centre and us: the client can do nothing about it.
            raise RequestRefused(502, f"the centre does not do what it was asked for: {error}") from error

    def is_too_old_for(self, headers: Mapping[str, str]) -> bool:
        """Tell whether a request wants the latest, or what is newer than we have. RequestRefused (400) for nonsense."""
        staleness_s_max = staleness_s(headers)
        if FORCE_HEADER in headers:
            return True
        return staleness_s_max is not None and self._clock.monotonic_s() - self._asked_s > staleness_s_max


def _whose(tenant: str) -> list[tuple[str, str]]:
    return [(TENANT_HEADER, tenant)] if tenant else []
