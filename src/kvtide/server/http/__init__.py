"""Connections of the server: heads, bodies, and how much of both anyone may hold."""

from kvtide.server.http.connections import Acceptor, Connection, Guest, listener_on
from kvtide.server.http.exchange import Exchange, Reception, Resources, receive
from kvtide.server.http.sender import Sender, SendOrder, lent_pieces
from kvtide.server.http.shares import BodyBuffers, Rates, Shares, Workers

__all__ = [
    "Acceptor",
    "BodyBuffers",
    "Connection",
    "Exchange",
    "Guest",
    "Rates",
    "Reception",
    "Resources",
    "SendOrder",
    "Sender",
    "Shares",
    "Workers",
    "lent_pieces",
    "listener_on",
    "receive",
]
