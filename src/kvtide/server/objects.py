"""The requests for one object: get, head, put, delete.

Invariant: nothing of a body becomes visible to a tier before all of it has come and been verified; every buffer and
lent object is given back, whatever happens to the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from kvtide.errors import CorruptPayload, QueueFull, RequestRefused, TierFull
from kvtide.server.auth import Scope
from kvtide.server.bodies import BodyBuffers
from kvtide.server.exchange import Exchange, Headers
from kvtide.server.member import Member
from kvtide.server.metrics import Metrics
from kvtide.server.names import Names
from kvtide.server.records import Records
from kvtide.server.regions import Region
from kvtide.server.sender import Order, Sender
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier
from kvtide.tier.base import Replacing
from kvtide.tier.deadline import until
from kvtide.tier.lend import Lender, LentObject
from kvtide.types import NamedId, ObjectId
from kvtide.wire import HEADER_BYTES, object_bytes, object_quality, parse_object, version_tag
from kvtide.wire.protocol import (
    AS_OF_HEADER,
    EPOCH_HEADER,
    FORCE_HEADER,
    LOCAL_HEADER,
    REASON_HEADER,
    REMOVED_HEADER,
    ByteRange,
    etag,
    generation,
    is_tag_matched,
    parse_range,
)
from kvtide.wire.records import RecordKind, RecordName

__all__ = ["ObjectRequests"]

_Result = TypeVar("_Result")
_REASON_CHARACTERS_MAX = 16


class ObjectRequests:
    """Answers for single objects out of one tier. Runs on the event loop; the tier's calls run in `workers`."""

    def __init__(
        self,
        tier: Tier,
        records: Records,
        names: Names,
        sender: Sender,
        buffers: BodyBuffers,
        limits: ServerLimits,
        metrics: Metrics,
        workers: Executor,
        member: Member | None = None,
        region: Region | None = None,
    ) -> None:
        self._tier = tier
        # Where a PUT looks whether the object is here: what the centre has is of no use if that falls silent.
        self._local: Tier = region.local if region is not None else tier
        self._records = records
        self._names = names
        self._metrics = metrics
        self._sender = sender
        self._buffers = buffers
        self._limits = limits
        self._workers = workers
        self._member = member
        self._region = region

    async def answer(self, exchange: Exchange, object_id: ObjectId) -> None:
        """Answer GET, HEAD, PUT or DELETE. RequestRefused if that is an error."""
        method = exchange.head.method
        if method in {"GET", "HEAD"}:
            await self._get(exchange, object_id)
        elif method == "PUT":
            if not await self._is_sent_on(exchange, object_id):
                await self._put(exchange, object_id)
        else:
            await self._delete(exchange, object_id)

    async def _in_thread(self, action: Callable[[], _Result], undo: Callable[[_Result], None] | None = None) -> _Result:
        """Run what may wait for a tier. If we are cancelled meanwhile, its result goes to `undo`."""
        future = asyncio.get_running_loop().run_in_executor(self._workers, action)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(partial(_undo, undo))
            raise

    async def _get(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.READ)
        region = self._region
        central = region.central if region is not None else None
        if central is not None and central.is_too_old_for(exchange.head.headers):
            # The object can't be out of date, but its namespace's generation can.
            await self._in_thread(central.require_latest)
        stored = await self._stored(exchange, object_id, 404)
        tier = self._tier_for(exchange, stored)
        # A thread takes ten times as long as what it would do here.
        lent = tier.lend_at_once(stored) if isinstance(tier, Lender) else None
        if lent is None:
            lend = partial(_within, exchange.start_deadline_s, partial(_lend, tier, stored, self._buffers))
            lent = await self._in_thread(lend, _release)
        if lent is None and region is not None and FORCE_HEADER in exchange.head.headers:
            await self._in_thread(partial(_within, exchange.start_deadline_s, partial(region.latest.bring, stored)))
            lent = await self._in_thread(partial(_lend, tier, stored, self._buffers), _release)
        if lent is None and exchange.stream.now_s() >= exchange.start_deadline_s:
            raise RequestRefused(504, "the deadline passed before everybody who may have it had answered")
        if lent is None:
            self._metrics.count_miss()
            if not await self._is_sent_on(exchange, object_id):
                await self._reply_absent(exchange, stored)
            return
        self._metrics.count_hit()
        self._names.note(stored)
        try:
            await self._send(exchange, lent)
        finally:
            lent.release()

    async def _stored(self, exchange: Exchange, object_id: ObjectId, otherwise: int) -> NamedId:
        """Return the id under which an object is stored. RequestRefused for one that is meant of another generation.

        A PUT may also teach us that a generation has risen, by a bounded step, unless we have a centre that says so.
        """
        tenant, name = exchange.caller.tenant, object_id.namespace
        meant = generation(exchange.head.headers)
        known = self._records.generation(tenant, name)
        is_centre = self._region is None or self._region.central is None
        if meant is not None and meant > known and is_centre and exchange.head.method == "PUT":
            record = RecordName(RecordKind.GENERATION, name.hex())
            taught = min(meant, known + exchange.caller.generation_step_max)
            await self._in_thread(partial(self._records.write, tenant, record, str(taught)))
        # Read once: it may rise at any moment.
        known = self._records.generation(tenant, name)
        if meant is not None and meant != known:
            reasons = {404: "no such object", 409: f"the namespace is at generation {known}, not {meant}"}
            raise RequestRefused(otherwise, reasons[otherwise])
        return self._names.ids(tenant, name, [object_id.key], known)[0]

    async def _is_sent_on(self, exchange: Exchange, object_id: ObjectId) -> bool:
        """Send a request on to who keeps the object in our pool. False if that is nobody else."""
        there = self._member.redirect(object_id.key) if self._member else None
        if there is None:
            return False
        place: Headers = [("Location", f"http://{there.address}{exchange.head.target}"), (EPOCH_HEADER, there.epoch)]
        await exchange.refuse(RequestRefused(307, "another server of the pool keeps this object"), place)
        return True

    def _tier_for(self, exchange: Exchange, stored: ObjectId) -> Tier:
        """Return where to look: what is here alone if a region asks, or if the latest is looked for apart anyway."""
        region, headers = self._region, exchange.head.headers
        if region is None:
            return self._tier
        region.note_use(stored)
        return region.local if LOCAL_HEADER in headers or FORCE_HEADER in headers else self._tier

    def _as_of(self) -> list[tuple[str, str | int]]:
        as_of_s = self._region.as_of_s() if self._region else None
        return [] if as_of_s is None else [(AS_OF_HEADER, f"{as_of_s:.3f}")]

    async def _reply_absent(self, exchange: Exchange, stored: ObjectId) -> None:
        reason = await self._in_thread(partial(self._tier.removed_reason, stored))
        known: Headers = [(REMOVED_HEADER, reason)] if reason else []
        await exchange.refuse(RequestRefused(404, "no such object"), [*known, *self._as_of()])

    async def _send(self, exchange: Exchange, lent: LentObject) -> None:
        headers, tag = exchange.head.headers, etag(version_tag(lent.head))
        common = [("ETag", tag), ("Accept-Ranges", "bytes"), *self._as_of()]
        if is_tag_matched(headers.get("if-none-match", ""), tag):
            await exchange.reply(304, headers=common)
            return
        part, status = ByteRange(0, lent.size), 200
        if "range" in headers:
            part, status = parse_range(headers["range"], lent.size), 206
            common.append(("Content-Range", f"bytes {part.start}-{part.stop - 1}/{lent.size}"))
        count = part.stop - part.start
        common.append(("Content-Type", "application/octet-stream"))
        if exchange.head.method == "HEAD":
            await exchange.reply(status, headers=common, length=count)
            return
        head = exchange.begin(status, count, common)
        exchange.wait_s = await self._sender.send(
            Order(
                stream=exchange.stream,
                head=head,
                lent=lent,
                part=part,
                tenant=exchange.caller.tenant,
                client=exchange.client,
                priority=exchange.priority,
                start_deadline_s=exchange.start_deadline_s,
                deadline_s=exchange.arrived_s + self._limits.body_s_max(count),
            )
        )
        exchange.status, exchange.sent_bytes = status, count
        self._metrics.count_sent(exchange.caller.tenant, count)

    async def _put(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.WRITE)
        size = exchange.head.content_length
        if size is None:
            raise RequestRefused(411, "a PUT needs a Content-Length")
        tenant, size_max = exchange.caller.tenant, self._limits.object_bytes_max
        if tenant:
            size_max = min(size_max, self._limits.tenant_buffer_bytes_max)
        if size > size_max:
            raise RequestRefused(413, f"an object may have {size_max} bytes here, got {size}")
        stored = await self._stored(exchange, object_id, 409)
        # Who holds the body back wants to know whether it is needed; for others it is looked up with the storing.
        if "expect" in exchange.head.headers and await self._in_thread(partial(self._local.contains, stored)):
            await exchange.reply(200)
            return
        buffer = self._buffer_for(tenant, size)
        body, give_back = buffer[:size], partial(self._buffers.give_back, buffer, tenant)
        try:
            await exchange.read_body(body, self._limits.body_s_max(size))
        except BaseException:
            give_back()
            raise
        # From here on the buffer is the thread's, also if this task ends before it.
        store = partial(_store, self._tier, self._local, stored, object_id, body, give_back)
        try:
            is_new = await self._in_thread(store)
        except RequestRefused as error:
            if error.status == 422:
                self._metrics.count_corrupt()
            raise
        self._metrics.count_received(tenant, size)
        await exchange.reply(201 if is_new else 200)

    def _buffer_for(self, tenant: str, size: int) -> memoryview:
        """Return a buffer for an upload. RequestRefused: 429 if the tenant has its share, 503 if all are in use."""
        try:
            buffer = self._buffers.take(size, tenant)
        except QueueFull as error:
            raise RequestRefused(429, str(error), retry_after_s=1.0) from error
        if buffer is None:
            raise RequestRefused(503, "every buffer is in use", retry_after_s=1.0)
        return buffer

    async def _delete(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.WRITE)
        stored = await self._stored(exchange, object_id, 404)
        reason = exchange.head.headers.get(REASON_HEADER, "removed")
        if not (reason.isascii() and reason.isalpha() and len(reason) <= _REASON_CHARACTERS_MAX):
            raise RequestRefused(400, f"{REASON_HEADER} must be 1 to {_REASON_CHARACTERS_MAX} letters")
        if await self._in_thread(partial(self._tier.delete, stored, reason)):
            await exchange.reply(204)
        else:
            await self._reply_absent(exchange, stored)


def _undo(undo: Callable[[_Result], None], future: asyncio.Future[_Result]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def _release(lent: LentObject | None) -> None:
    if lent is not None:
        lent.release()


def _within(deadline_s: float, action: Callable[[], _Result]) -> _Result:
    with until(deadline_s):
        return action()


def _lend(tier: Tier, stored: ObjectId, buffers: BodyBuffers) -> LentObject | None:
    """Lend an object, out of a buffer of ours where the tier that has it can't lend."""
    if isinstance(tier, Lender):
        lent = tier.lend(stored)
        if lent is not None:
            return lent
    head = bytearray(HEADER_BYTES)
    came = tier.get_into(stored, memoryview(head))
    if came is None:
        return None
    size = object_bytes(head[:came])
    buffer = buffers.take(size)
    if buffer is None:
        raise RequestRefused(503, "every buffer is in use", retry_after_s=1.0)
    try:
        if tier.get_into(stored, buffer[:size]) != size:
            buffers.give_back(buffer)
            return None
    except BaseException:
        buffers.give_back(buffer)
        raise
    return LentObject(size, bytes(head), (buffer[:size],), None, partial(buffers.give_back, buffer))


def _stored_quality(tier: Tier, stored: ObjectId) -> float:
    head = bytearray(HEADER_BYTES)
    return object_quality(head[: tier.get_into(stored, memoryview(head)) or 0])


def _store(
    tier: Tier, local: Tier, stored: ObjectId, claimed: ObjectId, body: memoryview, release: Callable[[], None]
) -> bool:
    """Verify a body and store it, in the place of a coarser one too. False if one as good was in the `local` tiers.

    RequestRefused if it is not the object that it claims to be, or there is no room.
    """
    try:
        is_here = local.contains(stored)
        if is_here and object_quality(body) >= _stored_quality(local, stored):
            return False
        parse_object(body, claimed).sections()
        put = tier.replace if is_here and isinstance(tier, Replacing) else tier.put_from
        is_stored = put(stored, body)
    except CorruptPayload as error:
        raise RequestRefused(422, str(error)) from error
    except TierFull as error:
        raise RequestRefused(507, str(error)) from error
    finally:
        release()
    if not is_stored:
        raise RequestRefused(507, "no tier took the object")
    return True
