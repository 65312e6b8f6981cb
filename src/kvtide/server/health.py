"""Liveness and readiness of a server, told on a port of their own to whoever manages it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.regions import Backing
from kvtide.tier.pool import Member
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END, Headers, pack_response_head, parse_request_head

_log = logging.getLogger(__name__)

PROBE_S_MAX = 1.0
# What was found out about tiers is told for so long.
PROBE_KEPT_S = 1.0
CONNECTIONS_MAX = 64
_CONNECTION_S_MAX = 5.0
# No object has this name: keys are digests.
_NOBODYS = ObjectId(Namespace(bytes(32)), BlockKey(bytes(32)))


class Health:
    """Answers `/livez` and `/readyz` on a port of their own. Runs on the event loop between `open` and `close`."""

    def __init__(self, backing: Backing, member: Member | None, clock: Clock) -> None:
        self._backing, self._member, self._clock = backing, member, clock
        # The first moment of a shutdown: balancers should look elsewhere from then on.
        self.is_draining = False
        self._prober = ThreadPoolExecutor(1, "kvtide-health")
        self._probing: asyncio.Future[dict[str, bool]] | None = None
        self._tiers: dict[str, bool] = {}
        self._probed_s = float("-inf")
        # In the order in which they came.
        self._connections: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port. OSError if that can't be done."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._prober.shutdown(wait=False, cancel_futures=True)

    async def _parts(self) -> dict[str, bool]:
        parts = {f"tier {name}": is_up for name, is_up in (await self._tiers_up()).items()}
        if self._backing.central is not None:
            parts["centre"] = self._backing.as_of_s() is not None
        if self._backing.recovery is not None:
            parts["regions"] = self._backing.recovery.is_over
        if self._member is not None:
            parts["pool"] = self._member.placement is not None
        return parts

    async def _tiers_up(self) -> dict[str, bool]:
        if self._clock.monotonic_s() - self._probed_s >= PROBE_KEPT_S:
            if self._probing is None or self._probing.done():
                self._probing = asyncio.get_running_loop().run_in_executor(self._prober, self._probe)
            done, _ = await asyncio.wait([self._probing], timeout=PROBE_S_MAX)
            # One that hangs keeps the prober, and with it all of them down until it answers.
            self._tiers = self._probing.result() if done else dict.fromkeys(self._backing.local.tier_names, False)
            self._probed_s = self._clock.monotonic_s()
        return self._tiers

    def _probe(self) -> dict[str, bool]:
        up = dict.fromkeys(self._backing.local.tier_names, False)
        for name, tier in self._backing.local.open_tiers.items():
            try:
                tier.contains(_NOBODYS)
                up[name] = True
            except TierUnavailable as error:
                _log.debug("%s does not answer: %s", tier.name, error)
        return up

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            # Who has been here longest makes room: those who say nothing keep no manager out.
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            async with asyncio.timeout(_CONNECTION_S_MAX):
                writer.write(await self._answer(await reader.readuntil(HEAD_END)))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("a health check went away: %s", error)
        finally:
            self._connections.pop(writer, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, data: bytes) -> bytes:
        value: object
        try:
            path = parse_request_head(data).target.partition("?")[0]
            if path == "/livez" or (path == "/healthz" and not self.is_draining):
                status, value = 200, {"is_alive": True}
            elif path == "/healthz":
                status, value = 503, {"is_draining": True}
            elif path == "/readyz":
                parts, is_draining = await self._parts(), self.is_draining
                is_ready = all(parts.values()) and not is_draining
                status = 200 if is_ready else 503
                value = {"is_ready": is_ready, "is_draining": is_draining, "parts": parts}
            else:
                raise RequestRefused(404, "expected /livez or /readyz")
        except RequestRefused as error:
            status, value = error.status, {"error": str(error)}
        body = msgspec.json.encode(value) + b"\n"
        headers: Headers = [
            ("Content-Type", "application/json"),
            ("Connection", "close"),
            ("Content-Length", len(body)),
        ]
        return pack_response_head(status, headers) + body
