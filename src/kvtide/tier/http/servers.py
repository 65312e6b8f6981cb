"""What a kvtide server's URL says: where servers listen, and what requests to them carry."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtide.tier.http.connection import Endpoint
from kvtide.types import NamedId, Namespace, ObjectId
from kvtide.wire.protocol import FORCE_HEADER, GENERATION_HEADER, TENANT_HEADER

_OPTIONS = frozenset({"token_file", "ca_file", "cert_file", "key_file", "write", "force_latest"})


class Servers(NamedTuple):
    """Where servers listen, what headers requests carry, those for objects, and whether only evicted ones are sent."""

    endpoints: list[Endpoint]
    headers: list[tuple[str, str]]
    object_headers: list[tuple[str, str]]
    takes_evicted: bool


def servers_of(url: str) -> Servers:
    """Return the servers of `http://host:port[,host:port]`, `https://…` or `http+unix:///path`.

    Options behind `?`: `token_file`; `write=evicted` for a store that gets only what the tiers in front of it evict;
    `force_latest=1` to look in all regions for what the server lacks; for TLS `ca_file`, `cert_file` and `key_file`.
    ValueError for anything else, or a file that can't be read.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = options.keys() - _OPTIONS
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ValueError(f"a remote store's URL has no user or password, give {shown}?token_file=PATH")
    if unknown or parts.fragment:
        raise ValueError(f"a remote store's URL takes the options {', '.join(sorted(_OPTIONS))}, got {url!r}")
    tls = _tls_context(options) if parts.scheme == "https" else None
    headers = []
    if "token_file" in options:
        headers.append(("Authorization", f"Bearer {_read_token(Path(options['token_file']))}"))
    takes_evicted = {"all": False, "evicted": True}.get(options.get("write", "all"))
    if takes_evicted is None:
        raise ValueError(f"write is all or evicted, got {options['write']!r}")
    if options.get("force_latest", "0") not in {"0", "1"}:
        raise ValueError(f"force_latest is 0 or 1, got {options['force_latest']!r}")
    latest = [(FORCE_HEADER, "1")] if options.get("force_latest") == "1" else []
    return Servers(_endpoints(url, tls), headers, [*headers, *latest], takes_evicted)


def asked_name(object_id: ObjectId) -> tuple[Namespace, list[tuple[str, str]]]:
    """Return by what namespace, and with which headers, a server is asked for an object."""
    if not isinstance(object_id, NamedId):
        return object_id.namespace, []
    tenant, namespace, generation = object_id.name
    whose = [(TENANT_HEADER, tenant)] if tenant else []
    latest = [(FORCE_HEADER, "1")] if object_id.is_latest else []
    return namespace, [*whose, *latest, (GENERATION_HEADER, str(generation))]


def object_target(object_id: ObjectId) -> tuple[str, list[tuple[str, str]]]:
    """Return the path at which a server is asked for an object, and the headers."""
    namespace, headers = asked_name(object_id)
    return f"/v1/{namespace.hex()}/{object_id.key.hex()}", headers


def _endpoints(url: str, tls: ssl.SSLContext | None) -> list[Endpoint]:
    parts = urlsplit(url)
    if parts.scheme == "http+unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"expected http+unix:///path, got {url!r}")
        return [Endpoint("", 0, unquote(parts.path))]
    if parts.path not in {"", "/"}:
        raise ValueError(f"a remote store's URL has no path, got {url!r}")
    found = []
    for name in parts.netloc.split(","):
        host, colon, port = name.rpartition(":")
        if not host or not colon:
            raise ValueError(f"a remote store needs host:port, or several with commas, got {name!r} in {url!r}")
        if not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) <= 0xFFFF:
            raise ValueError(f"a remote store's port is a number from 1 to 65535, got {port!r} in {url!r}")
        found.append(Endpoint(host.removeprefix("[").removesuffix("]"), int(port), tls=tls))
    return found


def _tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ca_file"))
        if "cert_file" in options:
            context.load_cert_chain(options["cert_file"], options.get("key_file"))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"can't use the TLS files of the remote store: {error}") from error
    return context


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read the token file {path}: {error}") from error
    if not token.isprintable() or not token:
        raise ValueError(f"the token file {path} holds no token")
    return token
