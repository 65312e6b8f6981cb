"""Sources of a pool's map: a list in the URL, a file, DNS, or etcd.

In etcd each server keeps its own entry under a lease; who reads them has the map.

Invariant: whoever reads one source at one time gets one map, so that clients and servers agree without talking.
"""

from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from kvtide.errors import TierUnavailable
from kvtide.tier.background import LastingFault
from kvtide.tier.pool.placement import SERVERS_MAX, PlacementKind, PoolMap, PoolServer

_log = logging.getLogger(__name__)

POLL_S = 1.0
# A question to etcd takes at most so long.
REQUEST_S_MAX = 2.0
# A server that is gone is out of the map after so long.
LEASE_S = 5
ANSWER_BYTES_MAX = 8 << 20
_LOGGED_MAX = 1000


class Membership(Protocol):
    """A source of maps."""

    @property
    def era(self) -> str:
        """Return what changes when epochs start over, as after a source has lost its data."""

    def read(self) -> PoolMap:
        """Return the map as it is now. May wait. TierUnavailable if it can't be had, ValueError if it is none."""

    def wait(self, timeout_s: float, stop: threading.Event) -> None:
        """Return when the map may have changed, `stop` is set or the time is over."""

    def close(self) -> None:
        """Give up what is held. Idempotent."""


class _Polled:
    """A source that is asked again and again."""

    era = ""

    def wait(self, timeout_s: float, stop: threading.Event) -> None:
        stop.wait(min(timeout_s, POLL_S))

    def close(self) -> None:
        """Nothing is held."""


def server_at(address: str, scheme: Literal["http", "https"] = "http") -> PoolServer:
    """Return a server that is named by where it listens. ValueError without a port."""
    host, colon, port = address.rpartition(":")
    if not host or not colon or not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) < 1 << 16:
        raise ValueError(f"expected HOST:PORT of a server, got {address!r}")
    return PoolServer(address, address, scheme=scheme)


class StaticMembership(_Polled):
    """A map that never changes."""

    def __init__(self, pool: PoolMap) -> None:
        self._pool = pool

    def read(self) -> PoolMap:
        """Return the map."""
        return self._pool


class FileMembership(_Polled):
    """A map in a JSON file (docs/operations.md). Replace the file whole, with a larger epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> PoolMap:
        """Read the file."""
        try:
            return PoolMap.from_json(self._path.read_bytes())
        except OSError as error:
            raise TierUnavailable(f"can't read the pool's map: {error}") from error


class DnsMembership(_Polled):
    """Every address that a name has is a server. The epoch counts the changes that this process saw."""

    def __init__(
        self,
        host: str,
        port: int,
        replicas: int,
        kind: PlacementKind,
        resolve: Callable[..., object] | None = None,
        scheme: Literal["http", "https"] = "http",
    ) -> None:
        self._scheme = scheme
        self._host = host
        self._port = port
        self._replicas = replicas
        self._kind = kind
        self._resolve = resolve or socket.getaddrinfo
        self._known: PoolMap | None = None

    def read(self) -> PoolMap:
        """Resolve the name."""
        try:
            found = self._resolve(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TierUnavailable(f"can't resolve {self._host}: {error}") from error
        assert isinstance(found, list)
        hosts = sorted({entry[4][0] for entry in found})
        servers = tuple(
            server_at(f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}", self._scheme)
            for host in hosts
        )
        known = self._known
        if known is None or known.servers != servers:
            epoch = known.epoch + 1 if known else 1
            self._known = known = PoolMap(epoch, servers, self._replicas, kind=self._kind)
        return known


class Watcher:
    """A thread that reads a source whenever it may have changed, and hands on maps that are new."""

    def __init__(self, source: Membership, on_map: Callable[[PoolMap], None]) -> None:
        self._source = source
        self._on_map = on_map
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._epoch, self._era = -1, ""
        self._fault = LastingFault(_log, "the pool's map stays as it is")

    def open(self) -> None:
        """Read the map once, then go on in a thread. A source that can't be read now is read later."""
        self._closing.clear()
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="kvtide-pool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closing.set()
        self._source.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def refresh(self) -> None:
        """Read the map now; a broken or unreachable source changes nothing and is logged once."""
        with self._lock:
            pool = None
            with self._fault.caught(TierUnavailable, ValueError):
                pool = self._source.read()
            if pool is not None and (pool.epoch > self._epoch or self._source.era != self._era):
                self._epoch, self._era = pool.epoch, self._source.era
                self._on_map(pool)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._source.wait(POLL_S, self._closing)
            if not self._closing.is_set():
                self.refresh()


class EtcdAccess(NamedTuple):
    """Access to etcd: under TLS if there is a context, as a user if it has a name."""

    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""


class EtcdMembership:
    """The map of the servers below a prefix, without what is no server there. ValueError from `read` if none is."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        replicas: int,
        kind: PlacementKind,
        access: EtcdAccess | None = None,
    ) -> None:
        self._endpoints = list(endpoints)
        self._access = access or EtcdAccess()
        # What etcd gave for user and password.
        self._token = ""
        self._prefix = f"{prefix}/"
        self._replicas = replicas
        self._kind = kind
        self._lock = threading.Lock()
        self._watch: Any = None
        self._revision = 0
        self._cluster = ""
        self._losses = 0
        self._unread: Sequence[str] = ()
        self._known: PoolMap | None = None

    @property
    def era(self) -> str:
        """Return the cluster's id, and how often its revision was found to have gone back."""
        return f"{self._cluster}-{self._losses}"

    def read(self) -> PoolMap:
        """Return the map of what is registered now."""
        start, stop = self._prefix.encode(), _behind(self._prefix)
        found = self._call("/v3/kv/range", {"key": _b64(start), "range_end": _b64(stop), "limit": SERVERS_MAX})
        members, era = self._members(found.get("kvs", [])), self.era
        revision, self._cluster = int(found["header"]["revision"]), str(found["header"].get("cluster_id", ""))
        self._losses += revision < self._revision
        self._revision = revision
        if self._known is None or self._known.servers != members or self.era != era:
            # Everything that changes the members changes the revision, the end of a lease too.
            self._known = PoolMap(self._revision, members, self._replicas, kind=self._kind)
        return self._known

    def _members(self, entries: Sequence[Mapping[str, str]]) -> tuple[PoolServer, ...]:
        """Return the servers that entries name, each name once: as the entry of that name says, if there is one."""
        found: dict[str, PoolServer] = {}
        unread: list[str] = []
        for entry in entries:
            key = base64.b64decode(entry["key"]).decode(errors="replace")
            try:
                server = msgspec.json.decode(base64.b64decode(entry.get("value", "")), type=PoolServer)
                PoolMap(0, (server,))
            except (ValueError, UnicodeDecodeError) as error:
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

    def wait(self, timeout_s: float, stop: threading.Event) -> None:
        """Watch the prefix for a while; the time is rounded by REQUEST_S_MAX."""
        question = {
            "key": _b64(self._prefix.encode()),
            "range_end": _b64(_behind(self._prefix)),
            "start_revision": self._revision + 1,
        }
        try:
            with self._open("/v3/watch", {"create_request": question}, timeout_s) as answer:
                with self._lock:
                    self._watch = answer
                # The first line says that the watch stands, the next one that something changed.
                for _ in range(2):
                    answer.readline(ANSWER_BYTES_MAX)
        except TimeoutError:
            return
        except (OSError, HTTPException, TierUnavailable, ValueError) as error:
            _log.debug("watching %s: %s", self._endpoints, error)
            stop.wait(timeout_s)
        finally:
            with self._lock:
                self._watch = None

    def close(self) -> None:
        """Nothing outlives a watch, and that ends by itself within its time."""

    def register(self, server: PoolServer, stop: threading.Event) -> None:
        """Keep a server in the map until `stop` is set, then take it out. Faults are tried again."""
        while not stop.is_set():
            try:
                lease = self._call("/v3/lease/grant", {"TTL": LEASE_S})["ID"]
                entry = {"value": _b64(msgspec.json.encode(server)), "lease": lease}
                self._call("/v3/kv/put", {"key": _b64(f"{self._prefix}{server.name}".encode()), **entry})
                while not stop.wait(LEASE_S / 3):
                    alive = self._call("/v3/lease/keepalive", {"ID": lease})
                    if not int(alive.get("result", {}).get("TTL", 0)):
                        break
                else:
                    self._call("/v3/lease/revoke", {"ID": lease})
            except (TierUnavailable, KeyError) as error:
                _log.warning("can't register at etcd, trying again: %s", error)
                stop.wait(LEASE_S / 3)

    def _call(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        """Return the answer of the first endpoint that gives one. TierUnavailable if none does."""
        try:
            with self._open(path, body, REQUEST_S_MAX) as answer:
                decoded = json.loads(answer.read(ANSWER_BYTES_MAX))
        except (OSError, HTTPException, ValueError) as error:
            raise TierUnavailable(f"etcd at {', '.join(self._endpoints)}: {error}") from error
        if not isinstance(decoded, dict):
            raise TierUnavailable(f"expected an object from etcd, got {decoded!r}")
        return decoded

    def _open(self, path: str, body: dict[str, object], timeout_s: float) -> Any:
        """Send a question, as our user if there is one; a token that is over is asked for again."""
        if self._access.user and not self._token:
            self._authenticate()
        try:
            return self._open_as(path, body, timeout_s)
        except _Unauthenticated:
            self._authenticate()
            return self._open_as(path, body, timeout_s)

    def _authenticate(self) -> None:
        self._token = ""
        words = {"name": self._access.user, "password": self._access.password}
        with self._open_as("/v3/auth/authenticate", words, REQUEST_S_MAX) as answer:
            self._token = str(json.loads(answer.read(ANSWER_BYTES_MAX)).get("token", ""))

    def _open_as(self, path: str, body: Mapping[str, object], timeout_s: float) -> Any:
        problem: Exception | None = None
        data, scheme = json.dumps(body).encode(), "https" if self._access.tls else "http"
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        for endpoint in list(self._endpoints):
            request = urllib.request.Request(f"{scheme}://{endpoint}{path}", data, headers)
            try:
                return urllib.request.urlopen(request, timeout=timeout_s, context=self._access.tls)
            except urllib.error.HTTPError as error:
                if error.code == HTTPStatus.UNAUTHORIZED and self._token:
                    error.close()
                    raise _Unauthenticated(f"etcd at {endpoint} takes our token no longer") from error
                error.close()
                raise TierUnavailable(f"etcd at {endpoint} answered {error.code} to {path}") from error
            except TimeoutError:
                raise
            except (OSError, HTTPException) as error:
                problem = error
                # The next call begins with another one.
                self._endpoints.append(self._endpoints.pop(0))
        raise TierUnavailable(f"no etcd of {', '.join(self._endpoints)} can be reached: {problem}")


class _Unauthenticated(TierUnavailable):
    """Etcd takes a token no longer."""


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _behind(prefix: str) -> bytes:
    """Return the first key after all that begin with the prefix."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])
