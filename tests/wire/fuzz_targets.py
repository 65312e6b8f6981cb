"""What strangers can make us parse, as functions that any fuzzer drives: they return, or raise what is a bug."""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from kvtide.errors import CorruptPayload, RequestRefused
from kvtide.wire import object as wire
from kvtide.wire import protocol
from kvtide.wire.http import HEAD_END, parse_request_head
from kvtide.wire.ranges import ByteRange, multipart, parse_parts, parse_ranges

_OBJECT_BYTES = 1000
_ASKED = [ByteRange(0, 5), ByteRange(7, 100), ByteRange(100, 101)]
_GOLDEN = Path(__file__).parent.parent / "golden" / "object-2.kvt"
_ID = b"/v1/" + b"a1" * 32
_REQUESTS = (
    b'GET %b/%b HTTP/1.1\r\nHost: x\r\nRange: bytes=5-9\r\nIf-None-Match: W/"a", *\r\nPriority: u=1, i\r\n\r\n'
    % (_ID, b"b2" * 32),
    b"GET %b?after=%b&limit=10 HTTP/1.1\r\nHost: x\r\nRange: bytes=0-3,7-9,-7\r\n\r\n" % (_ID, b"c3" * 32),
    b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n%b: 30\r\n%b: 1.5\r\n\r\n"
    % (protocol.Header.DEADLINE.encode(), protocol.Header.STALENESS.encode()),
    b'POST %b/exists HTTP/1.0\r\nConnection: close\r\n\r\n{"keys": ["%b"]}' % (_ID, b"d4" * 32),
)


def fuzz_request(data: bytes) -> None:
    """Parse a request as the server does: its head, then everything that its target, headers and body say."""
    end = data.find(HEAD_END) + len(HEAD_END)
    with suppress(RequestRefused):
        protocol.ExistsQuestion.parse(data[end:])
    try:
        head = parse_request_head(data[:end])
    except RequestRefused as error:
        assert 400 <= error.status < 600
        return
    with suppress(RequestRefused):
        protocol.parse_target(head.target)
    with suppress(RequestRefused):
        parts = parse_ranges(head.headers.get("range", ""), _OBJECT_BYTES)
        assert all(0 <= start < stop <= _OBJECT_BYTES for start, stop in parts)
        assert all(part.stop <= later.start for part, later in pairwise(parts))
    with suppress(RequestRefused):
        assert 1 <= (protocol.deadline_ms(head.headers) or 1) <= 3_600_000
    with suppress(RequestRefused):
        assert (protocol.staleness_s(head.headers) or 0.0) >= 0
    assert 0 <= protocol.urgency(head.headers) <= 7
    assert head.content_length is None or head.content_length >= 0
    protocol.is_tag_matched(head.headers.get("if-none-match", ""), protocol.etag(bytes(16)))


def fuzz_object(data: bytes) -> None:
    """Parse an object, as it is and with its header's checksum made right, which no fuzzer guesses."""
    sealed = bytearray(data)
    if len(data) >= wire.HEADER_BYTES:
        sealed[240:256] = wire._header_checksum(memoryview(sealed), int.from_bytes(data[12:16], "little"))
    for each in (data, sealed):
        try:
            stored = wire.parse_object(each)
            assert stored.entries[-1].offset + stored.entries[-1].size == len(each)
            stored.sections()
        except CorruptPayload:
            continue


def fuzz_parts(data: bytes) -> None:
    """Parse what a server answers to many ranges: the kind of its body in the first line, then the body."""
    kind, _, body = data.partition(b"\n")
    with suppress(RequestRefused):
        found = parse_parts(kind.decode("latin-1"), memoryview(body), _ASKED)
        for part, (start, stop) in zip(found, _ASKED, strict=True):
            assert len(part) in {0, stop - start} or part is found[-1]


def _parts() -> bytes:
    kind, leads = multipart("ab" * 16, _OBJECT_BYTES, _ASKED)
    bodies = [bytes(stop - start) + lead for (start, stop), lead in zip(_ASKED, leads[1:], strict=True)]
    return kind.encode() + b"\n" + leads[0] + b"".join(bodies)


TARGETS: dict[str, Callable[[bytes], None]] = {"request": fuzz_request, "object": fuzz_object, "parts": fuzz_parts}


def seeds(name: str) -> list[bytes]:
    """Return good inputs of a target, to begin with."""
    return {"request": list(_REQUESTS), "object": [_GOLDEN.read_bytes()], "parts": [_parts()]}[name]
