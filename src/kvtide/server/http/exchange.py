"""One request on a connection: who asks, on whose account, how often, when it is its turn, its body and its answer."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

import msgspec

from kvtide.errors import RequestRefused
from kvtide.server.auth import NOBODY, Caller
from kvtide.server.http.connections import SHARED_ADDRESSES, Connection, ConnectionLimits, Guest, account_of
from kvtide.server.http.shares import HEALTH, STRANGERS, BodyBuffers, Rates, Turns, Workers
from kvtide.server.metrics import Metrics
from kvtide.server.settings import Live, ProgressBudget
from kvtide.tier.buffers import copy_bytes
from kvtide.wire.http import NO_BODY, Headers, RequestHead, pack_response_head
from kvtide.wire.protocol import PageRoute, Route, deadline_ms, parse_target

_NO_PAGE = PageRoute("")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Addresses, names without a dot and those below localhost: nobody can own one on the Internet.
_OURS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|\d{1,3}(?:\.\d{1,3}){3}|[\w-]+|(?:[\w-]+\.)+localhost)(?::\d{1,5})?")

# Bodies up to this size, nearly all, are received where they stay; larger ones are copied when they outgrow a buffer.
_FIRST_BYTES = 4 << 20
_GROWTH = 4


@dataclass(slots=True)
class Exchange:
    """A request whose head has come, by whom, and what has been done about it. Times are the loop's."""

    stream: Connection
    guest: Guest
    head: RequestHead
    send_s_max: float
    # Where the client is, as logs say it.
    address: str = field(init=False)
    # On whose account it is: a tenant, or an address where nobody says which.
    owner: str = field(init=False)
    arrived_s: float = field(init=False)
    is_kept_alive: bool = field(init=False)
    has_unread_body: bool = field(init=False)
    # Of nobody, and for no page, until it is let in.
    route: Route = _NO_PAGE
    caller: Caller = NOBODY
    # 0 until an answer has been sent, a large one whole.
    status: int = 0
    # Something of the answer may be with the client.
    has_begun: bool = False
    # Of bodies alone, and only once they are whole.
    received_bytes: int = 0
    sent_bytes: int = 0
    wait_s: float = 0.0
    # Ends the request if the answer has not begun by its deadline.
    start_timeout: asyncio.Timeout | None = None
    # Whether who asks was found, and let in.
    is_let_in: bool = False
    # What was changed, for the audit log.
    change: str = ""

    def __post_init__(self) -> None:
        self.address, self.owner = self.guest.host, self.guest.address
        self.arrived_s = self.stream.head_began_s
        self.is_kept_alive, self.has_unread_body = self.head.is_kept_alive, bool(self.head.content_length)

    @property
    def start_deadline_s(self) -> float | None:
        """The latest time for the answer to begin, if any. RequestRefused (400) if the request says nonsense of it."""
        asked_ms = deadline_ms(self.head.headers)
        return None if asked_ms is None else self.arrived_s + asked_ms / 1000

    @property
    def share(self) -> str:
        """The sharer of the link: the tenant, else the address, or the connection where all have that one."""
        if self.caller.owner:
            return self.caller.tenant
        # Where nobody shows a token a tenant is what anybody calls himself.
        return f"{self.owner}#{self.guest.client}" if self.owner in SHARED_ADDRESSES else self.owner

    async def expect_body(self, pace: ProgressBudget) -> None:
        """Wait for the first bytes of the request's body, asking for it if the client waits for that."""
        if self.head.headers.get("expect", "").lower() == "100-continue" and not self.stream.has_pending:
            await self.stream.send_all(_CONTINUE, pace.due_s)
        if self.has_unread_body:
            await self.stream.is_readable(pace.due_s)

    def note_received(self, size: int) -> None:
        """Note that the body is whole."""
        self.has_unread_body = False
        self.received_bytes = size

    def begin(self, status: int, length: int, headers: Headers = ()) -> bytes:
        """Return the answer's head. Whoever sends it sets `status`."""
        self.is_kept_alive = self.is_kept_alive and not self.has_unread_body
        lines = list(headers)
        if status not in NO_BODY:
            lines.append(("Content-Length", length))
        if not self.is_kept_alive:
            lines.append(("Connection", "close"))
        return pack_response_head(status, lines)

    def started(self) -> None:
        """Note that the answer goes out now: no deadline ends it any more, and no error takes its place."""
        self.has_begun = True
        if self.start_timeout is not None and not self.start_timeout.expired():
            self.start_timeout.reschedule(None)

    async def reply(self, status: int, body: bytes = b"", headers: Headers = (), length: int | None = None) -> None:
        """Send a small answer. To HEAD without its body, whose length may be given."""
        head = self.begin(status, len(body) if length is None else length, headers)
        self.started()
        self.status = status
        data = head if self.head.method == "HEAD" else head + body
        await self.stream.send_all(data, self.stream.now_s() + self.send_s_max)
        self.sent_bytes = len(data) - len(head)

    async def reply_json(self, value: msgspec.Struct | dict[str, int]) -> None:
        """Send a value as JSON."""
        await self.reply(200, msgspec.json.encode(value) + b"\n", [("Content-Type", "application/json")])

    async def refuse(self, error: RequestRefused, headers: Headers = ()) -> None:
        """Send an error, unless an answer has begun: then the connection's end says it."""
        if self.has_begun:
            self.is_kept_alive = False
            return
        body = json.dumps({"error": str(error)}).encode() + b"\n"
        extra = [*headers, ("Content-Type", "application/json")]
        if error.status == 401:
            extra.append(("WWW-Authenticate", 'Bearer realm="kvtide"'))
        if error.retry_after_s is not None:
            extra.append(("Retry-After", math.ceil(error.retry_after_s)))
        await self.reply(error.status, body, extra)


def check_site(headers: Mapping[str, str]) -> None:
    """RequestRefused (421) for a request that a web page of another site may have sent.

    A name that an attacker owns may lead to this machine (DNS rebinding), and then a browser takes us for the
    attacker's own site. It still says the name: as Host, and as Origin where a page of another site asks.
    """
    host = headers.get("host", "localhost")
    if not _OURS.fullmatch(host):
        raise RequestRefused(421, f"this server is not called {host[:80]!r}; --open-to-all takes any name")
    if headers.get("origin", f"http://{host}").partition("://")[2] != host:
        raise RequestRefused(421, "a page of another site may not ask this server; --open-to-all lets it")


class Reception:
    """Asks every request for a token; without tokens, web pages of other sites may not ask. Runs on the event loop."""

    def __init__(self, live: Live, doors: ConnectionLimits) -> None:
        self._live = live
        self._doors = doors
        self._turns = Turns()
        self._rates = Rates(lambda: live.limits.tenant_requests_s_max)
        self._stranger_rates = Rates(lambda: live.limits.stranger_requests_s_max)

    async def let_in(self, exchange: Exchange) -> None:
        """Note route, caller and owner of a request whose turn it is.

        RequestRefused for a stranger, no sooner than strangers of that address may hear so, and for one who asks too
        often, or has too many connections.
        """
        guest = exchange.guest
        exchange.address = self._live.proxies.client_of(exchange.head.headers, guest.host)
        account = guest.address if exchange.address == guest.host else account_of(exchange.address)
        try:
            exchange.route = parse_target(exchange.head.target)
            # Who says nonsense waits for a turn to hear so, as for any other.
            deadline_ms(exchange.head.headers)
            if exchange.route == PageRoute("/healthz"):
                await self._turns.take(HEALTH)
                return
            if self._live.is_site_checked:
                check_site(exchange.head.headers)
            exchange.caller = self._live.gate.caller(exchange.head.headers, guest.common_name)
        except RequestRefused as error:
            # Who has a token may guess others no faster.
            if not guest.is_known or error.status == HTTPStatus.UNAUTHORIZED:
                wait_s = self._stranger_rates.take(account, exchange.stream.now_s(), self._live.limits.head_s_max)
                await asyncio.sleep(wait_s)
            await self._turns.take(STRANGERS)
            raise
        exchange.owner, exchange.is_let_in = exchange.caller.owner or account, True
        try:
            self._doors.settle(guest, exchange.caller.owner or guest.address)
        except RequestRefused:
            exchange.is_kept_alive = False
            raise
        await self._turns.take(exchange.owner)
        self._rates.take(exchange.owner, exchange.stream.now_s())

    async def go_on(self, exchange: Exchange) -> None:
        """Wait for the turn of the next part of a request that is as much work as several."""
        await self._turns.take(exchange.owner)

    def charge(self, exchange: Exchange, count: int) -> None:
        """Count so many requests more: their owner waits for its next one until its rate has paid for them."""
        self._rates.owe(exchange.owner, exchange.stream.now_s(), count)


@dataclass(frozen=True, slots=True)
class Resources:
    """Settings, counters, threads and buffers that all requests of a server share."""

    live: Live
    metrics: Metrics
    workers: Workers
    buffers: BodyBuffers


async def receive(exchange: Exchange, shared: Resources, size: int) -> tuple[memoryview, Callable[[], None]]:
    """Read a request's body of `size` bytes; return it, and how its buffer is given back, once and from any thread.

    RequestRefused (429, 503) without room, TimeoutError if it is slow.
    """
    buffers, limits = shared.buffers, shared.live.limits
    tenant, pace = exchange.caller.tenant, limits.pace(exchange.stream.now_s())
    await exchange.expect_body(pace)
    # Two buffers are held while one is copied.
    first = size if size + size // _GROWTH >= limits.buffer_bytes_max else min(size, _FIRST_BYTES)
    buffer, done = buffers.take(first, tenant), 0
    try:
        while True:
            stop = min(size, len(buffer))
            await exchange.stream.read_into(buffer[done:stop], pace)
            done = stop
            if done == size:
                break
            larger = buffers.take(min(size, _GROWTH * len(buffer)), tenant, len(buffer))
            copy_bytes(larger[:done], buffer[:done])
            buffers.give_back(buffer, tenant)
            buffer = larger
    except BaseException:
        buffers.give_back(buffer, tenant)
        raise
    exchange.note_received(size)
    return buffer[:size], partial(buffers.give_back, buffer, tenant)
