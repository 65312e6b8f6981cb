"""Connections of the server: heads, bodies, and how much of both anyone may hold."""

from kvtide.server.http.connection import Connection
from kvtide.server.http.doors import Acceptor, Guest, bound, listener_on
from kvtide.server.http.exchange import BodyBuffers, Exchange, Headers, Reception, receive, take_buffer
from kvtide.server.http.sender import Sender, SendOrder, lent_pieces, piece_bytes
from kvtide.server.http.shares import Rates, Shares, Workers

__all__ = [
    "Acceptor",
    "BodyBuffers",
    "Connection",
    "Exchange",
    "Guest",
    "Headers",
    "Rates",
    "Reception",
    "SendOrder",
    "Sender",
    "Shares",
    "Workers",
    "bound",
    "lent_pieces",
    "listener_on",
    "piece_bytes",
    "receive",
    "take_buffer",
]
