"""A kvtide server by its URL (`Servers`), and one blocking connection to it.

Heads are parsed by `wire.http`, bodies go straight into the caller's buffer.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtide.clock import Clock
from kvtide.errors import RequestRefused
from kvtide.tier.base import Buffer
from kvtide.types import NamedId, Namespace, ObjectId
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END, parse_response_head
from kvtide.wire.protocol import FORCE_HEADER, GENERATION_HEADER, TENANT_HEADER

# Answers that are not an object: errors, listings.
SMALL_ANSWER_BYTES_MAX = 1 << 20


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


@dataclass(slots=True)
class Patience:
    """The time that an exchange may take and its server may be silent, and an action to do once if it is late."""

    clock: Clock
    deadline_s: float
    silence_s_max: float = math.inf
    late_s: float | None = None
    on_late: Callable[[], None] | None = None
    _heard_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._heard_s = self.clock.monotonic_s()

    def note_progress(self) -> None:
        """Some bytes have moved."""
        self._heard_s = self.clock.monotonic_s()

    def left_s(self) -> float:
        """Return how long the next wait may be. TimeoutError if that is over. Calls `on_late` in time."""
        now_s = self.clock.monotonic_s()
        if self.late_s is not None and now_s >= self.late_s and self.on_late is not None:
            self.late_s = None
            self.on_late()
        until_s = min(self.deadline_s, self._heard_s + self.silence_s_max)
        if now_s >= until_s:
            raise TimeoutError("no answer in time")
        if self.late_s is not None:
            until_s = min(self.late_s, until_s)
        return max(until_s - now_s, 1e-3)


class HttpConnection:
    """A connection for one exchange at a time. Everything that goes wrong is OSError or RequestRefused (502)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._sock: socket.socket | None = None
        self._pending = b""
        self._is_aborted = False
        # Whether the exchange under way has got any byte back.
        self.has_answer = False
        # What of a body came into the caller's buffer, and the ETag of the object that it is of; kept after a fault.
        self.received = 0
        self.tag = ""

    def open(self, patience: Patience) -> None:
        """Connect."""
        endpoint, wait_s = self._endpoint, patience.left_s()
        if endpoint.path:
            self._sock = sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(wait_s)
            sock.connect(endpoint.path)
            return
        self._sock = sock = socket.create_connection((endpoint.host, endpoint.port), wait_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.tls is not None:
            self._sock = endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._sock is not None:
            self._sock.close()

    def abort(self) -> None:
        """Make an exchange in another thread fail now."""
        self._is_aborted = True
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                # It is not connected any more: what we wanted.
                return

    def exchange(self, head: bytes, body: Buffer, into: memoryview | None, patience: Patience) -> HttpAnswer:
        """Send a request and read its answer; of a 200 or 206 the body goes into `into`, if one is given.

        Never more bytes than `into` has: an answer that is longer is refused.
        """
        self.has_answer, self.received, self.tag = False, 0, ""
        self._send(head, body, patience)
        is_head = head.startswith(b"HEAD ")
        answer = parse_response_head(self._read_head(patience))
        while answer.status == 100:
            answer = parse_response_head(self._read_head(patience))
        length = 0 if is_head else answer.content_length
        if into is not None and answer.status in {200, 206}:
            if length > len(into):
                raise RequestRefused(502, f"asked for {len(into)} bytes, {length} come")
            self.tag = answer.headers.get("etag", "")
            self._read_into(into[:length], patience)
            small = b""
        else:
            if length > SMALL_ANSWER_BYTES_MAX:
                raise RequestRefused(502, f"an answer of {length} bytes, at most {SMALL_ANSWER_BYTES_MAX} are read")
            buffer = bytearray(length)
            self._read_into(memoryview(buffer), patience)
            small = bytes(buffer)
        if not answer.is_kept_alive or self._pending:
            self.close()
            self._sock = None
        return HttpAnswer(answer.status, answer.headers, length, small)

    @property
    def is_open(self) -> bool:
        """True if another exchange may follow."""
        return self._sock is not None and not self._is_aborted

    def _send(self, head: bytes, body: Buffer, patience: Patience) -> None:
        for part in (memoryview(head), memoryview(body)):
            rest = part
            while rest:
                rest = rest[self._when_ready(patience, _send_some, rest) :]

    def _read_head(self, patience: Patience) -> bytes:
        while (end := self._pending.find(HEAD_END)) < 0:
            if len(self._pending) > HEAD_BYTES_MAX:
                raise RequestRefused(502, f"the answer's head has more than {HEAD_BYTES_MAX} bytes")
            scratch = bytearray(HEAD_BYTES_MAX)
            came = self._when_ready(patience, _receive_some, memoryview(scratch))
            if not came:
                raise ConnectionResetError("the server closed before its answer")
            self.has_answer = True
            self._pending += scratch[:came]
        end += len(HEAD_END)
        head, self._pending = self._pending[:end], self._pending[end:]
        return head

    def _read_into(self, view: memoryview, patience: Patience) -> None:
        done = min(len(self._pending), len(view))
        view[:done] = self._pending[:done]
        self._pending = self._pending[done:]
        self.received = done
        while done < len(view):
            came = self._when_ready(patience, _receive_some, view[done:])
            if not came:
                raise ConnectionResetError(f"the server closed after {done} of {len(view)} bytes")
            self.received = done = done + came

    def _when_ready(
        self, patience: Patience, transfer: Callable[[socket.socket, memoryview], int], part: memoryview
    ) -> int:
        """Send or receive once, waiting as long as there is patience."""
        while True:
            wait_s = patience.left_s()
            sock = self._sock
            if sock is None or self._is_aborted:
                raise ConnectionAbortedError("the exchange was given up")
            sock.settimeout(wait_s)
            try:
                moved = transfer(sock, part)
                patience.note_progress()
                return moved
            except TimeoutError:
                # Late or over: `left_s` knows.
                continue


def _send_some(sock: socket.socket, part: memoryview) -> int:
    return sock.send(part)


def _receive_some(sock: socket.socket, part: memoryview) -> int:
    return sock.recv_into(part)


class Servers(NamedTuple):
    """Servers of one URL: where they listen, headers of requests and of those for objects, what they take."""

    endpoints: list[Endpoint]
    headers: list[tuple[str, str]]
    object_headers: list[tuple[str, str]]
    takes_evicted: bool
    takes_pieces: bool


def servers_of(url: str) -> Servers:
    """Return the servers of `http://host:port[,host:port]`, `https://…` or `http+unix:///path`.

    Options behind `?`: `token_file`; `write=evicted` for a store that gets only what the tiers in front of it evict;
    `force_latest=1` to look in all regions for what the server lacks; `upload=pieces` to send objects section by
    section; for TLS `ca_file`, `cert_file` and `key_file`. ValueError for anything else, or a file that can't be read.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = options.keys() - _OPTIONS
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ValueError(f"a remote store's URL has no user or password, give {shown}?token_file=PATH")
    if unknown or parts.fragment:
        raise ValueError(f"a remote store's URL takes the options {', '.join(sorted(_OPTIONS))}, got {url!r}")
    tls = _tls_context(options) if parts.scheme == "https" else None
    headers = []
    if "token_file" in options:
        headers.append(("Authorization", f"Bearer {_read_token(Path(options['token_file']))}"))
    takes_evicted = {"all": False, "evicted": True}.get(options.get("write", "all"))
    if takes_evicted is None:
        raise ValueError(f"write is all or evicted, got {options['write']!r}")
    takes_pieces = {"whole": False, "pieces": True}.get(options.get("upload", "whole"))
    if takes_pieces is None:
        raise ValueError(f"upload is whole or pieces, got {options['upload']!r}")
    if options.get("force_latest", "0") not in {"0", "1"}:
        raise ValueError(f"force_latest is 0 or 1, got {options['force_latest']!r}")
    latest = [(FORCE_HEADER, "1")] if options.get("force_latest") == "1" else []
    return Servers(_endpoints(url, tls), headers, [*headers, *latest], takes_evicted, takes_pieces)


def asked_name(object_id: ObjectId) -> tuple[Namespace, list[tuple[str, str]]]:
    """Return by what namespace, and with which headers, a server is asked for an object."""
    if not isinstance(object_id, NamedId):
        return object_id.namespace, []
    tenant, namespace, generation = object_id.name
    whose = [(TENANT_HEADER, tenant)] if tenant else []
    latest = [(FORCE_HEADER, "1")] if object_id.is_latest else []
    return namespace, [*whose, *latest, (GENERATION_HEADER, str(generation))]


def object_target(object_id: ObjectId) -> tuple[str, list[tuple[str, str]]]:
    """Return the path at which a server is asked for an object, and the headers."""
    namespace, headers = asked_name(object_id)
    return f"/v1/{namespace.hex()}/{object_id.key.hex()}", headers


def _endpoints(url: str, tls: ssl.SSLContext | None) -> list[Endpoint]:
    parts = urlsplit(url)
    if parts.scheme == "http+unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"expected http+unix:///path, got {url!r}")
        return [Endpoint("", 0, unquote(parts.path))]
    if parts.path not in {"", "/"}:
        raise ValueError(f"a remote store's URL has no path, got {url!r}")
    found = []
    for name in parts.netloc.split(","):
        host, colon, port = name.rpartition(":")
        if not host or not colon:
            raise ValueError(f"a remote store needs host:port, or several with commas, got {name!r} in {url!r}")
        if not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) <= 0xFFFF:
            raise ValueError(f"a remote store's port is a number from 1 to 65535, got {port!r} in {url!r}")
        found.append(Endpoint(host.removeprefix("[").removesuffix("]"), int(port), tls=tls))
    return found


def _tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ca_file"))
        if "cert_file" in options:
            context.load_cert_chain(options["cert_file"], options.get("key_file"))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"can't use the TLS files of the remote store: {error}") from error
    return context


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read the token file {path}: {error}") from error
    if not token.isprintable() or not token:
        raise ValueError(f"the token file {path} holds no token")
    return token
