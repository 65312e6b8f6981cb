"""A server's answers about objects, checked before anything of them is used: ranges, refusals, JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvtide.errors import RequestRefused, TierUnavailable, WrongServer
from kvtide.tier.http.connection import HttpAnswer
from kvtide.wire.ranges import ByteRange, parse_parts

_Result = TypeVar("_Result")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def range_bytes(answer: HttpAnswer, offset: int, wanted: int) -> int | None:
    """Return how many bytes came, None for an absent object. TierUnavailable if they are not those asked for."""
    if answer.status == 404:
        return None
    if answer.status == 416:
        return 0
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if answer.status != 206 or found is None:
        raise refusal("GET", answer)
    start, last, size = map(int, found.groups())
    if not (start == offset and last - start + 1 == answer.size == min(wanted, size - offset)):
        raise TierUnavailable(f"asked for {wanted} bytes from {offset}, {found[0]} came")
    return answer.size


def ranges_in(answer: HttpAnswer, body: memoryview, asked: Sequence[ByteRange]) -> list[memoryview] | None:
    """Return the bytes of each range, None for an absent object. TierUnavailable if they are not those asked for."""
    if answer.status == 404:
        return None
    if answer.status == 416:
        return [body[:0]] * len(asked)
    if answer.status != 206:
        raise refusal("GET", answer)
    try:
        return parse_parts(answer.headers.get("content-type", ""), body[: answer.size], asked)
    except RequestRefused as error:
        raise TierUnavailable(str(error)) from error


def refusal(method: str, answer: HttpAnswer) -> TierUnavailable:
    """Return the error that an answer is for us."""
    if answer.status == 307:
        return WrongServer(f"{method} was sent on to {answer.headers.get('location', 'nowhere')!r}")
    text = answer.body[:200].decode(errors="replace").strip()
    return TierUnavailable(f"{method} was answered with status {answer.status}: {text}")


def decoded(answer: HttpAnswer, kind: type[_Result]) -> _Result:
    """Return an answer's JSON. TierUnavailable if it is of another kind."""
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TierUnavailable(f"the server's answer can't be read: {error}") from error
