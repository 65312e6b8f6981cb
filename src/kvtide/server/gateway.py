"""Connections and requests: who asks, for what, how often; then to whoever answers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from prometheus_client import generate_latest

from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.auth import Scope
from kvtide.server.health import Health
from kvtide.server.http import Connection, Exchange, Guest, Reception, Resources, receive
from kvtide.server.logs import AccessLog
from kvtide.server.metrics import Route, SourceCollector
from kvtide.server.names import Listing
from kvtide.server.objects import ObjectRequests
from kvtide.server.records import RecordRequests
from kvtide.server.regions import Backing
from kvtide.types import Namespace, ObjectId
from kvtide.wire import protocol
from kvtide.wire.http import RequestHead, parse_request_head

_log = logging.getLogger(__name__)
_View = TypeVar("_View", protocol.ObjectList, protocol.TenantView)

_LINGER_S_MAX = 1.0
# Keys that are looked up at a time: a fraction of a millisecond in memory, one round trip for what lies behind it.
_LOOK_UPS_A_TURN = 256
_READ = ("GET", "HEAD")
_PAGES = {"/healthz": Route.HEALTH, "/metrics": Route.METRICS, "/v1": Route.LIST}
# What a request counts as, and its methods. Pages count one by one.
_ROUTES: dict[type[protocol.Route], tuple[Route, tuple[str, ...]]] = {
    ObjectId: (Route.OBJECT, (*_READ, "PUT", "POST", "DELETE")),
    protocol.ExistsRoute: (Route.EXISTS, ("POST",)),
    protocol.PrefetchRoute: (Route.PREFETCH, ("POST",)),
    protocol.ListRoute: (Route.LIST, _READ),
    protocol.RecordName: (Route.RECORDS, (*_READ, "PUT", "DELETE")),
    protocol.RecordsRoute: (Route.RECORDS, _READ),
    protocol.PageRoute: (Route.OTHER, _READ),
}


@dataclass(eq=False)
class Gateway:
    """Answers the requests of all connections. Runs on one event loop."""

    _backing: Backing
    _shared: Resources
    _reception: Reception
    _objects: ObjectRequests
    _records: RecordRequests
    _sources: SourceCollector
    _health: Health
    _access_log: AccessLog

    def __post_init__(self) -> None:
        self._listing = Listing(self._backing.store, self._backing.names)
        # Connections between a request's head and the end of its answer.
        self._busy: set[Guest] = set()
        # Requests that come now hear 503.
        self._is_draining = False

    async def serve(self, stream: Connection, guest: Guest) -> None:
        """Answer a connection's requests until one of both sides ends it."""
        self._shared.metrics.connections.inc()
        try:
            guest.common_name = await stream.handshake(stream.now_s() + self._shared.live.limits.head_s_max)
            while await self._serve_one(stream, guest):
                pass
        except (OSError, TimeoutError) as error:
            _log.debug("connection %s: %s", guest.client, error or "too slow")
        finally:
            stream.close()
            self._shared.metrics.connections.dec()

    async def _serve_one(self, stream: Connection, guest: Guest) -> bool:
        """Answer the next request. False if the connection ends with it."""
        limits = self._shared.live.limits
        try:
            wait_s = limits.idle_s_max if guest.is_known else limits.head_s_max
            data = await stream.read_head(stream.now_s() + wait_s, limits.head_s_max)
            if data is None:
                return False
            head = parse_request_head(data)
        except RequestRefused as error:
            exchange = Exchange(stream, guest, RequestHead("", "", {}, None, False), limits.head_s_max)
            try:
                await exchange.refuse(error)
            finally:
                self._note(exchange, Route.MALFORMED)
            await stream.linger(stream.now_s() + _LINGER_S_MAX)
            return False
        exchange = Exchange(stream, guest, head, limits.head_s_max)
        exchange.is_kept_alive = head.is_kept_alive and not self._is_draining
        self._busy.add(guest)
        try:
            if self._is_draining:
                await exchange.refuse(RequestRefused(503, "draining", retry_after_s=1.0))
            else:
                await self._answer(exchange)
            if exchange.has_unread_body:
                await stream.linger(stream.now_s() + _LINGER_S_MAX)
            return exchange.is_kept_alive and not self._is_draining
        finally:
            self._busy.discard(guest)
            self._note(exchange, _kind(exchange.route))

    def _note(self, exchange: Exchange, kind: Route) -> None:
        self._shared.metrics.requests.labels(kind, str(exchange.status)).inc()
        self._access_log.note(exchange, kind)

    async def _answer(self, exchange: Exchange) -> None:
        """Answer a request, or say that its deadline has passed, wherever it waits by then."""
        deadline_s = None
        with suppress(RequestRefused):
            # Of nonsense it hears where requests are let in.
            deadline_s = exchange.start_deadline_s
        try:
            async with asyncio.timeout_at(deadline_s) as exchange.start_timeout:
                await self._answer_at_leisure(exchange)
        except TimeoutError:
            if exchange.start_timeout is None or not exchange.start_timeout.expired():
                raise
            await exchange.refuse(RequestRefused(504, "the deadline passed before the answer could begin"))

    async def _answer_at_leisure(self, exchange: Exchange) -> None:
        try:
            await self._reception.let_in(exchange)
            _, allowed = _ROUTES[type(exchange.route)]
            if exchange.head.method not in allowed:
                refused = RequestRefused(405, f"expected one of {', '.join(allowed)}")
                await exchange.refuse(refused, [("Allow", ", ".join(allowed))])
                return
            told = protocol.decisions(exchange.head.headers)
            await self._dispatch(exchange)
            # What comes with a request that is refused may be anybody's.
            if told and exchange.status < HTTPStatus.BAD_REQUEST:
                # As its owner calls it; empty for a request about none.
                namespace = getattr(exchange.route, "namespace", Namespace(b""))
                self._shared.metrics.count_decisions(exchange.caller.tenant, namespace, told)
        except RequestRefused as error:
            await exchange.refuse(error)
        except TierUnavailable as error:
            _log.warning("%s %s: %s", exchange.head.method, exchange.head.target, error)
            await exchange.refuse(RequestRefused(503, "the store can't serve now", retry_after_s=1.0))
        except TimeoutError:
            exchange.is_kept_alive = False
            if exchange.has_unread_body:
                await exchange.refuse(RequestRefused(408, "the body came too slowly"))

    async def _dispatch(self, exchange: Exchange) -> None:
        route, caller, recovery = exchange.route, exchange.caller, self._backing.recovery
        if isinstance(route, protocol.PageRoute):
            await self._page(exchange, route.path)
        elif recovery is not None and not recovery.is_over:
            # What was invalidated might be taken for valid.
            raise RequestRefused(503, "the centre has yet to ask its regions what was invalidated", retry_after_s=1.0)
        elif isinstance(route, ObjectId):
            await self._objects.answer(exchange, route)
        elif isinstance(route, protocol.RecordName | protocol.RecordsRoute):
            await self._records.answer(exchange, route)
        elif isinstance(route, protocol.ListRoute):
            caller.require(Scope.READ)
            await exchange.reply_json(await self._walked(exchange, self._listing.objects(caller.tenant, route)))
        elif isinstance(route, protocol.PrefetchRoute):
            await self._prefetch(exchange, route)
        else:
            await self._exists(exchange, route)

    async def _page(self, exchange: Exchange, path: str) -> None:
        """Answer GET or HEAD of a path without anything variable in it."""
        if path not in _PAGES:
            raise RequestRefused(404, "no such page")
        if path == "/healthz":
            if self._health.is_draining:
                raise RequestRefused(503, "draining", retry_after_s=1.0)
            await exchange.reply(200, b"ok\n")
        elif path == "/metrics":
            exchange.caller.require(Scope.ADMIN)
            # Tiers may ask the disk for this, so not here.
            read = self._backing.store.tier_stats
            self._sources.tier_stats = await self._shared.workers.read(exchange.owner, read)
            headers = [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")]
            await exchange.reply(200, generate_latest(self._shared.metrics.registry), headers)
        else:
            exchange.caller.require(Scope.READ)
            await exchange.reply_json(await self._walked(exchange, self._listing.tenant(exchange.caller)))

    async def _asked(self, exchange: Exchange) -> protocol.ExistsQuestion:
        exchange.caller.require(Scope.READ)
        size, most = exchange.head.content_length, protocol.EXISTS_BYTES_MAX
        if size is None or size > most:
            raise RequestRefused(411 if size is None else 413, f"expected at most {most} bytes of JSON")
        body, give_back = await receive(exchange, self._shared, size)
        try:
            return protocol.ExistsQuestion.parse(body)
        finally:
            give_back()

    async def _prefetch(self, exchange: Exchange, route: protocol.PrefetchRoute) -> None:
        """Have objects brought to faster tiers. Its keys cost as much as requests for each."""
        keys = (await self._asked(exchange)).block_keys()
        self._reception.charge(exchange, len(keys))
        tenant, size_max = exchange.caller.tenant, self._shared.live.limits.object_bytes_max
        named = partial(self._backing.names.ids, tenant, route.namespace, keys)
        count = await self._shared.workers.read(exchange.owner, lambda: self._backing.store.prefetch(named(), size_max))
        await exchange.reply_json({"queued": count})

    async def _exists(self, exchange: Exchange, route: protocol.ExistsRoute) -> None:
        """Answer a batched look-up. Its keys cost as much as requests for each, and no more of them go at a time."""
        question = await self._asked(exchange)
        keys, leading_only = question.block_keys(), question.leading_only
        await self._objects.catch_up(exchange)
        tenant, advice = exchange.caller.tenant, protocol.hint(exchange.head.headers)
        if advice is not None:
            self._shared.metrics.count(self._shared.metrics.hints, tenant)
        store, named = self._backing.store, partial(self._backing.names.ids, tenant, route.namespace)

        def look(start: int) -> list[bool]:
            asked = named(keys[start : start + _LOOK_UPS_A_TURN])
            if not leading_only:
                return store.contains_each(asked)
            if not start:
                # What engines ask before they load: a prompt, with its advice.
                store.note_request(named(keys), advice)
            count = len(store.run_places(asked))
            return ([True] * count + [False])[: len(asked)]

        present: list[bool] = []
        for start in range(0, len(keys), _LOOK_UPS_A_TURN):
            await self._reception.go_on(exchange)
            found = await self._shared.workers.read(exchange.owner, partial(look, start))
            self._reception.charge(exchange, len(found))
            present += found
            if leading_only and not found[-1]:
                break
        leading = next((n for n, is_here in enumerate(present) if not is_here), len(present))
        await exchange.reply_json(protocol.ExistsAnswer(present + [False] * (len(keys) - len(present)), leading))

    async def _walked(self, exchange: Exchange, walk: Iterator[_View | None]) -> _View:
        """Return what a walk comes to. Each slice of it waits for a turn, and costs as much as a request."""
        step: Callable[[], _View | None] = partial(next, walk)
        while (found := await self._shared.workers.read(exchange.owner, step)) is None:
            self._reception.charge(exchange, 1)
            await self._reception.go_on(exchange)
        return found

    def drain(self) -> set[Guest]:
        """Answer 503 to requests that come from now on. Return connections that are busy with an earlier one."""
        self._is_draining = True
        return self._busy


def _kind(route: protocol.Route) -> Route:
    if isinstance(route, protocol.PageRoute):
        return _PAGES.get(route.path, Route.OTHER)
    return _ROUTES[type(route)][0]
