"""The centre's records as a region has them: asked for at intervals, at once where the latest is wanted, written there.

Invariant: everything that the centre wrote before `as_of_s` is in the region's records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.records import Records
from kvtide.tier.background import LastingFault, Repeater
from kvtide.tier.records import RecordsClient
from kvtide.wire.protocol import FORCE_HEADER, TENANT_HEADER, staleness_s
from kvtide.wire.records import Record, RecordName

__all__ = ["CentralRecords"]

_log = logging.getLogger(__name__)

POLL_S = 1.0


class CentralRecords:
    """Keeps a region's records like the centre's, from `open` to `close`."""

    def __init__(self, client: RecordsClient, records: Records, clock: Clock) -> None:
        self._client = client
        self._records = records
        self._clock = clock
        self._asking = Repeater(self._ask, "kvtide-records")
        # The version of the last change that is here. Asked for anew after a restart: that mends what a file lost.
        self._after = 0
        # Wall time; None until the centre has answered once.
        self.as_of_s: float | None = None
        self._fault = LastingFault(_log, "the centre's records stay as they are")

    def open(self) -> None:
        """Begin to ask."""
        self._client.open()
        self._asking.open()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._asking.close()
        self._client.close()

    def _ask(self) -> float:
        with self._fault.caught(TierUnavailable, RequestRefused, OSError):
            self.refresh()
        return POLL_S

    def refresh(self) -> None:
        """Take over what the centre has written until now. TierUnavailable or RequestRefused if it can't be asked."""
        asked_s, after, is_whole = self._clock.wall_s(), self._after, False
        while not is_whole:
            found = self._client.changes(after)
            self._records.adopt(found.records)
            is_whole = found.is_whole or not found.records
            after = found.records[-1].version if found.records else after
        self._after = max(self._after, after)
        self.as_of_s = asked_s if self.as_of_s is None else max(self.as_of_s, asked_s)

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
        own = [(TENANT_HEADER, tenant)] if tenant else []
        try:
            written = self._client.write(name, value, [*own, *headers])
        except TierUnavailable as error:
            reason = f"records are written at the centre, which can't be asked: {error}"
            raise RequestRefused(503, reason, retry_after_s=1.0) from error
        record = Record(tenant, name.kind, name.name, written.value, written.version)
        self._records.adopt([record])
        return record

    def is_too_old_for(self, headers: Mapping[str, str]) -> bool:
        """Tell whether a request wants the latest, or what is newer than we have. RequestRefused (400) for nonsense."""
        staleness_s_max = staleness_s(headers)
        if FORCE_HEADER in headers:
            return True
        as_of_s = float("-inf") if self.as_of_s is None else self.as_of_s
        return staleness_s_max is not None and self._clock.wall_s() - as_of_s > staleness_s_max
