"""Whether the server lives and is ready for traffic, on a port of its own that no crowd of clients can fill.

Invariant: an answer waits for no tier longer than `PROBE_S_MAX`; a tier that does not answer is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.member import Member
from kvtide.server.regions import Region
from kvtide.tier import Tier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire.http import HEAD_BYTES_MAX, HEAD_END, pack_response_head, parse_request_head

_log = logging.getLogger(__name__)

PROBE_S_MAX = 1.0
# What was found out about tiers is told for so long.
PROBE_KEPT_S = 1.0
CONNECTIONS_MAX = 64
_CONNECTION_S_MAX = 5.0
# No object has this name: keys are digests.
_NOBODYS = ObjectId(Namespace(bytes(32)), BlockKey(bytes(32)))
_JSON = [("Content-Type", "application/json"), ("Connection", "close")]


class Readiness(msgspec.Struct, frozen=True):
    """What a server needs to be ready, by name, and whether it is there: tiers, a region's centre, a pool's map."""

    is_ready: bool
    is_draining: bool
    parts: dict[str, bool]


class Health:
    """Answers `/livez` and `/readyz`. Runs on the event loop between `open` and `close`."""

    def __init__(
        self, store: TierStack, region: Region | None, member: Member | None, now_s: Callable[[], float]
    ) -> None:
        self._store = region.local if region is not None else store
        self._region = region
        self._member = member
        self._now_s = now_s
        # The first moment of a shutdown: balancers should look elsewhere from then on.
        self.is_draining = False
        self._prober = ThreadPoolExecutor(1, "kvtide-health")
        self._probing: asyncio.Future[dict[str, bool]] | None = None
        self._tiers: dict[str, bool] = {}
        self._probed_s = float("-inf")
        self._connections = 0
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

    async def readiness(self) -> Readiness:
        """Return what is there now, as far as it says so in time."""
        parts = {f"tier {name}": is_up for name, is_up in (await self._tiers_up()).items()}
        if self._region is not None and self._region.central is not None:
            parts["centre"] = self._region.central.as_of_s is not None
        if self._region is not None and self._region.recovery is not None:
            parts["regions"] = self._region.recovery.is_over
        if self._member is not None:
            parts["pool"] = self._member.has_map
        return Readiness(all(parts.values()) and not self.is_draining, self.is_draining, parts)

    async def _tiers_up(self) -> dict[str, bool]:
        if self._now_s() - self._probed_s >= PROBE_KEPT_S:
            if self._probing is None or self._probing.done():
                self._probing = asyncio.get_running_loop().run_in_executor(self._prober, self._probe)
            done, _ = await asyncio.wait([self._probing], timeout=PROBE_S_MAX)
            # One that hangs keeps the prober, and with it all of them down until it answers.
            self._tiers = self._probing.result() if done else dict.fromkeys(self._store.tier_names, False)
            self._probed_s = self._now_s()
        return self._tiers

    def _probe(self) -> dict[str, bool]:
        up = {name for name, tier in self._store.open_tiers.items() if _answers(tier)}
        return {name: name in up for name in self._store.tier_names}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(_CONNECTION_S_MAX):
                    writer.write(await self._answer(await reader.readuntil(HEAD_END)))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("a health check went away: %s", error)
        finally:
            self._connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, data: bytes) -> bytes:
        try:
            path = parse_request_head(data).target.partition("?")[0]
        except RequestRefused as error:
            return _packed(error.status, {"error": str(error)})
        if path in {"/livez", "/healthz"}:
            return _packed(200, {"is_alive": True})
        if path != "/readyz":
            return _packed(404, {"error": "expected /livez or /readyz"})
        found = await self.readiness()
        return _packed(200 if found.is_ready else 503, found)


def _answers(tier: Tier) -> bool:
    try:
        tier.contains(_NOBODYS)
    except TierUnavailable as error:
        _log.debug("%s does not answer: %s", tier.name, error)
        return False
    return True


def _packed(status: int, value: object) -> bytes:
    body = msgspec.json.encode(value) + b"\n"
    return pack_response_head(status, [*_JSON, ("Content-Length", len(body))]) + body
