"""One request and its answer on a connection."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvtide.errors import RequestRefused
from kvtide.server.auth import Caller
from kvtide.server.stream import Stream
from kvtide.wire.http import RequestHead, pack_response_head
from kvtide.wire.protocol import Route, deadline_ms, urgency

__all__ = ["Exchange"]

_URGENCY_MAX = 7
Headers = Sequence[tuple[str, str | int]]


@dataclass(slots=True)
class Exchange:
    """A request whose head has come, by whom, and what has been done about it. Times are the loop's."""

    stream: Stream
    client: str
    head: RequestHead
    route: Route
    caller: Caller
    arrived_s: float
    send_s_max: float
    is_kept_alive: bool
    has_unread_body: bool
    # 0 until the answer has begun.
    status: int = 0
    sent_bytes: int = 0

    @property
    def start_deadline_s(self) -> float:
        """When the answer must have begun. RequestRefused (400) if the request says nonsense about it."""
        asked_ms = deadline_ms(self.head.headers)
        return self.arrived_s + (math.inf if asked_ms is None else asked_ms / 1000)

    @property
    def priority(self) -> int:
        """The scheduler's priority: larger goes first."""
        return _URGENCY_MAX - urgency(self.head.headers)

    def begin(self, status: int, length: int, headers: Headers = ()) -> bytes:
        """Note that the answer begins and return its head."""
        self.status = status
        self.is_kept_alive = self.is_kept_alive and not self.has_unread_body
        connection = () if self.is_kept_alive else (("Connection", "close"),)
        return pack_response_head(status, (*headers, ("Content-Length", length), *connection))

    async def reply(self, status: int, body: bytes = b"", headers: Headers = ()) -> None:
        """Send a small answer."""
        head = self.begin(status, len(body), headers)
        data = head if self.head.method == "HEAD" else head + body
        await self.stream.send_all(data, self.arrived_s + self.send_s_max)
        self.sent_bytes += len(data) - len(head)

    async def reply_json(self, value: msgspec.Struct) -> None:
        """Send a value as JSON."""
        await self.reply(200, msgspec.json.encode(value) + b"\n", [("Content-Type", "application/json")])

    async def refuse(self, error: RequestRefused, headers: Headers = ()) -> None:
        """Send an error, unless an answer has begun: then the connection's end says it."""
        if self.status:
            self.is_kept_alive = False
            return
        body = json.dumps({"error": str(error)}).encode() + b"\n"
        extra = [*headers, ("Content-Type", "application/json")]
        if error.status == 401:
            extra.append(("WWW-Authenticate", 'Bearer realm="kvtide", Basic realm="kvtide"'))
        if error.retry_after_s is not None:
            extra.append(("Retry-After", math.ceil(error.retry_after_s)))
        await self.reply(error.status, body, extra)
