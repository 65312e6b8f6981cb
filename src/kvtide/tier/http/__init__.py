"""Objects on a kvtide server. `records` is imported by those who ask for the server's records."""

from kvtide.tier.http.peer import PeerSettings, tls_context
from kvtide.tier.http.tier import http_tier

__all__ = ["PeerSettings", "http_tier", "tls_context"]
