"""A kvtide server as its clients see it: bounded connections, retries, a circuit breaker.

Invariant: every request that kvtide sends may be repeated: keys name exact bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvtide.clock import Clock
from kvtide.errors import CorruptPayload, RequestRefused, TierUnavailable
from kvtide.tier.base import Buffer, Take
from kvtide.tier.breaker import Breaker, caller_deadline_s
from kvtide.tier.http.connection import Endpoint, HttpAnswer, HttpConnection, Patience
from kvtide.wire import StoredObject, parse_object
from kvtide.wire.frame import FRAME_HEADER_BYTES, frame_header
from kvtide.wire.http import pack_request_head
from kvtide.wire.protocol import DEADLINE_HEADER, PiecesAnswer

# Who waits for a range is asked so often whether to go on.
_BEAT_S = 0.05
# Waits so many seconds.
Sleep = Callable[[float], None]
# Worth another try: a body that was damaged on its way, a server that is busy, full of requests or restarting.
_REASON_BYTES_MAX = 200
_RETRIED = frozenset({408, 422, 429, 500, 502, 503})


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Bounds of what one client does with one server."""

    connections_max: int = 8
    # Tries of one call, the first included.
    tries_max: int = 3
    retry_s: float = 0.02
    faults_max: int = 5
    open_s: float = 2.0
    trial_s: float = 2.0


class Call:
    """One request, which another thread may abort. One for a range that begins at `start` goes on after a fault.

    Wherever it is tried next: at another server it asks for the rest, and begins again if that is of another object.
    """

    def __init__(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: Buffer,
        into: memoryview | None,
        start: int | None = None,
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.into = into
        self.start = start
        # How many bytes are in `into` already, and the ETag of the object that they are of.
        self.received = 0
        self.tag = ""
        self._lock = threading.Lock()
        self._link: HttpConnection | None = None
        self.is_aborted = False

    def use(self, link: HttpConnection) -> None:
        """Note the connection that it goes over. ConnectionAbortedError if it was aborted before."""
        with self._lock:
            if self.is_aborted:
                raise ConnectionAbortedError("the call was aborted")
            self._link = link

    def leave(self) -> None:
        """Note that the connection is somebody else's again."""
        with self._lock:
            self._link = None

    def again(self) -> Call:
        """Return the same request to be sent elsewhere, for what has not come yet."""
        other = Call(self.method, self.target, self.headers, self.body, self.into, self.start)
        other.received, other.tag = self.received, self.tag
        return other

    def missing(self) -> tuple[Sequence[tuple[str, str]], memoryview | None]:
        """Return the headers and the part of the buffer for what has not come yet."""
        if self.start is None or self.into is None or not self.received:
            return self.headers, self.into
        others = [header for header in self.headers if header[0] != "Range"]
        rest = ("Range", f"bytes={self.start + self.received}-{self.start + len(self.into) - 1}")
        return [*others, rest], self.into[self.received :]

    def keep(self, link: HttpConnection) -> None:
        """Count what an exchange brought before it failed."""
        if self.start is None or self.into is None or not link.tag:
            return
        if self.tag in {"", link.tag}:
            self.received, self.tag = self.received + link.received, link.tag
        else:
            self.received, self.tag = 0, ""

    def whole(self, answer: HttpAnswer) -> HttpAnswer:
        """Return an answer for the rest as one for all of it.

        ConnectionError, and nothing has come so far, if the rest is of another object or there is none.
        """
        if not self.received or answer.status not in {206, 416}:
            return answer
        content = answer.headers.get("content-range", "")
        expected = f"bytes {(self.start or 0) + self.received}-"
        if answer.status == 416 or answer.headers.get("etag") != self.tag or not content.startswith(expected):
            self.received, self.tag = 0, ""
            raise ConnectionError("the rest of the body is not to be had here")
        headers = {**answer.headers, "content-range": f"bytes {self.start}-{content.removeprefix(expected)}"}
        return answer._replace(headers=headers, size=self.received + answer.size)

    @property
    def came(self) -> int:
        """The number of bytes in `into` now, from its beginning on."""
        link = self._link
        return self.received + (link.received if link is not None else 0)

    def abort(self) -> None:
        """End the call where it is; it fails at once and is not tried again."""
        with self._lock:
            self.is_aborted = True
            if self._link is not None:
                self._link.abort()


class RangeWatch(Patience):
    """Hands over what has come of a range each time that the connection waits, and ends it when no more is wanted."""

    def __init__(self, clock: Clock, deadline_s: float, silence_s_max: float, call: Call, take: Take) -> None:
        super().__init__(clock, deadline_s, silence_s_max)
        self._call = call
        self._take = take
        self._handed = 0
        self._is_wanted = True

    def left_s(self) -> float:
        """Return how long the next wait may be. ConnectionAbortedError if nothing more is wanted."""
        self.hand_over()
        if not self._is_wanted:
            self._call.abort()
            raise ConnectionAbortedError("no more is wanted")
        return min(super().left_s(), _BEAT_S)

    def hand_over(self, came: int | None = None) -> None:
        """Hand over what has come since: all that has, by default."""
        came, into = self._call.came if came is None else came, self._call.into
        if self._is_wanted and into is not None:
            part, self._handed = into[self._handed : came], max(self._handed, came)
            self._is_wanted = self._take(part)


class Peer:
    """One server. Safe to use from several threads; at most `connections_max` of them at once, the others wait."""

    def __init__(
        self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], settings: PeerSettings, clock: Clock, sleep: Sleep
    ) -> None:
        self.endpoint = endpoint
        self.breaker = Breaker(settings.faults_max, settings.open_s, clock, settings.trial_s)
        self._headers = [("Host", str(endpoint) if not endpoint.path else "localhost"), *headers]
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._changed = threading.Condition()
        self._idle: list[HttpConnection] = []
        self._lent = 0
        self._is_open = False

    def open(self) -> None:
        """Allow calls. Nothing is connected yet."""
        with self._changed:
            self._is_open = True

    def close(self) -> None:
        """Close idle connections; those in use are closed when they come back."""
        with self._changed:
            self._is_open = False
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for link in idle:
            link.close()

    def call(self, call: Call, patience: Patience, tries_max: int | None = None) -> HttpAnswer:
        """Send a request until an answer comes that is worth having. TierUnavailable if none does."""
        if not self.breaker.allows():
            raise TierUnavailable(f"{self.endpoint} failed {self._settings.faults_max} times in a row; left alone")
        problem, is_cut = "", False
        for attempt in range(tries_max or self._settings.tries_max):
            try:
                answer = self._try(call, patience)
            except (OSError, RequestRefused) as error:
                problem = str(error) or type(error).__name__
                if call.is_aborted or isinstance(error, TimeoutError):
                    is_cut = call.is_aborted or patience.deadline_s >= caller_deadline_s()
                    break
            else:
                if answer.status not in _RETRIED:
                    self.breaker.note_success()
                    return answer
                problem = f"status {answer.status} {answer.body[:_REASON_BYTES_MAX].decode(errors='replace').strip()}"
            if not self._pause(attempt, patience):
                break
        if not is_cut:
            self.breaker.note_fault()
        raise TierUnavailable(f"{call.method} of {self.endpoint} failed: {problem}")

    def _pause(self, attempt: int, patience: Patience) -> bool:
        """Wait before the next try. False if the deadline comes first."""
        wait_s = self._settings.retry_s * 2**attempt
        if self._clock.monotonic_s() + wait_s >= patience.deadline_s:
            return False
        self._sleep(wait_s)
        return True

    def _try(self, call: Call, patience: Patience) -> HttpAnswer:
        """Send a request once; once more if a connection had been closed while it was idle."""
        while True:
            link, is_fresh = self._take(patience)
            try:
                call.use(link)
                if is_fresh:
                    link.open(patience)
                left_ms = max(1, int(1000 * (patience.deadline_s - self._clock.monotonic_s())))
                length = [("Content-Length", str(len(call.body)))] if call.method in {"PUT", "POST"} else []
                asked, into = call.missing()
                headers = [*self._headers, (DEADLINE_HEADER, str(left_ms)), *asked, *length]
                head = pack_request_head(call.method, call.target, headers)
                answer = link.exchange(head, call.body, into, patience)
                call.leave()
                self._give_back(link, link.is_open)
                break
            except BaseException as error:
                call.leave()
                call.keep(link)
                is_stale = not is_fresh and not link.has_answer and isinstance(error, ConnectionError)
                self._give_back(link, is_usable=False)
                if not is_stale or call.is_aborted:
                    raise
        return call.whole(answer)

    def _take(self, patience: Patience) -> tuple[HttpConnection, bool]:
        with self._changed:
            while self._is_open and self._lent >= self._settings.connections_max:
                self._changed.wait(patience.left_s())
            if not self._is_open:
                raise ConnectionAbortedError("the tier is closed")
            self._lent += 1
            if self._idle:
                return self._idle.pop(), False
            return HttpConnection(self.endpoint), True

    def _give_back(self, link: HttpConnection, is_usable: bool) -> None:
        with self._changed:
            self._lent -= 1
            is_kept = is_usable and self._is_open
            if is_kept:
                self._idle.append(link)
            self._changed.notify()
        if not is_kept:
            link.close()

    def check(self) -> None:
        """AssertionError if a connection is lost or there are too many."""
        with self._changed:
            assert self._lent >= 0
            assert self._lent + len(self._idle) <= self._settings.connections_max
            assert all(link.is_open for link in self._idle)


# Frames of one request, but for one that is larger alone.
REQUEST_BYTES_MAX = 256 << 10
# Requests one after the other, each with retries of its own, that bring the object no further; and how often what the
# server had may be lost there.
TRIES_MAX = 6
# Wait after the first of them that fails; twice as long after each further one.
_RETRY_S = 0.05


def put_in_pieces(
    ask: Callable[[Buffer], HttpAnswer], buffer: Buffer, clock: Clock, patience_s: float, sleep: Sleep
) -> HttpAnswer:
    """Send an object by requests with bodies of at most REQUEST_BYTES_MAX; return the answer that ends it.

    After a fault the server is asked again what it lacks. TierUnavailable if it gets no further for `patience_s`, once
    the caller's deadline is over, or for what is no object.
    """
    try:
        stored = parse_object(buffer)
    except CorruptPayload as error:
        raise TierUnavailable(f"this can't be sent in pieces: {error}") from error
    body: Buffer = stored.head
    missing: Sequence[int]
    least, tries, losses, problem, moved_s = len(stored.entries) + 1, 0, 0, "", clock.monotonic_s()
    while tries < TRIES_MAX and clock.monotonic_s() < min(moved_s + patience_s, caller_deadline_s()):
        tries, missing = tries + 1, ()
        try:
            answer = ask(body)
            # What was announced may be gone after a restart, or have made room.
            if answer.status not in {202, 404}:
                return answer
            if answer.status == 202:
                missing = _missing(answer, stored)
        except TierUnavailable as error:
            problem = f": {error}"
            sleep(_RETRY_S * 2**tries)
        if missing and len(missing) < least:
            least, tries, moved_s = len(missing), losses, clock.monotonic_s()
        elif len(missing) > least:
            least, losses = len(missing), losses + 1
        body = _frames(stored, missing, memoryview(buffer)) if missing else stored.head
    raise TierUnavailable(f"{stored.meta.id} still lacks {least} sections there{problem}")


def _missing(answer: HttpAnswer, stored: StoredObject) -> Sequence[int]:
    try:
        missing = msgspec.json.decode(answer.body, type=PiecesAnswer).missing
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TierUnavailable(f"the server's answer can't be read: {error}") from error
    if not all(0 <= position < len(stored.entries) for position in missing):
        raise TierUnavailable(f"the server lacks sections that are none, there are {len(stored.entries)}")
    return missing


def _frames(stored: StoredObject, positions: Sequence[int], data: memoryview) -> bytearray:
    """Return the frames of the first of these sections: at least one, and as many as a request takes."""
    body = bytearray()
    for position in positions:
        entry = stored.entries[position]
        if body and len(body) + FRAME_HEADER_BYTES + entry.size > REQUEST_BYTES_MAX:
            break
        # Not verified here: the server does.
        body += frame_header(stored, position)
        body += data[entry.offset : entry.offset + entry.size]
    return body
