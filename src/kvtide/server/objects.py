"""The requests for one object: get, head, put, delete, and post for one that comes in pieces; objects lent to readers.

Invariant: nothing of a body becomes visible to a tier before all of it has come and been verified; every buffer and
lent object is given back, whatever happens to the connection; readers of one tenant never keep so much of the memory
tier that what others store has no room in it.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from kvtide import wire
from kvtide.errors import CorruptPayload, RequestRefused, TierFull
from kvtide.server.auth import Scope
from kvtide.server.http import Exchange, Resources, Sender, SendOrder, Shares, lent_pieces, receive
from kvtide.server.quotas import Quotas
from kvtide.server.regions import Backing, Latest, stored_quality
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier
from kvtide.tier.base import LentObject
from kvtide.tier.breaker import until
from kvtide.tier.pool import Member
from kvtide.types import NamedId, ObjectId
from kvtide.wire import protocol
from kvtide.wire.http import Headers
from kvtide.wire.ranges import ByteRange, multipart, parse_ranges
from kvtide.wire.receiver import Receiver, is_frame, parse_frame_header

_Result = TypeVar("_Result")
_IsWanted = Callable[[wire.StoredObject], bool]
_REASON_CHARACTERS_MAX = 16


class Lending:
    """Lends objects out of any tier. Runs on the event loop; what waits for a tier runs in `workers`."""

    def __init__(self, shared: Resources, quotas: Quotas) -> None:
        self._shared, self._quotas = shared, quotas
        # As they were at the start: what memory tiers hold does not change.
        limits = shared.live.limits
        # Of the memory tier all readers hold a half at a time and one tenant's a quarter: the rest can be evicted.
        self.memory = Shares(max(1, limits.memory_bytes_max // 2), max(1, limits.memory_bytes_max // 4))

    async def lend(self, exchange: Exchange, tier: Tier, stored: ObjectId) -> LentObject | None:
        """Lend an object, to be released once; None if absent or damaged. RequestRefused (429, 503) without room."""
        # A thread takes ten times as long as what it would do here.
        lent = await self._lent_at_once(exchange, tier, stored)
        if lent is None:
            action = partial(_lend, tier, stored, self._shared, self._quotas, exchange.caller.tenant)
            try:
                lent = await self._shared.workers.read(exchange.owner, _in_time(exchange, action), _release)
            except CorruptPayload:
                self._shared.metrics.corrupt_objects.inc()
                await self._shared.workers.write(exchange.owner, partial(tier.delete, stored, "corrupt"))
        return lent

    async def bring(self, exchange: Exchange, latest: Latest, stored: ObjectId) -> None:
        """Copy an object here from whoever has the latest. RequestRefused: as `lend`, 503 if nobody knows."""
        tenant = exchange.caller.tenant

        def brought() -> None:
            with ExitStack() as held:

                def take(size: int) -> memoryview:
                    buffer = self._shared.buffers.take(size, tenant)
                    held.callback(self._shared.buffers.give_back, buffer, tenant)
                    return buffer

                latest.bring(stored, take)

        await self._shared.workers.read(exchange.owner, _in_time(exchange, brought))

    async def _lent_at_once(self, exchange: Exchange, tier: Tier, stored: ObjectId) -> LentObject | None:
        """Lend what needs no waiting for a disk; memory once its owner's share has room."""
        lent, owner = tier.lend(stored, can_wait=False), exchange.owner
        if lent is None or lent.file is not None or exchange.head.method == "HEAD":
            return lent
        size = lent.size
        if not self.memory.take_at_once(owner, size):
            lent.release()
            try:
                async with asyncio.timeout(self._shared.live.limits.head_s_max):
                    await self.memory.take(owner, size)
            except TimeoutError:
                raise RequestRefused(429, "readers hold all the memory they may", retry_after_s=1.0) from None
            lent = tier.lend(stored, can_wait=False)
            if lent is None or lent.file is not None or lent.size != size:
                # It was evicted or replaced meanwhile: a slower tier may have it in a file, which takes no share.
                self.memory.give_back(owner, size)
                if lent is not None and lent.file is not None:
                    return lent
                _release(lent)
                return None
        return LentObject(size, lent.head, lent.views, None, partial(self._take_back, lent, owner))

    def _take_back(self, lent: LentObject, owner: str) -> None:
        lent.release()
        self.memory.give_back(owner, lent.size)


def _in_time(exchange: Exchange, action: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return the action with the request's deadline, if it has one, for the servers that it asks."""
    deadline_s = exchange.start_deadline_s
    return until(deadline_s if deadline_s is not None else math.inf)(action)


def _release(lent: LentObject | None) -> None:
    if lent is not None:
        lent.release()


def _lend(tier: Tier, stored: ObjectId, shared: Resources, quotas: Quotas, tenant: str) -> LentObject | None:
    """Lend an object, else a copy in a buffer; None without it, or if it is too large. CorruptPayload if damaged."""
    if (lent := tier.lend(stored)) is not None:
        return lent
    head, buffers = bytearray(wire.HEADER_BYTES), shared.buffers
    came = tier.get_into(stored, memoryview(head))
    if came is None:
        return None
    size = wire.object_bytes(head[:came])
    if size < wire.HEADER_BYTES:
        raise CorruptPayload(f"{stored}: {came} bytes of a head say that the object has {size}")
    if size > shared.live.limits.object_bytes_max:
        # The centre, or this server before, takes larger ones: a miss here, and good there unless its head is damaged.
        table = memoryview(bytearray(wire.header_and_table_bytes(head)))
        wire.parse_header(table[: tier.get_into(stored, table) or 0])
        return None
    buffer = buffers.take(size, tenant)
    with ExitStack() as held:
        held.callback(buffers.give_back, buffer, tenant)
        room = buffer[:size]
        with suppress(RequestRefused), quotas.room(tenant, size):
            # A stack copies up what leaves room: it is whole. The rounded-up buffer has some for all but a few sizes.
            room = buffer[: size + 1]
        read = tier.get_into(stored, room)
        if read is None or (read > size and room[: wire.HEADER_BYTES] != head):
            # It is gone, or a longer one has taken its place meanwhile.
            return None
        if wire.parse_header(room[:read]).object_bytes != read:
            raise CorruptPayload(f"{stored}: {read} bytes came of an object of {size}")
        return LentObject(read, bytes(room[: wire.HEADER_BYTES]), (room[:read],), None, held.pop_all().close)


@dataclass(eq=False)
class ObjectRequests:
    """Answers for single objects. Runs on the event loop; what waits for a tier runs in the workers."""

    _backing: Backing
    _shared: Resources
    _sender: Sender
    _quotas: Quotas
    _uploads: Uploads
    _member: Member | None = None

    def __post_init__(self) -> None:
        self._tier: Tier = self._backing.store
        # Where a PUT looks whether the object is here: what the centre has is of no use if that falls silent.
        self._local: Tier = self._backing.local
        self._lending = Lending(self._shared, self._quotas)

    async def answer(self, exchange: Exchange, object_id: ObjectId) -> None:
        """Answer GET, HEAD, PUT, POST or DELETE. RequestRefused if that is an error."""
        method = exchange.head.method
        if method in {"GET", "HEAD"}:
            await self._get(exchange, object_id)
        elif method == "DELETE":
            await self._delete(exchange, object_id)
        elif not await self._is_sent_on(exchange, object_id):
            await (self._put if method == "PUT" else self._post)(exchange, object_id)

    async def catch_up(self, exchange: Exchange) -> None:
        """Have the centre's records for a request that wants fresher ones than ours. RequestRefused if it can't be."""
        central, records = self._backing.central, self._backing.records
        # Objects can't be out of date, but their namespace's generation can; of any, where records are missing.
        if central is not None and (central.is_too_old_for(exchange.head.headers) or not records.is_complete):
            await self._shared.workers.read(exchange.owner, central.require_latest)

    async def _get(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.READ)
        latest, method, headers = self._backing.latest, exchange.head.method, exchange.head.headers
        is_forced = protocol.Header.FORCE in headers
        await self.catch_up(exchange)
        stored = await self._stored(exchange, object_id, 404)
        if (sync := self._backing.synchroniser) is not None:
            # What is hot is synchronised first.
            sync.manifest.note_use(stored)
        # What is here alone if a region asks, or if the latest is looked for apart.
        tier = self._local if is_forced or protocol.Header.LOCAL in headers else self._tier
        lent = await self._lending.lend(exchange, tier, stored)
        if lent is None and latest is not None and is_forced:
            await self._lending.bring(exchange, latest, stored)
            lent = await self._lending.lend(exchange, tier, stored)
        lent = lent or self._uploads.lend(stored, method, headers)
        if lent is None:
            if not await self._is_sent_on(exchange, object_id):
                reason = await self._reply_absent(exchange, stored)
                if method == "GET":
                    self._shared.metrics.count_absent(exchange.caller.tenant, reason)
            return
        try:
            await self._send(exchange, lent)
        finally:
            lent.release()

    async def _stored(self, exchange: Exchange, object_id: ObjectId, otherwise: int) -> NamedId:
        """Id under which an object is stored. RequestRefused (`otherwise`) if another generation is meant.

        PUT and POST may also teach us that a generation has risen, by a bounded step, unless we have a centre.
        """
        tenant, name = exchange.caller.tenant, object_id.namespace
        meant, records = protocol.generation(exchange.head.headers), self._backing.records
        known, is_write = records.generation(tenant, name), exchange.head.method in {"PUT", "POST"}
        if meant is not None and meant > known and is_write and self._backing.central is None:
            record = protocol.RecordName(protocol.RecordKind.GENERATION, name.hex())
            taught = min(meant, known + exchange.caller.generation_step_max)
            await self._shared.workers.write(exchange.owner, partial(records.write, tenant, record, str(taught)))
            exchange.change = f"wrote generation/{record.name}: {taught}"
        # Read once: it may rise at any moment.
        known = records.generation(tenant, name)
        if meant is not None and meant != known:
            reasons = {404: "no such object", 409: f"the namespace is at generation {known}, not {meant}"}
            raise RequestRefused(otherwise, reasons[otherwise])
        found = self._backing.names.ids(tenant, name, [object_id.key], known)[0]
        if self._quotas.is_expired(found):
            await self._shared.workers.write(exchange.owner, partial(self._local.delete, found, "expired"))
        return found

    async def _is_sent_on(self, exchange: Exchange, object_id: ObjectId) -> bool:
        """Send a request on to who keeps the object in our pool. False if that is nobody else."""
        there = self._member.redirect(object_id.key) if self._member else None
        if there is None:
            return False
        origin, epoch = there
        place: Headers = [("Location", f"{origin}{exchange.head.target}"), (protocol.Header.EPOCH, epoch)]
        await exchange.refuse(RequestRefused(307, "another server of the pool keeps this object"), place)
        return True

    def _as_of(self) -> Headers:
        as_of_s = self._backing.as_of_s()
        return [] if as_of_s is None else [(protocol.Header.AS_OF, f"{as_of_s:.3f}")]

    async def _reply_absent(self, exchange: Exchange, stored: ObjectId) -> str | None:
        """Say that an object is not here, and why if that is remembered. Return the reason."""
        reason = await self._shared.workers.read(exchange.owner, partial(self._tier.removed_reason, stored))
        known: Headers = [(protocol.Header.REMOVED, reason)] if reason else []
        await exchange.refuse(RequestRefused(404, "no such object"), [*known, *self._as_of()])
        return reason

    async def _send(self, exchange: Exchange, lent: LentObject) -> None:
        headers, tag = exchange.head.headers, protocol.etag(wire.version_tag(lent.head))
        common = [("ETag", tag), ("Accept-Ranges", "bytes"), *self._as_of()]
        if protocol.is_tag_matched(headers.get("if-none-match", ""), tag):
            await exchange.reply(304, headers=common)
            return
        status, asked = 200, [ByteRange(0, lent.size)]
        pieces, kind = lent_pieces(lent, asked[0]), "application/octet-stream"
        if "range" in headers and headers.get("if-range", tag) == tag:
            status, asked = 206, parse_ranges(headers["range"], lent.size)
            if "," in headers["range"]:
                kind, leads = multipart(tag.strip('"'), lent.size, asked)
                pieces = [memoryview(leads[0])]
                for part, lead in zip(asked, leads[1:], strict=True):
                    pieces += [*lent_pieces(lent, part), memoryview(lead)]
            else:
                pieces = lent_pieces(lent, asked[0])
                common.append(("Content-Range", f"bytes {asked[0].start}-{asked[0].stop - 1}/{lent.size}"))
        common.append(("Content-Type", kind))
        count = sum(map(len, pieces))
        if exchange.head.method == "HEAD":
            await exchange.reply(status, headers=common, length=count)
            return
        if asked[0].start == 0:
            # Whoever loads layer by layer reads an object in several ranges.
            self._shared.metrics.count_read(exchange.caller.tenant)
        head, pace = exchange.begin(status, count, common), self._shared.live.limits.pace(exchange.stream.now_s())
        is_in_the_way = partial(self._lending.memory.is_waited_for, exchange.owner)
        exchange.wait_s = await self._sender.send(SendOrder(exchange, head, pieces, pace, is_in_the_way))
        exchange.status, exchange.sent_bytes = status, count
        self._shared.metrics.count(self._shared.metrics.sent, exchange.caller.tenant, count)

    async def _put(self, exchange: Exchange, object_id: ObjectId) -> None:
        size, tenant = self._body_bytes(exchange), exchange.caller.tenant
        stored = await self._stored(exchange, object_id, 409)
        # Who holds the body back wants to know whether it is needed; for others it is looked up with the storing.
        if "expect" in exchange.head.headers:
            look = partial(stored_quality, self._local, stored)
            # Nothing is better than what is exact.
            if not await self._shared.workers.read(exchange.owner, look):
                await exchange.reply(200)
                return
        with self._quotas.room(tenant, size):
            body, give_back = await receive(exchange, self._shared, size)
            is_new = await self._write(exchange, partial(self._store, object_id, stored, body), give_back)
            self._shared.metrics.count(self._shared.metrics.received, tenant, size)
            await exchange.reply(201 if is_new else 200)

    def _body_bytes(self, exchange: Exchange) -> int:
        """Length of the body of who may write. RequestRefused (403, 411, 413) for others."""
        exchange.caller.require(Scope.WRITE)
        size = exchange.head.content_length
        if size is None:
            raise RequestRefused(411, f"a {exchange.head.method} needs a Content-Length")
        self._check_size(exchange.caller.tenant, size)
        return size

    def _check_size(self, tenant: str, size: int) -> None:
        limits = self._shared.live.limits
        buffers_max = limits.tenant_buffer_bytes_max if tenant else limits.buffer_bytes_max
        size_max = min(limits.object_bytes_max, buffers_max)
        if size > size_max:
            raise RequestRefused(413, f"an object may have {size_max} bytes here, got {size}")

    async def _write(self, exchange: Exchange, action: Callable[[], _Result], give_back: Callable[[], None]) -> _Result:
        """Run in a thread what uses a buffer, and give that back. RequestRefused (422) for damaged bytes."""

        def act() -> _Result:
            try:
                return action()
            finally:
                give_back()

        try:
            # From here on the buffer is the thread's, also if this task ends before it.
            return await self._shared.workers.write(exchange.owner, act, give_back)
        except CorruptPayload as error:
            self._shared.metrics.corrupt_objects.inc()
            raise RequestRefused(422, str(error)) from error

    def _store(self, claimed: ObjectId, stored: NamedId, body: memoryview) -> bool:
        """Verify and store a body. False if one as good was here. CorruptPayload, RequestRefused (507)."""
        is_here = self._local.contains(stored)
        if is_here and wire.object_quality(body) >= stored_quality(self._local, stored):
            return False
        wire.parse_object(body, claimed).sections()
        put = self._tier.replace if is_here and self._tier.can_replace else self._tier.put_from
        try:
            if not put(stored, body):
                raise RequestRefused(507, "no tier took the object")
        except TierFull as error:
            raise RequestRefused(507, str(error)) from error
        return True

    async def _post(self, exchange: Exchange, object_id: ObjectId) -> None:
        size, tenant = self._body_bytes(exchange), exchange.caller.tenant
        stored = await self._stored(exchange, object_id, 409)
        body, give_back = await receive(exchange, self._shared, size)

        def is_wanted(announced: wire.StoredObject) -> bool:
            if self._local.contains(stored) and announced.quality >= stored_quality(self._local, stored):
                return False
            self._check_size(tenant, announced.object_bytes)
            with self._quotas.room(tenant, announced.object_bytes):
                return True

        def take() -> tuple[Upload | None, list[int]]:
            upload = self._uploads.take(stored, object_id, exchange.owner, body, is_wanted)
            return upload, upload.receiver.missing() if upload is not None else []

        upload, missing = await self._write(exchange, take, give_back)
        self._shared.metrics.count(self._shared.metrics.received, tenant, size)
        if upload is None:
            await exchange.reply(200)
        elif missing:
            answer = msgspec.json.encode(protocol.PiecesAnswer(missing))
            await exchange.reply(202, answer, [("Content-Type", "application/json")])
        else:
            try:
                with self._quotas.room(tenant, upload.stored.object_bytes):
                    lent = self._uploads.lend_whole(upload)
                    store = partial(self._store, object_id, stored, lent.views[0])
                    is_new = await self._write(exchange, store, lent.release)
            finally:
                self._uploads.drop(*upload.name)
            await exchange.reply(201 if is_new else 200)

    async def _delete(self, exchange: Exchange, object_id: ObjectId) -> None:
        exchange.caller.require(Scope.WRITE)
        stored = await self._stored(exchange, object_id, 404)
        reason = exchange.head.headers.get(protocol.Header.REASON, "removed")
        if not (reason.isascii() and reason.isalpha() and len(reason) <= _REASON_CHARACTERS_MAX):
            raise RequestRefused(400, f"{protocol.Header.REASON} must be 1 to {_REASON_CHARACTERS_MAX} letters")
        self._uploads.drop(stored)
        if await self._shared.workers.write(exchange.owner, partial(self._tier.delete, stored, reason)):
            exchange.change = f"deleted {object_id.namespace.hex()}/{object_id.key.hex()}: {reason}"
            await exchange.reply(204)
        else:
            await self._reply_absent(exchange, stored)


class Upload:
    """An object of which some sections are here. Thread-safe."""

    def __init__(self, object_id: ObjectId, owner: str, stored: wire.StoredObject, now_s: float) -> None:
        """CorruptPayload for a table out of bounds."""
        self.name = (object_id, stored.version_tag)
        self.owner, self.stored = owner, stored
        self.receiver = Receiver(stored)
        # Made here: the loop and a worker may ask for it at the same time.
        self.memory = self.receiver.memory
        self.held_bytes = self.receiver.held_bytes
        self.used_s = now_s
        # Those that read or store it now, and whether it goes when they are done.
        self.users, self.is_over = 0, False
        self._lock = threading.Lock()

    def offer(self, frames: memoryview) -> None:
        """Take frames, one behind the other. CorruptPayload for a damaged or foreign one; those before it count."""
        while frames:
            size = parse_frame_header(frames).frame_bytes
            with self._lock:
                self.receiver.offer(frames[:size])
            frames = frames[size:]

    def has_part(self, asked: str) -> bool:
        """True if all that a Range header asks for is here."""
        try:
            return all(self.receiver.has_range(*part) for part in parse_ranges(asked, self.stored.object_bytes))
        except RequestRefused:
            return False


class Uploads:
    """The uploads that are not over. Thread-safe; `limits` gives the bounds as they are now.

    Invariant: bytes of all and of each owner, and their number, are bounded; what is being read or stored stays.
    """

    def __init__(self, limits: Callable[[], ServerLimits], monotonic_s: Callable[[], float]) -> None:
        self._limits, self._monotonic_s = limits, monotonic_s
        self._lock = threading.Lock()
        # By object and version tag, as they began.
        self._uploads: dict[tuple[ObjectId, bytes], Upload] = {}

    def take(
        self, object_id: ObjectId, claimed: ObjectId, owner: str, body: memoryview, is_wanted: _IsWanted
    ) -> Upload | None:
        """Take an object's header and table, frames, or both in this order; None if the object is not wanted.

        CorruptPayload for other bytes. RequestRefused: 404 for frames of what was not announced, 413, 503 without room.
        """
        head_bytes, new = 0 if is_frame(body) else wire.header_and_table_bytes(body), None
        if head_bytes:
            announced = wire.parse_header(bytes(body[:head_bytes]), claimed)
            if not is_wanted(announced):
                return None
            self.drop_idle()
            new = Upload(object_id, owner, announced, self._monotonic_s())
        name = new.name if new is not None else (object_id, parse_frame_header(body).version_tag)
        with self._lock:
            upload = self._uploads.get(name, new)
            if upload is None:
                raise RequestRefused(404, "no such object was announced, or it had to make room")
            if upload is new:
                self._make_room(upload)
                self._uploads[name] = upload
            upload.used_s = self._monotonic_s()
        upload.offer(body[head_bytes:])
        return upload

    def _make_room(self, new: Upload) -> None:
        """Drop what rests longest until a new upload fits: of its owner, then of whoever holds most."""
        limits = self._limits()
        size_max = min(limits.uploads_bytes_max, limits.tenant_uploads_bytes_max)
        if new.held_bytes > size_max:
            raise RequestRefused(413, f"objects in pieces may take {size_max} bytes here, this one {new.held_bytes}")
        while True:
            held, counts = Counter[str](), Counter[str]()
            for each in (*self._uploads.values(), new):
                held[each.owner] += each.held_bytes
                counts[each.owner] += 1
            idle = sorted((each for each in self._uploads.values() if not each.users), key=lambda each: each.used_s)
            if held[new.owner] > limits.tenant_uploads_bytes_max:
                victim = next((each for each in idle if each.owner == new.owner), None)
            elif held.total() > limits.uploads_bytes_max:
                victim = max(idle, key=lambda each: held[each.owner], default=None)
            elif counts.total() > limits.uploads_max:
                victim = max(idle, key=lambda each: counts[each.owner], default=None)
            else:
                return
            if victim is None:
                raise RequestRefused(503, "objects in pieces hold all that they may", retry_after_s=1.0)
            del self._uploads[victim.name]

    def lend(self, object_id: ObjectId, method: str, headers: Mapping[str, str]) -> LentObject | None:
        """Lend an object to a GET for a range of which all is here, else None; of several versions the first one."""
        asked = headers.get("range")
        if method != "GET" or asked is None:
            return None
        with self._lock:
            upload = next((each for (of, _), each in self._uploads.items() if of == object_id), None)
            if upload is None or upload.is_over or not upload.has_part(asked):
                return None
            tag = protocol.etag(upload.stored.version_tag)
            return self._lent(upload) if headers.get("if-range", tag) == tag else None

    def lend_whole(self, upload: Upload) -> LentObject:
        """Lend an object of which every section is here, as one view."""
        with self._lock:
            return self._lent(upload)

    def _lent(self, upload: Upload) -> LentObject:
        upload.users += 1
        upload.used_s = self._monotonic_s()
        memory, release = upload.memory, partial(self._release, upload)
        return LentObject(len(memory), bytes(memory[: wire.HEADER_BYTES]), [memory], None, release)

    def _release(self, upload: Upload) -> None:
        with self._lock:
            upload.users -= 1
            if upload.is_over and not upload.users:
                self._uploads.pop(upload.name, None)

    def drop(self, object_id: ObjectId, version_tag: bytes | None = None) -> None:
        """Forget what has come of an object, of one version or of all; what is being read goes when that is done."""
        self._drop(lambda upload: upload.name == (object_id, version_tag or upload.stored.version_tag))

    def drop_idle(self) -> None:
        """Forget what has rested too long."""
        latest_s = self._monotonic_s() - self._limits().uploads_idle_s_max
        self._drop(lambda upload: upload.used_s < latest_s and not upload.users)

    def _drop(self, is_over: Callable[[Upload], bool]) -> None:
        with self._lock:
            for upload in [each for each in self._uploads.values() if is_over(each)]:
                upload.is_over = True
                if not upload.users:
                    del self._uploads[upload.name]

    def check(self) -> None:
        """AssertionError if the bounds don't hold or something is lent. Call it while no request is under way."""
        limits, uploads = self._limits(), list(self._uploads.values())
        assert len(uploads) <= limits.uploads_max
        assert sum(each.held_bytes for each in uploads) <= limits.uploads_bytes_max
        for upload in uploads:
            assert not upload.users, f"{upload.name[0]} is lent to nobody"
            upload.receiver.check()
