"""Connections of the server: heads, bodies, and how much of both anyone may hold."""

from kvtide.server.http.connection import Connection, Mover
from kvtide.server.http.doors import (
    ConnectionLimits,
    Guest,
    account_of,
    bound,
    connections_for,
    host_of,
    listener_on,
    turn_away,
)
from kvtide.server.http.exchange import AllowedHosts, BodyBuffers, Exchange, Headers, Reception, receive, take_buffer
from kvtide.server.http.sender import Sender, SendOrder
from kvtide.server.http.shares import Rates, Shares, Turns, Workers

__all__ = [
    "AllowedHosts",
    "BodyBuffers",
    "Connection",
    "ConnectionLimits",
    "Exchange",
    "Guest",
    "Headers",
    "Mover",
    "Rates",
    "Reception",
    "SendOrder",
    "Sender",
    "Shares",
    "Turns",
    "Workers",
    "account_of",
    "bound",
    "connections_for",
    "host_of",
    "listener_on",
    "receive",
    "take_buffer",
    "turn_away",
]
