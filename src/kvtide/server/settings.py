"""The server's configuration: one TOML file, flags on top; the settings that hold now.

Every bound of the server has its name here. Invariant: new settings are taken whole or not at all; what can't change in
a running server keeps its value.
"""

from __future__ import annotations

import resource
import ssl
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kvtide.clock import Clock
from kvtide.server.auth import Gate, Grant, Proxies
from kvtide.server.quotas import Quota
from kvtide.server.scheduler import SchedulerSettings
from kvtide.tier import disk_path

# What a server takes without any object or connection, and for each connection: heads, tasks, TLS.
PROCESS_BYTES = 128 << 20
CONNECTION_BYTES = 64 << 10
# Descriptors that are no client's: segments of the disk tier, connections to other servers, the loop's own.
FILES_MAX = 256
DRAIN_DELAY_S_MAX = 600.0
DEFAULT_LISTEN = "127.0.0.1:7421"
_Struct = TypeVar("_Struct", bound=msgspec.Struct)

# What may change while the server runs; the others are in sizes of pools and names of files that are open.
_LIVE = frozenset({"grants", "tls", "limits", "sending", "drain_delay_s", "quotas", "trusted_proxies"})
_LIVE_LIMITS = frozenset(
    {
        "object_bytes_max",
        "tenant_requests_s_max",
        "stranger_requests_s_max",
        "idle_s_max",
        "head_s_max",
        "rate_bytes_s_min",
        "drain_s_max",
        "log_lines_s_max",
        "stranger_log_lines_s_max",
    }
)


class ProgressBudget:
    """A bucket of time, empty at `due_s`: bytes at `bytes_s_min` fill it, up to `slow_s_max` seconds."""

    def __init__(self, slow_s_max: float, bytes_s_min: float, now_s: float) -> None:
        self._slow_s_max = slow_s_max
        self._bytes_s_min = bytes_s_min
        self.due_s = now_s + slow_s_max

    def moved(self, count: int, now_s: float) -> None:
        """Note bytes that moved."""
        self.due_s = min(now_s + self._slow_s_max, self.due_s + count / self._bytes_s_min)

    def paused(self, seconds: float) -> None:
        """Note time that the peer did not keep us waiting."""
        self.due_s += seconds


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every bound of the server. ValueError for one that is not positive."""

    memory_bytes_max: int = 1 << 30
    disk_bytes_max: int = 16 << 30
    # One object; a body that says more is refused before it is read.
    object_bytes_max: int = 256 << 20
    # Bodies on their way in, and out of tiers that can't lend, all connections together.
    buffer_bytes_max: int = 512 << 20
    # Of these, what one tenant's bodies hold; who asks nobody for a token has no tenants.
    tenant_buffer_bytes_max: int = 256 << 20
    # Objects that come in pieces, until they are whole: bytes of all, of one tenant, number, and how long one may rest.
    uploads_bytes_max: int = 512 << 20
    tenant_uploads_bytes_max: int = 256 << 20
    uploads_max: int = 256
    uploads_idle_s_max: float = 60.0
    connections_max: int = 4096
    # Of one tenant, or of one address until a request of theirs was let in, and where nobody is asked for a token.
    tenant_connections_max: int = 1024
    # Threads that wait for tiers.
    io_threads: int = 4
    # Each tenant's requests a second, with a burst of as many.
    tenant_requests_s_max: float = 10_000.0
    # Answers a second that say to somebody of one address that no such token is known.
    stranger_requests_s_max: float = 100.0
    idle_s_max: float = 300.0
    head_s_max: float = 10.0
    # Bodies, in and out, may be slower than this for `head_s_max` seconds at a time.
    rate_bytes_s_min: float = 64 << 10
    # A peer that takes nothing for so long gives its send slot back until it does.
    stall_s_max: float = 0.05
    drain_s_max: float = 30.0
    # Lines of the access log for requests that were let in, and for those of strangers and heads that are none.
    log_lines_s_max: float = 200.0
    stranger_log_lines_s_max: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")

    @property
    def resident_bytes_max(self) -> int:
        """The most memory that a server with memory tiers of these bounds takes."""
        bodies = self.buffer_bytes_max + self.uploads_bytes_max
        return PROCESS_BYTES + self.memory_bytes_max + bodies + self.connections_max * CONNECTION_BYTES

    def pace(self, now_s: float) -> ProgressBudget:
        """Bound of a body that begins now."""
        return ProgressBudget(self.head_s_max, self.rate_bytes_s_min, now_s)


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files. With `client_ca_file` every client must show a certificate that it signed (mTLS)."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `kvtide serve` needs."""

    listen: str = DEFAULT_LISTEN
    # Where others reach the server, host:port or https://host:port, if that is not where it listens.
    advertise: str | None = None
    # Where clients on this machine reach the server besides, without the network and without TLS.
    socket_path: Path | None = None
    tiers: tuple[str, ...] = ("memory://",)
    # A regional server's centre, and the file in which it notes what the centre has not got yet.
    central: str | None = None
    manifest: Path | None = None
    sync_bytes_s_max: float = 50e6
    # Generations, aliases and profiles; beside the manifest or in the first disk tier if it is not given.
    records: Path | None = None
    # A centre's regions, which it asks for what it lacks when a client wants the latest.
    regions: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()
    tls: TlsSettings | None = None
    limits: ServerLimits = ServerLimits()
    sending: SchedulerSettings = SchedulerSettings()
    # Addresses, networks or `unix` of proxies whose X-Forwarded-For is believed.
    trusted_proxies: tuple[str, ...] = ()
    # What tenants may have in this server's own tiers, by name; "*" for all others.
    quotas: Mapping[str, Quota] = {}
    is_open_to_all: bool = False
    # Where liveness and readiness are told, host:port, in the clear and to everybody; nowhere without it.
    health: str | None = None
    # For so long after SIGTERM requests are still taken, while readiness says no: balancers need it to look elsewhere.
    drain_delay_s: float = 0.0
    # One line of JSON for each request; none without it.
    access_log: Path | None = None
    # One line of JSON for each object that was deleted and record that was written; none without it.
    audit_log: Path | None = None


class ListenAddress(NamedTuple):
    """An address to listen on: a path, or host and port."""

    host: str
    port: int
    path: str = ""

    @property
    def is_local(self) -> bool:
        """True if only this machine can connect."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> ListenAddress:
    """Parse `host:port`, `[v6]:port` or `unix:/path`. ValueError for anything else."""
    if text.startswith("unix:/"):
        return ListenAddress("", 0, text.removeprefix("unix:"))
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port[:6]) > 0xFFFF:
        raise ValueError(f"expected host:port or unix:/path to listen on, got {text!r}")
    return ListenAddress(host.removeprefix("[").removesuffix("]"), int(port))


def records_path(settings: ServerSettings) -> Path | None:
    """File of a server's records; None if there is no place for one."""
    if settings.records is not None:
        return settings.records
    if settings.manifest is not None:
        return settings.manifest.with_name(settings.manifest.name + ".records")
    return next((path / "records" for url in settings.tiers if (path := disk_path(url)) is not None), None)


def read_settings(path: Path | None, changes: Mapping[str, object]) -> ServerSettings:
    """Read a TOML file, or the defaults, with these top-level fields changed.

    ValueError if the file can't be read, holds something unknown or off, or listening would let strangers in.
    """
    found: dict[str, object] = {}
    if path is not None:
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"can't read {path}: {error}") from error
    try:
        settings = msgspec.convert(found | dict(changes), ServerSettings, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path or 'settings'}: {error}") from error
    _check_doors(settings)
    Proxies(settings.trusted_proxies)
    if settings.health is not None and parse_address(settings.health).path:
        raise ValueError(f"health is told on host:port, got {settings.health!r}")
    if not 0 <= settings.drain_delay_s <= DRAIN_DELAY_S_MAX:
        raise ValueError(f"drain_delay_s is from 0 to {DRAIN_DELAY_S_MAX:g}, got {settings.drain_delay_s!r}")
    if not settings.sync_bytes_s_max > 0:
        raise ValueError(f"sync_bytes_s_max must be positive, got {settings.sync_bytes_s_max!r}")
    if not settings.tiers:
        raise ValueError("a server needs at least one tier, got none")
    if len({grant.token_sha256 or grant.common_name for grant in settings.grants}) < len(settings.grants):
        raise ValueError("a token_sha256 and a common_name are of one grant, got one of them twice")
    return settings


def _check_doors(settings: ServerSettings) -> None:
    address = parse_address(settings.listen)
    if not (address.is_local or settings.grants or settings.is_open_to_all):
        raise ValueError(
            f"{address} can be reached by others and no grant asks them for a token: "
            "add [[grants]] of what kvtide token prints, listen on 127.0.0.1, or say --open-to-all"
        )


def _path(kind: type[object], value: object) -> Path:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


def take_descriptors(limits: ServerLimits) -> None:
    """Raise this process's descriptors to what connections and files need, as far as the system allows."""
    wanted = limits.connections_max + FILES_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class Live:
    """The settings that hold now. Read it at each use: `adopt` replaces it. One thread adopts, the event loop's."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._clock = clock
        self._hold(settings)

    def _hold(self, settings: ServerSettings) -> None:
        proxies = Proxies(settings.trusted_proxies)
        self.tls = _tls_context(settings.tls) if settings.tls else None
        self.settings, self.proxies, self.gate = settings, proxies, Gate(settings.grants, self._clock)
        # Nobody is asked for a token, as none but this machine can connect: a browser here can.
        is_local = parse_address(settings.listen).is_local
        self.is_site_checked = is_local and not (settings.grants or settings.is_open_to_all)

    @property
    def limits(self) -> ServerLimits:
        """The limits that hold now."""
        return self.settings.limits

    def adopt(self, new: ServerSettings) -> list[str]:
        """Take new settings; return the names of those that wait for a restart. ValueError changes nothing."""
        old = self.settings
        fixed = set(old.__struct_fields__) - _LIVE
        if (new.tls is None) != (old.tls is None):
            # A port does not begin or cease to speak TLS under its clients.
            fixed.add("tls")
        if bool(new.quotas) != bool(old.quotas):
            # What is stored was counted from the start, or not.
            fixed.add("quotas")
        merged, waiting = _merged(new, old, fixed)
        limits, late = _merged(new.limits, old.limits, set(old.limits.__struct_fields__) - _LIVE_LIMITS)
        sending, later = _merged(new.sending, old.sending, {"policy", "slice_bytes"})
        merged = msgspec.structs.replace(merged, limits=limits, sending=sending)
        # The file's grants may go with an address that waits for a restart.
        _check_doors(merged)
        self._hold(merged)
        return [*waiting, *(f"limits.{name}" for name in late), *(f"sending.{name}" for name in later)]


def _merged(new: _Struct, old: _Struct, fixed: set[str]) -> tuple[_Struct, list[str]]:
    """Return the new values but for fixed ones, and the names of those that differ there."""
    kept = {name: getattr(old, name) for name in fixed}
    return msgspec.structs.replace(new, **kept), sorted(name for name in fixed if kept[name] != getattr(new, name))


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
