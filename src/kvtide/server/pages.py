"""The server's accounts of itself: health, metrics, events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.auth import Scope
from kvtide.server.http import Exchange, Headers, Resources
from kvtide.server.logs import EVENTS_CONTENT_TYPE, HEARTBEAT, EventKind, EventLog, events_body
from kvtide.server.metrics import Metrics, Route, SourceCollector
from kvtide.server.quotas import Quotas
from kvtide.server.regions import Backing
from kvtide.server.scheduler import Scheduler
from kvtide.tier import Tier
from kvtide.tier.pool import Member
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
# How often a reader of events that has them all looks for new ones, and how often it hears that there are none.
_EVENTS_POLL_S = 0.2
_HEARTBEAT_S = 15.0
PAGES = {"/healthz": Route.HEALTH, "/metrics": Route.METRICS, "/events": Route.EVENTS}


class Health:
    """Answers `/livez` and `/readyz` on a port of their own. Runs on the event loop between `open` and `close`."""

    def __init__(self, backing: Backing, member: Member | None, clock: Clock) -> None:
        self._backing = backing
        self._member = member
        self._clock = clock
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

    async def _parts(self) -> dict[str, bool]:
        """Conditions of a server that is ready, by name, and whether they hold as far as is known in time."""
        parts = {f"tier {name}": is_up for name, is_up in (await self._tiers_up()).items()}
        if self._backing.central is not None:
            parts["centre"] = self._backing.as_of_s() is not None
        if self._backing.recovery is not None:
            parts["regions"] = self._backing.recovery.is_over
        if self._member is not None:
            parts["pool"] = self._member.placement is not None
        return parts

    async def _tiers_up(self) -> dict[str, bool]:
        if self._clock.monotonic_s() - self._probed_s >= PROBE_KEPT_S:
            if self._probing is None or self._probing.done():
                self._probing = asyncio.get_running_loop().run_in_executor(self._prober, self._probe)
            done, _ = await asyncio.wait([self._probing], timeout=PROBE_S_MAX)
            # One that hangs keeps the prober, and with it all of them down until it answers.
            self._tiers = self._probing.result() if done else dict.fromkeys(self._backing.local.tier_names, False)
            self._probed_s = self._clock.monotonic_s()
        return self._tiers

    def _probe(self) -> dict[str, bool]:
        store = self._backing.local
        up = {name for name, tier in store.open_tiers.items() if _answers(tier)}
        return {name: name in up for name in store.tier_names}

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
        value: object
        try:
            path = parse_request_head(data).target.partition("?")[0]
            if path in {"/livez", "/healthz"}:
                status, value = 200, {"is_alive": True}
            elif path == "/readyz":
                parts, is_draining = await self._parts(), self.is_draining
                is_ready = all(parts.values()) and not is_draining
                status = 200 if is_ready else 503
                value = {"is_ready": is_ready, "is_draining": is_draining, "parts": parts}
            else:
                raise RequestRefused(404, "expected /livez or /readyz")
        except RequestRefused as error:
            status, value = error.status, {"error": str(error)}
        body = msgspec.json.encode(value) + b"\n"
        headers: Headers = [
            ("Content-Type", "application/json"),
            ("Connection", "close"),
            ("Content-Length", len(body)),
        ]
        return pack_response_head(status, headers) + body


def _answers(tier: Tier) -> bool:
    try:
        tier.contains(_NOBODYS)
    except TierUnavailable as error:
        _log.debug("%s does not answer: %s", tier.name, error)
        return False
    return True


class Observatory:
    """Counters and events of one server, and the observer of its tiers."""

    def __init__(self, backing: Backing, scheduler: Scheduler, quotas: Quotas) -> None:
        self._backing = backing
        self._quotas = quotas
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.events = EventLog(secrets.token_hex(4))
        self.tier_stats: Sequence[TierStats] = ()
        self.registry.register(SourceCollector(lambda: self.tier_stats, scheduler, quotas, self.metrics.label))
        if (sync := backing.synchroniser) is not None:
            for name, text, read in (
                ("waiting_objects", "Objects that the centre has not got yet", lambda: sync.waiting),
                ("given_up_objects", "Objects that the centre did not take", lambda: sync.given_up),
                ("as_of_seconds", "Unix time of the centre's last answer", lambda: backing.as_of_s() or 0.0),
            ):
                Gauge(f"kvtide_region_{name}", text, registry=self.registry).set_function(read)
        backing.store.observe(self)
        # A region's own tiers are a stack in this one: quotas count those.
        self._counts_quotas = backing.local is backing.store
        if not self._counts_quotas:
            backing.local.observe(quotas)
        backing.records.on_raised = self.invalidated

    def placed(self, object_id: ObjectId, tier: int, size: int) -> None:
        """Note that an object was stored in a tier, under the name that its owner gave its namespace."""
        if isinstance(object_id, NamedId):
            self._backing.names.note(object_id)
        if self._counts_quotas:
            self._quotas.placed(object_id, tier, size)
        self._append(EventKind.STORED, object_id, tier)

    def removed(self, object_id: ObjectId, tier: int) -> None:
        """Note that an object left a tier."""
        if self._counts_quotas:
            self._quotas.removed(object_id, tier)
        self._append(EventKind.REMOVED, object_id, tier)

    def invalidated(self, namespace: Namespace) -> None:
        """Note that a namespace's generation has risen: none of its blocks is here any more."""
        self.events.append(EventKind.INVALIDATED, namespace)

    def _append(self, kind: EventKind, object_id: ObjectId, tier: int) -> None:
        own = self._backing.names.own(object_id)
        if own is not None:
            self.events.append(kind, own.namespace, own.key.hex(), self._backing.store.tier_names[tier])


class Pages:
    """Answers for the pages. Runs on the event loop, as the scheduler does that it reads."""

    def __init__(self, backing: Backing, shared: Resources, observatory: Observatory, health: Health) -> None:
        self._backing = backing
        self._shared = shared
        self._observatory = observatory
        self._health = health
        # No more requests are taken.
        self.is_draining = False

    async def answer(self, exchange: Exchange, path: str) -> None:
        """Answer GET or HEAD. RequestRefused (404) for a page that there is not."""
        if path == "/healthz":
            if self._health.is_draining:
                raise RequestRefused(503, "draining", retry_after_s=1.0)
            await exchange.reply(200, b"ok\n")
            return
        if path not in PAGES:
            raise RequestRefused(404, "no such page")
        exchange.caller.require(Scope.ADMIN)
        if path == "/events":
            await self._stream_events(exchange)
            return
        # Tiers may ask the disk for this, so not here.
        read = self._backing.store.tier_stats
        self._observatory.tier_stats = await self._shared.workers.read(exchange.owner, read)
        headers = [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")]
        await exchange.reply(200, generate_latest(self._observatory.registry), headers)

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
