"""Records between a region and its centre, asked at intervals and where it must; a new centre asks its regions.

Invariant: everything that the centre wrote before `as_of_s` is in the region's records, and the centre knows of every
invalidation that the region knew of when it met the centre of this epoch. A centre whose records may be incomplete says
nothing of objects or records before each region was asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.regions.records import Records
from kvtide.tier import LastingFault, Repeater
from kvtide.tier.http.records import RecordsClient, backed_up, raise_to
from kvtide.wire.protocol import FORCE_HEADER, TENANT_HEADER, Record, RecordName, staleness_s

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

POLL_S = 1.0
# Whoever wants the latest while another compares all with a centre that has started over waits for that so long.
COMPARING_S_MAX = 2.0
# Starts of the centre while it is asked once.
EPOCHS_MAX = 3
# Answers of the centre that are about what the client said.
_PASSED_ON = frozenset({400, 403, 404, 409, 412, 413, 429, 503, 507})

RETRY_S = 0.5
# Regions that are asked at the same time.
ASKING_THREADS = 16


class _Heard(NamedTuple):
    """The version of the last change that is here, of those of an epoch of the centre."""

    epoch: str
    after: int


class CentralRecords:
    """Keeps a region's records like the centre's, from `open` to `close`."""

    def __init__(self, client: RecordsClient, records: Records, clock: Clock) -> None:
        self._client = client
        self._records = records
        self._clock = clock
        self._asking = Repeater(self._ask, "kvtide-records")
        # Nothing after a restart of ours or of the centre: comparing all mends what a file lost, here or there.
        self._heard = _Heard("", 0)
        self._lock = threading.Lock()
        self._comparing = threading.Lock()
        # When the centre was asked what is here, by the clock that never goes back; and for people, who read clocks.
        self._asked_s = float("-inf")
        # Wall time; None until the centre has answered once.
        self.as_of_s: float | None = None
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
        return POLL_S

    def refresh(self) -> None:
        """Take over what the centre has written until now. TierUnavailable or RequestRefused if it can't be asked."""
        asked_s, as_of_s = self._clock.monotonic_s(), self._clock.wall_s()
        for _ in range(EPOCHS_MAX):
            epoch = self._heard.epoch
            if self._follow() or self._meet(epoch):
                break
        else:
            raise TierUnavailable("the centre begins anew again and again")
        self._records.settle()
        if asked_s > self._asked_s:
            self._asked_s, self.as_of_s = asked_s, as_of_s

    def _follow(self) -> bool:
        """Take over what is new. False if the centre has started over: it may know less than it did, or than we do."""
        epoch, after = self._heard
        if not epoch:
            return False
        found = self._client.changes(after, epoch)
        if found.epoch != epoch:
            return False
        self._records.adopt(found.records)
        after = found.records[-1].version if found.records else after
        with self._lock:
            if self._heard.epoch == epoch:
                self._heard = _Heard(epoch, max(self._heard.after, after))
        return True

    def _meet(self, epoch: str) -> bool:
        """Compare all with a centre that is no more of this epoch. False if another has: perhaps before we asked."""
        is_first = self._comparing.acquire(blocking=False)
        if not is_first and not self._comparing.acquire(timeout=COMPARING_S_MAX):
            raise TierUnavailable("all records are being compared with the centre's")
        try:
            if is_first and self._heard.epoch == epoch:
                self._compare()
                return True
        finally:
            self._comparing.release()
        if self._heard.epoch == epoch:
            raise TierUnavailable("all records could not be compared with the centre's")
        return False

    def _compare(self) -> None:
        """Take over all that the centre has, and tell it the generations that it lacks: no invalidation is undone.

        It may have lost its file, or have an older one. What it has written since does not tell which.
        """
        found = self._client.changes()
        known = {(each.tenant, each.kind, each.name): each.value for each in found.records}
        lost = [
            each
            for each in self._records.generations()
            if int(each.value) > int(known.get((each.tenant, each.kind, each.name), 0))
        ]
        if found.version < self._records.version:
            # Its clock may have been set back besides.
            self._records.begin_anew()
        for record in lost:
            try:
                name = RecordName(record.kind, record.name)
                raise_to(self._client, name, int(record.value), _whose(record.tenant))
            except RequestRefused as error:
                _log.warning("the centre does not take back the generation of %s: %s", record.name, error)
        self._records.adopt(found.records)
        with self._lock:
            self._heard = _Heard(found.epoch, found.records[-1].version if found.records else 0)

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

    @property
    def is_needed(self) -> bool:
        """True if records are missing here, so that nothing is to be served before the centre was asked."""
        return not self._records.is_complete

    def is_too_old_for(self, headers: Mapping[str, str]) -> bool:
        """Tell whether a request wants the latest, or what is newer than we have. RequestRefused (400) for nonsense."""
        staleness_s_max = staleness_s(headers)
        if FORCE_HEADER in headers:
            return True
        return staleness_s_max is not None and self._clock.monotonic_s() - self._asked_s > staleness_s_max


def _whose(tenant: str) -> list[tuple[str, str]]:
    return [(TENANT_HEADER, tenant)] if tenant else []


class Recovery:
    """Asks regions for their generations, from `open` until it is over or `close`.

    It is over when all have answered; where no record is missing when all were asked once, for a file may be old.
    """

    def __init__(self, regions: Sequence[RecordsClient], records: Records) -> None:
        self._regions = list(regions)
        self._records = records
        self._asking = Repeater(self._ask, "kvtide-recovery")
        self._fault = LastingFault(_log, "the centre waits for what its regions know")
        self.is_over = False

    def open(self) -> None:
        """Begin to ask."""
        for region in self._regions:
            region.open()
        self._asking.open()

    def stop(self) -> None:
        """Ask nobody more. Does not wait."""
        self._asking.stop()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._asking.close()
        for region in self._regions:
            region.close()

    def require_over(self) -> None:
        """RequestRefused (503) if something invalidated might be taken for valid."""
        if not self.is_over:
            reason = "the centre has yet to ask its regions what was invalidated"
            raise RequestRefused(503, reason, retry_after_s=1.0)

    def _ask(self) -> float:
        with ThreadPoolExecutor(min(ASKING_THREADS, len(self._regions)), "kvtide-recovery") as pool:
            faults = [fault for fault in pool.map(self._recovered, self._regions) if fault is not None]
        with self._fault.caught(RequestRefused, TierUnavailable):
            if faults and not self._records.is_complete:
                raise faults[0]
            self._records.settle()
            self.is_over = True
            self.stop()
        return RETRY_S

    def _recovered(self, region: RecordsClient) -> RequestRefused | TierUnavailable | None:
        """Take over what a region knows; return why if it can't be asked."""
        try:
            self._records.recover(backed_up([region]))
        except (RequestRefused, TierUnavailable) as error:
            return error
        return None
