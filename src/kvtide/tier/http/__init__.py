"""Objects on a kvtide server."""

from kvtide.tier.http.connection import HttpAnswer, Patience, servers_of
from kvtide.tier.http.peer import Call, Peer, PeerSettings
from kvtide.tier.http.tier import OPERATION_S_MAX, HttpTier, http_tier

__all__ = [
    "OPERATION_S_MAX",
    "Call",
    "HttpAnswer",
    "HttpTier",
    "Patience",
    "Peer",
    "PeerSettings",
    "http_tier",
    "servers_of",
]
