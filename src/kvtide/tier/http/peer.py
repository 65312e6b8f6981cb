"""A kvtide server as its clients see it: by its URL, over bounded connections, with retries and a circuit breaker.

Heads are parsed by `wire.http`, bodies go straight into the caller's buffer. Invariant: every request that kvtide sends
may be repeated: keys name exact bytes.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.tier.base import Buffer, Take, host_and_port
from kvtide.tier.breaker import Breaker, caller_deadline_s
from kvtide.types import NamedId, Namespace, ObjectId
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END, Headers, pack_request_head, parse_response_head
from kvtide.wire.protocol import Header

# Answers that are not an object: errors, listings. As JSON 256 records of control characters have 1.6 MB.
SMALL_ANSWER_BYTES_MAX = 2 << 20
# Who waits for a range is asked so often whether to go on.
_BEAT_S = 0.05
_WAIT_S_MIN = 1e-3
# A server that is silent for less may only be far.
_SILENCE_S_MIN = 0.25
_REASON_BYTES_MAX = 200
# Worth another try: a body that was damaged on its way, a server that is busy, full of requests or restarting.
_RETRIED = frozenset({408, 422, 429, 500, 502, 503})
_OPTIONS = frozenset({"token_file", "ca_file", "cert_file", "key_file", "write", "force_latest", "upload"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's listening address: a host and port, with TLS or not, or a path."""

    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class HttpAnswer(NamedTuple):
    """An answer read to its end. `size` bytes of it are in the caller's buffer; `body` has them if they are not."""

    status: int
    headers: Mapping[str, str]
    size: int
    body: bytes

    @property
    def reason(self) -> str:
        """The begin of what an error says."""
        return self.body[:_REASON_BYTES_MAX].decode(errors="replace").strip()


class Patience:
    """The time that an exchange may take, and how long its server may be silent."""

    def __init__(self, clock: Clock, deadline_s: float, silence_s_max: float = math.inf) -> None:
        self.deadline_s = deadline_s
        self._clock = clock
        self._silence_s_max = silence_s_max
        self._heard_s = clock.monotonic_s()

    def note_progress(self) -> None:
        """Some bytes have moved."""
        self._heard_s = self._clock.monotonic_s()

    def left_s(self, received: int = 0) -> float:
        """Return how long the next wait may be, of a body so far `received`. TimeoutError if the time is over."""
        wait_s = min(self.deadline_s, self._heard_s + self._silence_s_max) - self._clock.monotonic_s()
        if wait_s <= 0:
            raise TimeoutError("no answer in time")
        return max(wait_s, _WAIT_S_MIN)


class HttpConnection:
    """A connection for one exchange at a time. Everything that goes wrong is OSError or RequestRefused (502)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._sock: socket.socket | None = None
        self._pending = b""
        # Whether the exchange under way has got any byte back.
        self.has_answer = False
        # How much of a body is in the caller's buffer, and the ETag of its object; kept after a fault.
        self.received = 0
        self.tag = ""

    def open(self, patience: Patience) -> None:
        """Connect."""
        # Not a watch's beat: a connection that is given up has to begin again, and a round trip may be longer.
        endpoint, wait_s = self._endpoint, Patience.left_s(patience)
        if endpoint.path:
            self._sock = sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(wait_s)
            sock.connect(endpoint.path)
            return
        places = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        # Of a name's addresses none takes the time of those behind it.
        self._sock = sock = socket.create_connection((endpoint.host, endpoint.port), wait_s / len(places))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.tls is not None:
            self._sock = endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    @property
    def is_open(self) -> bool:
        """True if another exchange may follow."""
        return self._sock is not None

    def exchange(
        self, head: bytes, body: Buffer, into: memoryview | None, patience: Patience, start: int | None = None
    ) -> HttpAnswer:
        """Send a request and read its answer; the body of a 200 or 206 goes into `into`, if given, and must fit.

        start: where a range begins that is asked for. `received` counts its bytes alone, or those of a whole body.
        """
        self.has_answer, self.received, self.tag = False, 0, ""
        # Who refuses a body answers before it has all of it, and closes.
        with suppress(ConnectionError, ssl.SSLEOFError):
            for part in (memoryview(head), memoryview(body)):
                rest = part
                while rest:
                    rest = rest[self._when_ready(patience, lambda sock, part: sock.send(part), rest) :]
        while (answer := parse_response_head(self._read_head(patience))).status < 200:
            pass
        length = 0 if head.startswith(b"HEAD ") else answer.content_length
        if into is not None and answer.status in {200, 206}:
            if length > len(into):
                raise RequestRefused(502, f"asked for {len(into)} bytes, {length} come")
            is_asked = start is None or answer.headers.get("content-range", "").startswith(f"bytes {start}-")
            self.tag = answer.headers.get("etag", "") if is_asked else ""
            small = bytearray()
            self._read_into(into[:length], patience, is_asked)
        else:
            if length > SMALL_ANSWER_BYTES_MAX:
                raise RequestRefused(502, f"an answer of {length} bytes, at most {SMALL_ANSWER_BYTES_MAX} are read")
            small = bytearray(length)
            self._read_into(memoryview(small), patience, is_counted=False)
        if not answer.is_kept_alive or self._pending:
            self.close()
        return HttpAnswer(answer.status, answer.headers, length, bytes(small))

    def _read_head(self, patience: Patience) -> bytes:
        while (end := self._pending.find(HEAD_END)) < 0:
            if len(self._pending) > HEAD_BYTES_MAX:
                raise RequestRefused(502, f"the answer's head has more than {HEAD_BYTES_MAX} bytes")
            scratch = bytearray(HEAD_BYTES_MAX)
            came = self._when_ready(patience, lambda sock, part: sock.recv_into(part), memoryview(scratch))
            if not came:
                raise ConnectionResetError("the server closed before its answer")
            self.has_answer = True
            self._pending += scratch[:came]
        end += len(HEAD_END)
        head, self._pending = self._pending[:end], self._pending[end:]
        return head

    def _read_into(self, view: memoryview, patience: Patience, is_counted: bool) -> None:
        done = min(len(self._pending), len(view))
        view[:done], self._pending = self._pending[:done], self._pending[done:]
        while done < len(view):
            self.received = done if is_counted else 0
            came = self._when_ready(patience, lambda sock, part: sock.recv_into(part), view[done:])
            if not came:
                raise ConnectionResetError(f"the server closed after {done} of {len(view)} bytes")
            done += came
        self.received = done if is_counted else 0

    def _when_ready(
        self, patience: Patience, transfer: Callable[[socket.socket, memoryview], int], part: memoryview
    ) -> int:
        """Send or receive once, waiting as long as there is patience."""
        assert self._sock is not None
        while True:
            self._sock.settimeout(patience.left_s(self.received))
            try:
                moved = transfer(self._sock, part)
            except TimeoutError:
                # Over, or only a beat: `left_s` knows.
                continue
            patience.note_progress()
            return moved


@dataclass(slots=True, eq=False)
class Call:
    """One request. With `start` it is for as many bytes from there on as `into` takes, and goes on after a fault.

    At the same server or another one it asks for the rest, and begins again if that is of another object.
    """

    method: str
    target: str
    headers: Headers
    body: Buffer = b""
    into: memoryview | None = None
    start: int | None = None
    # How many bytes are in `into` already, and the ETag of their object.
    received: int = field(default=0, init=False)
    tag: str = field(default="", init=False)
    # True once nobody wants the answer: the call fails, and is not tried again.
    is_given_up: bool = field(default=False, init=False)

    def send(self, link: HttpConnection, headers: Headers, patience: Patience) -> HttpAnswer:
        """Send it over a connection, for what has not come yet; count what came before a fault."""
        length = [("Content-Length", str(len(self.body)))] if self.method in {"PUT", "POST"} else []
        begin, asked, into = self._missing()
        head = pack_request_head(self.method, self.target, [*headers, *asked, *length])
        try:
            return link.exchange(head, self.body, into, patience, begin)
        except BaseException:
            self._keep(link)
            raise

    def _missing(self) -> tuple[int | None, Headers, memoryview | None]:
        if self.start is None or self.into is None:
            return None, self.headers, self.into
        begin = self.start + self.received
        rest = ("Range", f"bytes={begin}-{self.start + len(self.into) - 1}")
        return begin, [*self.headers, rest], self.into[self.received :]

    def _keep(self, link: HttpConnection) -> None:
        if self.start is None or self.into is None or not link.tag:
            return
        if self.tag in {"", link.tag}:
            self.received, self.tag = self.received + link.received, link.tag
        else:
            self.received, self.tag = 0, ""

    def whole(self, answer: HttpAnswer) -> HttpAnswer:
        """Return an answer for the rest as one for all. ConnectionError, and all begins again, if it is another's."""
        if not self.received or answer.status not in {206, 416}:
            return answer
        content = answer.headers.get("content-range", "")
        expected = f"bytes {(self.start or 0) + self.received}-"
        if answer.status == 416 or answer.headers.get("etag") != self.tag or not content.startswith(expected):
            self.received, self.tag = 0, ""
            raise ConnectionError("the rest of the body is not to be had here")
        headers = {**answer.headers, "content-range": f"bytes {self.start}-{content.removeprefix(expected)}"}
        return answer._replace(headers=headers, size=self.received + answer.size)


class RangeWatch(Patience):
    """Hands over what has come of a range each time that the connection waits; ends it when no more is wanted."""

    def __init__(self, clock: Clock, deadline_s: float, silence_s_max: float, call: Call, take: Take) -> None:
        super().__init__(clock, deadline_s, silence_s_max)
        self._call = call
        self._take = take
        self._handed = 0

    def left_s(self, received: int = 0) -> float:
        """Return how long the next wait may be. ConnectionAbortedError if nothing more is wanted."""
        self.hand_over(self._call.received + received)
        if self._call.is_given_up:
            raise ConnectionAbortedError("no more is wanted")
        return min(super().left_s(), _BEAT_S)

    def hand_over(self, came: int) -> None:
        """Hand over what has come since the last time; `came` bytes are here by now."""
        into = self._call.into
        if not self._call.is_given_up and into is not None:
            part, self._handed = into[self._handed : came], max(self._handed, came)
            self._call.is_given_up = not self._take(part)


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


class _AllInUse(TimeoutError):
    """Our own calls had all connections for as long as this one may take."""


class Peer:
    """One server. Safe to use from several threads; at most `connections_max` of them at once, the others wait."""

    def __init__(self, endpoint: Endpoint, headers: Headers, settings: PeerSettings, clock: Clock) -> None:
        self.endpoint = endpoint
        self.breaker = Breaker(settings.faults_max, settings.open_s, clock, settings.trial_s)
        self._headers = [("Host", str(endpoint) if not endpoint.path else "localhost"), *headers]
        self._settings = settings
        self._clock = clock
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
        problem, is_cut, started_s = "", False, self._clock.monotonic_s()
        for attempt in range(tries_max or self._settings.tries_max):
            try:
                answer = self._try(call, patience)
            except (OSError, RequestRefused) as error:
                problem = str(error) or type(error).__name__
                if call.is_given_up or isinstance(error, TimeoutError):
                    # It says nothing of a server that had hardly time to answer, or was never asked.
                    now_s = self._clock.monotonic_s()
                    is_late = now_s + _WAIT_S_MIN >= caller_deadline_s() or now_s < started_s + _SILENCE_S_MIN
                    is_cut = call.is_given_up or is_late or isinstance(error, _AllInUse)
                    break
            else:
                if answer.status not in _RETRIED:
                    self.breaker.note_success()
                    return answer
                problem = f"status {answer.status} {answer.reason}"
            wait_s = self._settings.retry_s * 2**attempt
            if self._clock.monotonic_s() + wait_s >= patience.deadline_s:
                break
            time.sleep(wait_s)
        if not is_cut:
            self.breaker.note_fault()
        raise TierUnavailable(f"{call.method} of {self.endpoint} failed: {problem}")

    def _try(self, call: Call, patience: Patience) -> HttpAnswer:
        """Send a request once; once more if a connection had been closed while it was idle."""
        while True:
            link = self._take(patience)
            is_fresh = not link.is_open
            try:
                if is_fresh:
                    link.open(patience)
                left_ms = max(1, int(1000 * (patience.deadline_s - self._clock.monotonic_s())))
                answer = call.send(link, [*self._headers, (Header.DEADLINE, str(left_ms))], patience)
            except BaseException as error:
                is_stale = not is_fresh and not link.has_answer and isinstance(error, ConnectionError)
                self._give_back(link, is_usable=False)
                if not is_stale or call.is_given_up:
                    raise
            else:
                self._give_back(link, link.is_open)
                return call.whole(answer)

    def _take(self, patience: Patience) -> HttpConnection:
        with self._changed:
            while self._is_open and self._lent >= self._settings.connections_max:
                try:
                    wait_s = patience.left_s()
                except TimeoutError as error:
                    raise _AllInUse(f"all {self._lent} connections are in use") from error
                self._changed.wait(wait_s)
            if not self._is_open:
                raise ConnectionAbortedError("the tier is closed")
            self._lent += 1
            return self._idle.pop() if self._idle else HttpConnection(self.endpoint)

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


class Servers(NamedTuple):
    """Servers of one URL: where they listen, headers of requests and of those for objects, what they take."""

    endpoints: list[Endpoint]
    headers: list[tuple[str, str]]
    object_headers: list[tuple[str, str]]
    takes_evicted: bool
    takes_pieces: bool


def servers_of(url: str) -> Servers:
    """Return the servers of `http://host:port[,host:port]`, `https://…` or `http+unix:///path`.

    Options: `token_file`; `write=evicted` for a store that gets only what the tiers in front of it evict;
    `force_latest=1` to look in all regions for what the server lacks; `upload=pieces` to send objects section by
    section; for TLS `ca_file`, `cert_file` and `key_file`. ValueError for anything else, or a file that can't be read.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ValueError(f"a remote store's URL has no user or password, give {shown}?token_file=PATH")
    if options.keys() - _OPTIONS or parts.fragment:
        raise ValueError(f"a remote store's URL takes the options {', '.join(sorted(_OPTIONS))}, got {url!r}")
    files = [options.get(f"{name}_file") for name in ("ca", "cert", "key")]
    tls = tls_context("the remote store", *files) if parts.scheme == "https" else None
    token = _read_token(Path(options["token_file"])) if "token_file" in options else ""
    headers = [("Authorization", f"Bearer {token}")] if token else []
    takes_evicted = _is_second(options, "write", "all", "evicted")
    takes_pieces = _is_second(options, "upload", "whole", "pieces")
    latest = [(Header.FORCE, "1")] if _is_second(options, "force_latest", "0", "1") else []
    return Servers(_endpoints(url, tls), headers, [*headers, *latest], takes_evicted, takes_pieces)


def _is_second(options: Mapping[str, str], name: str, first: str, second: str) -> bool:
    """True if an option is the second of its two values, the first one being the default."""
    value = options.get(name, first)
    if value not in {first, second}:
        raise ValueError(f"{name} is {first} or {second}, got {value!r}")
    return value == second


def _endpoints(url: str, tls: ssl.SSLContext | None) -> list[Endpoint]:
    parts = urlsplit(url)
    if parts.scheme == "http+unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"expected http+unix:///path, got {url!r}")
        return [Endpoint("", 0, unquote(parts.path))]
    if parts.scheme not in {"http", "https"} or parts.path not in {"", "/"}:
        raise ValueError(f"a remote store's URL begins with http:// or https:// and has no path, got {url!r}")
    try:
        return [Endpoint(*host_and_port(place), tls=tls) for place in parts.netloc.split(",")]
    except ValueError as error:
        raise ValueError(f"a remote store needs one server or several with commas: {error} in {url!r}") from error


def tls_context(whose: str, ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """Return the context of a client, with a certificate of its own if one is given. ValueError for an unfit file."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"can't use the TLS files of {whose}: {error}") from error
    return context


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read the token file {path}: {error}") from error
    if not token.isprintable() or not token:
        raise ValueError(f"the token file {path} holds no token")
    return token


def asked_name(object_id: ObjectId) -> tuple[Namespace, list[tuple[str, str]]]:
    """Return the namespace and the headers by which a server is asked for an object."""
    if not isinstance(object_id, NamedId):
        return object_id.namespace, []
    tenant, namespace, generation = object_id.name
    whose = [(Header.TENANT, tenant)] if tenant else []
    latest = [(Header.FORCE, "1")] if object_id.is_latest else []
    return namespace, [*whose, *latest, (Header.GENERATION, str(generation))]


def object_target(object_id: ObjectId) -> tuple[str, list[tuple[str, str]]]:
    """Return the path and the headers by which a server is asked for an object."""
    namespace, headers = asked_name(object_id)
    return f"/v1/{namespace.hex()}/{object_id.key.hex()}", headers
