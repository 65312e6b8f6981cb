"""A running server: the socket it listens on, its connections, its threads, and the order in which they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import resource
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.server.auth import ProxyHeader, read_proxy_header, tenants_named
from kvtide.server.gateway import Gateway
from kvtide.server.http import (
    AllowedHosts,
    BodyBuffers,
    Connection,
    ConnectionLimits,
    Guest,
    Mover,
    Reception,
    Sender,
    Turns,
    Workers,
    account_of,
    bound,
    connections_for,
    host_of,
    listener_on,
    turn_away,
)
from kvtide.server.lending import Lending
from kvtide.server.live import Live, SettingsFile
from kvtide.server.member import Member
from kvtide.server.names import Listing, Names
from kvtide.server.objects import ObjectRequests
from kvtide.server.observe import AccessLog, Health, Observability, Observatory, Outlook
from kvtide.server.quotas import OTHERS, QuotaCollector, Quotas
from kvtide.server.regions import RecordRequests, Records, Region, RegionSettings, centre_of, region_of
from kvtide.server.scheduler import Scheduler
from kvtide.server.settings import ListenAddress, ServerSettings, are_records_kept, parse_address, records_path
from kvtide.tier import tiers_of
from kvtide.tier.stack import TierStack

_log = logging.getLogger(__name__)

# The listener is none any more. Of other faults a connection is the cause, or a lack of descriptors, memory or rights,
# and connections wait in the backlog meanwhile.
_DEAF = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})
_ACCEPT_PAUSE_S = 0.1
# How often the files of the settings are looked at.
_SETTINGS_POLL_S = 2.0
# How often objects are looked for that a quota lets be no longer; who asks for one finds it gone at once.
_EXPIRY_S = 10.0
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
# A reader on this machine gets the bytes while they are in the processor's cache: 0.18 instead of 0.26 s of CPU a GB,
# half as much throughput again. Over a network the kernel knows better.
_LOOPBACK_SEND_BYTES = 256 << 10


class Backing(NamedTuple):
    """What a server answers from, and what it knows: records, names, and other regions if there are any."""

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
        self._tasks: dict[Guest, asyncio.Task[None]] = {}
        self._connections = 0
        self._mover = Mover()
        self._sender: Sender | None = None
        # Connections of proxies that have not said yet whom they are of.
        self._introducing: set[asyncio.Task[None]] = set()
        self.health = Health(tier, backing.region, member, clock.monotonic_s)
        self.health_port = 0
        self._access_log = AccessLog(lambda: self.live.limits, clock)
        limits = settings.limits
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.doors = ConnectionLimits(connections_for(limits, descriptors), limits.tenant_connections_max, self._cut)
        self.buffers = BodyBuffers(settings.limits.buffer_bytes_max, settings.limits.tenant_buffer_bytes_max)
        self.scheduler = Scheduler(settings.sending, random.Random())
        self.quotas = Quotas(lambda: self.live.settings.quotas, clock.wall_s)
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
        return len(self._tasks)

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
            self._mover.open(loop)
            stack.callback(self._mover.close)
            gateway = self._gateway(loop, workers)
            accepting = [asyncio.create_task(self._accept(listener, gateway)) for listener in listeners]
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
            await self._drain(gateway, self.live.limits.drain_s_max)
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
            self._member,
            region,
        )
        central = region.central if region else None
        records = RecordRequests(stored, central, workers, live, are_records_kept(live.settings))
        outlook = Outlook(self._member, region, self._clock)
        pages = Observability(self._tier, self.scheduler, self.observatory, workers, self._local, outlook)
        settings = live.settings
        is_mine = self._address.is_local and not (settings.grants or settings.is_open_to_all)
        reception = Reception(live, self.doors, Turns(loop), AllowedHosts(is_mine))
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
        """Read the settings anew; those that can't be used change nothing. Call it on the event loop."""
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
        while self.quotas.is_counting:
            await asyncio.sleep(_EXPIRY_S)
            for object_id in await asyncio.to_thread(self.quotas.expired):
                await asyncio.to_thread(self._local.delete, object_id, "expired")

    async def _follow_settings(self) -> None:
        while self._source is not None:
            await asyncio.sleep(_SETTINGS_POLL_S)
            if self._source.has_changed(self.live.settings):
                self.reload()

    async def _accept(self, listener: socket.socket, gateway: Gateway) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                # Without a pause whoever connects without one would be all that happens here.
                await asyncio.sleep(0)
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _DEAF:
                    raise
                _log.warning("can't accept a connection now: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            host = host_of(peer)
            if not self.live.proxies.speaks_for_others(host, ProxyHeader.PROXY_PROTOCOL):
                self._admit(sock, host, gateway, loop)
            elif len(self._introducing) >= self.live.limits.connections_max:
                turn_away(sock)
            else:
                task = loop.create_task(self._introduce(sock, host, gateway))
                self._introducing.add(task)
                task.add_done_callback(self._introducing.discard)

    async def _introduce(self, sock: socket.socket, host: str, gateway: Gateway) -> None:
        """Let a connection in as that of whom a proxy speaks for."""
        try:
            async with asyncio.timeout(self.live.limits.head_s_max):
                client = await read_proxy_header(sock, host)
        except (OSError, TimeoutError, ValueError) as error:
            _log.warning("a connection of the proxy %s is closed: %s", host, error or "its header came too slowly")
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        self._admit(sock, client, gateway, asyncio.get_running_loop())

    def _admit(self, sock: socket.socket, host: str, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        """Take a connection from an address, if there is room for one."""
        self._connections += 1
        account, number = account_of(host), str(self._connections)
        if self.live.proxies.speaks_for_others(host, ProxyHeader.X_FORWARDED_FOR):
            # Its connections are of many clients: no bound of one address holds for them together.
            account = f"{account}#{number}"
        guest = self.doors.enter(number, account, host)
        if guest is None:
            turn_away(sock)
            return
        try:
            self._start(self._set_up(sock), guest, gateway, loop)
        except OSError as error:
            self.doors.leave(guest)
            sock.close()
            _log.debug("a connection was gone before it was taken: %s", error)

    def _set_up(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if host_of(sock.getpeername()) in _LOOPBACK:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
        is_near = sock.family == socket.AF_UNIX and not self._address.path
        if self.live.tls is not None and not is_near:
            return self.live.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock

    def _start(self, sock: socket.socket, guest: Guest, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        stream = Connection(sock, loop, self._mover)
        task = self._tasks[guest] = loop.create_task(gateway.serve(stream, guest))
        task.add_done_callback(partial(self._end, guest, stream))

    def _cut(self, guest: Guest) -> None:
        self._tasks[guest].cancel()

    def _end(self, guest: Guest, stream: Connection, task: asyncio.Task[None]) -> None:
        # A task that was cut before it began has closed nothing.
        stream.close()
        del self._tasks[guest]
        self.doors.leave(guest)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a connection ended with a fault of ours", exc_info=task.exception())

    async def _drain(self, gateway: Gateway, drain_s_max: float) -> None:
        """Close idle connections, wait for busy ones, then end those too."""
        for task in self._introducing:
            task.cancel()
        await asyncio.gather(*self._introducing, return_exceptions=True)
        busy = gateway.drain()
        for guest, task in self._tasks.items():
            if guest not in busy:
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks.values()), timeout=drain_s_max)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def check(self) -> None:
        """AssertionError if buffers or send slots are lost. Call it while no request is under way."""
        self.buffers.check()
        self.doors.check()
        assert self.buffers.lent_bytes == 0, f"{self.buffers.lent_bytes} bytes of buffers are lent to nobody"
        self.scheduler.check()
        self.quotas.check()
        assert self.scheduler.slots_used == 0
