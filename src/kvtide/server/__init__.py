"""The cache server: tiers over HTTP, byte-fair between tenants."""

from kvtide.server.auth import new_token, token_digest
from kvtide.server.http import listener_on
from kvtide.server.logs import ACCESS_LOGGER, AUDIT_LOGGER, write_log
from kvtide.server.regions import backing_for
from kvtide.server.service import Service

__all__ = [
    "ACCESS_LOGGER",
    "AUDIT_LOGGER",
    "Service",
    "backing_for",
    "listener_on",
    "new_token",
    "token_digest",
    "write_log",
]
