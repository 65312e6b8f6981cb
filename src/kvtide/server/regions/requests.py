"""The requests for records: read, written, listed. At a region they are read here and written at the centre."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from kvtide.errors import RequestRefused
from kvtide.server.auth import Caller, Scope
from kvtide.server.http import Exchange, Workers
from kvtide.server.live import Live
from kvtide.server.regions.central import CentralRecords
from kvtide.server.regions.records import Records, WriteCondition
from kvtide.server.settings import ServerLimits
from kvtide.types import Namespace
from kvtide.wire.protocol import AS_OF_HEADER, FORCE_HEADER, is_tag_matched
from kvtide.wire.records import RECORD_BYTES_MAX, Record, RecordKind, RecordName, RecordsRoute, checked_value


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
