"""What a centre that starts learns from its regions: generations that it has lost.

Invariant: a centre whose records may be incomplete says nothing of objects or records before each region was asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.regions.records import Records
from kvtide.tier import LastingFault, Repeater
from kvtide.tier.records import RecordsClient, backed_up

_log = logging.getLogger(__name__)

RETRY_S = 0.5
# Regions that are asked at the same time.
ASKING_THREADS = 16


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
