"""Objects lent to readers: memory of a tier or a buffer of ours, on the account of who reads.

Invariant: readers of one tenant never keep so much of the memory tier that what others store has no room in it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from kvtide.errors import CorruptPayload, RequestRefused
from kvtide.server.http import BodyBuffers, Exchange, Shares, Workers, take_buffer
from kvtide.server.metrics import Metrics
from kvtide.server.regions import Latest
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier
from kvtide.tier.base import LentObject
from kvtide.tier.breaker import until
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, object_bytes, parse_header

_Result = TypeVar("_Result")


class Lending:
    """Lends objects out of any tier. Runs on the event loop; what waits for a tier runs in `workers`."""

    def __init__(self, buffers: BodyBuffers, limits: ServerLimits, metrics: Metrics, workers: Workers) -> None:
        self._buffers = buffers
        self._limits = limits
        self._metrics = metrics
        self._workers = workers
        self._memory = Shares(limits.lent_bytes_max, limits.tenant_lent_bytes_max)

    def is_waited_for(self, owner: str) -> bool:
        """Tell whether readers of this owner wait for memory that others of its readers hold."""
        return self._memory.is_waited_for(owner)

    async def lend(self, exchange: Exchange, tier: Tier, stored: ObjectId) -> LentObject | None:
        """Lend an object, to be released once; None if it is not here, or damaged and therefore removed.

        RequestRefused: 429 if the owner's readers hold all that they may, 503 if every buffer is in use.
        """
        # A thread takes ten times as long as what it would do here.
        lent = await self._lent_at_once(exchange, tier, stored)
        if lent is None:
            action = partial(_lend, tier, stored, self._buffers, exchange.caller.tenant, self._limits.object_bytes_max)
            try:
                lent = await self._workers.read(exchange.owner, _in_time(exchange, action), _release)
            except CorruptPayload:
                self._metrics.count_corrupt()
                await self._workers.write(exchange.owner, partial(tier.delete, stored, "corrupt"))
        return lent

    async def bring(self, exchange: Exchange, latest: Latest, stored: ObjectId) -> None:
        """Copy an object here from whoever has the latest, if anybody has, through a buffer of the tenant's share.

        RequestRefused: as `lend`, and 503 if somebody can't be asked.
        """
        tenant = exchange.caller.tenant

        def brought() -> None:
            with ExitStack() as held:

                def take(size: int) -> memoryview:
                    buffer = take_buffer(self._buffers, size, tenant)
                    held.callback(self._buffers.give_back, buffer, tenant)
                    return buffer

                latest.bring(stored, take)

        await self._workers.read(exchange.owner, _in_time(exchange, brought))

    async def _lent_at_once(self, exchange: Exchange, tier: Tier, stored: ObjectId) -> LentObject | None:
        """Lend what needs no waiting for a disk; memory once its owner's share has room."""
        lent, owner = tier.lend_at_once(stored), exchange.owner
        if lent is None or lent.file is not None or exchange.head.method == "HEAD":
            return lent
        size = lent.size
        if not self._memory.take_at_once(owner, size):
            lent.release()
            try:
                async with asyncio.timeout(self._limits.head_s_max):
                    await self._memory.take(owner, size)
            except TimeoutError:
                raise RequestRefused(429, "readers hold all the memory they may", retry_after_s=1.0) from None
            lent = tier.lend_at_once(stored)
            if lent is None or lent.size != size:
                # It was evicted or replaced meanwhile.
                _release(lent)
                self._memory.give_back(owner, size)
                return None
        return LentObject(size, lent.head, lent.views, None, partial(self._take_back, lent, owner))

    def _take_back(self, lent: LentObject, owner: str) -> None:
        lent.release()
        self._memory.give_back(owner, lent.size)


def _in_time(exchange: Exchange, action: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return the action with the request's deadline, if it has one, for the servers that it asks."""
    deadline_s = exchange.start_deadline_s

    def run() -> _Result:
        with until(deadline_s if deadline_s is not None else math.inf):
            return action()

    return run


def _release(lent: LentObject | None) -> None:
    if lent is not None:
        lent.release()


def _lend(tier: Tier, stored: ObjectId, buffers: BodyBuffers, tenant: str, size_max: int) -> LentObject | None:
    """Lend an object, out of a buffer of ours where the tier that has it can't lend.

    CorruptPayload if that is no object, by its head.
    """
    lent = tier.lend(stored)
    if lent is not None:
        return lent
    head = bytearray(HEADER_BYTES)
    came = tier.get_into(stored, memoryview(head))
    if came is None:
        return None
    size = object_bytes(head[:came])
    if not HEADER_BYTES <= size <= size_max:
        raise CorruptPayload(f"{stored}: {came} bytes of a head say that the object has {size}")
    buffer = take_buffer(buffers, size, tenant)
    give_back = partial(buffers.give_back, buffer, tenant)
    try:
        read = tier.get_into(stored, buffer[:size])
        if read is None:
            give_back()
            return None
        parse_header(buffer[:read])
        if read != size:
            raise CorruptPayload(f"{stored}: {read} bytes came of an object of {size}")
    except BaseException:
        give_back()
        raise
    return LentObject(size, bytes(head), (buffer[:size],), None, give_back)
