"""Lines of what happened: requests, changes, and events for routers that send prompts to where their blocks are.

Invariant: an access line never holds a token, a key or a namespace: who may read that log learns nothing of a tenant's
prompts. The audit log names what was changed, and is for operators alone. A reader of events gets each once and in
order, or a gap that says which ones it missed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import islice
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused
from kvtide.server.http import Exchange, Rates
from kvtide.server.metrics import Route
from kvtide.server.settings import ServerLimits
from kvtide.types import Namespace

ACCESS_LOGGER = "kvtide.access"
AUDIT_LOGGER = "kvtide.audit"
_access = logging.getLogger(ACCESS_LOGGER)
_audit = logging.getLogger(AUDIT_LOGGER)
_KNOWN, _STRANGERS = "known", "strangers"
EVENTS_CONTENT_TYPE = "text/event-stream"
# A comment: keeps the connection alive and tells a reader that nothing happened.
HEARTBEAT = b": nothing new\n\n"


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


def write_logs(access: Path | None, audit: Path | None) -> None:
    """Let the access and the audit log go to files, if there are any. OSError if one can't be written."""
    for logger, path in ((ACCESS_LOGGER, access), (AUDIT_LOGGER, audit)):
        if path is not None:
            write_log(logger, path)


def write_log(logger: str, path: Path) -> None:
    """Let a logger's lines go to a file, opened again if somebody moves it away. OSError if it can't be written."""
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
            line = {
                "time_s": wall_s,
                "client": exchange.client,
                "address": exchange.address,
                "tenant": exchange.caller.tenant,
                "change": exchange.change,
            }
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
            time_s = round(self._clock.wall_s(), 3)
            line = {"time_s": time_s, "left_out": known, "left_out_strangers": strangers}
            _access.info("%s", msgspec.json.encode(line).decode())
            self._left_out = dict.fromkeys(self._left_out, 0)


class EventKind(StrEnum):
    """The kind of change of a block, or by an invalidation of all of a namespace."""

    STORED = "stored"
    REMOVED = "removed"
    INVALIDATED = "invalidated"


class Event(msgspec.Struct, frozen=True):
    """One block that came to a tier or left it; without key and tier a namespace that was invalidated."""

    sequence: int
    kind: EventKind
    namespace: str
    key: str
    tier: str


class Position(NamedTuple):
    """A reader's place: the sequence number that it wants next, of one life of the server."""

    epoch: str
    sequence: int


class Batch(NamedTuple):
    """A reader's next events: first `[gap_start, gap_stop)` that it missed, if any, then events and where to go on."""

    has_gap: bool
    gap_start: int
    gap_stop: int
    events: Sequence[Event]
    next: Position


class EventLog:
    """The last `events_max` events. Thread-safe; never waits. `epoch` tells one life of the server from the next."""

    def __init__(self, epoch: str, events_max: int = 16384) -> None:
        assert epoch.isalnum() and events_max > 0
        self._epoch = epoch
        self._events: deque[Event] = deque(maxlen=events_max)
        self._next = 0
        self._lock = threading.Lock()

    def append(self, kind: EventKind, namespace: Namespace, key: str = "", tier: str = "") -> None:
        """Note that a block came or went, or all of a namespace."""
        with self._lock:
            self._events.append(Event(self._next, kind, namespace.hex(), key, tier))
            self._next += 1

    def end(self) -> Position:
        """Return the position of the next event: where a reader without one begins."""
        return Position(self._epoch, self._next)

    def position(self, last_event_id: str | None) -> Position:
        """Return where a reader goes on that names the last event that it got, or none. ValueError for a bad id."""
        if not last_event_id:
            return self.end()
        epoch, _, sequence = last_event_id.partition("-")
        if not (epoch.isalnum() and sequence.isascii() and sequence.isdecimal() and len(sequence) < 20):
            raise ValueError(f"Last-Event-ID is EPOCH-NUMBER, got {last_event_id!r}")
        return Position(epoch, int(sequence) + 1)

    def since(self, position: Position, events_max: int = 1024) -> Batch:
        """Return at most `events_max` events from a position on, and the gap before them if the log begins later."""
        with self._lock:
            first = self._next - len(self._events)
            is_other_life = position.epoch != self._epoch or position.sequence > self._next
            wanted = first if is_other_life else max(position.sequence, first)
            stop = min(wanted + events_max, self._next)
            events = list(islice(self._events, wanted - first, stop - first))
        has_gap = is_other_life or wanted > position.sequence
        gap_start = 0 if is_other_life else position.sequence
        return Batch(has_gap, gap_start, wanted, events, Position(self._epoch, stop))


def events_body(batch: Batch) -> bytes:
    """Return a batch as a `text/event-stream`: `stored`, `removed`, `invalidated` and `gap` events."""
    lines = []
    epoch = batch.next.epoch
    if batch.has_gap:
        data = {"start": batch.gap_start, "stop": batch.gap_stop}
        lines.append(_message(f"{epoch}-{batch.gap_stop - 1}" if batch.gap_stop else "", "gap", data))
    lines += [_message(f"{epoch}-{event.sequence}", event.kind, event) for event in batch.events]
    return b"".join(lines)


def _message(event_id: str, name: str, data: object) -> bytes:
    lines = [f"id: {event_id}"] if event_id else []
    return "\n".join([*lines, f"event: {name}", f"data: {msgspec.json.encode(data).decode()}", "", ""]).encode()
