"""URLs of pools: where the map comes from, and how the servers are reached.

`pool://HOST:PORT,HOST:PORT`, `pool+file:///PATH`, `pool+dns://NAME:PORT`, `pool+etcd://HOST:PORT[,…]/PREFIX`, and
`pool+etcds://…` for etcd under TLS.
"""

from __future__ import annotations

import platform
import ssl
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvtide.clock import Clock
from kvtide.tier.http import HttpTier, PeerSettings, http_tier
from kvtide.tier.pool.membership import (
    DnsMembership,
    EtcdAccess,
    EtcdMembership,
    FileMembership,
    Membership,
    StaticMembership,
    Watcher,
    server_at,
)
from kvtide.tier.pool.placement import Placement, PlacementKind, PoolMap, PoolServer
from kvtide.tier.pool.tier import PoolTier
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


# A replica is the second try, and a server that fails twice is left alone for a second.
_PEER = PeerSettings(tries_max=1, faults_max=2, open_s=1.0)
OPERATION_S_MAX = 2.0
_ETCD_OPTIONS = frozenset({"etcd_ca_file", "etcd_cert_file", "etcd_key_file", "etcd_user_file"})
_OPTIONS = frozenset({"replicas", "kind", "scheme", *_ETCD_OPTIONS})


def pool_tier(url: str, clock: Clock) -> PoolTier:
    """Return the tier of a pool's URL, not yet opened. ValueError for a bad one.

    Options: `replicas` (2), `kind` (rendezvous, mod), `scheme` (http, https) where the map does not say; `etcd_…` for
    etcd under TLS (`pool+etcds://`) and with a user; the others are those of http://.
    """
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    passed = {name: value for name, value in options.items() if name not in _OPTIONS}
    connect = partial(_connect, options=passed, clock=clock)
    # Bad options are the user's mistake now, not a fault of each server later.
    if passed.keys() & {"ca_file", "cert_file"}:
        connect(PoolServer("probe", "127.0.0.1:1", scheme="https"), here="")
    takes_evicted = connect(PoolServer("probe", "127.0.0.1:1"), here="").takes_evicted
    here = platform.node()
    return PoolTier(membership_of(url), partial(connect, here=here), here, clock, takes_evicted)


def server_urls(url: str) -> list[str]:
    """Return the URL of each server that a pool has now. ValueError for a bad URL, TierUnavailable without a map."""
    source = membership_of(url)
    try:
        servers = source.read().servers
    finally:
        source.close()
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    return [
        _url(server.origin, {name: value for name, value in options.items() if name not in _OPTIONS})
        for server in servers
    ]


def membership_of(url: str) -> Membership:
    """Return where the map of a pool's URL comes from. ValueError for a bad URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    replicas, kind = options.get("replicas", "2"), options.get("kind", PlacementKind.RENDEZVOUS)
    if not (replicas.isdecimal() and 0 < int(replicas[:3]) <= 8) or kind not in {*PlacementKind}:
        raise ValueError(f"a pool has 1 to 8 replicas and one of {', '.join(PlacementKind)}, got {replicas} and {kind}")
    chosen, scheme = PlacementKind(kind), _scheme(options.get("scheme", "http"))
    if parts.scheme == "pool":
        servers = tuple(
            sorted((server_at(each, scheme) for each in parts.netloc.split(",")), key=lambda each: each.name)
        )
        return StaticMembership(PoolMap(0, servers, int(replicas), kind=chosen))
    if parts.scheme == "pool+file" and parts.path and not parts.netloc:
        return FileMembership(Path(unquote(parts.path)))
    if parts.scheme == "pool+dns":
        name = server_at(parts.netloc).address
        host, _, port = name.rpartition(":")
        return DnsMembership(host.strip("[]"), int(port), int(replicas), chosen, scheme=scheme)
    if parts.scheme in {"pool+etcd", "pool+etcds"} and parts.path.strip("/"):
        endpoints = [server_at(each).address for each in parts.netloc.split(",")]
        access = _etcd_access(options, parts.scheme == "pool+etcds")
        return EtcdMembership(endpoints, parts.path.strip("/"), int(replicas), chosen, access)
    raise ValueError(
        f"expected pool://HOST:PORT,… or pool+file:///PATH, +dns://NAME:PORT, +etcd://…/PREFIX, got {url!r}"
    )


def _connect(server: PoolServer, options: Mapping[str, str], here: str, clock: Clock) -> HttpTier:
    """Return a tier on one server: through its socket if it runs on this machine, else over the network."""
    is_here = bool(here) and server.host == here and bool(server.socket_path)
    url = _url(f"http+unix://{quote(server.socket_path)}" if is_here else server.origin, options)
    return http_tier(url, clock, _PEER, OPERATION_S_MAX)


def _url(place: str, options: Mapping[str, str]) -> str:
    return place + (f"?{urlencode(options)}" if options else "")


def _scheme(text: str) -> Literal["http", "https"]:
    if text not in {"http", "https"}:
        raise ValueError(f"the scheme of a pool's servers is http or https, got {text!r}")
    return "https" if text == "https" else "http"


def _etcd_access(options: Mapping[str, str], is_tls: bool) -> EtcdAccess:
    """Return how etcd is reached. ValueError for a file that can't be used, or one that would not be."""
    user, password = "", ""
    if not is_tls and options.keys() & (_ETCD_OPTIONS - {"etcd_user_file"}):
        raise ValueError("etcd's TLS files are for pool+etcds://")
    if "etcd_user_file" in options:
        try:
            text = Path(options["etcd_user_file"]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"can't read etcd's user and password: {error}") from error
        user, colon, password = text.partition(":")
        if not (user and colon):
            raise ValueError(f"expected USER:PASSWORD in {options['etcd_user_file']}")
    if not is_tls:
        return EtcdAccess(None, user, password)
    try:
        tls = ssl.create_default_context(cafile=options.get("etcd_ca_file"))
        if "etcd_cert_file" in options:
            tls.load_cert_chain(options["etcd_cert_file"], options.get("etcd_key_file"))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"can't use etcd's TLS files: {error}") from error
    return EtcdAccess(tls, user, password)
