"""Connections and requests: who asks, for what, how often; then to whoever answers it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.access import note_access
from kvtide.server.auth import NOBODY, Gate, Scope
from kvtide.server.exchange import Exchange
from kvtide.server.listing import Listing
from kvtide.server.metrics import Metrics, Route
from kvtide.server.objects import ObjectRequests
from kvtide.server.pages import PAGES, Pages
from kvtide.server.rates import Rates
from kvtide.server.record_requests import RecordRequests
from kvtide.server.settings import ServerLimits
from kvtide.server.stream import Stream
from kvtide.wire.http import RequestHead, parse_request_head
from kvtide.wire.protocol import (
    EXISTS_BYTES_MAX,
    ExistsRoute,
    ListRoute,
    ObjectRoute,
    PageRoute,
    decisions,
    parse_look_ups,
    parse_target,
)
from kvtide.wire.protocol import Route as ProtocolRoute
from kvtide.wire.records import RecordName, RecordsRoute

__all__ = ["Gateway"]

_log = logging.getLogger(__name__)

_LINGER_S_MAX = 1.0
# Ends only when the reader does.
_EVENTS = "/events"
_METHODS: dict[type[ProtocolRoute], tuple[str, ...]] = {
    ObjectRoute: ("GET", "HEAD", "PUT", "DELETE"),
    ExistsRoute: ("POST",),
    ListRoute: ("GET", "HEAD"),
    RecordName: ("GET", "HEAD", "PUT", "DELETE"),
    RecordsRoute: ("GET", "HEAD"),
    PageRoute: ("GET", "HEAD"),
}
_KINDS = {
    ObjectRoute: Route.OBJECT,
    ExistsRoute: Route.EXISTS,
    ListRoute: Route.LIST,
    RecordName: Route.RECORDS,
    RecordsRoute: Route.RECORDS,
}


class Gateway:
    """Answers the requests of all connections. Runs on one event loop."""

    def __init__(
        self,
        gate: Gate,
        objects: ObjectRequests,
        records: RecordRequests,
        listing: Listing,
        pages: Pages,
        rates: Rates,
        limits: ServerLimits,
        metrics: Metrics,
        workers: Executor,
        clock: Clock,
    ) -> None:
        self._gate = gate
        self._objects = objects
        self._records = records
        self._listing = listing
        self._pages = pages
        self._metrics = metrics
        self._rates = rates
        self._limits = limits
        self._workers = workers
        self._clock = clock
        # Connections between a request's head and the end of its answer, where that is near.
        self.busy: set[str] = set()

    async def serve(self, stream: Stream, client: str) -> None:
        """Answer a connection's requests until one of both sides ends it."""
        self._metrics.connection_opened()
        try:
            common_name = await stream.handshake(stream.now_s() + self._limits.head_s_max)
            while await self._serve_one(stream, client, common_name):
                pass
        except (OSError, TimeoutError) as error:
            _log.debug("connection %s: %s", client, error or "too slow")
        finally:
            stream.close()
            self._metrics.connection_closed()

    async def _serve_one(self, stream: Stream, client: str, common_name: str | None) -> bool:
        """Answer the next request. False if the connection ends with it."""
        limits = self._limits
        try:
            data = await stream.read_head(stream.now_s() + limits.idle_s_max, limits.head_s_max)
            if data is None:
                return False
            head = parse_request_head(data)
        except RequestRefused as error:
            await self._refuse_head(stream, client, error)
            return False
        exchange = self._exchange(stream, client, head)
        if head.target != _EVENTS:
            self.busy.add(client)
        try:
            await self._answer(exchange, common_name)
            if exchange.has_unread_body:
                await stream.linger(stream.now_s() + _LINGER_S_MAX)
            return exchange.is_kept_alive and not self._pages.is_draining
        finally:
            self.busy.discard(client)
            kind = _kind(exchange.route)
            self._metrics.count_request(kind, exchange.status)
            note_access(exchange, kind, self._clock.wall_s())

    def _exchange(self, stream: Stream, client: str, head: RequestHead) -> Exchange:
        return Exchange(
            stream=stream,
            client=client,
            head=head,
            route=PageRoute(""),
            caller=NOBODY,
            arrived_s=stream.now_s(),
            send_s_max=self._limits.head_s_max,
            is_kept_alive=head.is_kept_alive and not self._pages.is_draining,
            has_unread_body=bool(head.content_length),
        )

    async def _refuse_head(self, stream: Stream, client: str, error: RequestRefused) -> None:
        exchange = self._exchange(stream, client, RequestHead("GET", "", {}, None, False))
        await exchange.refuse(error)
        await stream.linger(stream.now_s() + _LINGER_S_MAX)

    async def _answer(self, exchange: Exchange, common_name: str | None) -> None:
        try:
            exchange.route = parse_target(exchange.head.target)
            if exchange.route != PageRoute("/healthz"):
                exchange.caller = self._gate.caller(exchange.head.headers, common_name)
                self._rates.take(exchange.caller.tenant, exchange.arrived_s)
                self._metrics.count_decisions(decisions(exchange.head.headers))
            allowed = _METHODS[type(exchange.route)]
            if exchange.head.method not in allowed:
                refused = RequestRefused(405, f"expected one of {', '.join(allowed)}")
                await exchange.refuse(refused, [("Allow", ", ".join(allowed))])
                return
            await self._dispatch(exchange)
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
        route, caller = exchange.route, exchange.caller
        if isinstance(route, ObjectRoute):
            await self._objects.answer(exchange, route.id)
            return
        if isinstance(route, RecordName | RecordsRoute):
            await self._records.answer(exchange, route)
            return
        if isinstance(route, PageRoute):
            await self._page(exchange, route.path)
            return
        caller.require(Scope.READ)
        loop = asyncio.get_running_loop()
        if isinstance(route, ListRoute):
            look = partial(self._listing.objects, caller.tenant, route)
            await exchange.reply_json(await loop.run_in_executor(self._workers, look))
            return
        size = exchange.head.content_length
        if size is None or size > EXISTS_BYTES_MAX:
            raise RequestRefused(411 if size is None else 413, f"expected at most {EXISTS_BYTES_MAX} bytes of JSON")
        body = bytearray(size)
        await exchange.read_body(memoryview(body), self._limits.body_s_max(size))
        found = partial(self._listing.exists, caller.tenant, route.namespace, parse_look_ups(body))
        await exchange.reply_json(await loop.run_in_executor(self._workers, found))

    async def _page(self, exchange: Exchange, path: str) -> None:
        if path != "/v1":
            await self._pages.answer(exchange, path)
            return
        exchange.caller.require(Scope.READ)
        look = partial(self._listing.tenant, exchange.caller)
        await exchange.reply_json(await asyncio.get_running_loop().run_in_executor(self._workers, look))

    def drain(self) -> set[str]:
        """Take no more requests on connections that are here. Return those that are busy with one that will end."""
        self._pages.is_draining = True
        return self.busy


def _kind(route: ProtocolRoute) -> Route:
    """Return what a request counts as."""
    if isinstance(route, PageRoute):
        return Route.LIST if route.path == "/v1" else PAGES.get(route.path, Route.OTHER)
    return _KINDS[type(route)]
