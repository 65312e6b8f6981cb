"""Where a pool's map comes from: a list in the URL, a file, DNS, or etcd (membership_etcd.py).

Invariant: whoever reads one source at one time gets one map, so that clients and servers agree without talking.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from kvtide.errors import TierUnavailable
from kvtide.tier.background import LastingFault
from kvtide.tier.pool.placement import PlacementKind, PoolMap, PoolServer

_log = logging.getLogger(__name__)

POLL_S = 1.0


class Membership(Protocol):
    """A source of maps."""

    @property
    def era(self) -> str:
        """Return what changes when epochs begin anew, as after a source has lost its data."""

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
