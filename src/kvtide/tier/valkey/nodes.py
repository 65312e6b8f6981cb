"""The servers behind a Valkey URL: who owns a key now, and connections that are ready to use. All by redis-py.

A URL is `valkey://[USER:PASSWORD@]HOST[:PORT][,HOST…][/DATABASE][?OPTION=VALUE…]`; `redis://` is the same, `valkeys://`
and `rediss://` are under TLS. Invariant: no caller waits for a map of the cluster; one thread fetches it, and until
it is here calls fail at once.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.evict import Recent
from kvtide.tier.background import Repeater
from kvtide.tier.base import host_and_port
from kvtide.tier.breaker import Breaker, caller_deadline_s
from kvtide.tier.valkey.resp import WAIT_S_MIN, RespSocket

_log = logging.getLogger(__name__)

# What redis-py raises. A cluster that can't be reached, or has no owner of a slot, is no RedisError there.
FAULTS = (RedisError, RedisClusterException, OSError)
CONNECT_S_MAX = 0.5
# What a new connection may wait for before it is ready: to be made, and for the answers to who we are and what we want.
HANDSHAKE_WAITS = 5
CONNECTIONS_MAX = 64
# Twice as many as a cluster should have.
SERVERS_MAX = 2000
# How long a server that did not answer is left alone; then one caller tries it, and the others don't wait.
SHUN_S = 0.5
REFRESH_S_MIN = 0.1
_PORT = 6379
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class ValkeyAddress(NamedTuple):
    """A server's host and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ValkeyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a URL. ValueError for one out of its range.

    `ttl_s` 0: objects stay until the server evicts them. `wait_s_max`: a server that is silent for so long has failed.
    """

    prefix: str = "kvtide"
    ttl_s: int = 0
    value_bytes_max: int = 64 << 20
    wait_s_max: float = 2.0
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix takes 1 to 64 letters, digits and _.:-, got {self.prefix!r}")
        if self.ttl_s < 0 or self.value_bytes_max <= 0 or not 0 < self.wait_s_max < 3600:
            raise ValueError(
                "expected ttl_s >= 0, value_bytes_max > 0 and 0 < wait_s_max < 3600, "
                f"got {self.ttl_s}, {self.value_bytes_max} and {self.wait_s_max}"
            )


@dataclass(frozen=True, slots=True)
class ValkeyTarget:
    """A parsed URL. `shown` names it without the password."""

    addresses: tuple[ValkeyAddress, ...]
    username: str | None
    password: str | None
    database: int
    is_tls: bool
    options: ValkeyOptions
    shown: str


def parse_valkey_url(url: str) -> ValkeyTarget:
    """Parse a URL. ValueError that names what is wrong, never the password."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    shown = f"{parts.scheme}://{hosts}"
    username, has_password, password = credentials.partition(":")
    addresses = tuple(_address(each, shown) for each in hosts.split(","))
    database = parts.path.strip("/") or "0"
    if not (database.isascii() and database.isdecimal()):
        raise ValueError(f"a database is a number, as in {shown}/0, got {database!r}")
    if "sentinel" in parts.scheme or "sentinel" in parts.query:
        raise ValueError(f"Sentinel is not spoken: {shown} must name the servers, primary and replicas, with commas")
    try:
        options = msgspec.convert(dict(parse_qsl(parts.query, keep_blank_values=True)), ValkeyOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"options of {shown}: {error}") from error
    is_tls, secret = parts.scheme in {"valkeys", "rediss"}, unquote(password) if has_password else None
    return ValkeyTarget(addresses, unquote(username) or None, secret, int(database), is_tls, options, shown)


def _address(text: str, shown: str) -> ValkeyAddress:
    has_port = ":" in text.rpartition("]")[2]
    try:
        return ValkeyAddress(*host_and_port(text if has_port else f"{text}:{_PORT}"))
    except ValueError as error:
        raise ValueError(f"{shown} names servers as valkey://localhost:6379 does, with commas: {error}") from error


class _Topology(NamedTuple):
    """A cluster, or one server at an address, as redis-py knows it. A standby takes no writes."""

    client: RedisCluster | redis.Redis
    address: ValkeyAddress
    is_standby: bool = False


class _Connection(NamedTuple):
    """A connection of redis-py, and our way to speak on its socket."""

    connection: Any
    resp: RespSocket

    def is_ready(self) -> bool:
        """Tell whether the connection still stands, with nothing left on it."""
        try:
            return not self.connection.can_read(0) if self.resp.is_tls else self.resp.is_idle()
        except FAULTS:
            return False


class _Server:
    """Connections to one server."""

    def __init__(self, address: ValkeyAddress, breaker: Breaker) -> None:
        self.address = address
        self.breaker = breaker
        self.idle: list[_Connection] = []
        self.lent = 0


class ValkeyNodes:
    """Keys to servers to connections. Thread-safe between `open` and `close`."""

    def __init__(self, target: ValkeyTarget, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._settings: dict[str, Any] = {
            "username": target.username,
            "password": target.password,
            "socket_timeout": target.options.wait_s_max,
            "socket_connect_timeout": CONNECT_S_MAX,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        if target.is_tls:
            ca, certificate, key = target.options.ca, target.options.certificate, target.options.key
            self._settings |= {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
        self._lock = threading.Lock()
        # Of the servers that were named last: a cluster's come and go, each time at another address.
        self._servers: Recent[ValkeyAddress, _Server] = Recent(SERVERS_MAX)
        self._topology: _Topology | None = None
        self._reason = "not connected yet"
        self._wanted = threading.Event()
        self._is_open = False
        self._refresher = Repeater(self._refresh_when_wanted, "kvtide-valkey")

    def open(self) -> None:
        """Connect. A server that can't be reached is no error: it is tried again when somebody needs it."""
        self._is_open = True
        self._refresh()
        self._refresher.open()

    def close(self) -> None:
        """Disconnect from everything. Idempotent."""
        self._is_open = False
        self._refresher.stop()
        self._wanted.set()
        self._refresher.close()
        topology, self._topology = self._topology, None
        with self._lock:
            servers = [*self._servers.values()]
            self._servers.clear()
        for server in servers:
            self._drop_idle(server)
        if topology is not None:
            topology.client.close()

    def owner(self, key: bytes) -> ValkeyAddress:
        """Return the server that owns a key as far as we know. TierUnavailable without a map, or a hole in it."""
        topology = self._topology
        if topology is None:
            self.refresh_soon()
            raise TierUnavailable(f"no Valkey server of {self._target.shown} can be reached: {self._reason}")
        if not isinstance(topology.client, RedisCluster):
            return topology.address
        try:
            node = topology.client.nodes_manager.get_node_from_slot(key_slot(key))
        except (*FAULTS, LookupError) as error:
            self.refresh_soon()
            raise TierUnavailable(f"no Valkey server owns the slot of {key!r} now: {error}") from error
        return ValkeyAddress(str(node.host), int(node.port))

    def primary(self, key: bytes) -> ValkeyAddress:
        """Return the server that takes writes of a key. TierUnavailable as `owner`, and while a replica stands in."""
        address, topology = self.owner(key), self._topology
        if topology is not None and topology.is_standby:
            self.refresh_soon()
            raise TierUnavailable(f"{address} is a replica, and no primary of {self._target.shown} answers")
        return address

    def refresh_soon(self) -> None:
        """Let the background thread fetch the map."""
        self._wanted.set()

    @contextmanager
    def connection(self, address: ValkeyAddress) -> Iterator[RespSocket]:
        """Lend a connection that is authenticated and idle. TierUnavailable if it can't be had in time, or fails."""
        deadline_s = caller_deadline_s()
        with self._lock:
            if (server := self._servers.get(address)) is None:
                breaker = Breaker(1, SHUN_S, self._clock, self._target.options.wait_s_max)
                self._servers[address] = server = _Server(address, breaker)
        opened = self._take(server, deadline_s)
        is_whole = False
        try:
            opened.resp.give_up_at(deadline_s)
            yield opened.resp
            is_whole = True
            server.breaker.note_success()
        except OSError as error:
            raise self._fault(server, error, self._clock.monotonic_s() >= deadline_s - WAIT_S_MIN) from error
        finally:
            self._give_back(server, opened, is_whole)

    def _take(self, server: _Server, deadline_s: float) -> _Connection:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s < WAIT_S_MIN:
            raise TierUnavailable(f"the caller's deadline passed before {server.address} could be asked")
        if not server.breaker.allows():
            raise TierUnavailable(f"{server.address} did not answer just now")
        with self._lock:
            if server.lent >= CONNECTIONS_MAX:
                raise TierUnavailable(f"all {CONNECTIONS_MAX} connections to {server.address} are in use")
            server.lent += 1
            opened = server.idle.pop() if server.idle else None
        if opened is not None and opened.is_ready():
            return opened
        try:
            if opened is not None:
                opened.connection.disconnect()
            return self._new_connection(server.address, left_s / HANDSHAKE_WAITS)
        except FAULTS as error:
            self._give_back(server, None, is_whole=False)
            is_late = isinstance(error, TimeoutError | redis.TimeoutError)
            is_cut = is_late and left_s / HANDSHAKE_WAITS < self._target.options.wait_s_max
            raise self._fault(server, error, is_cut) from error

    def _new_connection(self, address: ValkeyAddress, wait_s_max: float) -> _Connection:
        kind = redis.SSLConnection if self._target.is_tls else redis.Connection
        waits = {name: min(wait_s_max, self._settings[name]) for name in ("socket_timeout", "socket_connect_timeout")}
        settings = {**self._settings, **waits}
        connection: Any = kind(host=address.host, port=address.port, db=self._target.database, **settings)
        connection.connect()
        # redis-py keeps the socket that it connected, authenticated and put under TLS to itself.
        return _Connection(connection, RespSocket(connection._sock, self._target.options.wait_s_max, self._clock))

    def _give_back(self, server: _Server, opened: _Connection | None, is_whole: bool) -> None:
        with self._lock:
            server.lent -= 1
            if is_whole and opened is not None and self._is_open:
                server.idle.append(opened)
                opened = None
        if opened is not None:
            opened.connection.disconnect()

    def _fault(self, server: _Server, error: Exception, is_cut: bool) -> TierUnavailable:
        if is_cut and not server.breaker.is_open:
            # The caller's own deadline says nothing of the server.
            return TierUnavailable(f"{server.address}: no answer before the caller's deadline")
        server.breaker.note_fault()
        self.refresh_soon()
        # Of a server that is gone for good they would stay.
        self._drop_idle(server)
        is_late = isinstance(error, BlockingIOError | TimeoutError)
        what = f"no answer within {self._target.options.wait_s_max} s" if is_late else str(error)
        return TierUnavailable(f"{server.address}: {what or type(error).__name__}")

    def _drop_idle(self, server: _Server) -> None:
        with self._lock:
            idle, server.idle = server.idle, []
        for opened in idle:
            opened.connection.disconnect()

    def clients(self) -> list[redis.Redis]:
        """Return a redis-py client of each server that owns slots; none before one was reached."""
        if self._topology is None:
            return []
        client = self._topology.client
        if isinstance(client, RedisCluster):
            return [client.get_redis_connection(node) for node in client.get_primaries()]
        return [client]

    def _refresh_when_wanted(self) -> float:
        self._wanted.wait()
        self._wanted.clear()
        if self._is_open:
            self._refresh()
        return REFRESH_S_MIN

    def _refresh(self) -> None:
        topology = self._topology
        try:
            if topology is not None and isinstance(topology.client, RedisCluster):
                topology.client.nodes_manager.initialize()
            elif topology is None or len(self._target.addresses) > 1:
                # Of several servers without a cluster another one may have become the primary.
                self._topology = self._connect()
                if topology is not None:
                    topology.client.close()
        except (*FAULTS, TierUnavailable) as error:
            self._reason = str(error) or type(error).__name__
            _log.debug("no map of %s: %s", self._target.shown, error)

    def _connect(self) -> _Topology:
        """Ask the servers in turn for one of a cluster, or for the primary; without that a replica serves reads."""
        problem: Exception | None = None
        standby: _Topology | None = None
        settings = {**self._settings, "ssl": self._target.is_tls}
        for address in self._target.addresses:
            client = redis.Redis(host=address.host, port=address.port, db=self._target.database, **settings)
            try:
                # It connects again when it is asked for more.
                with client:
                    said = client.info()
            except FAULTS as error:
                problem = error
                continue
            if said.get("cluster_enabled") == 1:
                seeds = [ClusterNode(each.host, each.port) for each in self._target.addresses]
                return _Topology(RedisCluster(startup_nodes=seeds, **settings), address)
            if said.get("redis_mode") == "sentinel":
                problem = TierUnavailable(
                    f"{address} is a Sentinel and keeps no data; the URL names the servers themselves"
                )
            elif said.get("role", "master") == "master" or len(self._target.addresses) == 1:
                # A server alone is taken as it is: a replica can be read.
                return _Topology(client, address)
            else:
                standby = standby or _Topology(client, address, is_standby=True)
        if standby is not None:
            return standby
        assert problem is not None
        raise problem
