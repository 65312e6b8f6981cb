"""One line of JSON for each request, on a logger of its own: who asked, for what kind of thing, and what became of it.

Invariant: a line never holds a token, a key or a namespace: who may read the log learns nothing of a tenant's prompts.
"""

from __future__ import annotations

import logging
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec

from kvtide.server.exchange import Exchange
from kvtide.server.metrics import Route

__all__ = ["ACCESS_LOGGER", "AccessLine", "note_access", "write_access_log"]

ACCESS_LOGGER = "kvtide.access"
_log = logging.getLogger(ACCESS_LOGGER)


class AccessLine(msgspec.Struct, frozen=True):
    """A request that has ended. Status 0: the connection ended before an answer began, or within a body.

    `wait_s` is how long the body waited for its first slice, `took_s` the time from head to end.
    """

    time_s: float
    client: str
    tenant: str
    method: str
    route: str
    status: int
    received_bytes: int
    sent_bytes: int
    wait_s: float
    took_s: float


def write_access_log(path: Path) -> None:
    """Let the lines go to a file from now on, opened anew if somebody moves it away. OSError if it can't be written."""
    handler = WatchedFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    # Other logs are for other readers.
    _log.propagate = False


def note_access(exchange: Exchange, route: Route, wall_s: float) -> None:
    """Write the line of a request that has ended, if anybody listens."""
    if not _log.isEnabledFor(logging.INFO):
        return
    line = AccessLine(
        time_s=round(wall_s, 3),
        client=exchange.client,
        tenant=exchange.caller.tenant,
        method=exchange.head.method,
        route=str(route),
        status=exchange.status,
        received_bytes=exchange.received_bytes,
        sent_bytes=exchange.sent_bytes,
        wait_s=round(exchange.wait_s, 6),
        took_s=round(exchange.stream.now_s() - exchange.arrived_s, 6),
    )
    _log.info("%s", msgspec.json.encode(line).decode())
