"""The settings that hold now: who may ask, by which certificate we are known, which limits.

Invariant: new settings are taken whole or not at all; what can't change in a running server keeps its value.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtide.clock import Clock
from kvtide.server.auth import Gate, Proxies
from kvtide.server.settings import ServerLimits, ServerSettings, TlsSettings

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

# What may change while the server runs; the others are in sizes of pools and names of files that are open.
_LIVE = frozenset({"grants", "tls", "limits", "sending", "drain_delay_s", "quotas", "trusted_proxies", "proxy_header"})
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
_FIXED_SENDING = frozenset({"policy", "slice_bytes"})


class Live:
    """The settings that hold now. Read it at each use: `adopt` replaces it. One thread adopts, the event loop's."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._clock = clock
        self.settings = settings
        self.gate = Gate(settings.grants, clock)
        self.proxies = Proxies(settings.trusted_proxies, settings.proxy_header)
        self.tls = _tls_context(settings.tls) if settings.tls else None

    @property
    def limits(self) -> ServerLimits:
        """The limits that hold now."""
        return self.settings.limits

    def adopt(self, new: ServerSettings) -> list[str]:
        """Take new settings; return the names of those that wait for a restart. ValueError, nothing changed, if off."""
        old, tls = self.settings, self.tls
        merged, waiting = _merged(new, old, frozenset(old.__struct_fields__) - _LIVE)
        if (new.tls is None) != (old.tls is None):
            # A port does not begin or cease to speak TLS under its clients.
            merged, waiting = msgspec.structs.replace(merged, tls=old.tls), [*waiting, "tls"]
        if bool(new.quotas) != bool(old.quotas):
            # What is stored was counted from the start, or not.
            merged, waiting = msgspec.structs.replace(merged, quotas=old.quotas), [*waiting, "quotas"]
        limits, late = _merged(new.limits, old.limits, frozenset(old.limits.__struct_fields__) - _LIVE_LIMITS)
        sending, later = _merged(new.sending, old.sending, _FIXED_SENDING)
        merged = msgspec.structs.replace(merged, limits=limits, sending=sending)
        proxies = Proxies(merged.trusted_proxies, merged.proxy_header)
        if merged.tls is not None:
            tls = _tls_context(merged.tls)
        self.proxies = proxies
        self.settings, self.tls, self.gate = merged, tls, Gate(merged.grants, self._clock)
        return [*waiting, *(f"limits.{name}" for name in late), *(f"sending.{name}" for name in later)]


def _merged(new: _Struct, old: _Struct, fixed: frozenset[str]) -> tuple[_Struct, list[str]]:
    """Return the new values but for fixed ones, and the names of those that differ there."""
    kept = {name: getattr(old, name) for name in fixed}
    return msgspec.structs.replace(new, **kept), sorted(name for name in fixed if kept[name] != getattr(new, name))


class SettingsFile:
    """The file that the settings come from, read again by `read`, which raises ValueError if it can't be used."""

    def __init__(self, path: Path | None, read: Callable[[], ServerSettings]) -> None:
        self._path = path
        self.read = read
        self._seen: tuple[object, ...] = ()

    def has_changed(self, settings: ServerSettings) -> bool:
        """Tell whether the file, or one that the settings name for TLS, is another one than at the last call."""
        tls = settings.tls
        paths = [self._path, tls and tls.cert_file, tls and tls.key_file, tls and tls.client_ca_file]
        before, self._seen = self._seen, tuple(_marks(path for path in paths if path))
        return bool(before) and before != self._seen


def _marks(paths: Iterator[Path]) -> Iterator[object]:
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            # It is being replaced, or gone: reading it says which.
            yield path, None
        else:
            yield path, (found.st_ino, found.st_size, found.st_mtime_ns)


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
