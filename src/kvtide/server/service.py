"""A running server: the socket it listens on, its connections, its threads, and the order in which they end."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.server.auth import tenants_named
from kvtide.server.gateway import Gateway
from kvtide.server.http import Acceptor, BodyBuffers, Reception, Sender, Workers, bound, listener_on
from kvtide.server.lending import Lending
from kvtide.server.live import Live, SettingsFile
from kvtide.server.names import Listing, Names
from kvtide.server.objects import ObjectRequests
from kvtide.server.observe import AccessLog, Health, Observability, Observatory, Outlook
from kvtide.server.quotas import OTHERS, QuotaCollector, Quotas
from kvtide.server.regions import RecordRequests, Records, Region, RegionSettings, centre_of, region_of
from kvtide.server.scheduler import Scheduler
from kvtide.server.settings import ListenAddress, ServerSettings, are_records_kept, parse_address, records_path
from kvtide.server.uploads import Uploads
from kvtide.tier import tiers_of
from kvtide.tier.pool import Member
from kvtide.tier.stack import TierStack

_log = logging.getLogger(__name__)

# How often the files of the settings are looked at.
_SETTINGS_POLL_S = 2.0
# How often uploads are looked for that rest too long, and objects that a quota lets be no longer; who asks for one of
# those finds it gone at once.
_EXPIRY_S = 10.0


class Backing(NamedTuple):
    """A server's sources of answers: tiers, records, names, and other regions if there are any."""

    store: TierStack
    records: Records
    names: Names
    region: Region | None

    def open(self) -> None:
        """Open all of it, the records first: they say what is out of date. TierUnavailable or OSError if one can't."""
        self.records.open()
        self.store.open()
        if self.region is not None:
            self.region.open()

    def close(self) -> None:
        """Close all of it. Idempotent."""
        if self.region is not None:
            self.region.close()
        self.store.close()
        self.records.close()


def backing_for(settings: ServerSettings, clock: Clock) -> Backing:
    """Return what the settings name, not yet opened. ValueError for a bad URL, or a region without a manifest."""
    records = Records(records_path(settings), clock)
    names = Names(records.generation)
    local = tiers_of(settings.tiers, settings.limits.of_tiers(), clock, lambda key: False)
    bounds = RegionSettings(settings.sync_bytes_s_max, settings.limits.object_bytes_max)
    if settings.central is not None:
        if settings.manifest is None:
            raise ValueError("a regional server needs a file for its manifest: --manifest PATH")
        region = region_of(local, settings.central, settings.manifest, bounds, records, names, clock)
        return Backing(region.store, records, names, region)
    centre = centre_of(local, settings.regions, bounds, records, clock) if settings.regions else None
    return Backing(local, records, names, centre)


class Service:
    """Serves what the caller has opened, until it is told to stop."""

    def __init__(
        self,
        settings: ServerSettings,
        backing: Backing,
        clock: Clock,
        member: Member | None = None,
        source: SettingsFile | None = None,
    ) -> None:
        self.live = Live(settings, clock)
        self._source = source
        self._member = member
        self._backing = backing
        self._tier = tier = backing.store
        self._clock = clock
        self._address = parse_address(settings.listen)
        self._addresses = [self._address]
        if settings.socket_path is not None:
            self._addresses.append(ListenAddress("", 0, str(settings.socket_path)))
        self.acceptor = Acceptor(self.live, self._address)
        self._sender: Sender | None = None
        self.health = Health(tier, backing.region, member, clock.monotonic_s)
        self.health_port = 0
        self._access_log = AccessLog(lambda: self.live.limits, clock)
        self.buffers = BodyBuffers(settings.limits.buffer_bytes_max, settings.limits.tenant_buffer_bytes_max)
        self.scheduler = Scheduler(settings.sending, random.Random())
        self.quotas = Quotas(lambda: self.live.settings.quotas, clock.wall_s)
        self.uploads = Uploads(lambda: self.live.limits, clock.monotonic_s)
        # What is on this machine, and counts.
        self._local = backing.region.local if backing.region is not None else tier
        is_region = self._local is not tier
        epoch = secrets.token_hex(4)
        self.observatory = Observatory(tier, self.scheduler, backing.names, epoch, self.quotas, is_region)
        if self.quotas.is_counting:
            label = self.observatory.metrics.label
            self.observatory.registry.register(QuotaCollector(self.quotas, lambda: self.live.settings.quotas, label))
        for tenant in tenants_named(settings.grants):
            # Before names that anybody may make up.
            self.observatory.metrics.label(tenant)
        tier.observe(self.observatory)
        if is_region:
            self._local.observe(self.quotas)
        backing.records.on_raised = self.observatory.invalidated

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return self.acceptor.connections

    async def run(self, stop: asyncio.Event, on_listening: Callable[[ListenAddress], None]) -> None:
        """Serve until `stop` is set, then finish what is under way for at most `drain_s_max`.

        OSError if the address can't be listened on. `on_listening` gets the address with the port that it really is.
        """
        loop = asyncio.get_running_loop()
        if self.quotas.is_counting:
            await asyncio.to_thread(self._recount)
        with ExitStack() as stack:
            listeners = [stack.enter_context(listener_on(address)) for address in self._addresses]
            workers = stack.enter_context(Workers(self.live.limits.io_threads))
            self.acceptor.open(loop)
            stack.callback(self.acceptor.close)
            gateway = self._gateway(loop, workers)
            accepting = [asyncio.create_task(self.acceptor.accept(listener, gateway.serve)) for listener in listeners]
            await self._open_health(stack)
            if self._source is not None:
                # Who hears that we listen may change the file, however late the first look comes.
                self._source.has_changed(self.live.settings)
            on_listening(bound(self._address, listeners[0]))
            stopping = asyncio.create_task(stop.wait())
            following = [
                asyncio.create_task(each)
                for each in (self._follow_settings(), self._drop_expired(), gateway.keep_history())
            ]
            done, _ = await asyncio.wait({*accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                self.health.is_draining = True
                gateway.leave()
                done, _ = await asyncio.wait(accepting, timeout=self.live.settings.drain_delay_s)
            for task in (*accepting, stopping, *following):
                task.cancel()
            await asyncio.gather(*accepting, stopping, *following, return_exceptions=True)
            for task in accepting:
                if task in done:
                    # It ends by a fault alone: better no server than one that is deaf.
                    task.result()
            for listener in listeners:
                listener.close()
            if self._backing.region is not None:
                # Its waits for a centre that is silent and ours for connections are over at the same time.
                self._backing.region.stop()
            await self.acceptor.drain(gateway.drain, self.live.limits.drain_s_max)
            self._access_log.flush()
        for address in self._addresses:
            if address.path:
                Path(address.path).unlink(missing_ok=True)

    def _gateway(self, loop: asyncio.AbstractEventLoop, workers: Workers) -> Gateway:
        live, metrics = self.live, self.observatory.metrics
        sender = self._sender = Sender(self.scheduler, loop, workers, live.limits.stall_s_max, metrics)
        _, stored, names, region = self._backing
        lending = Lending(self.buffers, live.limits, metrics, workers)
        objects = ObjectRequests(
            self._tier,
            stored,
            names,
            sender,
            lending,
            self.buffers,
            live,
            metrics,
            workers,
            self.quotas,
            self.uploads,
            self._member,
            region,
        )
        central = region.central if region else None
        records = RecordRequests(stored, central, workers, live, are_records_kept(live.settings))
        outlook = Outlook(self._member, region, self._clock)
        pages = Observability(self._tier, self.scheduler, self.observatory, workers, self._local, outlook)
        settings = live.settings
        is_mine = self._address.is_local and not (settings.grants or settings.is_open_to_all)
        reception = Reception(live, self.acceptor.limits, loop, is_mine)
        listing = Listing(self._tier, names)
        return Gateway(
            reception, objects, records, listing, self.buffers, pages, live, metrics, workers, self._access_log, region
        )

    async def _open_health(self, stack: ExitStack) -> None:
        stack.callback(self.health.close)
        if self.live.settings.health is not None:
            where = parse_address(self.live.settings.health)
            self.health_port = await self.health.open(where.host, where.port)

    def reload(self) -> None:
        """Read the settings again; those that can't be used change nothing. Call it on the event loop."""
        if self._source is None:
            _log.warning("there is no file of settings to read anew")
            return
        # What is read now is no news to who looks at the files.
        self._source.has_changed(self.live.settings)
        try:
            waiting = self.live.adopt(self._source.read())
        except ValueError as error:
            _log.error("the settings stay as they are: %s", error)
            return
        (self._sender or self.scheduler).adopt(self.live.settings.sending)
        _log.info("settings read anew%s", f"; these wait for a restart: {', '.join(waiting)}" if waiting else "")

    def _recount(self) -> None:
        settings = self.live.settings
        tenants = {*settings.quotas, *tenants_named(settings.grants)}
        self.quotas.recount(self._local, sorted(tenants - {OTHERS}), self._backing.records.generation)

    async def _drop_expired(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            self.uploads.drop_idle()
            for object_id in await asyncio.to_thread(self.quotas.expired):
                await asyncio.to_thread(self._local.delete, object_id, "expired")

    async def _follow_settings(self) -> None:
        while self._source is not None:
            await asyncio.sleep(_SETTINGS_POLL_S)
            if self._source.has_changed(self.live.settings):
                self.reload()

    def check(self) -> None:
        """AssertionError if buffers or send slots are lost. Call it while no request is under way."""
        self.buffers.check()
        self.acceptor.limits.check()
        self.uploads.check()
        assert self.buffers.lent_bytes == 0, f"{self.buffers.lent_bytes} bytes of buffers are lent to nobody"
        self.scheduler.check()
        self.quotas.check()
        assert self.scheduler.slots_used == 0
