"""What came and went, for routers that send prompts to where their blocks are: a bounded log with sequence numbers.

Invariant: a reader gets every event once and in order, or a gap that says which ones it missed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

import msgspec

from kvtide.types import Namespace

EVENTS_CONTENT_TYPE = "text/event-stream"
# A comment: keeps the connection alive and tells a reader that nothing happened.
HEARTBEAT = b": nothing new\n\n"


class EventKind(StrEnum):
    """What happened to a block, or by an invalidation to all of a namespace."""

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
    """A reader's place: the sequence number that it wants next, in the log of one life of the server."""

    epoch: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.sequence}"


class Batch(NamedTuple):
    """What a reader gets: first `[gap_start, gap_stop)` that it missed, if any, then events, then where to go on.

    A gap without numbers to name, after a restart of the server, has `gap_start` 0.
    """

    has_gap: bool
    gap_start: int
    gap_stop: int
    events: Sequence[Event]
    next: Position


class EventLog:
    """The last `events_max` events. Thread-safe; never waits. `epoch` tells one life of the server from the next."""

    def __init__(self, epoch: str, events_max: int = 16384) -> None:
        if events_max <= 0:
            raise ValueError(f"events_max must be positive, got {events_max}")
        if not epoch.isalnum():
            raise ValueError(f"an epoch is letters and digits, got {epoch!r}")
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
