"""A kvtide server, or replicas of it, as a tier (docs/protocol.md). Every fault is TierUnavailable: a miss upstairs.

Invariant: the caller's buffer is written by one read at a time, and by none after `get_into` has returned.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from typing import TypeVar

import msgspec

from kvtide.clock import Clock
from kvtide.errors import CorruptPayload, NotAllowed, RequestRefused, TierFull, TierUnavailable, WrongServer
from kvtide.evict import Hint
from kvtide.outcomes import Decided, decisions_text
from kvtide.tier.base import Buffer, CountingTier, ObjectInfo, RangeRead, Take
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.http.peer import (
    Call,
    HttpAnswer,
    Patience,
    Peer,
    PeerSettings,
    RangeWatch,
    asked_name,
    object_target,
    servers_of,
)
from kvtide.tier.source import read_from_any
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats
from kvtide.wire import StoredObject, parse_object
from kvtide.wire.http import Headers
from kvtide.wire.protocol import (
    EXISTS_KEYS_MAX,
    LIST_MAX,
    ExistsAnswer,
    ExistsQuestion,
    Header,
    ObjectList,
    PiecesAnswer,
    TenantView,
    hint_headers,
)
from kvtide.wire.ranges import PART_HEAD_BYTES_MAX, ByteRange, parse_parts, ranges_header
from kvtide.wire.receiver import FRAME_HEADER_BYTES, frame_header

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# One operation, its retries included.
OPERATION_S_MAX = 10.0
# One range, as long as bytes come.
RANGE_S_MAX = 60.0
# The part of an operation's time for which a server may be silent while there is another one to ask.
REPLICA_SHARE = 0.25
# Frames of one request, unless one is larger alone.
REQUEST_BYTES_MAX = 256 << 10
# Requests in a row, each with retries of its own, that bring an object in pieces no further; and how often what the
# server had may be lost there.
TRIES_MAX = 6
# Wait after the first of them that fails; twice as long after each further one.
_RETRY_S = 0.05
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
# Statuses that say more than that a server can't serve now.
_REFUSALS = {307: WrongServer, 400: NotAllowed, 403: NotAllowed, 413: TierFull, 507: TierFull}


@dataclass(eq=False, repr=False)
class HttpTier(CountingTier):
    """Objects on a server. With several peers each has every object: writes go to all, reads to the first that works.

    A server that is silent for `operation_s_max` has failed, for REPLICA_SHARE of that if another one can be asked; an
    operation may take `operation_s_max` and its bytes over `bytes_s_min`.
    """

    name = "http"
    is_batched = takes_advice = can_replace = True
    looks_in_regions = True

    _peers: Sequence[Peer]
    _clock: Clock
    _operation_s_max: float
    _bytes_s_min: float
    _takes_pieces: bool
    takes_evicted: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._known = TierStats.sum_of(self.name, [])

    def open(self) -> None:
        """Allow calls. Servers that are down now are asked again later."""
        for peer in self._peers:
            peer.open()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def contains(self, object_id: ObjectId) -> bool:
        return self._ask("HEAD", *object_target(object_id), allowed=(200, 404)).status == 200

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Ask the server in one request, for those of the first one's namespace, at most EXISTS_KEYS_MAX."""
        asked = list(takewhile(lambda each: each.namespace == object_ids[0].namespace, object_ids[:EXISTS_KEYS_MAX]))
        return self._exists(asked, leading_only=True).leading if asked else 0

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Ask the server in one request for each namespace, and for each EXISTS_KEYS_MAX objects of it."""
        groups = [list(group) for _, group in groupby(object_ids, lambda each: each.namespace)]
        parts = (ids[at : at + EXISTS_KEYS_MAX] for ids in groups for at in range(0, len(ids), EXISTS_KEYS_MAX))
        return [is_here for asked in parts for is_here in self._exists(asked, leading_only=False).present]

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        """Tell the server by a look-up of the whole prompt, of its first EXISTS_KEYS_MAX blocks."""
        self._exists(object_ids[:EXISTS_KEYS_MAX], leading_only=True, more_headers=hint_headers(hint))

    def _exists(self, asked: Sequence[ObjectId], leading_only: bool, more_headers: Headers = ()) -> ExistsAnswer:
        """Ask for objects of one namespace."""
        question = ExistsQuestion([object_id.key.hex() for object_id in asked], leading_only=leading_only)
        namespace, headers = asked_name(asked[0])
        path = f"/v1/{namespace.hex()}/exists"
        answer = self._ask("POST", path, [*headers, *more_headers], msgspec.json.encode(question))
        found = _decoded(answer, ExistsAnswer)
        if len(found.present) != len(asked) or not 0 <= found.leading <= len(asked):
            raise TierUnavailable(f"asked for {len(asked)} objects, the server tells of {len(found.present)}")
        return found

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        if not buffer:
            return 0 if self.contains(object_id) else None
        target, headers = object_target(object_id)
        with self._faults_noted():
            answer = self._first_answer(Call("GET", target, headers, into=buffer, start=offset))
            came = _range_bytes(answer, offset, len(buffer))
        self._note(is_hit=came is not None)
        return came

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        asked = [ByteRange(offset, offset + len(buffer)) for offset, buffer in ranges]
        room = memoryview(bytearray(sum(len(part) + PART_HEAD_BYTES_MAX for _, part in ranges) + PART_HEAD_BYTES_MAX))
        target, headers = object_target(object_id)
        with self._faults_noted():
            answer = self._first_answer(Call("GET", target, [*headers, ("Range", ranges_header(asked))], into=room))
            found = _ranges_in(answer, room, asked)
        for each, part in zip(ranges, found or [], strict=False):
            each.buffer[: len(part)] = part
        self._note(is_hit=found is not None)
        return None if found is None else list(map(len, found))

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range as it comes, going on at the next server where one breaks off; nobody is asked twice."""
        target, headers = object_target(object_id)
        peers = self._in_order()

        def read_on(peer: Peer, at: int, stop: int, take: Take) -> bool:
            call = Call("GET", target, headers, into=memoryview(bytearray(stop - at)), start=at)
            # However slow the link: what counts is that bytes come.
            deadline_s = min(caller_deadline_s(), self._clock.monotonic_s() + RANGE_S_MAX)
            watch = RangeWatch(self._clock, deadline_s, self._operation_s_max, call, take)
            try:
                came = _range_bytes(peer.call(call, watch, tries_max=1), at, stop - at)
            except TierUnavailable:
                watch.hand_over(call.received)
                raise
            watch.hand_over(came or 0)
            return came == stop - at

        def note(at: int, error: Exception) -> None:
            _log.debug("%s: %s", peers[at].endpoint, error)
            self._note_fault(error)

        return read_from_any([partial(read_on, peer) for peer in peers], start, stop, take, note)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Send the object to every server. True if one of them has it now."""
        stored, error = False, None
        target, headers = object_target(object_id)
        for peer in self._peers:
            try:
                if self._takes_pieces:
                    ask = partial(self._send, peer, "POST", target, headers)
                    answer = put_in_pieces(ask, buffer, self._clock, self._operation_s_max, time.sleep)
                else:
                    answer = self._send(peer, "PUT", target, headers, buffer)
                # Of 409 its generation is over: nobody wants the object.
                if answer.status not in {200, 201, 409}:
                    raise _refusal("PUT", answer)
                stored |= answer.status != 409
            except TierUnavailable as caught:
                error = caught
        if not stored and error is not None:
            self._note_fault(error)
            raise error
        return stored

    # A server puts it in the place of a coarser one.
    replace = put_from

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove the object from every server. False if none had it; TierUnavailable after all were asked."""
        target, headers = object_target(object_id)
        why = [(Header.REASON, reason)] if reason.isalpha() else []
        is_gone, fault = False, None
        for peer in self._peers:
            try:
                is_gone |= self._send(peer, "DELETE", target, [*headers, *why]).status == 204
            except TierUnavailable as error:
                fault = error
        if fault is not None:
            self._note_fault(fault)
            raise fault
        return is_gone

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Tell the first server that answers, by the cheapest question about the namespace, a look-up of nothing."""
        if text := decisions_text(counts):
            target, question = f"/v1/{namespace.hex()}/exists", msgspec.json.encode(ExistsQuestion([]))
            self._ask("POST", target, [(Header.DECISIONS, text)], question)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return what the server remembers; None if it can't be asked."""
        with suppress(TierUnavailable):
            return self._ask("HEAD", *object_target(object_id), allowed=(200, 404)).headers.get(Header.REMOVED)
        return None

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what the first server that answers has of ours."""
        for name in self._view().namespaces:
            after, namespace = "", Namespace(_digest(name))
            while True:
                listed = _decoded(self._ask("GET", f"/v1/{name}?limit={LIST_MAX}&after={after}"), ObjectList).objects
                for each in listed:
                    if each.key <= after:
                        raise TierUnavailable(f"the server lists {each.key[:80]!r} after {after!r}")
                    after = each.key
                    yield ObjectInfo(ObjectId(namespace, BlockKey(_digest(after))), each.size, each.last_use_s)
                if len(listed) < LIST_MAX:
                    break

    def _view(self) -> TenantView:
        return _decoded(self._ask("GET", "/v1"), TenantView)

    def stats(self) -> TierStats:
        """Return our hits, misses and faults, and what the server says it holds: the last that was heard of that."""
        with suppress(TierUnavailable):
            self._known = self._view().tier or self._known
        with self._lock:
            known = self._known
            counts = (self._hits, self._misses, known.evictions, self._faults)
        return TierStats(self.name, known.objects, known.used_bytes, known.bytes_max, *counts)

    def _in_order(self) -> list[Peer]:
        """Return the peers, those that work first."""
        return sorted(self._peers, key=lambda peer: peer.breaker.is_open)

    def _ask(
        self, method: str, target: str, headers: Headers = (), body: Buffer = b"", allowed: Sequence[int] = (200,)
    ) -> HttpAnswer:
        """Return the first answer that comes. TierUnavailable for a status that is not allowed."""
        with self._faults_noted():
            answer = self._first_answer(Call(method, target, headers, body))
            if answer.status not in allowed:
                raise _refusal(method, answer)
        return answer

    def _first_answer(self, call: Call) -> HttpAnswer:
        """Return the answer of the first peer that gives one; where one breaks off, the next goes on."""
        *others, last = self._in_order()
        # A look-up leaves time for the next one; a body may come slowly.
        left_s = (caller_deadline_s() - self._clock.monotonic_s()) * (REPLICA_SHARE if call.into is None else 1.0)
        for peer in others:
            try:
                return peer.call(call, self._patience(call, REPLICA_SHARE, left_s))
            except TierUnavailable as error:
                _log.debug("%s; the next one is asked", error)
        return last.call(call, self._patience(call))

    def _send(self, peer: Peer, method: str, target: str, headers: Headers, body: Buffer = b"") -> HttpAnswer:
        call = Call(method, target, headers, body)
        return peer.call(call, self._patience(call))

    def _patience(self, call: Call, silence_share: float = 1.0, left_s: float = math.inf) -> Patience:
        moved_bytes = len(call.body) + len(call.into or b"")
        own_s = self._clock.monotonic_s() + min(left_s, self._operation_s_max + moved_bytes / self._bytes_s_min)
        return Patience(self._clock, min(own_s, caller_deadline_s()), silence_share * self._operation_s_max)

    def check(self) -> None:
        for peer in self._peers:
            peer.check()


def http_tier(
    url: str,
    clock: Clock,
    settings: PeerSettings | None = None,
    operation_s_max: float = OPERATION_S_MAX,
    extra: Sequence[tuple[str, str]] = (),
    bytes_s_min: float = math.inf,
) -> HttpTier:
    """Return the unopened tier of a URL's servers; `extra` goes with every request. ValueError as in `servers_of`."""
    servers = servers_of(url)
    headers = [*servers.object_headers, *extra]
    peers = [Peer(each, headers, settings or PeerSettings(), clock) for each in servers.endpoints]
    return HttpTier(peers, clock, operation_s_max, bytes_s_min, servers.takes_pieces, servers.takes_evicted)


def _range_bytes(answer: HttpAnswer, offset: int, wanted: int) -> int | None:
    """Return how many bytes came, None for an absent object. TierUnavailable if they are not those asked for."""
    if answer.status == 404:
        return None
    if answer.status == 416:
        return 0
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if answer.status != 206 or found is None:
        raise _refusal("GET", answer)
    start, last, size = map(int, found.groups())
    if not (start == offset and last - start + 1 == answer.size == min(wanted, size - offset)):
        raise TierUnavailable(f"asked for {wanted} bytes from {offset}, {found[0]} came")
    return answer.size


def _ranges_in(answer: HttpAnswer, body: memoryview, asked: Sequence[ByteRange]) -> list[memoryview] | None:
    """Return the bytes of each range, None for an absent object. TierUnavailable if they are not those asked for."""
    if answer.status == 404:
        return None
    if answer.status == 416:
        return [body[:0]] * len(asked)
    if answer.status != 206:
        raise _refusal("GET", answer)
    try:
        return parse_parts(answer.headers.get("content-type", ""), body[: answer.size], asked)
    except RequestRefused as error:
        raise TierUnavailable(str(error)) from error


def _refusal(method: str, answer: HttpAnswer) -> TierUnavailable:
    kind = _REFUSALS.get(answer.status, TierUnavailable)
    return kind(f"{method} was answered with status {answer.status}: {answer.reason}")


def _decoded(answer: HttpAnswer, kind: type[_Result]) -> _Result:
    """Return an answer's JSON. TierUnavailable if it is of another kind."""
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TierUnavailable(f"the server's answer can't be read: {error}") from error


def _digest(digits: str) -> bytes:
    if not _DIGEST.fullmatch(digits):
        raise TierUnavailable(f"expected 64 hex digits from the server, got {digits[:80]!r}")
    return bytes.fromhex(digits)


def put_in_pieces(
    ask: Callable[[Buffer], HttpAnswer], buffer: Buffer, clock: Clock, patience_s: float, sleep: Callable[[float], None]
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
            missing = _missing(answer, stored) if answer.status == 202 else ()
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
    missing = _decoded(answer, PiecesAnswer).missing
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
