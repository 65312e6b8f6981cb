"""The requests for one object: get, head, put, delete, and post for one that comes in pieces.

Invariant: nothing of a body becomes visible to a tier before all of it has come and been verified; every buffer and
lent object is given back, whatever happens to the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TypeVar

import msgspec

from kvtide.errors import CorruptPayload, RequestRefused, TierFull
from kvtide.server.auth import Scope
from kvtide.server.http import (
    BodyBuffers,
    Exchange,
    Headers,
    Sender,
    SendOrder,
    Workers,
    lent_pieces,
    piece_bytes,
    receive,
)
from kvtide.server.lending import Lending
from kvtide.server.live import Live
from kvtide.server.metrics import Metrics
from kvtide.server.names import Names
from kvtide.server.quotas import Quotas
from kvtide.server.regions import Records, Region, stored_quality
from kvtide.server.settings import ServerLimits
from kvtide.server.uploads import Upload, Uploads
from kvtide.tier import Tier
from kvtide.tier.base import LentObject
from kvtide.tier.pool import Member
from kvtide.types import NamedId, ObjectId
from kvtide.wire import StoredObject, object_quality, parse_object, version_tag
from kvtide.wire.protocol import (
    AS_OF_HEADER,
    EPOCH_HEADER,
    FORCE_HEADER,
    LOCAL_HEADER,
    REASON_HEADER,
    REMOVED_HEADER,
    PiecesAnswer,
    RecordKind,
    RecordName,
    etag,
    generation,
    is_tag_matched,
)
from kvtide.wire.ranges import ByteRange, multipart, parse_ranges

_REASON_CHARACTERS_MAX = 16
_Result = TypeVar("_Result")


class ObjectRequests:
    """Answers for single objects out of one tier. Runs on the event loop; the tier's calls run in `workers`."""

    def __init__(
        self,
        tier: Tier,
        records: Records,
        names: Names,
        sender: Sender,
        lending: Lending,
        buffers: BodyBuffers,
        live: Live,
        metrics: Metrics,
        workers: Workers,
        quotas: Quotas,
        uploads: Uploads,
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
        self._lending = lending
        self._buffers = buffers
        self._live = live
        self._workers = workers
        self._quotas = quotas
        self._uploads = uploads
        self._member = member
        self._region = region

    @property
    def _limits(self) -> ServerLimits:
        return self._live.limits

    async def answer(self, exchange: Exchange, object_id: ObjectId) -> None:
        """Answer GET, HEAD, PUT, POST or DELETE. RequestRefused if that is an error."""
        method = exchange.head.method
        if method in {"GET", "HEAD"}:
            await self._get(exchange, object_id)
        elif method in {"PUT", "POST"}:
            if not await self._is_sent_on(exchange, object_id):
                await (self._put if method == "PUT" else self._post)(exchange, object_id)
        else:
            await self._delete(exchange, object_id)

    async def catch_up(self, exchange: Exchange) -> None:
        """Have the centre's records for a request that wants fresher ones than ours. RequestRefused if it can't be."""
        central = self._region.central if self._region is not None else None
        if central is not None and (central.is_too_old_for(exchange.head.headers) or central.is_needed):
            # Objects can't be out of date, but their namespace's generation can.
            await self._workers.read(exchange.owner, central.require_latest)

    async def _get(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.READ)
        region, method = self._region, exchange.head.method
        await self.catch_up(exchange)
        stored = await self._stored(exchange, object_id, 404)
        if self._quotas.is_expired(stored):
            await self._workers.write(exchange.owner, partial(self._tier.delete, stored, "expired"))
        tier = self._tier_for(exchange, stored)
        lent = await self._lending.lend(exchange, tier, stored)
        if lent is None and region is not None and FORCE_HEADER in exchange.head.headers:
            await self._lending.bring(exchange, region.latest, stored)
            lent = await self._lending.lend(exchange, tier, stored)
        lent = lent or self._uploads.lend(stored, method, exchange.head.headers)
        if lent is None:
            if not await self._is_sent_on(exchange, object_id):
                reason = await self._reply_absent(exchange, stored)
                if method == "GET":
                    self._metrics.count_absent(exchange.caller.tenant, reason)
            return
        self._names.note(stored)
        try:
            await self._send(exchange, lent)
        finally:
            lent.release()

    async def _stored(self, exchange: Exchange, object_id: ObjectId, otherwise: int) -> NamedId:
        """Return the id under which an object is stored. RequestRefused for one that is meant of another generation.

        PUT and POST may also teach us that a generation has risen, by a bounded step, unless we have a centre.
        """
        tenant, name = exchange.caller.tenant, object_id.namespace
        meant = generation(exchange.head.headers)
        known = self._records.generation(tenant, name)
        is_centre = self._region is None or self._region.central is None
        if meant is not None and meant > known and is_centre and exchange.head.method in {"PUT", "POST"}:
            record = RecordName(RecordKind.GENERATION, name.hex())
            taught = min(meant, known + exchange.caller.generation_step_max)
            await self._workers.write(exchange.owner, partial(self._records.write, tenant, record, str(taught)))
            exchange.change = f"wrote generation/{record.name}: {taught}"
        # Read once: it may rise at any moment.
        known = self._records.generation(tenant, name)
        if meant is not None and meant != known:
            reasons = {404: "no such object", 409: f"the namespace is at generation {known}, not {meant}"}
            raise RequestRefused(otherwise, reasons[otherwise])
        found = self._names.ids(tenant, name, [object_id.key], known)[0]
        self._quotas.note(found.namespace, tenant)
        return found

    async def _is_sent_on(self, exchange: Exchange, object_id: ObjectId) -> bool:
        """Send a request on to who keeps the object in our pool. False if that is nobody else."""
        there = self._member.redirect(object_id.key) if self._member else None
        if there is None:
            return False
        place: Headers = [("Location", f"{there.origin}{exchange.head.target}"), (EPOCH_HEADER, there.epoch)]
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

    async def _reply_absent(self, exchange: Exchange, stored: ObjectId) -> str | None:
        """Say that an object is not here, and why if that is remembered. Return the reason."""
        reason = await self._workers.read(exchange.owner, partial(self._tier.removed_reason, stored))
        known: Headers = [(REMOVED_HEADER, reason)] if reason else []
        await exchange.refuse(RequestRefused(404, "no such object"), [*known, *self._as_of()])
        return reason

    async def _send(self, exchange: Exchange, lent: LentObject) -> None:
        headers, tag = exchange.head.headers, etag(version_tag(lent.head))
        common = [("ETag", tag), ("Accept-Ranges", "bytes"), *self._as_of()]
        if is_tag_matched(headers.get("if-none-match", ""), tag):
            await exchange.reply(304, headers=common)
            return
        status, asked = 200, [ByteRange(0, lent.size)]
        pieces, kind = lent_pieces(lent, asked[0]), "application/octet-stream"
        if "range" in headers and headers.get("if-range", tag) == tag:
            status, asked = 206, parse_ranges(headers["range"], lent.size)
            if "," in headers["range"]:
                kind, leads = multipart(tag.strip('"'), lent.size, asked)
                behind = [
                    [*lent_pieces(lent, part), memoryview(lead)] for part, lead in zip(asked, leads[1:], strict=True)
                ]
                pieces = [memoryview(leads[0]), *chain.from_iterable(behind)]
            else:
                pieces = lent_pieces(lent, asked[0])
                common.append(("Content-Range", f"bytes {asked[0].start}-{asked[0].stop - 1}/{lent.size}"))
        common.append(("Content-Type", kind))
        count = sum(map(piece_bytes, pieces))
        if exchange.head.method == "HEAD":
            await exchange.reply(status, headers=common, length=count)
            return
        if asked[0].start == 0:
            # Whoever loads layer by layer reads an object in several ranges.
            self._metrics.count_read(exchange.caller.tenant)
        order = SendOrder(
            stream=exchange.stream,
            head=exchange.begin(status, count, common),
            pieces=pieces,
            tenant=exchange.caller.tenant,
            owner=exchange.owner,
            client=exchange.client,
            share=exchange.share,
            priority=exchange.priority,
            pace=self._limits.pace(exchange.stream.now_s()),
            on_start=exchange.started,
            is_in_the_way=partial(self._lending.is_waited_for, exchange.owner),
        )
        exchange.wait_s = await self._sender.send(order)
        exchange.status, exchange.sent_bytes = status, count
        self._metrics.count_sent(exchange.caller.tenant, count)

    async def _put(self, exchange: Exchange, object_id: ObjectId) -> None:
        size = self._body_bytes(exchange)
        stored = await self._stored(exchange, object_id, 409)
        # Who holds the body back wants to know whether it is needed; for others it is looked up with the storing.
        if "expect" in exchange.head.headers:
            look = partial(self._local.contains, stored)
            if await self._workers.read(exchange.owner, look):
                await exchange.reply(200)
                return
        tenant = exchange.caller.tenant
        with self._quotas.room(tenant, size):
            body, give_back = await receive(exchange, self._buffers, self._limits, size)
            is_new = await self._store(exchange, object_id, stored, body, give_back)
            self._metrics.count_received(tenant, size)
            await exchange.reply(201 if is_new else 200)

    def _body_bytes(self, exchange: Exchange) -> int:
        """Return how long the body is of who may write. RequestRefused (403, 411, 413) for others."""
        exchange.caller.require(Scope.WRITE)
        size = exchange.head.content_length
        if size is None:
            raise RequestRefused(411, f"a {exchange.head.method} needs a Content-Length")
        self._check_size(exchange.caller.tenant, size)
        return size

    def _check_size(self, tenant: str, size: int) -> None:
        size_max = self._limits.object_bytes_max
        if tenant:
            size_max = min(size_max, self._limits.tenant_buffer_bytes_max)
        if size > size_max:
            raise RequestRefused(413, f"an object may have {size_max} bytes here, got {size}")

    async def _store(
        self, exchange: Exchange, object_id: ObjectId, stored: NamedId, body: memoryview, give_back: Callable[[], None]
    ) -> bool:
        """Verify and store an object; False if one as good was here. RequestRefused (422, 507) if it can't be."""
        note = partial(self._metrics.note_model, exchange.caller.tenant, object_id.namespace)
        store = partial(_store, self._tier, self._local, stored, object_id, body, give_back, note)
        return await self._write(exchange, store, give_back)

    async def _write(self, exchange: Exchange, action: Callable[[], _Result], give_back: Callable[[], None]) -> _Result:
        """Run in a thread what uses a buffer: from here on that is the thread's, also if this task ends before it."""
        try:
            return await self._workers.write(exchange.owner, action, give_back)
        except RequestRefused as error:
            if error.status == 422:
                self._metrics.count_corrupt()
            raise

    async def _post(self, exchange: Exchange, object_id: ObjectId) -> None:
        """Take pieces of an object, and store it once it is whole."""
        size, tenant = self._body_bytes(exchange), exchange.caller.tenant
        stored = await self._stored(exchange, object_id, 409)
        body, give_back = await receive(exchange, self._buffers, self._limits, size)

        def is_wanted(announced: StoredObject) -> bool:
            if self._local.contains(stored) and announced.quality >= stored_quality(self._local, stored):
                return False
            self._check_size(tenant, announced.object_bytes)
            with self._quotas.room(tenant, announced.object_bytes):
                return True

        def take() -> tuple[Upload | None, list[int]]:
            try:
                upload = self._uploads.take(stored, object_id, exchange.owner, body, is_wanted)
                return upload, upload.missing() if upload is not None else []
            except CorruptPayload as error:
                raise RequestRefused(422, str(error)) from error
            finally:
                give_back()

        upload, missing = await self._write(exchange, take, give_back)
        self._metrics.count_received(tenant, size)
        if upload is None:
            await exchange.reply(200)
        elif missing:
            answer = msgspec.json.encode(PiecesAnswer(missing))
            await exchange.reply(202, answer, [("Content-Type", "application/json")])
        else:
            await self._store_upload(exchange, object_id, stored, upload)

    async def _store_upload(self, exchange: Exchange, object_id: ObjectId, stored: NamedId, upload: Upload) -> None:
        try:
            with self._quotas.room(exchange.caller.tenant, upload.stored.object_bytes):
                lent = self._uploads.lend_whole(upload)
                is_new = await self._store(exchange, object_id, stored, lent.views[0], lent.release)
        finally:
            self._uploads.drop(*upload.name)
        await exchange.reply(201 if is_new else 200)

    async def _delete(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.WRITE)
        stored = await self._stored(exchange, object_id, 404)
        reason = exchange.head.headers.get(REASON_HEADER, "removed")
        if not (reason.isascii() and reason.isalpha() and len(reason) <= _REASON_CHARACTERS_MAX):
            raise RequestRefused(400, f"{REASON_HEADER} must be 1 to {_REASON_CHARACTERS_MAX} letters")
        self._uploads.drop(stored)
        if await self._workers.write(exchange.owner, partial(self._tier.delete, stored, reason)):
            exchange.change = f"deleted {object_id.namespace.hex()}/{object_id.key.hex()}: {reason}"
            await exchange.reply(204)
        else:
            await self._reply_absent(exchange, stored)


def _store(
    tier: Tier,
    local: Tier,
    stored: ObjectId,
    claimed: ObjectId,
    body: memoryview,
    release: Callable[[], None],
    note_model: Callable[[str], None],
) -> bool:
    """Verify a body and store it, in the place of a coarser one too; say what it calls its model.

    False if one as good was in the `local` tiers already.

    RequestRefused if it is not the object that it claims to be, or there is no room.
    """
    try:
        is_here = local.contains(stored)
        if is_here and object_quality(body) >= stored_quality(local, stored):
            return False
        parsed = parse_object(body, claimed)
        parsed.sections()
        note_model(parsed.meta.model)
        put = tier.replace if is_here and tier.can_replace else tier.put_from
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
