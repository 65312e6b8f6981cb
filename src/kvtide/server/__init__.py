"""The cache server: tiers over HTTP, byte-fair between tenants."""

from kvtide.server.auth import new_token, token_digest
from kvtide.server.live import SettingsFile
from kvtide.server.service import Service, backing_for

__all__ = [
    "Service",
    "SettingsFile",
    "backing_for",
    "new_token",
    "token_digest",
]
