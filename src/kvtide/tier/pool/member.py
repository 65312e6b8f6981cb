"""A server's place in a pool: which blocks it keeps by the map, and where to send who asks for others."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvtide.tier.pool.membership import EtcdMembership, Membership, Watcher
from kvtide.tier.pool.placement import Placement, PoolMap, PoolServer
from kvtide.types import BlockKey

_CLOSE_S_MAX = 5.0


class Redirect(NamedTuple):
    """The server that keeps a block in this one's place, and the epoch of the map that says so."""

    origin: str
    epoch: int


class Member:
    """Follows the pool's map for the server named `me`. A map without it, or none, sends nobody away."""

    def __init__(self, me: PoolServer, source: Membership) -> None:
        self._me = me
        self._source = source
        self._watcher = Watcher(source, self._adopt)
        self._placement: Placement | None = None
        self._stop = threading.Event()
        self._registering: threading.Thread | None = None

    def open(self) -> None:
        """Follow the map; where members register themselves, do."""
        self._stop.clear()
        if isinstance(self._source, EtcdMembership):
            work = (self._me, self._stop)
            self._registering = threading.Thread(target=self._source.register, args=work, name="kvtide-etcd")
            self._registering.start()
        self._watcher.open()

    def close(self) -> None:
        """Leave the pool. Idempotent."""
        self._stop.set()
        if self._registering is not None:
            self._registering.join(_CLOSE_S_MAX)
            self._registering = None
        self._watcher.close()

    def _adopt(self, pool: PoolMap) -> None:
        self._placement = Placement(pool)

    @property
    def name(self) -> str:
        """The name of this server in the pool."""
        return self._me.name

    @property
    def placement(self) -> Placement | None:
        """The pool's map, made ready for look-ups; None as long as none has come."""
        return self._placement

    @property
    def has_map(self) -> bool:
        """True once a map of the pool has come."""
        return self._placement is not None

    def redirect(self, key: BlockKey) -> Redirect | None:
        """Return where a block is kept; None if that is here, as far as is known."""
        placement = self._placement
        if placement is None:
            return None
        servers = placement.map.servers
        owners = [servers[position] for position in placement.owners(key)]
        names, is_member = {owner.name for owner in owners}, any(each.name == self._me.name for each in servers)
        if self._me.name in names or not is_member:
            return None
        return Redirect(owners[0].origin, placement.map.epoch)
