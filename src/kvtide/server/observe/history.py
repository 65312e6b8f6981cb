"""An hour of a server's counters, so that whoever looks sees what was before: every 5 s of late, every minute before.

Invariant: there are at most `_FINE_MAX + _COARSE_MAX` samples, in the order of time.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvtide.server.observe.status import Status

SAMPLE_S = 5.0
_FINE_MAX = 120
_COARSE_S = 60.0
_COARSE_MAX = 60


class Sample(msgspec.Struct, frozen=True):
    """Counters at one moment; they only grow, but for what waits. Differences are rates."""

    uptime_s: float
    loaded_tokens: int
    missed_tokens: dict[str, int]
    sent_bytes: int
    received_bytes: int
    evictions: int
    waiting_sends: int

    @staticmethod
    def of(status: Status) -> Sample:
        """Return what a status says that is kept."""
        return Sample(
            status.uptime_s,
            status.loaded_tokens,
            status.missed_tokens,
            status.links[0].sent_bytes,
            status.links[0].received_bytes,
            sum(tier.evictions for tier in status.tiers),
            sum(tenant.waiting_sends for tenant in status.tenants),
        )


class History:
    """The samples of the last hour. One thread uses it."""

    def __init__(self) -> None:
        self._fine: deque[Sample] = deque(maxlen=_FINE_MAX)
        self._coarse: deque[Sample] = deque(maxlen=_COARSE_MAX)

    def note(self, sample: Sample) -> None:
        """Keep a sample."""
        self._fine.append(sample)
        if not self._coarse or sample.uptime_s - self._coarse[-1].uptime_s >= _COARSE_S:
            self._coarse.append(sample)

    def samples(self) -> list[Sample]:
        """Return what is kept, the oldest first."""
        since_s = self._fine[0].uptime_s if self._fine else 0.0
        return [*(each for each in self._coarse if each.uptime_s < since_s), *self._fine]


def history_body(history: History) -> bytes:
    """Return the samples as JSON."""
    return msgspec.json.encode({"samples": history.samples()})
