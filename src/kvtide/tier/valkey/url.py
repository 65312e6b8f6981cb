"""What a Valkey URL says: `valkey://[USER:PASSWORD@]HOST[:PORT][,HOST…][/DATABASE][?OPTION=VALUE…]`.

`redis://` is the same; `valkeys://` and `rediss://` are under TLS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

_PORT = 6379
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class ValkeyAddress(NamedTuple):
    """Where a server listens."""

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

    def tls_settings(self) -> dict[str, Any]:
        """Return what redis-py wants to know for TLS; nothing without it."""
        if not self.is_tls:
            return {}
        options = self.options
        return {"ssl_ca_certs": options.ca, "ssl_certfile": options.certificate, "ssl_keyfile": options.key}


def parse_valkey_url(url: str) -> ValkeyTarget:
    """Parse a URL. ValueError that names what is wrong, never the password."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    shown = f"{parts.scheme}://{hosts}"
    username, has_password, password = credentials.partition(":")
    addresses = tuple(_address(each, shown) for each in hosts.split(","))
    database = parts.path.strip("/") or "0"
    if not database.isdigit():
        raise ValueError(f"a database is a number, as in {shown}/0, got {database!r}")
    if "sentinel" in parts.scheme or "sentinel" in parts.query:
        raise ValueError(f"Sentinel is not spoken: {shown} must name the servers, primary and replicas, with commas")
    try:
        options = msgspec.convert(dict(parse_qsl(parts.query, keep_blank_values=True)), ValkeyOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"options of {shown}: {error}") from error
    return ValkeyTarget(
        addresses=addresses,
        username=unquote(username) or None,
        password=unquote(password) if has_password else None,
        database=int(database),
        is_tls=parts.scheme in {"valkeys", "rediss"},
        options=options,
        shown=shown,
    )


def _address(text: str, shown: str) -> ValkeyAddress:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, port = (host, port) if colon else (host or port, str(_PORT))
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"expected HOST:PORT[,HOST:PORT…], as in valkey://localhost:6379, got {text!r} in {shown}")
    return ValkeyAddress(host.strip("[]"), int(port))
