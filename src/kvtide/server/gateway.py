"""Connections and requests: who asks, for what, how often; then to whoever answers it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial

from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.auth import NOBODY, Gate, Scope
from kvtide.server.exchange import Exchange
from kvtide.server.listing import Listing
from kvtide.server.objects import ObjectRequests
from kvtide.server.rates import Rates
from kvtide.server.settings import ServerLimits
from kvtide.server.stream import Stream
from kvtide.wire.http import RequestHead, parse_request_head
from kvtide.wire.protocol import (
    EXISTS_BYTES_MAX,
    ExistsRoute,
    ListRoute,
    ObjectRoute,
    PageRoute,
    Route,
    parse_keys,
    parse_target,
)

__all__ = ["Gateway"]

_log = logging.getLogger(__name__)

_METHODS: dict[type[Route], tuple[str, ...]] = {
    ObjectRoute: ("GET", "HEAD", "PUT", "DELETE"),
    ExistsRoute: ("POST",),
    ListRoute: ("GET", "HEAD"),
    PageRoute: ("GET", "HEAD"),
}


class Gateway:
    """Answers the requests of all connections. Runs on one event loop."""

    def __init__(
        self,
        gate: Gate,
        objects: ObjectRequests,
        listing: Listing,
        rates: Rates,
        limits: ServerLimits,
        workers: Executor,
    ) -> None:
        self._gate = gate
        self._objects = objects
        self._listing = listing
        self._rates = rates
        self._limits = limits
        self._workers = workers
        self.is_draining = False
        # Connections between a request's head and the end of its answer.
        self.busy: set[str] = set()

    async def serve(self, stream: Stream, client: str) -> None:
        """Answer a connection's requests until one of both sides ends it."""
        try:
            common_name = await stream.handshake(stream.now_s() + self._limits.head_s_max)
            while await self._serve_one(stream, client, common_name):
                pass
            await stream.linger(stream.now_s() + self._limits.head_s_max)
        except (OSError, TimeoutError) as error:
            _log.debug("connection %s: %s", client, error or "too slow")
        finally:
            stream.close()

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
        self.busy.add(client)
        try:
            exchange = self._exchange(stream, client, head)
            await self._answer(exchange, common_name)
            return exchange.is_kept_alive
        finally:
            self.busy.discard(client)

    def _exchange(self, stream: Stream, client: str, head: RequestHead) -> Exchange:
        return Exchange(
            stream=stream,
            client=client,
            head=head,
            route=PageRoute(""),
            caller=NOBODY,
            arrived_s=stream.now_s(),
            send_s_max=self._limits.head_s_max,
            is_kept_alive=head.is_kept_alive and not self.is_draining,
            has_unread_body=bool(head.content_length),
        )

    async def _refuse_head(self, stream: Stream, client: str, error: RequestRefused) -> None:
        exchange = self._exchange(stream, client, RequestHead("GET", "", {}, None, False))
        await exchange.refuse(error)

    async def _answer(self, exchange: Exchange, common_name: str | None) -> None:
        try:
            exchange.route = parse_target(exchange.head.target)
            if exchange.route != PageRoute("/healthz"):
                exchange.caller = self._gate.caller(exchange.head.headers, common_name)
                self._rates.take(exchange.caller.tenant, exchange.arrived_s)
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
        keys = parse_keys(body)
        found = partial(self._listing.exists, caller.tenant, route.namespace, keys)
        await exchange.reply_json(await loop.run_in_executor(self._workers, found))

    async def _page(self, exchange: Exchange, path: str) -> None:
        if path == "/healthz":
            if self.is_draining:
                raise RequestRefused(503, "draining", retry_after_s=1.0)
            await exchange.reply(200, b"ok\n")
        elif path == "/v1":
            exchange.caller.require(Scope.READ)
            look = partial(self._listing.tenant, exchange.caller)
            await exchange.reply_json(await asyncio.get_running_loop().run_in_executor(self._workers, look))
        else:
            raise RequestRefused(404, "no such page")
