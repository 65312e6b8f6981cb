"""A running server: the socket it listens on, its connections, its threads, and the order in which they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import secrets
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.server.auth import Gate
from kvtide.server.bodies import BodyBuffers
from kvtide.server.gateway import Gateway
from kvtide.server.listing import Listing
from kvtide.server.member import Member
from kvtide.server.names import Names
from kvtide.server.objects import ObjectRequests
from kvtide.server.pages import Observatory, Pages
from kvtide.server.rates import Rates
from kvtide.server.record_requests import RecordRequests
from kvtide.server.records import Records
from kvtide.server.regions import Region, RegionSettings, centre_of, region_of
from kvtide.server.scheduler import Scheduler
from kvtide.server.sender import Sender
from kvtide.server.settings import Address, ServerSettings, TlsSettings, are_records_kept, parse_address, records_path
from kvtide.server.stream import Stream
from kvtide.tier import TierStack, tiers_of

__all__ = ["Backing", "Service", "backing_for"]

_log = logging.getLogger(__name__)

_BACKLOG = 1024
# The system has no descriptor left: connections wait in the backlog meanwhile.
_ACCEPT_PAUSE_S = 0.1
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
# A reader on this machine gets the bytes while they are in the processor's cache: 0.18 instead of 0.26 s of CPU a GB,
# half as much throughput again. Over a network the kernel knows better.
_LOOPBACK_SEND_BYTES = 256 << 10
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def _store_for(settings: ServerSettings, clock: Clock) -> TierStack:
    """Return the tiers that the settings name as one, not yet opened. ValueError for a bad URL."""
    return tiers_of(settings.tiers, settings.limits.of_tiers(), clock, lambda key: False)


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
    local = _store_for(settings, clock)
    bounds = RegionSettings(settings.sync_bytes_s_max, settings.limits.object_bytes_max)
    if settings.central is not None:
        if settings.manifest is None:
            raise ValueError("a regional server needs a file for its manifest: --manifest PATH")
        region = region_of(local, settings.central, settings.manifest, bounds, records, names, clock)
        return Backing(region.store, records, names, region)
    centre = centre_of(local, settings.regions, bounds, clock) if settings.regions else None
    return Backing(local, records, names, centre)


class Service:
    """Serves what the caller has opened, until it is told to stop."""

    def __init__(self, settings: ServerSettings, backing: Backing, clock: Clock, member: Member | None = None) -> None:
        self._settings = settings
        self._member = member
        self._backing = backing
        self._tier = tier = backing.store
        self._clock = clock
        self._address = parse_address(settings.listen)
        self._addresses = [self._address]
        if settings.socket_path is not None:
            self._addresses.append(Address("", 0, str(settings.socket_path)))
        self._tls = _tls_context(settings.tls) if settings.tls else None
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._connections = 0
        self.buffers = BodyBuffers(settings.limits.buffer_bytes_max, settings.limits.tenant_buffer_bytes_max)
        self.scheduler = Scheduler(settings.sending, random.Random())
        self.observatory = Observatory(tier, self.scheduler, backing.names, secrets.token_hex(4))
        tier.observe(self.observatory)
        backing.records.on_raised = self.observatory.invalidated

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._tasks)

    async def run(self, stop: asyncio.Event, on_listening: Callable[[Address], None]) -> None:
        """Serve until `stop` is set, then finish what is under way for at most `drain_s_max`.

        OSError if the address can't be listened on. `on_listening` gets the address with the port that it really is.
        """
        limits = self._settings.limits
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            listeners = [stack.enter_context(_listener(address)) for address in self._addresses]
            workers = stack.enter_context(ThreadPoolExecutor(limits.io_threads, "kvtide-tiers"))
            gateway = self._gateway(loop, workers)
            accepting = [asyncio.create_task(self._accept(listener, gateway)) for listener in listeners]
            on_listening(_bound(self._address, listeners[0]))
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait({*accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*accepting, stopping):
                task.cancel()
            await asyncio.gather(*accepting, stopping, return_exceptions=True)
            for task in accepting:
                if task in done:
                    # It ends by a fault alone: better no server than one that is deaf.
                    task.result()
            for listener in listeners:
                listener.close()
            await self._drain(gateway, limits.drain_s_max)
        for address in self._addresses:
            if address.path:
                Path(address.path).unlink(missing_ok=True)

    def _gateway(self, loop: asyncio.AbstractEventLoop, workers: Executor) -> Gateway:
        limits, metrics = self._settings.limits, self.observatory.metrics
        sender = Sender(self.scheduler, loop, workers, limits.stall_s_max, metrics)
        _, stored, names, region = self._backing
        objects = ObjectRequests(
            self._tier, stored, names, sender, self.buffers, limits, metrics, workers, self._member, region
        )
        central = region.central if region else None
        records = RecordRequests(stored, central, workers, limits, are_records_kept(self._settings))
        pages = Pages(self._tier, self.scheduler, self.observatory, workers)
        gate = Gate(self._settings.grants, self._clock)
        listing, rates = Listing(self._tier, names), Rates(limits.tenant_requests_s_max)
        return Gateway(gate, objects, records, listing, pages, rates, limits, metrics, workers, self._clock)

    async def _accept(self, listener: socket.socket, gateway: Gateway) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}:
                    raise
                _log.warning("can't accept a connection now: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._tasks) >= self._settings.limits.connections_max:
                _turn_away(sock)
                continue
            self._connections += 1
            try:
                self._start(self._set_up(sock, peer), gateway, loop)
            except OSError as error:
                sock.close()
                _log.debug("a connection was gone before it was taken: %s", error)

    def _set_up(self, sock: socket.socket, peer: object) -> socket.socket:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if isinstance(peer, tuple) and peer[0] in _LOOPBACK:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
        is_near = sock.family == socket.AF_UNIX and not self._address.path
        if self._tls is not None and not is_near:
            return self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock

    def _start(self, sock: socket.socket, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        client = str(self._connections)
        task = loop.create_task(gateway.serve(Stream(sock, loop), client))
        self._tasks[task] = client
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            _log.error("a connection ended with a fault of ours", exc_info=task.exception())

    async def _drain(self, gateway: Gateway, drain_s_max: float) -> None:
        """Close idle connections, wait for busy ones, then end those too."""
        busy = gateway.drain()
        for task, client in list(self._tasks.items()):
            if client not in busy:
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=drain_s_max)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """AssertionError if buffers or send slots are lost. Call it while no request is under way."""
        self.buffers.check()
        assert self.buffers.lent_bytes == 0, f"{self.buffers.lent_bytes} bytes of buffers are lent to nobody"
        self.scheduler.check()
        assert self.scheduler.slots_used == 0


def _listener(address: Address) -> socket.socket:
    if address.path:
        path = Path(address.path)
        if path.is_socket():
            # Left by a server that was killed: one that lives answers.
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(address.path) == 0:
                    raise OSError(errno.EADDRINUSE, f"another server listens on {address}")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.path)
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _bound(address: Address, listener: socket.socket) -> Address:
    return address if address.path else address._replace(port=listener.getsockname()[1])


def _turn_away(sock: socket.socket) -> None:
    with sock:
        try:
            sock.send(_BUSY, socket.MSG_DONTWAIT)
        except OSError as error:
            _log.debug("a connection too many went away: %s", error)


def _tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return a context of TLS 1.2 and up. ValueError if a file can't be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file)
        if settings.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(settings.client_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"can't use the TLS files {settings.cert_file}, {settings.key_file}: {error}") from error
    return context
