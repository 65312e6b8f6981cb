"""Byte ranges of an object as HTTP asks for them: one, or many, which come as the parts of one body (RFC 9110).

Invariant: ranges ascend and lie apart, so that an answer is never longer than its object and a head for each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtide.errors import RequestRefused
from kvtide.types import RANGES_MAX

# What stands in front of a part, its delimiter included.
PART_HEAD_BYTES_MAX = 512

_UNIT = "bytes="
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})?|-(\d{1,18})", re.ASCII)
_BOUNDARY = re.compile(r'multipart/byteranges;[ \t]*boundary="?([0-9A-Za-z_.+:=/-]{1,70})"?', re.IGNORECASE)
_CONTENT_RANGE = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d{1,18})-(\d{1,18})/(\d{1,18})\r\n", re.IGNORECASE)


class ByteRange(NamedTuple):
    """Bytes `[start, stop)` of an object."""

    start: int
    stop: int


def ranges_header(ranges: Sequence[ByteRange]) -> str:
    """Return the Range header that asks for ranges, none of them empty."""
    return _UNIT + ",".join(f"{start}-{stop - 1}" for start, stop in ranges)


def parse_ranges(value: str, size: int) -> list[ByteRange]:
    """Return what a Range header asks for of an object of `size` bytes: those ranges that hold bytes of it, ascending.

    RequestRefused: 400 for anything but ranges of bytes, for more than RANGES_MAX, and for ranges that overlap or don't
    ascend; 416 if none holds a byte of the object.
    """
    unit, *asked = value.strip()[: len(_UNIT)], *value.strip()[len(_UNIT) :].split(",", RANGES_MAX)
    if unit != _UNIT or len(asked) > RANGES_MAX:
        raise RequestRefused(400, f"expected at most {RANGES_MAX} ranges bytes=START-STOP,…, got {value[:80]!r}")
    found = [part for part in (_parsed(each.strip(" \t"), size) for each in asked) if part.start < part.stop]
    if not found:
        raise RequestRefused(416, f"the object has {size} bytes, none of them in {value.strip()[:80]}")
    if any(later.start < part.stop for part, later in pairwise(found)):
        raise RequestRefused(400, f"ranges must ascend and lie apart, got {value[:80]!r}")
    return found


def _parsed(text: str, size: int) -> ByteRange:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise RequestRefused(400, f"expected a range START-STOP, got {text[:80]!r}")
    first, last, suffix = found.groups()
    if suffix is not None:
        return ByteRange(max(0, size - int(suffix)), size)
    if last is not None and int(last) < int(first):
        raise RequestRefused(400, f"a range that ends before it begins: {text!r}")
    return ByteRange(int(first), size if last is None else min(size, int(last) + 1))


def multipart(boundary: str, size: int, ranges: Sequence[ByteRange]) -> tuple[str, list[bytes]]:
    """Return an answer's content type, and what stands in front of each range's bytes and behind the last ones.

    size: of the object. boundary: text that no body has by chance.
    """
    kind = "Content-Type: application/octet-stream\r\nContent-Range: bytes"
    leads = [f"\r\n--{boundary}\r\n{kind} {start}-{stop - 1}/{size}\r\n\r\n" for start, stop in ranges]
    end = f"\r\n--{boundary}--\r\n"
    return f"multipart/byteranges; boundary={boundary}", [lead.encode() for lead in (*leads, end)]


def parse_parts(content_type: str, body: memoryview, asked: Sequence[ByteRange]) -> list[memoryview]:
    """Return the bytes of each range asked for, none behind the object's end. RequestRefused (502) for other parts."""
    boundary = _BOUNDARY.fullmatch(content_type.strip())
    if boundary is None:
        raise _odd(f"asked for {len(asked)} ranges, {content_type[:80]!r} came")
    delimiter, found, sizes = f"--{boundary[1]}".encode(), list[memoryview](), set[int]()
    at = 0
    while True:
        head = bytes(body[at : at + PART_HEAD_BYTES_MAX]).removeprefix(b"\r\n")
        if not head.startswith(delimiter):
            raise _odd(f"expected the delimiter of a part at byte {at}")
        if head[len(delimiter) :].startswith(b"--"):
            break
        content, end = _CONTENT_RANGE.search(head), head.find(b"\r\n\r\n") + 4
        if content is None or end < content.end() + 2:
            raise _odd(f"expected a part's Content-Range at byte {at}")
        start, last, size = map(int, content.groups())
        at += end + (2 if bytes(body[at : at + 2]) == b"\r\n" else 0)
        stop, view = last + 1, body[at : at + max(0, last + 1 - start)]
        while len(found) < len(asked) and asked[len(found)].start != start:
            found.append(body[:0])
        if len(found) == len(asked) or stop != min(asked[len(found)].stop, size) or len(view) != stop - start:
            raise _odd(f"bytes {start}-{last}/{size} came, which is no range that was asked for")
        found.append(view)
        sizes.add(size)
        at += len(view)
    found += [body[:0]] * (len(asked) - len(found))
    missing = [part for part, view in zip(asked, found, strict=True) if not view]
    if len(sizes) != 1 or any(part.start < max(sizes) for part in missing):
        raise _odd(f"{len(missing)} of {len(asked)} ranges did not come")
    return found


def _odd(problem: str) -> RequestRefused:
    return RequestRefused(502, f"the answer can't be read: {problem}")
