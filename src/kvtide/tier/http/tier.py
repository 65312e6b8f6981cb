"""A kvtide server, or replicas of it, as a tier (docs/protocol.md). Every fault is TierUnavailable: a miss upstairs.

Invariant: the caller's buffer is written by one read at a time, and by none after `get_into` has returned.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import TypeVar

import msgspec

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable, WrongServer
from kvtide.evict import Hint
from kvtide.outcomes import Decided, decisions_text
from kvtide.tier.base import Buffer, ObjectInfo, RangeRead, Take, Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.http.answers import decoded, range_bytes, ranges_in, refusal
from kvtide.tier.http.connection import HttpAnswer, Patience, asked_name, object_target, servers_of
from kvtide.tier.http.hedge import Hedges
from kvtide.tier.http.peer import Call, Peer, PeerSettings, RangeWatch, put_in_pieces
from kvtide.tier.source import read_from_any
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats
from kvtide.wire.protocol import (
    DECISIONS_HEADER,
    EXISTS_KEYS_MAX,
    LIST_MAX,
    REASON_HEADER,
    REMOVED_HEADER,
    ExistsAnswer,
    ExistsQuestion,
    ObjectList,
    TenantView,
    hint_headers,
)
from kvtide.wire.ranges import PART_HEAD_BYTES_MAX, ByteRange, ranges_header

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# One operation, its retries included.
OPERATION_S_MAX = 10.0
# One range, as long as bytes come.
RANGE_S_MAX = 60.0


class HttpTier(Tier):
    """Objects on a server. With several peers each has every object: writes go to all, reads to the first that works.

    A server that is silent for `operation_s_max` has failed; an operation may take that long and its bytes over
    `bytes_s_min`. A read that is later than 95 of 100 before it is sent to a second peer as well, and the first answer
    counts.
    """

    name = "http"
    is_batched = takes_advice = can_replace = True
    looks_in_regions = True

    def __init__(
        self,
        peers: Sequence[Peer],
        clock: Clock,
        operation_s_max: float = OPERATION_S_MAX,
        takes_evicted: bool = False,
        bytes_s_min: float = math.inf,
        takes_pieces: bool = False,
    ) -> None:
        if not peers:
            raise ValueError("a remote tier needs at least one server, got none")
        self._peers = list(peers)
        self._clock = clock
        self._operation_s_max = operation_s_max
        self._bytes_s_min = bytes_s_min
        self._takes_pieces = takes_pieces
        # Whether a stack should send here only what the tiers in front of this one evict.
        self.takes_evicted = takes_evicted
        self.hedges = Hedges(clock, operation_s_max)
        self._lock = threading.Lock()
        self._hits = self._misses = self._faults = 0
        self._known = TierStats.sum_of(self.name, [])

    def open(self) -> None:
        """Allow calls. Servers that are down now are asked again later."""
        self.hedges.open()
        for peer in self._peers:
            peer.open()

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()
        self.hedges.close()

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the server."""
        answer = self._any("HEAD", *object_target(object_id))
        if answer.status not in {200, 404}:
            raise self._refused("HEAD", answer)
        return answer.status == 200

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

    def _exists(
        self, asked: Sequence[ObjectId], leading_only: bool, more_headers: Sequence[tuple[str, str]] = ()
    ) -> ExistsAnswer:
        """Ask for objects of one namespace."""
        question = ExistsQuestion([object_id.key.hex() for object_id in asked], leading_only=leading_only)
        namespace, headers = asked_name(asked[0])
        path = f"/v1/{namespace.hex()}/exists"
        answer = self._any("POST", path, [*headers, *more_headers], msgspec.json.encode(question))
        if answer.status != 200:
            raise self._refused("POST", answer)
        found = decoded(answer, ExistsAnswer)
        if len(found.present) != len(asked) or not 0 <= found.leading <= len(asked):
            raise TierUnavailable(f"asked for {len(asked)} objects, the server tells of {len(found.present)}")
        return found

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read the object's bytes from `offset` on into `buffer`, by one range."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        if not buffer:
            return 0 if self.contains(object_id) else None
        target, headers = object_target(object_id)
        part = ("Range", f"bytes={offset}-{offset + len(buffer) - 1}")
        call = Call("GET", target, [*headers, part], b"", buffer, offset)
        came = self._guarded(lambda: range_bytes(self._read(call, buffer), offset, len(buffer)))
        with self._lock:
            self._hits += came is not None
            self._misses += came is None
        return came

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read several ranges by one request."""
        asked = [ByteRange(offset, offset + len(buffer)) for offset, buffer in ranges]
        room = memoryview(
            bytearray(sum(stop - start for start, stop in asked) + PART_HEAD_BYTES_MAX * (len(asked) + 1))
        )
        target, headers = object_target(object_id)
        call = Call("GET", target, [*headers, ("Range", ranges_header(asked))], b"", room)
        found = self._guarded(lambda: ranges_in(self._read(call, room), room, asked))
        for each, part in zip(ranges, found or [], strict=False):
            each.buffer[: len(part)] = part
        with self._lock:
            self._hits += found is not None
            self._misses += found is None
        return None if found is None else list(map(len, found))

    def _read(self, call: Call, buffer: memoryview) -> HttpAnswer:
        peers = self._in_order()
        deadline_s = self._deadline_s(len(buffer))
        replica = peers[1] if len(peers) > 1 and not peers[1].breaker.is_open else None
        for position, peer in enumerate(peers):
            try:
                return self.hedges.read(peer, replica if position == 0 else None, call, buffer, deadline_s)
            except TierUnavailable:
                if position == len(peers) - 1:
                    raise
                call = call.again()
        raise AssertionError("there is at least one peer")

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range as it comes, from the first server that has it, going on at the next where one breaks off.

        Nobody is asked a second time: who takes ranges knows what is still missing.
        """
        target, headers = object_target(object_id)
        peers = self._in_order()

        def read_on(peer: Peer, at: int, take: Take) -> bool:
            into = memoryview(bytearray(stop - at))
            call = Call("GET", target, [*headers, ("Range", f"bytes={at}-{stop - 1}")], b"", into, at)
            # However slow the link: what counts is that bytes come.
            deadline_s = min(caller_deadline_s(), self._clock.monotonic_s() + RANGE_S_MAX)
            watch = RangeWatch(self._clock, deadline_s, self._operation_s_max, call, take)
            try:
                came = range_bytes(peer.call(call, watch, tries_max=1), at, stop - at)
            except TierUnavailable:
                watch.hand_over()
                raise
            watch.hand_over(came or 0)
            return came == stop - at

        def note(at: int, error: Exception) -> None:
            _log.debug("%s: %s", peers[at].endpoint, error)
            with self._lock:
                self._faults += 1

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
            except TierUnavailable as caught:
                error = caught
                continue
            if answer.status in {200, 201}:
                stored = True
            elif answer.status == 409:
                # Its generation is over: nobody wants the object.
                continue
            elif answer.status in {413, 507}:
                error = TierFull(f"{peer.endpoint} has no room for {object_id}")
            else:
                error = refusal("PUT", answer)
        if not stored and error is not None:
            with self._lock:
                self._faults += 1
            raise error
        return stored

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Send the object; a server puts it in the place of a coarser one."""
        return self.put_from(object_id, buffer)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove the object from every server. False if none had it."""
        target, headers = object_target(object_id)
        why = [(REASON_HEADER, reason)] if reason.isalpha() else []
        answers = [
            self._guarded(partial(self._ask, peer, Call("DELETE", target, [*headers, *why], b"", None)))
            for peer in self._peers
        ]
        return any(answer.status == 204 for answer in answers)

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Tell the first server that answers, by the cheapest question about the namespace, a look-up of nothing."""
        text = decisions_text(counts)
        if text:
            target, question = f"/v1/{namespace.hex()}/exists", msgspec.json.encode(ExistsQuestion([]))
            answer = self._any("POST", target, [(DECISIONS_HEADER, text)], question)
            if answer.status != 200:
                raise self._refused("POST", answer)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return what the server remembers; None if it can't be asked."""
        try:
            return self._any("HEAD", *object_target(object_id)).headers.get(REMOVED_HEADER)
        except TierUnavailable:
            return None

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what the first server that answers has of ours."""
        for name in self._view().namespaces:
            after = ""
            while True:
                answer = self._any("GET", f"/v1/{name}?limit={LIST_MAX}&after={after}")
                if answer.status != 200:
                    raise self._refused("GET", answer)
                part = decoded(answer, ObjectList)
                namespace = Namespace(bytes.fromhex(name))
                for each in part.objects:
                    yield ObjectInfo(ObjectId(namespace, BlockKey(bytes.fromhex(each.key))), each.size, each.last_use_s)
                if len(part.objects) < LIST_MAX:
                    break
                after = part.objects[-1].key

    def _view(self) -> TenantView:
        answer = self._any("GET", "/v1")
        if answer.status != 200:
            raise self._refused("GET", answer)
        return decoded(answer, TenantView)

    def stats(self) -> TierStats:
        """Return our hits, misses and faults, and what the server says it holds: the last that was heard of that."""
        try:
            view = self._view().tier
        except TierUnavailable:
            view = None
        with self._lock:
            self._known = known = view or self._known
            counts = (self._hits, self._misses, known.evictions, self._faults)
        return TierStats(self.name, known.objects, known.used_bytes, known.bytes_max, *counts)

    def _in_order(self) -> list[Peer]:
        """Return the peers, those that work first."""
        return sorted(self._peers, key=lambda peer: peer.breaker.is_open)

    def _ask(self, peer: Peer, call: Call) -> HttpAnswer:
        return peer.call(call, Patience(self._clock, self._deadline_s(len(call.body)), self._operation_s_max))

    def _send(
        self, peer: Peer, method: str, target: str, headers: Sequence[tuple[str, str]], body: Buffer
    ) -> HttpAnswer:
        return self._ask(peer, Call(method, target, headers, body, None))

    def _deadline_s(self, size: int) -> float:
        own_s = self._clock.monotonic_s() + self._operation_s_max + size / self._bytes_s_min
        return min(own_s, caller_deadline_s())

    def _any(self, method: str, target: str, headers: Sequence[tuple[str, str]] = (), body: Buffer = b"") -> HttpAnswer:
        """Return the answer of the first peer that gives one."""
        for peer in self._in_order()[:-1]:
            try:
                return self._ask(peer, Call(method, target, headers, body, None))
            except TierUnavailable as error:
                _log.debug("%s; the next one is asked", error)
        return self._guarded(lambda: self._ask(self._in_order()[-1], Call(method, target, headers, body, None)))

    def _guarded(self, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except TierUnavailable:
            with self._lock:
                self._faults += 1
            raise

    def _refused(self, method: str, answer: HttpAnswer) -> TierUnavailable:
        error = refusal(method, answer)
        with self._lock:
            self._faults += not isinstance(error, WrongServer)
        return error

    def check(self) -> None:
        """AssertionError if connections or buffers are lost. Call it while nobody uses the tier."""
        for peer in self._peers:
            peer.check()
        self.hedges.check()


def http_tier(
    url: str,
    clock: Clock,
    settings: PeerSettings | None = None,
    operation_s_max: float = OPERATION_S_MAX,
    extra: Sequence[tuple[str, str]] = (),
    bytes_s_min: float = math.inf,
) -> HttpTier:
    """Return the tier of the servers that a URL names, not yet opened; `extra` goes with every request.

    ValueError as in `servers_of`.
    """
    servers = servers_of(url)
    bounds = settings or PeerSettings()
    peers = [Peer(each, [*servers.object_headers, *extra], bounds, clock, time.sleep) for each in servers.endpoints]
    return HttpTier(peers, clock, operation_s_max, servers.takes_evicted, bytes_s_min, servers.takes_pieces)
