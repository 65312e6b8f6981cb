"""The server's accounts of itself: health, metrics, events, status and the dashboard that draws it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

import kvtide
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.auth import Scope
from kvtide.server.http import Exchange, Workers
from kvtide.server.metrics import Metrics, Route, SourceCollector
from kvtide.server.names import Names
from kvtide.server.observe.access import EVENTS_CONTENT_TYPE, HEARTBEAT, EventKind, EventLog, events_body
from kvtide.server.observe.status import (
    SAMPLE_S,
    History,
    Outlook,
    Sample,
    Status,
    history_body,
    server_status,
)
from kvtide.server.quotas import Quotas
from kvtide.server.regions import Region
from kvtide.server.scheduler import Scheduler
from kvtide.tier import Tier
from kvtide.tier.pool import Member
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, NamedId, Namespace, ObjectId, TierStats
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END, pack_response_head, parse_request_head

_log = logging.getLogger(__name__)

PROBE_S_MAX = 1.0
# What was found out about tiers is told for so long.
PROBE_KEPT_S = 1.0
CONNECTIONS_MAX = 64
_CONNECTION_S_MAX = 5.0
# No object has this name: keys are digests.
_NOBODYS = ObjectId(Namespace(bytes(32)), BlockKey(bytes(32)))
_JSON = [("Content-Type", "application/json"), ("Connection", "close")]


PAGES = {
    "/healthz": Route.HEALTH,
    "/metrics": Route.METRICS,
    "/events": Route.EVENTS,
    "/": Route.DASHBOARD,
    "/v1/status": Route.STATUS,
    "/v1/history": Route.STATUS,
}
# How often a reader of events that has them all looks for new ones, and how often it hears that there are none.
_EVENTS_POLL_S = 0.2
_HEARTBEAT_S = 15.0
# Content-Security-Policy of the page: its own script and style, and requests to its own server.
DASHBOARD_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DASHBOARD_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", DASHBOARD_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)


class Readiness(msgspec.Struct, frozen=True):
    """Conditions of a server that is ready, by name, and whether they hold: tiers, a region's centre, a pool's map."""

    is_ready: bool
    is_draining: bool
    parts: dict[str, bool]


class Health:
    """Answers `/livez` and `/readyz`. Runs on the event loop between `open` and `close`."""

    def __init__(
        self, store: TierStack, region: Region | None, member: Member | None, now_s: Callable[[], float]
    ) -> None:
        self._store = region.local if region is not None else store
        self._region = region
        self._member = member
        self._now_s = now_s
        # The first moment of a shutdown: balancers should look elsewhere from then on.
        self.is_draining = False
        self._prober = ThreadPoolExecutor(1, "kvtide-health")
        self._probing: asyncio.Future[dict[str, bool]] | None = None
        self._tiers: dict[str, bool] = {}
        self._probed_s = float("-inf")
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port. OSError if that can't be done."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._prober.shutdown(wait=False, cancel_futures=True)

    async def readiness(self) -> Readiness:
        """Return what is there now, as far as it says so in time."""
        parts = {f"tier {name}": is_up for name, is_up in (await self._tiers_up()).items()}
        if self._region is not None and self._region.central is not None:
            parts["centre"] = self._region.central.as_of_s is not None
        if self._region is not None and self._region.recovery is not None:
            parts["regions"] = self._region.recovery.is_over
        if self._member is not None:
            parts["pool"] = self._member.placement is not None
        return Readiness(all(parts.values()) and not self.is_draining, self.is_draining, parts)

    async def _tiers_up(self) -> dict[str, bool]:
        if self._now_s() - self._probed_s >= PROBE_KEPT_S:
            if self._probing is None or self._probing.done():
                self._probing = asyncio.get_running_loop().run_in_executor(self._prober, self._probe)
            done, _ = await asyncio.wait([self._probing], timeout=PROBE_S_MAX)
            # One that hangs keeps the prober, and with it all of them down until it answers.
            self._tiers = self._probing.result() if done else dict.fromkeys(self._store.tier_names, False)
            self._probed_s = self._now_s()
        return self._tiers

    def _probe(self) -> dict[str, bool]:
        up = {name for name, tier in self._store.open_tiers.items() if _answers(tier)}
        return {name: name in up for name in self._store.tier_names}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(_CONNECTION_S_MAX):
                    writer.write(await self._answer(await reader.readuntil(HEAD_END)))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("a health check went away: %s", error)
        finally:
            self._connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, data: bytes) -> bytes:
        try:
            path = parse_request_head(data).target.partition("?")[0]
        except RequestRefused as error:
            return _packed(error.status, {"error": str(error)})
        if path in {"/livez", "/healthz"}:
            return _packed(200, {"is_alive": True})
        if path != "/readyz":
            return _packed(404, {"error": "expected /livez or /readyz"})
        found = await self.readiness()
        return _packed(200 if found.is_ready else 503, found)


def _answers(tier: Tier) -> bool:
    try:
        tier.contains(_NOBODYS)
    except TierUnavailable as error:
        _log.debug("%s does not answer: %s", tier.name, error)
        return False
    return True


def _packed(status: int, value: object) -> bytes:
    body = msgspec.json.encode(value) + b"\n"
    return pack_response_head(status, [*_JSON, ("Content-Length", len(body))]) + body


def dashboard_page() -> bytes:
    """Return the page."""
    return files("kvtide.server").joinpath("dashboard.html").read_bytes()


class Observatory:
    """Counters and events of one server, and the observer of its tiers."""

    def __init__(
        self, tier: TierStack, scheduler: Scheduler, names: Names, epoch: str, quotas: Quotas, is_region: bool
    ) -> None:
        self.quotas = quotas
        # A region's own tiers are a stack in this one: quotas count those.
        self._is_region = is_region
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.events = EventLog(epoch)
        self.tier_stats: Sequence[TierStats] = ()
        self._tier_names = tier.tier_names
        self._names = names
        self.registry.register(SourceCollector(lambda: self.tier_stats, scheduler))

    def placed(self, object_id: ObjectId, tier: int, size: int) -> None:
        """Note that an object was stored in a tier, under the name that its owner gave its namespace."""
        if isinstance(object_id, NamedId):
            self._names.note(object_id)
        if not self._is_region:
            self.quotas.placed(object_id, tier, size)
        self._append(EventKind.STORED, object_id, tier)

    def removed(self, object_id: ObjectId, tier: int) -> None:
        """Note that an object left a tier."""
        if not self._is_region:
            self.quotas.removed(object_id, tier)
        self._append(EventKind.REMOVED, object_id, tier)

    def invalidated(self, namespace: Namespace) -> None:
        """Note that a namespace's generation has risen: none of its blocks is here any more."""
        self.events.append(EventKind.INVALIDATED, namespace)

    def _append(self, kind: EventKind, object_id: ObjectId, tier: int) -> None:
        own = self._names.own(object_id)
        if own is not None:
            self.events.append(kind, own.namespace, own.key.hex(), self._tier_names[tier])


class Observability:
    """Answers for the pages. Runs on the event loop, as the scheduler does that it reads."""

    def __init__(
        self,
        tier: TierStack,
        scheduler: Scheduler,
        observatory: Observatory,
        workers: Workers,
        local: TierStack,
        outlook: Outlook,
    ) -> None:
        self._local = local
        self._outlook = outlook
        self._history = History()
        self._tier = tier
        self._scheduler = scheduler
        self._observatory = observatory
        self._workers = workers
        self._started_s = asyncio.get_running_loop().time()
        self.is_draining = False
        # Requests are still taken, and balancers told to look elsewhere.
        self.is_leaving = False

    async def answer(self, exchange: Exchange, path: str) -> None:
        """Answer GET or HEAD. RequestRefused (404) for a page that there is not."""
        if path == "/healthz":
            if self.is_leaving or self.is_draining:
                raise RequestRefused(503, "draining", retry_after_s=1.0)
            await exchange.reply(200, b"ok\n")
            return
        if path not in PAGES:
            raise RequestRefused(404, "no such page")
        exchange.caller.require(Scope.ADMIN)
        if path == "/events":
            await self._stream_events(exchange)
        elif path == "/":
            await exchange.reply(200, dashboard_page(), DASHBOARD_HEADERS)
        elif path == "/v1/history":
            await exchange.reply(200, history_body(self._history), [("Content-Type", "application/json")])
        else:
            # Tiers may ask the disk for this, so not here.
            stats = await self._workers.read(exchange.owner, self._tier.tier_stats)
            self._observatory.tier_stats = stats
            if path == "/metrics":
                body, kind = generate_latest(self._observatory.registry), "text/plain; version=0.0.4; charset=utf-8"
            else:
                body, kind = msgspec.json.encode(self._status(stats)), "application/json"
            await exchange.reply(200, body, [("Content-Type", kind)])

    def _status(self, stats: Sequence[TierStats]) -> Status:
        uptime_s = asyncio.get_running_loop().time() - self._started_s
        metrics = self._observatory.metrics
        return server_status(metrics, stats, self._scheduler, uptime_s, kvtide.__version__, self._outlook)

    def _own_stats(self) -> list[TierStats]:
        """Return the counters of this server's own tiers, without asking another one."""
        return [tier.stats() for tier in self._local.open_tiers.values() if tier.is_own]

    async def keep_history(self) -> None:
        """Note the counters every SAMPLE_S, and look around, until cancelled."""
        while True:
            self._history.note(Sample.of(self._status(await asyncio.to_thread(self._own_stats))))
            await self._outlook.look()
            await asyncio.sleep(SAMPLE_S)

    async def _stream_events(self, exchange: Exchange) -> None:
        """Send events from after `Last-Event-ID` on until the reader goes away or the server ends."""
        log, stream = self._observatory.events, exchange.stream
        try:
            position = log.position(exchange.head.headers.get("last-event-id"))
        except ValueError as error:
            raise RequestRefused(400, str(error)) from error
        await exchange.begin_stream([("Content-Type", EVENTS_CONTENT_TYPE), ("Cache-Control", "no-store")])
        heard_s = stream.now_s()
        while not self.is_draining and exchange.head.method != "HEAD":
            batch = log.since(position)
            position = batch.next
            body = events_body(batch)
            if not body and stream.now_s() - heard_s >= _HEARTBEAT_S:
                body = HEARTBEAT
            if body:
                await stream.send_all(body, stream.now_s() + exchange.send_s_max)
                heard_s = stream.now_s()
            if not batch.events:
                await asyncio.sleep(_EVENTS_POLL_S)
