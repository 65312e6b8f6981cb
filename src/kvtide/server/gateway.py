"""Connections and requests: who asks, for what, how often; then to whoever answers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.auth import NOBODY, Scope
from kvtide.server.http import BodyBuffers, Connection, Exchange, Guest, Reception, Workers, receive
from kvtide.server.live import Live
from kvtide.server.metrics import Metrics, Route
from kvtide.server.names import Listing
from kvtide.server.objects import ObjectRequests
from kvtide.server.observe import PAGES, AccessLog, Observability
from kvtide.server.regions import RecordRequests, Region
from kvtide.server.settings import ServerLimits
from kvtide.types import Namespace
from kvtide.wire.http import RequestHead, parse_request_head
from kvtide.wire.protocol import (
    EXISTS_BYTES_MAX,
    ExistsAnswer,
    ExistsRoute,
    ListRoute,
    LookUps,
    ObjectList,
    ObjectRoute,
    PageRoute,
    PrefetchAnswer,
    PrefetchRoute,
    RecordName,
    RecordsRoute,
    TenantView,
    decisions,
    hint,
    parse_look_ups,
)
from kvtide.wire.protocol import Route as ProtocolRoute

_log = logging.getLogger(__name__)
_View = TypeVar("_View", ObjectList, TenantView)

_LINGER_S_MAX = 1.0
# Keys that are looked up at a time: a fraction of a millisecond in memory, one round trip for what lies behind it.
_LOOK_UPS_A_TURN = 256
# Ends only when the reader does.
_EVENTS = "/events"
_METHODS: dict[type[ProtocolRoute], tuple[str, ...]] = {
    ObjectRoute: ("GET", "HEAD", "PUT", "POST", "DELETE"),
    ExistsRoute: ("POST",),
    PrefetchRoute: ("POST",),
    ListRoute: ("GET", "HEAD"),
    RecordName: ("GET", "HEAD", "PUT", "DELETE"),
    RecordsRoute: ("GET", "HEAD"),
    PageRoute: ("GET", "HEAD"),
}
_KINDS = {
    ObjectRoute: Route.OBJECT,
    ExistsRoute: Route.EXISTS,
    PrefetchRoute: Route.PREFETCH,
    ListRoute: Route.LIST,
    RecordName: Route.RECORDS,
    RecordsRoute: Route.RECORDS,
}


class Gateway:
    """Answers the requests of all connections. Runs on one event loop."""

    def __init__(
        self,
        reception: Reception,
        objects: ObjectRequests,
        records: RecordRequests,
        listing: Listing,
        buffers: BodyBuffers,
        pages: Observability,
        live: Live,
        metrics: Metrics,
        workers: Workers,
        access_log: AccessLog,
        region: Region | None = None,
    ) -> None:
        self._reception = reception
        self._objects = objects
        self._records = records
        self._listing = listing
        self._buffers = buffers
        self._pages = pages
        self._metrics = metrics
        self._live = live
        self._workers = workers
        self._access_log = access_log
        self._region = region
        # Connections between a request's head and the end of its answer, where that is near.
        self.busy: set[Guest] = set()

    @property
    def _limits(self) -> ServerLimits:
        return self._live.limits

    async def serve(self, stream: Connection, guest: Guest) -> None:
        """Answer a connection's requests until one of both sides ends it."""
        self._metrics.connection_opened()
        try:
            common_name = await stream.handshake(stream.now_s() + self._limits.head_s_max)
            while await self._serve_one(stream, guest, common_name):
                pass
        except (OSError, TimeoutError) as error:
            _log.debug("connection %s: %s", guest.client, error or "too slow")
        finally:
            stream.close()
            self._metrics.connection_closed()

    async def _serve_one(self, stream: Connection, guest: Guest, common_name: str | None) -> bool:
        """Answer the next request. False if the connection ends with it."""
        limits = self._limits
        try:
            wait_s = limits.idle_s_max if guest.is_known else limits.head_s_max
            data = await stream.read_head(stream.now_s() + wait_s, limits.head_s_max)
            if data is None:
                return False
            head = parse_request_head(data)
        except RequestRefused as error:
            await self._refuse_head(stream, guest, error)
            return False
        exchange = self._exchange(stream, guest, head)
        if head.target != _EVENTS:
            self.busy.add(guest)
        try:
            await self._answer(exchange, guest, common_name)
            if exchange.has_unread_body:
                await stream.linger(stream.now_s() + _LINGER_S_MAX)
            return exchange.is_kept_alive and not self._pages.is_draining
        finally:
            self.busy.discard(guest)
            kind = _kind(exchange.route)
            self._metrics.count_request(kind, exchange.status)
            self._access_log.note(exchange, kind)

    def _exchange(self, stream: Connection, guest: Guest, head: RequestHead) -> Exchange:
        return Exchange(
            stream=stream,
            client=guest.client,
            address=guest.host,
            head=head,
            route=PageRoute(""),
            caller=NOBODY,
            owner=guest.address,
            arrived_s=stream.head_began_s,
            send_s_max=self._limits.head_s_max,
            is_kept_alive=head.is_kept_alive and not self._pages.is_draining,
            has_unread_body=bool(head.content_length),
        )

    async def _refuse_head(self, stream: Connection, guest: Guest, error: RequestRefused) -> None:
        exchange = self._exchange(stream, guest, RequestHead("", "", {}, None, False))
        try:
            await exchange.refuse(error)
        finally:
            self._metrics.count_request(Route.MALFORMED, error.status)
            self._access_log.note(exchange, Route.MALFORMED)
        await stream.linger(stream.now_s() + _LINGER_S_MAX)

    async def _answer(self, exchange: Exchange, guest: Guest, common_name: str | None) -> None:
        """Answer a request, or say that its deadline has passed, wherever it waits by then."""
        try:
            if exchange.start_deadline_s is None:
                await self._answer_at_leisure(exchange, guest, common_name)
                return
            async with asyncio.timeout_at(exchange.start_deadline_s) as exchange.start_timeout:
                await self._answer_at_leisure(exchange, guest, common_name)
        except RequestRefused as error:
            await exchange.refuse(error)
        except TimeoutError:
            if exchange.start_timeout is None or not exchange.start_timeout.expired():
                raise
            await exchange.refuse(RequestRefused(504, "the deadline passed before the answer could begin"))

    async def _answer_at_leisure(self, exchange: Exchange, guest: Guest, common_name: str | None) -> None:
        try:
            await self._reception.let_in(exchange, guest, common_name)
            allowed = _METHODS[type(exchange.route)]
            if exchange.head.method not in allowed:
                refused = RequestRefused(405, f"expected one of {', '.join(allowed)}")
                await exchange.refuse(refused, [("Allow", ", ".join(allowed))])
                return
            told = decisions(exchange.head.headers)
            await self._dispatch(exchange)
            # What comes with a request that is refused may be anybody's.
            if told and exchange.status < HTTPStatus.BAD_REQUEST:
                tenant, namespace = exchange.caller.tenant, _namespace(exchange.route)
                self._metrics.count_decisions(tenant, namespace, told)
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
        if isinstance(route, PageRoute):
            await self._page(exchange, route.path)
            return
        if self._region is not None:
            self._region.require_recovered()
        if isinstance(route, ObjectRoute):
            await self._objects.answer(exchange, route.id)
            return
        if isinstance(route, RecordName | RecordsRoute):
            await self._records.answer(exchange, route)
            return
        caller.require(Scope.READ)
        if isinstance(route, ListRoute):
            await exchange.reply_json(await self._walked(exchange, self._listing.objects(caller.tenant, route)))
        elif isinstance(route, PrefetchRoute):
            await self._prefetch(exchange, route)
        else:
            await self._exists(exchange, route)

    async def _asked(self, exchange: Exchange) -> LookUps:
        """Return the keys in the request's body."""
        size = exchange.head.content_length
        if size is None or size > EXISTS_BYTES_MAX:
            raise RequestRefused(411 if size is None else 413, f"expected at most {EXISTS_BYTES_MAX} bytes of JSON")
        body, give_back = await receive(exchange, self._buffers, self._limits, size)
        try:
            return parse_look_ups(body)
        finally:
            give_back()

    async def _prefetch(self, exchange: Exchange, route: PrefetchRoute) -> None:
        """Have objects brought to faster tiers. Its keys cost as much as requests for each."""
        keys, _ = await self._asked(exchange)
        self._reception.charge(exchange, len(keys))
        ask = partial(
            self._listing.prefetch, exchange.caller.tenant, route.namespace, keys, self._limits.object_bytes_max
        )
        await exchange.reply_json(PrefetchAnswer(await self._workers.read(exchange.owner, ask)))

    async def _exists(self, exchange: Exchange, route: ExistsRoute) -> None:
        """Answer a batched look-up. Its keys cost as much as requests for each, and no more of them go at a time."""
        keys, leading_only = await self._asked(exchange)
        await self._objects.catch_up(exchange)
        tenant, advice = exchange.caller.tenant, hint(exchange.head.headers)
        if advice is not None:
            self._metrics.count_hint(tenant)
        look = self._listing.leading if leading_only else self._listing.present
        present: list[bool] = []
        for start in range(0, len(keys), _LOOK_UPS_A_TURN):
            await self._reception.go_on(exchange)
            asked = keys[start : start + _LOOK_UPS_A_TURN]
            part = partial(look, tenant, route.namespace, asked)
            if leading_only and not start:
                part = partial(self._listing.beginning, tenant, route.namespace, keys, len(asked), advice)
            found = await self._workers.read(exchange.owner, part)
            self._reception.charge(exchange, len(found))
            present += found
            if len(found) < len(asked):
                break
        leading = next((n for n, is_here in enumerate(present) if not is_here), len(present))
        await exchange.reply_json(ExistsAnswer(present + [False] * (len(keys) - len(present)), leading))

    async def _page(self, exchange: Exchange, path: str) -> None:
        if path != "/v1":
            await self._pages.answer(exchange, path)
            return
        exchange.caller.require(Scope.READ)
        await exchange.reply_json(await self._walked(exchange, self._listing.tenant(exchange.caller)))

    async def _walked(self, exchange: Exchange, walk: Iterator[_View | None]) -> _View:
        """Return what a walk comes to. Each slice of it waits for a turn, and costs as much as a request."""
        step: Callable[[], _View | None] = partial(next, walk)
        while (found := await self._workers.read(exchange.owner, step)) is None:
            self._reception.charge(exchange, 1)
            await self._reception.go_on(exchange)
        return found

    async def keep_history(self) -> None:
        """Keep an hour of the server's counters, until cancelled."""
        await self._pages.keep_history()

    def leave(self) -> None:
        """Tell balancers to look elsewhere from now on."""
        self._pages.is_leaving = True

    def drain(self) -> set[Guest]:
        """Take no more requests on connections that are here. Return those that are busy with one that will end."""
        self._pages.is_draining = True
        return self.busy


def _namespace(route: ProtocolRoute) -> Namespace:
    """Return the namespace that a request is about, as its owner says it; without bytes if it is about none."""
    if isinstance(route, ObjectRoute):
        return route.id.namespace
    return route.namespace if isinstance(route, ExistsRoute | PrefetchRoute | ListRoute) else Namespace(b"")


def _kind(route: ProtocolRoute) -> Route:
    """Return what a request counts as."""
    if isinstance(route, PageRoute):
        return Route.LIST if route.path == "/v1" else PAGES.get(route.path, Route.OTHER)
    return _KINDS[type(route)]
