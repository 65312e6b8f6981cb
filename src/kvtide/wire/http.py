"""Heads of HTTP/1.1 messages as bytes, parsed by llhttp. Bodies never pass through here.

Invariant: a head is taken only if every reader would see its end where we do; whatever is ambiguous is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import httptools

from kvtide.errors import RequestRefused

HEAD_BYTES_MAX = 8 << 10
_HEADERS_MAX = 64
HEAD_END = b"\r\n\r\n"
# A second one of these would let two readers understand two things. llhttp refuses a second Content-Length.
_ONCE = frozenset(
    {"authorization", "content-range", "etag", "host", "if-none-match", "if-range", "range", "transfer-encoding"}
)
NO_BODY = frozenset({204, 304})

Headers = Sequence[tuple[str, str | int]]


class RequestHead(NamedTuple):
    """A request before its body. Header names are lower case; `content_length` is None without that header."""

    method: str
    target: str
    headers: Mapping[str, str]
    content_length: int | None
    is_kept_alive: bool


class ResponseHead(NamedTuple):
    """A response before its body, which has `content_length` bytes."""

    status: int
    headers: Mapping[str, str]
    content_length: int
    is_kept_alive: bool


class _Collector:
    """The parts of a head as llhttp calls them out."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[str, str] = {}
        self.count = 0
        self.is_complete = False
        self.is_kept_alive = False
        self.parser: httptools.HttpRequestParser | httptools.HttpResponseParser | None = None

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.count += 1
        if self.count > _HEADERS_MAX:
            raise RequestRefused(431, f"more than {_HEADERS_MAX} headers")
        key, text = name.decode("ascii").lower(), value.decode("latin-1")
        if key in self.headers:
            if key in _ONCE:
                raise RequestRefused(400, f"two {key} headers")
            text = f"{self.headers[key]}, {text}"
        self.headers[key] = text

    def on_headers_complete(self) -> None:
        self.is_complete = True
        # Asked now: after a message without a body llhttp has forgotten.
        self.is_kept_alive = self.parser is not None and self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        raise RequestRefused(400, "the head ends before its empty line")


def _fed(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, found: _Collector, data: bytes) -> None:
    found.parser = parser
    try:
        parser.feed_data(data)
    except httptools.HttpParserCallbackError as error:
        if isinstance(error.__context__, RequestRefused):
            raise error.__context__ from None
        raise RequestRefused(400, f"malformed head: {error}") from error
    except httptools.HttpParserUpgrade as error:
        # A request stays one of HTTP/1.1 if the wish to speak something else is not met; CONNECT has no other meaning.
        if not isinstance(parser, httptools.HttpRequestParser) or parser.get_method() == b"CONNECT":
            raise RequestRefused(400, "malformed head: nothing but HTTP/1.1 is spoken here") from error
    except httptools.HttpParserError as error:
        raise RequestRefused(400, f"malformed head: {type(error).__name__} {error}") from error
    finally:
        found.parser = None
    if not found.is_complete:
        raise RequestRefused(400, "malformed head: it does not end where its lines do")


def _checked(data: bytes) -> None:
    if len(data) > HEAD_BYTES_MAX:
        raise RequestRefused(431, f"the head has more than {HEAD_BYTES_MAX} bytes")
    if not data.endswith(HEAD_END) or data.count(HEAD_END) != 1:
        raise RequestRefused(400, "malformed head: its only empty line must be its end")


def _length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RequestRefused(400, f"Content-Length must be a decimal number, got {text[:40]!r}")
    return int(text)


def parse_request_head(data: bytes) -> RequestHead:
    """Return a request's head from its bytes, the empty line included. RequestRefused, with a status, if it is off."""
    _checked(data)
    found = _Collector()
    parser = httptools.HttpRequestParser(found)
    _fed(parser, found, data)
    version = parser.get_http_version()
    if version not in {"1.0", "1.1"}:
        raise RequestRefused(505, f"HTTP/{version} is not spoken here")
    if version == "1.1" and "host" not in found.headers:
        raise RequestRefused(400, "HTTP/1.1 wants a Host header")
    if "transfer-encoding" in found.headers:
        raise RequestRefused(411, "a body needs a Content-Length, not a Transfer-Encoding")
    method = parser.get_method().decode("ascii")
    target = found.target.decode("latin-1")
    return RequestHead(method, target, found.headers, _length(found.headers), found.is_kept_alive)


def parse_response_head(data: bytes) -> ResponseHead:
    """Return a response's head from its bytes. RequestRefused (502) if it is off or says no length of its body."""
    found = _Collector()
    try:
        _checked(data)
        parser = httptools.HttpResponseParser(found)
        _fed(parser, found, data)
        length = _length(found.headers)
    except RequestRefused as error:
        raise RequestRefused(502, str(error)) from error
    status = parser.get_status_code()
    if "transfer-encoding" in found.headers or (length is None and status >= 200 and status not in NO_BODY):
        raise RequestRefused(502, "the answer does not say how long it is")
    return ResponseHead(status, found.headers, 0 if status in NO_BODY else length or 0, found.is_kept_alive)


def pack_request_head(method: str, target: str, headers: Headers) -> bytes:
    """Return a request's head. The caller gives Host and Content-Length."""
    return _packed(f"{method} {target} HTTP/1.1", headers)


def pack_response_head(status: int, headers: Headers) -> bytes:
    """Return a response's head. The caller gives Content-Length."""
    return _packed(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", headers)


def _packed(first_line: str, headers: Headers) -> bytes:
    lines = "".join(f"\r\n{name}: {value}" for name, value in headers)
    assert lines.count("\r") == lines.count("\n") == len(headers), "a header's value must not break its line"
    return f"{first_line}{lines}\r\n\r\n".encode("latin-1")
