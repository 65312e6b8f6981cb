"""What a pool's URL says: where its map comes from, and how its servers are reached.

`pool://HOST:PORT,HOST:PORT`, `pool+file:///PATH`, `pool+dns://NAME:PORT`, `pool+etcd://HOST:PORT[,…]/PREFIX`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvtide.clock import Clock
from kvtide.placement import PlacementKind, PoolMap, PoolServer
from kvtide.tier.base import Tier
from kvtide.tier.http import http_tier
from kvtide.tier.membership import DnsMembership, FileMembership, Membership, StaticMembership, server_at
from kvtide.tier.membership_etcd import EtcdMembership
from kvtide.tier.peer import PeerSettings
from kvtide.tier.pool import PoolTier

__all__ = ["POOL_SCHEMES", "membership_of", "pool_tier", "server_urls"]

POOL_SCHEMES = ("pool", "pool+file", "pool+dns", "pool+etcd")
# A replica is the second try, and a server that fails twice is left alone for a second.
_PEER = PeerSettings(tries_max=1, faults_max=2, open_s=1.0)
OPERATION_S_MAX = 2.0
_OPTIONS = frozenset({"replicas", "kind"})


def pool_tier(url: str, clock: Clock) -> PoolTier:
    """Return the tier of a pool's URL, not yet opened. ValueError for a bad one.

    Options: `replicas` (2) and `kind` (rendezvous, mod) where the map does not say; the others are those of http://.
    """
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    passed = {name: value for name, value in options.items() if name not in _OPTIONS}
    here = platform.node()
    # Bad options are the user's mistake now, not a fault of each server later.
    _connect(PoolServer("probe", "127.0.0.1:1"), passed, "", clock)
    return PoolTier(membership_of(url), partial(_connect, options=passed, here=here, clock=clock), here, clock)


def server_urls(url: str) -> list[str]:
    """Return the URL of each server that a pool has now. ValueError for a bad URL, TierUnavailable without a map."""
    source = membership_of(url)
    try:
        servers = source.read().servers
    finally:
        source.close()
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    return [
        _url(server.address, {name: value for name, value in options.items() if name not in _OPTIONS})
        for server in servers
    ]


def membership_of(url: str) -> Membership:
    """Return where the map of a pool's URL comes from. ValueError for a bad URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    replicas, kind = options.get("replicas", "2"), options.get("kind", PlacementKind.RENDEZVOUS)
    if not (replicas.isdecimal() and 0 < int(replicas[:3]) <= 8) or kind not in {*PlacementKind}:
        raise ValueError(f"a pool has 1 to 8 replicas and one of {', '.join(PlacementKind)}, got {replicas} and {kind}")
    chosen = PlacementKind(kind)
    if parts.scheme == "pool":
        servers = tuple(sorted((server_at(each) for each in parts.netloc.split(",")), key=lambda each: each.name))
        return StaticMembership(PoolMap(0, servers, int(replicas), kind=chosen))
    if parts.scheme == "pool+file" and parts.path and not parts.netloc:
        return FileMembership(Path(unquote(parts.path)))
    if parts.scheme == "pool+dns":
        name = server_at(parts.netloc).address
        host, _, port = name.rpartition(":")
        return DnsMembership(host.strip("[]"), int(port), int(replicas), chosen)
    if parts.scheme == "pool+etcd" and parts.path.strip("/"):
        endpoints = [server_at(each).address for each in parts.netloc.split(",")]
        return EtcdMembership(endpoints, parts.path.strip("/"), int(replicas), chosen)
    raise ValueError(
        f"expected pool://HOST:PORT,… or pool+file:///PATH, +dns://NAME:PORT, +etcd://…/PREFIX, got {url!r}"
    )


def _connect(server: PoolServer, options: Mapping[str, str], here: str, clock: Clock) -> Tier:
    """Return a tier on one server: through its socket if it runs on this machine, else over the network."""
    is_here = bool(here) and server.host == here and bool(server.socket_path)
    url = _url(quote(server.socket_path), options, "http+unix") if is_here else _url(server.address, options)
    return http_tier(url, clock, _PEER, OPERATION_S_MAX)


def _url(place: str, options: Mapping[str, str], scheme: str = "http") -> str:
    return f"{scheme}://{place}" + (f"?{urlencode(options)}" if options else "")
