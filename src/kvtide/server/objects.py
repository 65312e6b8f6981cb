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

from kvtide.errors import CorruptPayload, RequestRefused, TierFull, TierUnavailable
from kvtide.server.auth import Scope, tenant_namespace
from kvtide.server.bodies import BodyBuffers
from kvtide.server.exchange import Exchange
from kvtide.server.sender import Order, Sender
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier
from kvtide.tier.lend import Lender, LentObject
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, parse_object, version_tag
from kvtide.wire.protocol import REASON_HEADER, REMOVED_HEADER, ByteRange, etag, is_tag_matched, parse_range

__all__ = ["ObjectRequests", "stored_id"]

_Result = TypeVar("_Result")
_REASON_CHARACTERS_MAX = 16
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def stored_id(tenant: str, object_id: ObjectId) -> ObjectId:
    """Return the id under which a tenant's object is stored."""
    return ObjectId(tenant_namespace(tenant, object_id.namespace), object_id.key)


class ObjectRequests:
    """Answers for single objects out of one tier. Runs on the event loop; the tier's calls run in `workers`."""

    def __init__(
        self, tier: Tier, sender: Sender, buffers: BodyBuffers, limits: ServerLimits, workers: Executor
    ) -> None:
        self._tier = tier
        self._sender = sender
        self._buffers = buffers
        self._limits = limits
        self._workers = workers

    async def answer(self, exchange: Exchange, object_id: ObjectId) -> None:
        """Answer GET, HEAD, PUT or DELETE. RequestRefused if that is an error."""
        method = exchange.head.method
        if method in {"GET", "HEAD"}:
            await self._get(exchange, object_id)
        elif method == "PUT":
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
        start_deadline_s = exchange.start_deadline_s
        stored = stored_id(exchange.caller.tenant, object_id)
        lent = await self._in_thread(partial(_lend, self._tier, stored, self._buffers), _release)
        if lent is None:
            reason = await self._in_thread(partial(self._tier.removed_reason, stored))
            raise_absent(reason)
        try:
            await self._send(exchange, lent, start_deadline_s)
        finally:
            lent.release()

    async def _send(self, exchange: Exchange, lent: LentObject, start_deadline_s: float) -> None:
        headers = exchange.head.headers
        tag = etag(version_tag(lent.head))
        common = [("ETag", tag), ("Accept-Ranges", "bytes")]
        if is_tag_matched(headers.get("if-none-match", ""), tag):
            await exchange.reply(304, headers=common)
            return
        part, status = ByteRange(0, lent.size), 200
        if "range" in headers:
            part, status = parse_range(headers["range"], lent.size), 206
            common.append(("Content-Range", f"bytes {part.start}-{part.stop - 1}/{lent.size}"))
        count = part.stop - part.start
        if asyncio.get_running_loop().time() > start_deadline_s:
            raise RequestRefused(504, "the deadline passed before the answer could begin")
        common.append(("Content-Type", "application/octet-stream"))
        head = exchange.begin(status, count, common)
