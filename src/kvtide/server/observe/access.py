"""Who asked, for what kind of thing, and what became of it: a line of JSON a request; and who changed what, apart.

Invariant: an access line never holds a token, a key or a namespace: who may read that log learns nothing of a tenant's
prompts. The audit log names what was changed, and is for operators alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused
from kvtide.server.http import Exchange, Rates
from kvtide.server.metrics import Route
from kvtide.server.settings import ServerLimits

ACCESS_LOGGER = "kvtide.access"
AUDIT_LOGGER = "kvtide.audit"
_access = logging.getLogger(ACCESS_LOGGER)
_audit = logging.getLogger(AUDIT_LOGGER)
_KNOWN, _STRANGERS = "known", "strangers"


class AccessLine(msgspec.Struct, frozen=True):
    """A request that has ended. Status 0: the connection ended before an answer began, or within a body.

    `wait_s` is how long the body waited for its first slice, `took_s` the time from head to end.
    """

    time_s: float
    client: str
    address: str
    tenant: str
    method: str
    route: str
    status: int
    received_bytes: int
    sent_bytes: int
    wait_s: float
    took_s: float


class LeftOut(msgspec.Struct, frozen=True):
    """How many lines there was no room for since the last such line: of callers that were let in, and of strangers."""

    time_s: float
    left_out: int
    left_out_strangers: int


class AuditLine(msgspec.Struct, frozen=True):
    """A change: who made it, from where. `change` is what was done to what."""

    time_s: float
    client: str
    address: str
    tenant: str
    change: str


def write_log(logger: str, path: Path) -> None:
    """Let a logger's lines go to a file, opened anew if somebody moves it away. OSError if it can't be written."""
    handler = WatchedFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger(logger)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Other logs are for other readers.
    log.propagate = False


class AccessLog:
    """Writes the lines if anybody listens, `log_lines_s_max` a second; those of strangers have a bound of their own."""

    def __init__(self, limits: Callable[[], ServerLimits], clock: Clock) -> None:
        self._clock = clock
        self._rates = {
            _KNOWN: Rates(lambda: limits().log_lines_s_max),
            _STRANGERS: Rates(lambda: limits().stranger_log_lines_s_max),
        }
        self._left_out = dict.fromkeys(self._rates, 0)

    def note(self, exchange: Exchange, route: Route) -> None:
        """Write the lines of a request that has ended."""
        wall_s = round(self._clock.wall_s(), 3)
        if exchange.change:
            line = AuditLine(wall_s, exchange.client, exchange.address, exchange.caller.tenant, exchange.change)
            _audit.info("%s", msgspec.json.encode(line).decode())
        if not _access.isEnabledFor(logging.INFO):
            return
        who = _KNOWN if exchange.is_let_in else _STRANGERS
        try:
            self._rates[who].take(who, self._clock.monotonic_s())
        except RequestRefused:
            self._left_out[who] += 1
            return
        self.flush()
        entry = AccessLine(
            time_s=wall_s,
            client=exchange.client,
            address=exchange.address,
            tenant=exchange.caller.tenant,
            method=exchange.head.method,
            route=str(route),
            status=exchange.status,
            received_bytes=exchange.received_bytes,
            sent_bytes=exchange.sent_bytes,
            wait_s=round(exchange.wait_s, 6),
            took_s=round(exchange.stream.now_s() - exchange.arrived_s, 6),
        )
        _access.info("%s", msgspec.json.encode(entry).decode())

    def flush(self) -> None:
        """Say how many lines were left out, if any were."""
        known, strangers = self._left_out.values()
        if known or strangers:
            line = LeftOut(round(self._clock.wall_s(), 3), known, strangers)
            _access.info("%s", msgspec.json.encode(line).decode())
            self._left_out = dict.fromkeys(self._left_out, 0)
