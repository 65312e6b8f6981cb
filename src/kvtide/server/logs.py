"""Lines of what happened: requests, and changes.

Invariant: an access line never holds a token, a key or a namespace: who may read that log learns nothing of a tenant's
prompts. The audit log names what was changed, and is for operators alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
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


def write_logs(access: Path | None, audit: Path | None) -> None:
    """Let the access and the audit log go to files, if there are any. OSError if one can't be written."""
    for logger, path in ((ACCESS_LOGGER, access), (AUDIT_LOGGER, audit)):
        if path is not None:
            write_log(logger, path)


def write_log(logger: str, path: Path) -> None:
    """Let a logger's lines go to a file, opened again if somebody moves it away. OSError if it can't be written."""
    handler = WatchedFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    # A disk that is full costs lines: for each, logging would write a traceback to stderr.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
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
        """Write the lines of a request that has ended. Status 0: before an answer began, or within a body."""
        who = {
            "time_s": round(self._clock.wall_s(), 3),
            "client": exchange.guest.client,
            "address": exchange.address,
            "tenant": exchange.caller.tenant,
        }
        if exchange.change:
            _write(_audit, {**who, "change": exchange.change})
        if not _access.isEnabledFor(logging.INFO):
            return
        kind = _KNOWN if exchange.is_let_in else _STRANGERS
        try:
            self._rates[kind].take(kind, self._clock.monotonic_s())
        except RequestRefused:
            self._left_out[kind] += 1
            return
        self.flush()
        line = {
            "method": exchange.head.method,
            "route": str(route),
            "status": exchange.status,
            "received_bytes": exchange.received_bytes,
            "sent_bytes": exchange.sent_bytes,
            "wait_s": round(exchange.wait_s, 6),
            "took_s": round(exchange.stream.now_s() - exchange.arrived_s, 6),
        }
        _write(_access, {**who, **line})

    def flush(self) -> None:
        """Say how many lines were left out, if any were."""
        known, strangers = self._left_out.values()
        if known or strangers:
            time_s = round(self._clock.wall_s(), 3)
            _write(_access, {"time_s": time_s, "left_out": known, "left_out_strangers": strangers})
            self._left_out = dict.fromkeys(self._left_out, 0)


def _write(log: logging.Logger, line: Mapping[str, object]) -> None:
    # A file that was moved away and can't be opened again costs lines, not connections.
    with suppress(OSError):
        log.info("%s", msgspec.json.encode(line).decode())
