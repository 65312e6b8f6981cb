"""A kvtide server as a source of ranges: bytes are handed over as they come, and what has come before a fault counts.

Unlike `HttpTier`, which answers whole reads and tries them again, a read here is tried once: who asked knows what is
still missing, and asks for that.
"""

from __future__ import annotations

import re
import threading

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.tier.http.connection import Endpoint, HttpConnection, Patience
from kvtide.tier.http.servers import Servers, object_target, servers_of
from kvtide.tier.source import Take
from kvtide.types import ObjectId
from kvtide.wire.http import pack_request_head
from kvtide.wire.protocol import DEADLINE_HEADER

# Who waits is asked so often whether to go on.
_BEAT_S = 0.05
# Connections that are kept for the next read.
_IDLE_MAX = 8
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/\d{1,18}")


class RangeSource:
    """One server. Safe to use from several threads, each read on a connection of its own."""

    def __init__(self, endpoint: Endpoint, headers: list[tuple[str, str]], clock: Clock) -> None:
        self._endpoint = endpoint
        self._headers = headers
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[HttpConnection] = []
        self._is_closed = False

    @property
    def name(self) -> str:
        """Return the server's address."""
        return str(self._endpoint)

    def close(self) -> None:
        """Close the connections, those in use when their read ends. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def read(self, object_id: ObjectId, start: int, stop: int, take: Take, deadline_s: float) -> bool:
        """Ask for bytes [start, stop) and hand them to `take` as they come; see `Source`."""
        assert 0 <= start < stop
        while True:
            with self._lock:
                if self._is_closed:
                    raise TierUnavailable(f"{self.name} is closed")
                link = self._idle.pop() if self._idle else None
            is_fresh = link is None
            link = link or HttpConnection(self._endpoint)
            watch = _Watch(self._clock, deadline_s, link, memoryview(bytearray(stop - start)), take)
            try:
                return self._exchange(link, is_fresh, watch, object_id, start)
            except (OSError, RequestRefused) as error:
                link.close()
                if not is_fresh and not link.has_answer and isinstance(error, ConnectionError) and watch.is_wanted:
                    # Closed while it was idle: that says nothing of the server.
                    continue
                watch.hand_over()
                if not watch.is_wanted or watch.handed == stop - start:
                    return True
                raise TierUnavailable(f"{self.name}: {error or type(error).__name__}") from error

    def _exchange(self, link: HttpConnection, is_fresh: bool, watch: _Watch, object_id: ObjectId, start: int) -> bool:
        if is_fresh:
            link.open(watch)
        left_ms = max(1, int(1000 * (watch.deadline_s - self._clock.monotonic_s())))
        target, named = object_target(object_id)
        headers = [
            *self._headers,
            *named,
            ("Range", f"bytes={start}-{start + len(watch.into) - 1}"),
            (DEADLINE_HEADER, str(left_ms)),
        ]
        answer = link.exchange(pack_request_head("GET", target, headers), b"", watch.into, watch)
        if answer.status == 206:
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
            if found is None or int(found.group(1)) != start:
                raise RequestRefused(502, f"asked for bytes from {start}, came {answer.headers.get('content-range')!r}")
        watch.hand_over()
        with self._lock:
            is_kept = link.is_open and len(self._idle) < _IDLE_MAX and not self._is_closed
            if is_kept:
                self._idle.append(link)
        if not is_kept:
            link.close()
        if answer.status in {404, 416}:
            return False
        if answer.status != 206:
            raise TierUnavailable(f"{self.name} answered with status {answer.status}")
        return watch.handed == len(watch.into) or not watch.is_wanted


class _Watch(Patience):
    """Hands over what has come each time that the link waits, and ends the exchange when no more is wanted."""

    def __init__(self, clock: Clock, deadline_s: float, link: HttpConnection, into: memoryview, take: Take) -> None:
        super().__init__(clock, deadline_s)
        self.into = into
        self.handed = 0
        self.is_wanted = True
        self._link = link
        self._take = take

    def left_s(self) -> float:
        """Return how long the next wait may be. ConnectionAbortedError if nothing more is wanted."""
        self.hand_over()
        if not self.is_wanted:
            raise ConnectionAbortedError("no more is wanted")
        return min(super().left_s(), _BEAT_S)

    def hand_over(self) -> None:
        """Hand over what has come since."""
        received = self._link.received
        if self.is_wanted:
            part, self.handed = self.into[self.handed : received], max(self.handed, received)
            self.is_wanted = self._take(part)


def range_sources(url: str, clock: Clock) -> list[RangeSource]:
    """Return a source for each server of a store's URL (`http_tier` says what that is). ValueError as there."""
    servers: Servers = servers_of(url)
    hosts = [str(endpoint) if not endpoint.path else "localhost" for endpoint in servers.endpoints]
    return [
        RangeSource(endpoint, [("Host", host), *servers.object_headers], clock)
        for endpoint, host in zip(servers.endpoints, hosts, strict=True)
    ]
