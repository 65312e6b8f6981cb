"""One request on a connection: who asks, on whose account, how often, when it is its turn, its body and its answer."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from kvtide.errors import QueueFull, RequestRefused
from kvtide.server.auth import Caller
from kvtide.server.http.connection import Connection
from kvtide.server.http.doors import ADDRESS_MARK, SHARED_ADDRESSES, ConnectionLimits, Guest, account_of
from kvtide.server.http.shares import HEALTH, STRANGERS, Rates, Turns
from kvtide.server.live import Live
from kvtide.server.settings import ProgressBudget, ServerLimits
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.wire.http import RequestHead, pack_response_head
from kvtide.wire.protocol import PageRoute, Route, deadline_ms, parse_target, urgency

_URGENCY_MAX = 7
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_WITHOUT_LENGTH = frozenset({204, 304})
Headers = Sequence[tuple[str, str | int]]
# Addresses, names without a dot and those below localhost: nobody can own one on the Internet.
_OURS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|\d{1,3}(?:\.\d{1,3}){3}|[\w-]+|(?:[\w-]+\.)+localhost)(?::\d{1,5})?")


_SIZE_MIN = 64 << 10
# Sizes of buffers are these parts of a power of two, so that at most a fifth of one is empty.
_STEPS = 4
# Bodies up to this size, nearly all, are received where they stay; larger ones are copied when they outgrow a buffer.
_FIRST_BYTES = 4 << 20
_GROWTH = 4


@dataclass(slots=True)
class Exchange:
    """A request whose head has come, by whom, and what has been done about it. Times are the loop's."""

    stream: Connection
    client: str
    # Where the client is, as logs say it.
    address: str
    head: RequestHead
    route: Route
    caller: Caller
    # On whose account it is: a tenant, or an address where nobody says which.
    owner: str
    arrived_s: float
    send_s_max: float
    is_kept_alive: bool
    has_unread_body: bool
    # 0 until an answer has been sent.
    status: int = 0
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

    @property
    def start_deadline_s(self) -> float | None:
        """The latest time for the answer to begin, if any. RequestRefused (400) if the request says nonsense of it."""
        asked_ms = deadline_ms(self.head.headers)
        return None if asked_ms is None else self.arrived_s + asked_ms / 1000

    @property
    def priority(self) -> int:
        """The scheduler's priority: larger goes first."""
        return _URGENCY_MAX - urgency(self.head.headers)

    @property
    def share(self) -> str:
        """The sharer of the link where no tenant is known: the address, or the connection where all have that one."""
        if not self.owner.startswith(ADDRESS_MARK):
            return ""
        return f"{self.owner}#{self.client}" if self.owner in SHARED_ADDRESSES else self.owner

    async def expect_body(self, pace: ProgressBudget) -> None:
        """Wait for the first bytes of the request's body, asking for it if the client waits for that."""
        if self.head.headers.get("expect", "").lower() == "100-continue" and not self.stream.has_pending:
            await self.stream.send_all(_CONTINUE, pace.due_s)
        if self.has_unread_body:
            await self.stream.is_readable(pace.due_s)

    async def read_body(self, view: memoryview, pace: ProgressBudget) -> None:
        """Read a small body into `view`, which is as long as it."""
        await self.expect_body(pace)
        await self.stream.read_into(view, pace)
        self.note_received(len(view))

    def note_received(self, size: int) -> None:
        """Note that the body is whole."""
        self.has_unread_body = False
        self.received_bytes = size

    def begin(self, status: int, length: int, headers: Headers = ()) -> bytes:
        """Return the answer's head. Whoever sends it sets `status`."""
        self.is_kept_alive = self.is_kept_alive and not self.has_unread_body
        lines = list(headers)
        if status not in _WITHOUT_LENGTH:
            lines.append(("Content-Length", length))
        if not self.is_kept_alive:
            lines.append(("Connection", "close"))
        return pack_response_head(status, lines)

    def started(self) -> None:
        """Note that the answer goes out now: no deadline ends it any more."""
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

    async def begin_stream(self, headers: Headers) -> None:
        """Send the head of an answer that goes on until the connection ends."""
        self.started()
        self.is_kept_alive, self.status = False, 200
        head = pack_response_head(200, [*headers, ("Connection", "close")])
        await self.stream.send_all(head, self.stream.now_s() + self.send_s_max)

    async def reply_json(self, value: msgspec.Struct) -> None:
        """Send a value as JSON."""
        await self.reply(200, msgspec.json.encode(value) + b"\n", [("Content-Type", "application/json")])

    async def refuse(self, error: RequestRefused, headers: Headers = ()) -> None:
        """Send an error, unless an answer has begun: then the connection's end says it."""
        if self.status:
            self.is_kept_alive = False
            return
        body = json.dumps({"error": str(error)}).encode() + b"\n"
        extra = [*headers, ("Content-Type", "application/json")]
        if error.status == 401:
            # A line each: browsers read the first challenge of a line.
            extra += [("WWW-Authenticate", f'{scheme} realm="kvtide"') for scheme in ("Basic", "Bearer")]
        if error.retry_after_s is not None:
            extra.append(("Retry-After", math.ceil(error.retry_after_s)))
        await self.reply(error.status, body, extra)


class AllowedHosts:
    """The web pages that may ask a server without tokens: its own. All may where tokens protect it.

    A name that an attacker owns may lead to this machine (DNS rebinding), and then a browser takes us for the
    attacker's own site. It still says the name: as Host, and as Origin where a page of another site asks.
    """

    def __init__(self, is_checked: bool) -> None:
        self._is_checked = is_checked

    def check(self, headers: Mapping[str, str]) -> None:
        """RequestRefused (421) for a request that a page of another site may have sent."""
        if not self._is_checked:
            return
        host = headers.get("host", "localhost")
        if not _OURS.fullmatch(host):
            raise RequestRefused(421, f"this server is not called {host[:80]!r}; --open-to-all takes any name")
        if headers.get("origin", f"http://{host}").partition("://")[2] != host:
            raise RequestRefused(421, "a page of another site may not ask this server; --open-to-all lets it")


class Reception:
    """Asks every request for a token. Runs on the event loop."""

    def __init__(self, live: Live, doors: ConnectionLimits, loop: asyncio.AbstractEventLoop, is_checked: bool) -> None:
        """is_checked: web pages of other sites may not ask, see AllowedHosts."""
        self._live = live
        self._sites = AllowedHosts(is_checked)
        self._doors = doors
        self._turns = Turns(loop)
        self._rates = Rates(lambda: live.limits.tenant_requests_s_max)
        self._stranger_rates = Rates(lambda: live.limits.stranger_requests_s_max)

    async def let_in(self, exchange: Exchange, guest: Guest, common_name: str | None) -> None:
        """Note route, caller and owner of a request whose turn it is.

        RequestRefused for a stranger, no sooner than strangers of that address may hear so, and for one who asks too
        often, or has too many connections.
        """
        exchange.address = self._live.proxies.client_of(exchange.head.headers, guest.host)
        account = guest.address if exchange.address == guest.host else account_of(exchange.address)
        try:
            exchange.route = parse_target(exchange.head.target)
            if exchange.route == PageRoute("/healthz"):
                await self._turns.take(HEALTH)
                return
            self._sites.check(exchange.head.headers)
            exchange.caller = self._live.gate.caller(exchange.head.headers, common_name)
        except RequestRefused:
            if not guest.is_known:
                wait_s = self._stranger_rates.wait_s(account, exchange.arrived_s, self._live.limits.head_s_max)
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
        self._rates.take(exchange.owner, exchange.arrived_s)

    async def go_on(self, exchange: Exchange) -> None:
        """Wait for the turn of the next part of a request that is as much work as several."""
        await self._turns.take(exchange.owner)

    def charge(self, exchange: Exchange, count: int) -> None:
        """Count so many requests more: their owner waits for its next one until its rate has paid for them."""
        self._rates.owe(exchange.owner, exchange.stream.now_s(), count)


def _buffer_bytes(size: int) -> int:
    """Return the size of the buffer that a body of `size` bytes gets."""
    if size <= _SIZE_MIN:
        return _SIZE_MIN
    step = 1 << max((size - 1).bit_length() - _STEPS.bit_length(), 0)
    return -(-size // step) * step


class BodyBuffers:
    """Lends buffers of at most `bytes_max` in sum, `tenant_bytes_max` to a tenant. Thread-safe; never waits.

    Who has no name may have them all.
    """

    def __init__(self, bytes_max: int, tenant_bytes_max: int | None = None) -> None:
        if bytes_max <= 0 or (tenant_bytes_max is not None and tenant_bytes_max <= 0):
            raise ValueError(f"bounds of the body buffers must be positive, got {bytes_max}, {tenant_bytes_max}")
        self._bytes_max = bytes_max
        # One buffer of the largest body that fits is always allowed, rounded up as it is.
        self._tenant_bytes_max = bytes_max if tenant_bytes_max is None else _buffer_bytes(tenant_bytes_max)
        self._tenants: dict[str, int] = {}
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        self._lent_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Return the bytes that are lent now."""
        return self._lent_bytes

    def take(self, size: int, tenant: str = "", returning_bytes: int = 0) -> memoryview | None:
        """Return a buffer of at least `size` bytes, its content whatever was left in it; None if there is none for it.

        QueueFull if the tenant has its share: of `tenant_bytes_max`, and as much as it leaves free, so that however
        many tenants take what they may, the next one finds some. `returning_bytes` of what the tenant holds don't
        count: they come back when the new buffer is here.
        """
        wanted = _buffer_bytes(size)
        with self._lock:
            held = self._tenants.get(tenant, 0) - returning_bytes
            share = min(self._tenant_bytes_max, self._bytes_max - self._lent_bytes - wanted + returning_bytes)
            if tenant and held + wanted > share:
                if not held:
                    return None
                raise QueueFull(f"bodies of a tenant may hold {max(share, 0)} bytes of buffers now, {held} are held")
            free = self._free.get(wanted)
            if free:
                self._free_bytes -= wanted
                self._lend(wanted, tenant)
                return free.pop()
            if self._lent_bytes + wanted > self._bytes_max:
                return None
            self._make_room(wanted)
            self._lend(wanted, tenant)
        return aligned_buffer(wanted)

    def _lend(self, size: int, tenant: str) -> None:
        self._lent_bytes += size
        if tenant:
            self._tenants[tenant] = self._tenants.get(tenant, 0) + size

    def _make_room(self, wanted: int) -> None:
        """Let go of free buffers until `wanted` more bytes fit."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._lent_bytes + self._free_bytes + wanted > self._bytes_max:
                self._free[size].pop()
                self._free_bytes -= size

    def give_back(self, buffer: memoryview, tenant: str = "") -> None:
        """Take a buffer back, as `take` returned it to this tenant."""
        with self._lock:
            self._lent_bytes -= len(buffer)
            if tenant:
                self._tenants[tenant] -= len(buffer)
                if not self._tenants[tenant]:
                    del self._tenants[tenant]
            self._free_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        with self._lock:
            assert self._free_bytes == sum(size * len(buffers) for size, buffers in self._free.items())
            assert all(len(buffer) == size for size, buffers in self._free.items() for buffer in buffers)
            assert self._lent_bytes >= sum(self._tenants.values())
            assert all(0 < held <= self._bytes_max for held in self._tenants.values())
            assert self._free_bytes + self._lent_bytes <= self._bytes_max


class ReceivedBody(NamedTuple):
    """A whole body in a buffer. `give_back` gives that back; call it once, from any thread."""

    view: memoryview
    give_back: Callable[[], None]


def take_buffer(buffers: BodyBuffers, size: int, tenant: str, held_bytes: int = 0) -> memoryview:
    """Return a buffer, for one of `held_bytes` that the tenant gives back next.

    RequestRefused: 429 if the tenant has its share, 503 if all are in use.
    """
    try:
        buffer = buffers.take(size, tenant, held_bytes)
    except QueueFull as error:
        raise RequestRefused(429, str(error), retry_after_s=1.0) from error
    if buffer is None:
        raise RequestRefused(503, "every buffer is in use", retry_after_s=1.0)
    return buffer


async def receive(exchange: Exchange, buffers: BodyBuffers, limits: ServerLimits, size: int) -> ReceivedBody:
    """Read a request's body of `size` bytes.

    RequestRefused (429, 503) if there is no room for it, TimeoutError if it comes too slowly.
    """
    tenant, pace = exchange.caller.tenant, limits.pace(exchange.stream.now_s())
    await exchange.expect_body(pace)
    # Two buffers are held while one is copied.
    first = size if size + size // _GROWTH >= limits.buffer_bytes_max else min(size, _FIRST_BYTES)
    buffer, done = take_buffer(buffers, first, tenant), 0
    try:
        while True:
            stop = min(size, len(buffer))
            await exchange.stream.read_into(buffer[done:stop], pace)
            done = stop
            if done == size:
                break
            larger = take_buffer(buffers, min(size, _GROWTH * len(buffer)), tenant, len(buffer))
            copy_bytes(larger[:done], buffer[:done])
            buffers.give_back(buffer, tenant)
            buffer = larger
    except BaseException:
        buffers.give_back(buffer, tenant)
        raise
    exchange.note_received(size)
    return ReceivedBody(buffer[:size], partial(buffers.give_back, buffer, tenant))
