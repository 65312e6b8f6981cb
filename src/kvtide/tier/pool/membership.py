"""Sources of a pool's map (a list in the URL, a file, DNS, or etcd), and who follows it.

`pool://HOST:PORT,HOST:PORT`, `pool+file:///PATH`, `pool+dns://NAME:PORT`, `pool+etcd://HOST:PORT[,…]/PREFIX`, and
`pool+etcds://…` for etcd under TLS. In etcd each server keeps its own entry under a lease; who reads them has the map.

Invariant: whoever reads one source at one time gets one map, so that clients and servers agree without talking.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from kvtide.errors import TierUnavailable
from kvtide.tier.background import LastingFault, Repeater
from kvtide.tier.base import host_and_port
from kvtide.tier.http import tls_context
from kvtide.tier.pool.placement import SERVERS_MAX, Placement, PlacementKind, PoolMap, PoolServer
from kvtide.types import BlockKey

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

POLL_S = 1.0
# A question to etcd takes at most so long.
REQUEST_S_MAX = 2.0
# A server that is gone is out of the map after so long.
LEASE_S = 5
ANSWER_BYTES_MAX = 8 << 20
MAP_BYTES_MAX = 8 << 20
_LOGGED_MAX = 1000
_CLOSE_S_MAX = 5.0
ETCD_OPTIONS = frozenset({"etcd_ca_file", "etcd_cert_file", "etcd_key_file", "etcd_user_file"})


class Membership(ABC):
    """A source of maps, asked again and again. `era` changes when epochs start over, as after a loss of data."""

    era = ""

    @abstractmethod
    def read(self) -> PoolMap:
        """Return the map as it is now. May wait. TierUnavailable if it can't be had, ValueError if it is none."""


@dataclass(eq=False)
class StaticMembership(Membership):
    """A map that never changes."""

    pool: PoolMap

    def read(self) -> PoolMap:
        return self.pool


@dataclass(eq=False)
class FileMembership(Membership):
    """A map in a JSON file (docs/operations.md). Replace the file whole, with a larger epoch."""

    path: Path

    def read(self) -> PoolMap:
        try:
            data = self.path.read_bytes()
            if len(data) > MAP_BYTES_MAX:
                raise ValueError(f"a pool's map has at most {MAP_BYTES_MAX} bytes, got {len(data)}")
            return msgspec.json.decode(data, type=PoolMap)
        except OSError as error:
            raise TierUnavailable(f"can't read the pool's map: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"not a pool's map: {error}") from error


@dataclass(eq=False)
class DnsMembership(Membership):
    """Every address that a name has is a server. The epoch counts the changes that this process saw."""

    host: str
    port: int
    replicas: int
    kind: PlacementKind
    resolve: Callable[..., Sequence[Any]] = socket.getaddrinfo
    scheme: Literal["http", "https"] = "http"
    _known: PoolMap | None = field(default=None, init=False)

    def read(self) -> PoolMap:
        try:
            found = self.resolve(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TierUnavailable(f"can't resolve {self.host}: {error}") from error
        hosts = sorted({entry[4][0] for entry in found})
        places = (f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in hosts)
        servers = tuple(server_at(place, self.scheme) for place in places)
        known = self._known
        if known is None or known.servers != servers:
            self._known = known = PoolMap(known.epoch + 1 if known else 1, servers, self.replicas, kind=self.kind)
        return known


class _Header(msgspec.Struct):
    revision: int
    cluster_id: str = ""


class _EtcdEntry(msgspec.Struct):
    key: bytes
    value: bytes = b""


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_EtcdEntry] = []


class _Lease(msgspec.Struct):
    id: str = msgspec.field(name="ID")
    left_s: int = msgspec.field(name="TTL", default=0)


class _Alive(msgspec.Struct):
    result: _Lease


class _Token(msgspec.Struct):
    token: str = ""


class EtcdAccess(NamedTuple):
    """Access to etcd: under TLS if there is a context, as a user if it has a name."""

    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""


@dataclass(eq=False, repr=False)
class EtcdMembership(Membership):
    """The map of the servers below a prefix; other entries are passed over. ValueError from `read` if none is left."""

    _endpoints: Sequence[str]
    prefix: InitVar[str]
    _replicas: int
    _kind: PlacementKind
    _access: EtcdAccess = field(default_factory=EtcdAccess)

    def __post_init__(self, prefix: str) -> None:
        # Etcd's answer to user and password.
        self._token = ""
        self._prefix = f"{prefix}/"
        start = self._prefix.encode()
        # All keys that begin with the prefix.
        self._range = {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}
        self._revision = 0
        self._losses = 0
        self._unread: Sequence[str] = ()
        self._known: PoolMap | None = None

    def read(self) -> PoolMap:
        """Return the map of what is registered now. The era is the cluster's id, and how often its revision fell."""
        found = self._call("/v3/kv/range", {**self._range, "limit": SERVERS_MAX}, _Range)
        members, revision = self._members(found.kvs), found.header.revision
        self._losses += revision < self._revision
        self._revision, era = revision, f"{found.header.cluster_id}-{self._losses}"
        if self._known is None or self._known.servers != members or self.era != era:
            # Everything that changes the members changes the revision, the end of a lease too.
            self._known = PoolMap(revision, members, self._replicas, kind=self._kind)
        # Not before there is a map of it: with no server left there is none.
        self.era = era
        return self._known

    def _members(self, entries: Sequence[_EtcdEntry]) -> tuple[PoolServer, ...]:
        """Return the servers that entries name, each name once: as the entry of that name says, if there is one."""
        found: dict[str, PoolServer] = {}
        unread: list[str] = []
        for entry in entries:
            key = entry.key.decode(errors="replace")
            try:
                server = msgspec.json.decode(entry.value, type=PoolServer)
                PoolMap(0, (server,))
            except (msgspec.DecodeError, ValueError) as error:
                unread.append(f"{key}: {error}")
                continue
            if server.name in found:
                unread.append(f"{key}: another entry names {server.name!r} too")
            if server.name not in found or key == f"{self._prefix}{server.name}":
                found[server.name] = server
        if unread != self._unread:
            self._unread = unread
            if unread:
                _log.warning("entries that are no servers are passed over: %s", "; ".join(unread)[:_LOGGED_MAX])
        return tuple(sorted(found.values(), key=lambda each: each.name))

    def register(self, server: PoolServer, stop: threading.Event) -> None:
        """Keep a server in the map until `stop` is set, then take it out. Faults are tried again."""
        key = f"{self._prefix}{server.name}".encode()
        while not stop.is_set():
            try:
                lease = self._call("/v3/lease/grant", {"TTL": LEASE_S}, _Lease).id
                entry = {"value": msgspec.json.encode(server), "lease": lease}
                self._call("/v3/kv/put", {"key": key, **entry}, dict)
                while not stop.wait(LEASE_S / 3):
                    is_alive = self._call("/v3/lease/keepalive", {"ID": lease}, _Alive).result.left_s
                    # A second server of this name, which has ended since, has taken the entry with it.
                    if not is_alive or not self._call("/v3/kv/range", {"key": key}, _Range).kvs:
                        break
                else:
                    self._call("/v3/lease/revoke", {"ID": lease}, dict)
            except TierUnavailable as error:
                _log.warning("can't register at etcd, trying again: %s", error)
                stop.wait(LEASE_S / 3)

    def _call(self, path: str, body: dict[str, object], kind: type[_Answer]) -> _Answer:
        """Return the first endpoint's answer, to our user if there is one. TierUnavailable if none is of this kind."""
        try:
            if self._access.user and not self._token:
                self._authenticate()
            try:
                answer = self._open(path, body)
            except _Unauthenticated:
                self._authenticate()
                answer = self._open(path, body)
            with answer:
                # Etcd writes numbers as strings, and bytes in base 64, as msgspec does.
                return msgspec.json.decode(answer.read(ANSWER_BYTES_MAX), type=kind, strict=False)
        except (OSError, HTTPException, msgspec.DecodeError, ValueError, RecursionError) as error:
            raise TierUnavailable(f"etcd at {', '.join(self._endpoints)}: {error}") from error

    def _authenticate(self) -> None:
        self._token = ""
        words = {"name": self._access.user, "password": self._access.password}
        with self._open("/v3/auth/authenticate", words) as answer:
            self._token = msgspec.json.decode(answer.read(ANSWER_BYTES_MAX), type=_Token).token

    def _open(self, path: str, body: Mapping[str, object]) -> Any:
        problem: Exception | None = None
        data, scheme = msgspec.json.encode(body), "https" if self._access.tls else "http"
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        for endpoint in list(self._endpoints):
            request = urllib.request.Request(f"{scheme}://{endpoint}{path}", data, headers)
            try:
                return urllib.request.urlopen(request, timeout=REQUEST_S_MAX, context=self._access.tls)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == HTTPStatus.UNAUTHORIZED and self._token:
                    raise _Unauthenticated(f"etcd at {endpoint} takes our token no longer") from error
                raise TierUnavailable(f"etcd at {endpoint} answered {error.code} to {path}") from error
            except (OSError, HTTPException) as error:
                problem = error
                # The next call begins with another one. Another thread's never meets a list that lacks one.
                first, *others = self._endpoints
                self._endpoints = [*others, first]
        raise TierUnavailable(f"no etcd of {', '.join(self._endpoints)} can be reached: {problem}")


class _Unauthenticated(TierUnavailable):
    """Etcd takes a token no longer."""


class Watcher(Repeater):
    """A thread that reads a source every POLL_S, and hands on maps that are new."""

    def __init__(self, source: Membership, on_map: Callable[[PoolMap], None]) -> None:
        super().__init__(self._follow, "kvtide-pool")
        self._source = source
        self._on_map = on_map
        self._lock = threading.Lock()
        self._epoch, self._era = -1, ""
        self._fault = LastingFault(_log, "the pool's map stays as it is")

    def open(self) -> None:
        """Read the map once, then go on in a thread. A source that can't be read now is read later."""
        self.refresh()
        super().open()

    def refresh(self) -> None:
        """Read the map now; a broken or unreachable source, or a map that can't be used, is logged once and no more."""
        with self._lock, self._fault.caught(TierUnavailable, ValueError):
            pool, era = self._source.read(), self._source.era
            if pool.epoch > self._epoch or era != self._era:
                self._on_map(pool)
                self._epoch, self._era = pool.epoch, era

    def _follow(self) -> float:
        self.refresh()
        return POLL_S


class Member(Watcher):
    """Follows the pool's map for the server `me`. A map without it, or none, sends nobody away."""

    def __init__(self, me: PoolServer, source: Membership) -> None:
        super().__init__(source, self._adopt)
        self.name = me.name
        self.placement: Placement | None = None
        self._me = me
        self._registering: threading.Thread | None = None

    def open(self) -> None:
        """Follow the map; where members register themselves, do."""
        self._closing.clear()
        if isinstance(self._source, EtcdMembership):
            work = (self._me, self._closing)
            self._registering = threading.Thread(target=self._source.register, args=work, name="kvtide-etcd")
            self._registering.start()
        super().open()

    def close(self) -> None:
        """Leave the pool. Idempotent."""
        self.stop()
        if self._registering is not None:
            self._registering.join(_CLOSE_S_MAX)
            self._registering = None
        super().close()

    def _adopt(self, pool: PoolMap) -> None:
        self.placement = Placement(pool)

    def redirect(self, key: BlockKey) -> tuple[str, int] | None:
        """Return the origin of who keeps a block, and the epoch of the map; None if we do, as far as is known."""
        placement = self.placement
        if placement is None:
            return None
        servers = placement.map.servers
        owners = [servers[position] for position in placement.owners(key)]
        is_member = any(each.name == self.name for each in servers)
        if not is_member or any(owner.name == self.name for owner in owners):
            return None
        return owners[0].origin, placement.map.epoch


def membership_of(url: str) -> Membership:
    """Return the source of the map of a pool's URL. ValueError for a bad URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    replicas, kind = options.get("replicas", "2"), options.get("kind", PlacementKind.RENDEZVOUS)
    if not (replicas.isdecimal() and 0 < int(replicas[:3]) <= 8) or kind not in {*PlacementKind}:
        raise ValueError(f"a pool has 1 to 8 replicas and one of {', '.join(PlacementKind)}, got {replicas} and {kind}")
    chosen, scheme = PlacementKind(kind), _scheme(options.get("scheme", "http"))
    if parts.scheme == "pool":
        servers = tuple(server_at(each, scheme) for each in sorted(parts.netloc.split(",")))
        return StaticMembership(PoolMap(0, servers, int(replicas), kind=chosen))
    if parts.scheme == "pool+file" and parts.path and not parts.netloc:
        return FileMembership(Path(unquote(parts.path)))
    if parts.scheme == "pool+dns":
        return DnsMembership(*host_and_port(parts.netloc), int(replicas), chosen, scheme=scheme)
    if parts.scheme in {"pool+etcd", "pool+etcds"} and parts.path.strip("/"):
        endpoints = [server_at(each).address for each in parts.netloc.split(",")]
        access = _etcd_access(options, parts.scheme == "pool+etcds")
        return EtcdMembership(endpoints, parts.path.strip("/"), int(replicas), chosen, access)
    raise ValueError(
        f"expected pool://HOST:PORT,… or pool+file:///PATH, +dns://NAME:PORT, +etcd://…/PREFIX, got {url!r}"
    )


def server_at(address: str, scheme: Literal["http", "https"] = "http") -> PoolServer:
    """Return a server that is named by where it listens. ValueError without a port."""
    return PoolServer(address, address, scheme=scheme)


def _scheme(text: str) -> Literal["http", "https"]:
    if text not in {"http", "https"}:
        raise ValueError(f"the scheme of a pool's servers is http or https, got {text!r}")
    return "https" if text == "https" else "http"


def _etcd_access(options: Mapping[str, str], is_tls: bool) -> EtcdAccess:
    """Return how etcd is reached. ValueError for a file that can't be used, or one that would not be."""
    user, password = "", ""
    if not is_tls and options.keys() & (ETCD_OPTIONS - {"etcd_user_file"}):
        raise ValueError("etcd's TLS files are for pool+etcds://")
    if "etcd_user_file" in options:
        try:
            text = Path(options["etcd_user_file"]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"can't read etcd's user and password: {error}") from error
        user, colon, password = text.partition(":")
        if not (user and colon):
            raise ValueError(f"expected USER:PASSWORD in {options['etcd_user_file']}")
    files = [options.get(f"etcd_{name}_file") for name in ("ca", "cert", "key")]
    return EtcdAccess(tls_context("etcd", *files) if is_tls else None, user, password)
