"""The requests for records: read, written, listed. At a region they are read here and written at the centre."""

from __future__ import annotations

import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvtide.errors import RequestRefused
from kvtide.server.auth import Caller, Scope
from kvtide.server.http import Exchange, Workers
from kvtide.server.live import Live
from kvtide.server.regions.central import CentralRecords
from kvtide.server.regions.records import Records, WriteCondition
from kvtide.server.settings import ServerLimits
from kvtide.tier.files import Files
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId
from kvtide.wire.protocol import (
    AS_OF_HEADER,
    FORCE_HEADER,
    RECORD_BYTES_MAX,
    Record,
    RecordKind,
    RecordName,
    RecordsRoute,
    checked_value,
    is_tag_matched,
)

PENDING_MAX = 1 << 18
# The file is written again when it has more records than this: 73 bytes each.
RECORDS_MAX = 4 * PENDING_MAX
# Sequence number, stored namespace, key, kind. A name takes two: generation, stored and own namespace; then the tenant.
_RECORD = struct.Struct("<Q32s32sB")
_ADDED, _DONE, _NAME, _TENANT = range(4)
_TENANT_BYTES = 64
_FILE_BYTES_MAX = 2 * RECORDS_MAX * _RECORD.size


class Manifest:
    """The objects that wait, by sequence number. Thread-safe between `open` and `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._pending: OrderedDict[ObjectId, int] = OrderedDict()
        self._uses: Counter[ObjectId] = Counter()
        self._names: dict[Namespace, Name] = {}
        self._sequence = self._records = 0
        # What `next` has returned last.
        self._taken: tuple[ObjectId, int] | None = None
        self.dropped = 0

    def open(self) -> None:
        """Read what waits, and write it again without what is done. OSError if that can't be done."""
        with self._lock:
            data = Files().content(self._path, _FILE_BYTES_MAX) if self._path.exists() else b""
            # A record that a crash cut off is of an object that is stored once more or misses.
            named: tuple[int, Namespace, Namespace] | None = None
            for number, first, second, kind in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
                if kind == _NAME:
                    named = (number, Namespace(first), Namespace(second))
                elif kind == _TENANT and named is not None:
                    tenant = (first + second).rstrip(b"\0").decode("ascii", errors="replace")
                    self._names[named[1]] = Name(tenant, named[2], named[0])
                elif kind in {_ADDED, _DONE}:
                    self._replay(number, ObjectId(Namespace(first), BlockKey(second)), kind == _DONE)
            self._rewrite()

    def _replay(self, sequence: int, object_id: ObjectId, is_done: bool) -> None:
        self._sequence = max(self._sequence, sequence)
        if is_done:
            self._pending.pop(object_id, None)
        elif object_id.namespace in self._names:
            self._pending[object_id] = sequence
        else:
            # A fault took its name, by which alone the centre could get it.
            self.dropped += 1

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, object_id: NamedId) -> None:
        """Note a new object, and what its namespace is called. The oldest is dropped if too many wait.

        One that waits already, or is being sent, is sent once more as it is then.
        """
        with self._lock:
            if object_id in self._pending:
                self._sequence += 1
                self._pending[object_id] = self._sequence
                return
            if self._names.get(object_id.namespace) != object_id.name:
                self._names[object_id.namespace] = object_id.name
                self._append(_packed_name(object_id.namespace, object_id.name), 2)
            self._sequence += 1
            self._pending[object_id] = self._sequence
            self._write(self._sequence, object_id, _ADDED)
            if len(self._pending) > PENDING_MAX:
                oldest, sequence = self._pending.popitem(last=False)
                self._uses.pop(oldest, None)
                self._write(sequence, oldest, _DONE)
                self.dropped += 1

    def note_use(self, object_id: ObjectId) -> None:
        """Count a read: what is read often is sent first."""
        with self._lock:
            if object_id in self._pending:
                self._uses[object_id] += 1

    def next(self) -> NamedId | None:
        """Return what to send next: the one that was read most, of those the oldest. None if nothing waits."""
        with self._lock:
            found = next(iter(self._pending), None)
            if self._uses:
                found = max(self._uses, key=lambda each: (self._uses[each], -self._pending[each]))
            if found is None:
                return None
            self._taken = (found, self._pending[found])
            return NamedId.of(found, self._names[found.namespace])

    def done(self, object_id: ObjectId) -> None:
        """Forget an object: the centre has it, or nobody has. Not if it was added again after `next` returned it."""
        with self._lock:
            taken = self._taken
            if taken is not None and taken[0] == object_id and taken[1] != self._pending.get(object_id):
                return
            self._uses.pop(object_id, None)
            sequence = self._pending.pop(object_id, None)
            if sequence is not None:
                self._write(sequence, object_id, _DONE)

    def _write(self, sequence: int, object_id: ObjectId, kind: int) -> None:
        self._append(_RECORD.pack(sequence, object_id.namespace, object_id.key, kind), 1)

    def _append(self, data: bytes, records: int) -> None:
        if self._file is not None:
            self._file.write(data)
            self._records += records
            if self._records > RECORDS_MAX:
                self._rewrite()

    def _rewrite(self) -> None:
        """Write again what waits, without what is done, and go on after it."""
        used = {object_id.namespace for object_id in self._pending}
        self._names = {stored: name for stored, name in self._names.items() if stored in used}
        names = [_packed_name(*each) for each in self._names.items()]
        waiting = [_RECORD.pack(n, *object_id, _ADDED) for object_id, n in self._pending.items()]
        Files().save(self._path, b"".join([*names, *waiting]))
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._records = len(waiting) + 2 * len(names)


def _packed_name(stored: Namespace, name: Name) -> bytes:
    tenant = name.tenant.encode("ascii").ljust(_TENANT_BYTES, b"\0")
    half = _TENANT_BYTES // 2
    first = _RECORD.pack(name.generation, stored, name.namespace, _NAME)
    return first + _RECORD.pack(0, tenant[:half], tenant[half:], _TENANT)


class RecordRequests:
    """Answers for records. Runs on the event loop; what waits for the disk or the centre runs in `workers`.

    `central` is None where no centre is behind us. Where records are not kept, none can be written.
    """

    def __init__(
        self, records: Records, central: CentralRecords | None, workers: Workers, live: Live, are_kept: bool
    ) -> None:
        self._records = records
        self._central = central
        self._workers = workers
        self._live = live
        self._are_kept = are_kept

    @property
    def _limits(self) -> ServerLimits:
        return self._live.limits

    async def answer(self, exchange: Exchange, route: RecordName | RecordsRoute) -> None:
        """Answer GET, HEAD, PUT or DELETE. RequestRefused if that is an error."""
        if exchange.head.method in {"PUT", "DELETE"}:
            assert isinstance(route, RecordName)
            await (self._put if exchange.head.method == "PUT" else self._delete)(exchange, route)
            return
        exchange.caller.require(Scope.READ)
        if self._central is not None and self._central.is_too_old_for(exchange.head.headers):
            await self._workers.read(exchange.owner, self._central.require_latest)
        if isinstance(route, RecordsRoute):
            await self._list(exchange, route)
            return
        is_latest = FORCE_HEADER in exchange.head.headers and route.kind is not RecordKind.GENERATION
        if self._central is not None and is_latest:
            # It may have lost what we know; a generation never sinks.
            look = partial(self._central.latest, exchange.caller.tenant, route)
            record = await self._workers.read(exchange.owner, look)
        else:
            record = self._records.get(exchange.caller.tenant, route)
        if self._central is not None and self._central.as_of_s is None and (record is None or not record.version):
            raise RequestRefused(503, "the centre, where records are, has not answered yet", retry_after_s=1.0)
        if record is None:
            raise RequestRefused(404, "no such record")
        await self._reply(exchange, record)

    async def _list(self, exchange: Exchange, route: RecordsRoute) -> None:
        caller = exchange.caller
        look = partial(self._records.changes, caller.may_act_for, route.after)
        found = await self._workers.read(exchange.owner, look)
        version = found.records[-1].version if found.records else route.after
        tag = f'"{found.epoch}.{version}"'
        headers = [("ETag", tag), *self._as_of()]
        is_behind = found.version < route.after
        if not found.records and not is_behind and is_tag_matched(exchange.head.headers.get("if-none-match", ""), tag):
            await exchange.reply(304, headers=headers)
            return
        shown = [_as_seen_by(caller, record) for record in found.records]
        body = msgspec.json.encode(msgspec.structs.replace(found, records=shown)) + b"\n"
        await exchange.reply(200, body, [*headers, ("Content-Type", "application/json")])

    async def _reply(self, exchange: Exchange, record: Record) -> None:
        headers = [("ETag", record.tag), *self._as_of()]
        if is_tag_matched(exchange.head.headers.get("if-none-match", ""), record.tag):
            await exchange.reply(304, headers=headers)
            return
        body = record.value.encode() + b"\n"
        await exchange.reply(200, body, [*headers, ("Content-Type", "text/plain; charset=utf-8")], len(body))

    def _as_of(self) -> list[tuple[str, str | int]]:
        as_of_s = self._central.as_of_s if self._central is not None else None
        return [] if as_of_s is None else [(AS_OF_HEADER, f"{as_of_s:.3f}")]

    async def _put(self, exchange: Exchange, name: RecordName) -> None:
        caller, headers = exchange.caller, exchange.head.headers
        caller.require(Scope.WRITE)
        size = exchange.head.content_length
        if size is None or size > RECORD_BYTES_MAX:
            raise RequestRefused(411 if size is None else 413, f"a record may have {RECORD_BYTES_MAX} bytes")
        if not self._are_kept:
            raise RequestRefused(409, "this server has no file for records and would forget them: --records PATH")
        body = bytearray(size)
        await exchange.read_body(memoryview(body), self._limits.pace(exchange.stream.now_s()))
        value = checked_value(name.kind, body)
        if name.kind is RecordKind.GENERATION:
            self._require_step(caller, name, int(value))
        if self._central is not None:
            write = partial(self._central.write, caller.tenant, name, value, _said(headers))
        else:
            write = partial(self._records.write, caller.tenant, name, value, _condition(headers))
        record = await self._workers.write(exchange.owner, write)
        exchange.change = f"wrote {name.kind}/{name.name}: {value}"
        await self._reply_written(exchange, record)

    async def _delete(self, exchange: Exchange, name: RecordName) -> None:
        tenant, headers = exchange.caller.tenant, exchange.head.headers
        exchange.caller.require(Scope.WRITE)
        if self._central is not None:
            remove = partial(self._central.remove, tenant, name, _said(headers))
        else:
            remove = partial(self._records.remove, tenant, name, _condition(headers))
        removed = await self._workers.write(exchange.owner, remove)
        if removed is None:
            raise RequestRefused(404, "no such record")
        exchange.change = f"removed {name.kind}/{name.name}"
        await exchange.reply(204, headers=[("ETag", removed.tag), *self._as_of()])

    def _require_step(self, caller: Caller, name: RecordName, generation: int) -> None:
        known = self._records.generation(caller.tenant, Namespace(bytes.fromhex(name.name)))
        if generation > known + caller.generation_step_max:
            most = caller.generation_step_max
            raise RequestRefused(409, f"the generation is {known}, and rises by {most} at once at most")

    async def _reply_written(self, exchange: Exchange, record: Record) -> None:
        body = record.value.encode() + b"\n"
        headers = [("ETag", record.tag), *self._as_of(), ("Content-Type", "text/plain; charset=utf-8")]
        await exchange.reply(200, body, headers)


def _said(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a request's conditions as headers for the centre."""
    return [(name, headers[name.lower()]) for name in ("If-Match", "If-None-Match") if name.lower() in headers]


def _condition(headers: Mapping[str, str]) -> WriteCondition:
    return WriteCondition(headers.get("if-match", ""), headers.get("if-none-match", ""))


def _as_seen_by(caller: Caller, record: Record) -> Record:
    """Return a record with nobody for its tenant if that is the caller's own."""
    return msgspec.structs.replace(record, tenant="") if record.tenant == caller.tenant else record
