"""Connections of the server: heads, bodies, and how much of both anyone may hold."""

from kvtide.server.http.bodies import BodyBuffers
from kvtide.server.http.connection import Connection
from kvtide.server.http.doors import FILES_MAX, ConnectionLimits, Guest, account_of, connections_for, host_of
from kvtide.server.http.exchange import Exchange, Headers
from kvtide.server.http.listeners import bound, listener_on, turn_away
from kvtide.server.http.mover import Mover
from kvtide.server.http.rates import Rates
from kvtide.server.http.receive import take_buffer
from kvtide.server.http.reception import AllowedHosts, Reception
from kvtide.server.http.sender import Sender, SendOrder
from kvtide.server.http.shares import Shares
from kvtide.server.http.turns import Turns
from kvtide.server.http.workers import Workers

__all__ = [
    "FILES_MAX",
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
    "take_buffer",
    "turn_away",
]
