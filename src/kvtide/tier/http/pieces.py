"""Uploads in pieces: header and table first, then the sections that the server lacks, in stored order.

Invariant: what has come there is sent again only if the server says that it lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvtide.clock import Clock
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.tier.base import Buffer
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.http.connection import HttpAnswer
from kvtide.tier.http.peer import Sleep
from kvtide.wire import StoredObject, parse_object
from kvtide.wire.frame import FRAME_HEADER_BYTES, frame_header
from kvtide.wire.protocol import PiecesAnswer

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
