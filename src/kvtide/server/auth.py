"""Callers, also from behind a proxy, and their rights: tokens, certificates, scopes, namespaces of tenants.

Invariant: what a tenant names maps to a place that no other tenant can name, so that another's object and an absent one
are the same case, in the code and therefore in time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused
from kvtide.types import Namespace
from kvtide.wire.protocol import Header

_TENANT_TAG = b"kvtide-tenant-1"
_GENERATION_TAG = b"kvtide-generation-1"
_EVERYBODY = "*"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOKEN_BYTES = 32
_TOKEN_CHARACTERS_MAX = 256
# A generation has twelve digits and never sinks: a leap to the last one would end all invalidation.
GENERATION_STEP_MAX = 1024
_UNIX = "unix"
FORWARDED_HEADER = "x-forwarded-for"


class Scope(Enum):
    """Rights of a grant: `read` gets, `write` puts and deletes, `admin` sees the whole server's figures."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One token, by its SHA-256, or one client certificate, by its common name. ValueError for anything off."""

    tenant: str
    scopes: list[Scope]
    token_sha256: str = ""
    common_name: str = ""
    # Seconds since the Unix epoch; 0 is never.
    expires_s: float = 0.0
    # The tenants for which a regional server may ask with this grant; "*" for all.
    on_behalf_of: list[str] = []

    def __post_init__(self) -> None:
        if not _TENANT.fullmatch(self.tenant):
            raise ValueError(f"a tenant is 1 to 64 letters, digits, dots, dashes, got {self.tenant!r}")
        if bool(self.token_sha256) == bool(self.common_name):
            raise ValueError(f"a grant of tenant {self.tenant!r} needs token_sha256 or common_name, one of them")
        if self.token_sha256 and not _DIGEST.fullmatch(self.token_sha256):
            raise ValueError(f"token_sha256 of tenant {self.tenant!r} must be 64 lower-case hex digits")
        if not all(each == _EVERYBODY or _TENANT.fullmatch(each) for each in self.on_behalf_of):
            raise ValueError(f'on_behalf_of names tenants, or "*", got {self.on_behalf_of}')


class Caller(NamedTuple):
    """The sender of a request; `tenant` is empty where the server asks nobody for a token.

    `owner` is the tenant on whose account that is; for a name that no grant lists, as there is no end of such, the
    grant's.
    """

    tenant: str
    scopes: frozenset[Scope]
    on_behalf_of: frozenset[str] = frozenset()
    owner: str = ""
    # Asks for a tenant by a grant that names it: another server does.
    is_relay: bool = False

    @property
    def generation_step_max(self) -> int:
        """The most by which the caller may raise a generation at once: a tenant by one, a server or an admin more."""
        is_trusted = self.is_relay or self.on_behalf_of or Scope.ADMIN in self.scopes
        return GENERATION_STEP_MAX if is_trusted else 1

    def may_act_for(self, tenant: str) -> bool:
        """True for the caller's own tenant, and those that its grant names."""
        return tenant == self.tenant or tenant in self.on_behalf_of or _EVERYBODY in self.on_behalf_of

    def acting_for(self, tenant: str) -> Caller:
        """The tenant for whom the caller asks, without `admin`. RequestRefused (403) if it may not."""
        if not _TENANT.fullmatch(tenant) or not self.may_act_for(tenant):
            raise RequestRefused(403, "the token may not ask for that tenant")
        owner = tenant if tenant in self.on_behalf_of else self.owner
        return Caller(tenant, self.scopes - {Scope.ADMIN}, owner=owner, is_relay=bool(self.on_behalf_of))

    def require(self, scope: Scope) -> None:
        """RequestRefused (403) unless the caller may do this."""
        if scope not in self.scopes:
            raise RequestRefused(403, f"the token lacks the scope {scope.value!r}")


NOBODY = Caller("", frozenset(Scope), frozenset({_EVERYBODY}))


def new_token() -> str:
    """Make a token of 256 random bits, so that a plain hash of it is as good as a slow one."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def token_digest(token: str) -> str:
    """SHA-256 of a token, as the configuration keeps it."""
    return hashlib.sha256(token.encode()).hexdigest()


def tenants_named(grants: Sequence[Grant]) -> list[str]:
    """Tenants whose grants these are or for whom they may ask, in order."""
    names = [name for grant in grants for name in (grant.tenant, *grant.on_behalf_of)]
    return [name for name in dict.fromkeys(names) if name != _EVERYBODY]


def stored_namespace(tenant: str, namespace: bytes, generation: int = 0) -> Namespace:
    """Place of a tenant's namespace, of a generation: SHA-256 over tag, tenant and namespace if there is a tenant.

    Then over tag, generation and that, but for generation 0.
    """
    if tenant:
        name = tenant.encode()
        namespace = hashlib.sha256(_TENANT_TAG + len(name).to_bytes(4, "little") + name + namespace).digest()
    if generation:
        namespace = hashlib.sha256(_GENERATION_TAG + generation.to_bytes(8, "little") + namespace).digest()
    return Namespace(namespace)


class Gate:
    """Finds the caller of a request. Without grants everybody is `NOBODY`, who may do everything."""

    def __init__(self, grants: Sequence[Grant], clock: Clock) -> None:
        self._tokens = [(grant.token_sha256.encode(), grant) for grant in grants if grant.token_sha256]
        self._names = {grant.common_name: grant for grant in grants if grant.common_name}
        self._is_open = not grants
        self._clock = clock

    def caller(self, headers: Mapping[str, str], common_name: str | None) -> Caller:
        """Return who asks, by token, else by the certificate's common name, and for whom if a header says that.

        RequestRefused: 401 for nobody known, 403 for one who may not ask for that tenant.
        """
        caller = NOBODY if self._is_open else self._granted(headers, common_name)
        return caller.acting_for(headers[Header.TENANT]) if Header.TENANT in headers else caller

    def _granted(self, headers: Mapping[str, str], common_name: str | None) -> Caller:
        kind, _, token = headers.get("authorization", "").strip().partition(" ")
        if kind.lower() == "bearer" and token.strip():
            digest = token_digest(token.strip()[:_TOKEN_CHARACTERS_MAX]).encode()
            # Every entry is compared in full: time tells neither which one nor how much of it was right.
            matching = [grant for known, grant in self._tokens if hmac.compare_digest(known, digest)]
            grant = matching[0] if matching else None
        else:
            grant = self._names.get(common_name or "")
        if grant is None or (grant.expires_s and grant.expires_s <= self._clock.wall_s()):
            raise RequestRefused(401, "a token is needed that this server knows")
        return Caller(grant.tenant, frozenset(grant.scopes), frozenset(grant.on_behalf_of), grant.tenant)


class Proxies:
    """Proxies that may say for whom they speak. ValueError for one that is no address, network or `unix`."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(each) for each in trusted if each != _UNIX]
        self._is_unix_trusted = _UNIX in trusted

    def is_trusted(self, host: str) -> bool:
        """Tell whether a peer is believed when it names its client."""
        if host == _UNIX:
            return self._is_unix_trusted
        address = ip_address(host)
        return any(address in network for network in self._networks)

    def client_of(self, headers: Mapping[str, str], host: str) -> str:
        """Return who sent a request: the last one of its chain that is not trusted, else the peer itself."""
        # What stands before something that is no address may be anybody's.
        with suppress(ValueError):
            for text in reversed(headers.get(FORWARDED_HEADER, "").split(",")):
                if not self.is_trusted(host):
                    break
                host = _plain(ip_address(text.strip()))
        return host


def _plain(address: IPv4Address | IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address).partition("%")[0]
