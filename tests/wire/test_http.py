"""Request and response heads, paths, ranges: examples and a fuzzer. What breaks is RequestRefused, nothing else."""

import contextlib
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtide.errors import RequestRefused
from kvtide.types import RANGES_MAX
from kvtide.wire import http, protocol
from kvtide.wire.ranges import ByteRange, multipart, parse_parts, parse_ranges, ranges_header

# CI gives every fuzzer a minute; a slow machine needs it for so many.
EXAMPLES = max(200, 50 * int(os.environ.get("KVTIDE_FUZZ_S", "1")))
TOKEN = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)
VALUE = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)
PIECES = st.sampled_from(
    b"GET |PUT |/v1/| HTTP/1.1|\r\n|\r\n\r\n|\n|Host: x|Content-Length: |5|-1|Transfer-Encoding: chunked|Range: bytes="
    b"|0-|\0| |:|HTTP/1.1 200 OK|\xff|aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".split(b"|")
)


@given(TOKEN, st.dictionaries(TOKEN.map("x-".__add__), VALUE, max_size=8), st.integers(0, 10**12))
def test_request_head_round_trips(name: str, headers: dict[str, str], length: int) -> None:
    packed = http.pack_request_head("PUT", f"/{name}", [("Host", "x"), *headers.items(), ("Content-Length", length)])
    head = http.parse_request_head(packed)
    assert (head.method, head.target, head.content_length, head.is_kept_alive) == ("PUT", f"/{name}", length, True)
    assert {key: value for key, value in head.headers.items() if key.startswith("x-")} == headers


# What a body would have had that is not sent counts for nothing.
@pytest.mark.parametrize(("status", "length", "body_bytes"), [(206, 0, 0), (206, 5, 5), (304, 5, 0)])
@pytest.mark.parametrize("is_kept_alive", [True, False])
def test_response_head_round_trips(status: int, length: int, body_bytes: int, is_kept_alive: bool) -> None:
    connection = [] if is_kept_alive else [("Connection", "close")]
    head = http.parse_response_head(http.pack_response_head(status, [("Content-Length", length), *connection]))
    assert (head.status, head.content_length, head.is_kept_alive) == (status, body_bytes, is_kept_alive)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_answer_of_unknown_length_is_refused(data: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        http.parse_response_head(data)
    assert caught.value.status == 502


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(PIECES | st.binary(max_size=20), max_size=40).map(b"".join))
@example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"x" * (http.HEAD_BYTES_MAX + 1))
def test_any_bytes_are_a_head_or_refused(data: bytes) -> None:
    for tail in (b"", b"\r\n\r\n"):
        with contextlib.suppress(RequestRefused):
            head = http.parse_request_head(data + tail)
            assert "transfer-encoding" not in head.headers
            assert head.content_length is None or head.content_length >= 0
        with contextlib.suppress(RequestRefused):
            assert http.parse_response_head(data + tail).content_length >= 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=4, max_size=2 * RANGES_MAX, unique=True), st.data())
def test_answer_to_many_ranges_holds_them_or_is_refused(edges: list[int], data: st.DataObject) -> None:
    size, content = 700, bytes(range(256)) * 3
    asked = [ByteRange(*pair) for pair in zip(*[iter(sorted(edges))] * 2, strict=False)]
    with contextlib.suppress(RequestRefused):
        parts = parse_ranges(ranges_header(asked), size)
        kind, leads = multipart("ab" * 16, size, parts)
        bodies = [content[start:stop] + lead for (start, stop), lead in zip(parts, leads[1:], strict=True)]
        whole = leads[0] + b"".join(bodies)
        found = parse_parts(kind, memoryview(whole), asked)
        assert list(map(bytes, found)) == [content[start : min(stop, size)] for start, stop in asked]
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
        for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        lengths = [len(part) for part in parse_parts(kind, memoryview(damaged), asked)]
        assert all(length <= stop - start for length, (start, stop) in zip(lengths, asked, strict=True))


@pytest.mark.parametrize(
    ("value", "expected"), [("u=0", 0), ("u=7, i", 7), ("i, u=5", 5), ("u=9", 3), ("", 3), ("u=10", 3), ("x", 3)]
)
def test_urgency_is_that_of_the_rfc(value: str, expected: int) -> None:
    assert protocol.urgency({"priority": value}) == expected


def test_deadline_is_read_or_refused() -> None:
    assert protocol.deadline_ms({}) is None
    assert protocol.deadline_ms({"kvtide-deadline-ms": "250"}) == 250
    # More digits than Python turns into a number; and a number that begins like a good one.
    for text in ("0", "9" * 5000, "0" * 17 + "1" + "9"):
        with pytest.raises(RequestRefused):
            protocol.deadline_ms({"kvtide-deadline-ms": text})
