"""A running server: the socket it listens on, its connections, its threads, and the order in which they end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import InitVar, dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtide.clock import Clock
from kvtide.server.auth import tenants_named
from kvtide.server.gateway import Gateway
from kvtide.server.health import Health
from kvtide.server.http import Acceptor, BodyBuffers, Reception, Resources, Sender, Workers, listener_on
from kvtide.server.logs import AccessLog
from kvtide.server.metrics import Metrics, SourceCollector
from kvtide.server.objects import ObjectRequests, Uploads
from kvtide.server.quotas import OTHERS, Quotas
from kvtide.server.records import RecordRequests
from kvtide.server.regions import Backing
from kvtide.server.scheduler import Scheduler
from kvtide.server.settings import ListenAddress, Live, ServerSettings, parse_address, records_path
from kvtide.tier.pool import Member

_log = logging.getLogger(__name__)

# How often uploads are looked for that rest too long, and objects that a quota lets be no longer; who asks for one of
# those finds it gone at once.
_EXPIRY_S = 10.0


@dataclass(eq=False, repr=False)
class Service:
    """Serves what the caller has opened, until it is told to stop. `read` reads the settings again, for `reload`."""

    settings: InitVar[ServerSettings]
    _backing: Backing
    clock: InitVar[Clock]
    _member: Member | None = None
    _read: Callable[[], ServerSettings] | None = None

    def __post_init__(self, settings: ServerSettings, clock: Clock) -> None:
        self.live, backing = Live(settings, clock), self._backing
        self._address = parse_address(settings.listen)
        self._addresses = [self._address]
        if settings.socket_path is not None:
            self._addresses.append(ListenAddress("", 0, str(settings.socket_path)))
        self.acceptor = Acceptor(self.live, self._address)
        self._sender: Sender | None = None
        self.health, self.health_port = Health(backing, self._member, clock), 0
        self._access_log = AccessLog(lambda: self.live.limits, clock)
        self.buffers = BodyBuffers(settings.limits.buffer_bytes_max, settings.limits.tenant_buffer_bytes_max)
        self.scheduler = Scheduler(settings.sending, random.Random())
        self.quotas = Quotas(lambda: self.live.settings.quotas, clock.wall_s)
        self.uploads = Uploads(lambda: self.live.limits, clock.monotonic_s)
        # A region's own tiers are a stack in this one: quotas count those.
        backing.local.observe(self.quotas.placed, self.quotas.removed)
        self.metrics = Metrics(CollectorRegistry())
        self._sources = SourceCollector(self.scheduler, self.quotas, self.metrics.label)
        self.metrics.registry.register(self._sources)
        if (sync := backing.synchroniser) is not None:
            watch, waiting = self.metrics.watch, "Objects that the centre has not got yet"
            watch("kvtide_region_waiting_objects", waiting, lambda: len(sync.manifest))
            watch("kvtide_region_given_up_objects", "Objects that the centre did not take", lambda: sync.given_up)
            heard = "Unix time until which all that the centre wrote is known"
            watch("kvtide_region_as_of_seconds", heard, lambda: backing.as_of_s() or 0.0)
        for tenant in tenants_named(settings.grants):
            # Before names that anybody may make up.
            self.metrics.label(tenant)

    async def run(self, stop: asyncio.Event, on_listening: Callable[[ListenAddress], None]) -> None:
        """Serve until `stop` is set, then drain. OSError if the address can't be had; `on_listening` gets it."""
        if self.quotas.is_counting:
            settings = self.live.settings
            tenants = sorted({*settings.quotas, *tenants_named(settings.grants)} - {OTHERS})
            generation = self._backing.records.generation
            await asyncio.to_thread(self.quotas.recount, self._backing.local, tenants, generation)
        with ExitStack() as stack:
            listeners = [stack.enter_context(listener_on(address)) for address in self._addresses]
            workers = stack.enter_context(closing(Workers(self.live.limits.io_threads)))
            self.acceptor.mover.open()
            stack.callback(self.acceptor.mover.close)
            shared = Resources(self.live, self.metrics, workers, self.buffers)
            gateway = self._gateway(shared)
            accepting = [asyncio.create_task(self.acceptor.accept(listener, gateway.serve)) for listener in listeners]
            stack.callback(self.health.close)
            if self.live.settings.health is not None:
                where = parse_address(self.live.settings.health)
                self.health_port = await self.health.open(where.host, where.port)
            where = self._address
            on_listening(where if where.path else where._replace(port=listeners[0].getsockname()[1]))
            stopping, beside = asyncio.create_task(stop.wait()), asyncio.create_task(self._drop_expired())
            done, _ = await asyncio.wait({*accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                self.health.is_draining = True
                done, _ = await asyncio.wait(accepting, timeout=self.live.settings.drain_delay_s)
            # Its waits for a centre that is silent and ours for connections are over at the same time.
            self._backing.stop()
            # Who connects until the last request has ended hears 503, so that balancers need not guess.
            await self.acceptor.drain(gateway.drain, self.live.limits.drain_s_max)
            for task in (*accepting, stopping, beside):
                task.cancel()
            await asyncio.gather(*accepting, stopping, beside, return_exceptions=True)
            # A successor may bind as soon as nobody listens: what lies there then is its own.
            for address in self._addresses:
                if address.path:
                    Path(address.path).unlink(missing_ok=True)
            for listener in listeners:
                listener.close()
            await self.acceptor.end()
            self._access_log.flush()
            for task in done.intersection(accepting):
                # It ends by a fault alone: better no server than one that is deaf.
                task.result()

    def _gateway(self, shared: Resources) -> Gateway:
        backing, settings = self._backing, self.live.settings
        self._sender = Sender(self.scheduler, shared.workers, settings.limits.stall_s_max, shared.metrics)
        objects = ObjectRequests(backing, shared, self._sender, self.quotas, self.uploads, self._member)
        # Records last as long as what they are about: in a file, unless all of that is in memory.
        is_memory = all(url.startswith("memory://") for url in settings.tiers)
        are_kept = is_memory or records_path(settings) is not None
        records = RecordRequests(backing.records, backing.central, shared, are_kept)
        reception = Reception(self.live, self.acceptor.limits)
        return Gateway(backing, shared, reception, objects, records, self._sources, self.health, self._access_log)

    def reload(self) -> None:
        """Read the settings again; those that can't be used change nothing. Call it on the event loop."""
        if self._read is None:
            _log.warning("there is no file of settings to read again")
            return
        try:
            waiting = self.live.adopt(self._read())
        except ValueError as error:
            _log.error("the settings stay as they are: %s", error)
            return
        (self._sender or self.scheduler).adopt(self.live.settings.sending)
        _log.info("settings read again%s", f"; these wait for a restart: {', '.join(waiting)}" if waiting else "")

    async def _drop_expired(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            self.uploads.drop_idle()
            # A machine that has no thread to give now may have one next time.
            with suppress(RuntimeError):
                for object_id in await asyncio.to_thread(self.quotas.expired):
                    await asyncio.to_thread(self._backing.local.delete, object_id, "expired")

    def check(self) -> None:
        """AssertionError if buffers or send slots are lost. Call it while no request is under way."""
        self.buffers.check()
        self.acceptor.limits.check()
        self.uploads.check()
        assert self.buffers.lent_bytes == 0, f"{self.buffers.lent_bytes} bytes of buffers are lent to nobody"
        self.scheduler.check()
        self.quotas.check()
        assert self.scheduler.slots_used == 0
