"""The cache server: tiers over HTTP, byte-fair between tenants."""

from kvtide.server.auth import new_token, token_digest
from kvtide.server.logs import write_logs
from kvtide.server.regions import backing_for
from kvtide.server.service import Service

__all__ = ["Service", "backing_for", "new_token", "token_digest", "write_logs"]
