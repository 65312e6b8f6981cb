"""Bodies on their way in: memory is taken when bytes come, and grows with what has come.

Invariant: whoever sends nothing holds nothing, and who holds a large buffer has sent a quarter of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvtide.errors import QueueFull, RequestRefused
from kvtide.server.http.bodies import BodyBuffers
from kvtide.server.http.exchange import Exchange
from kvtide.server.settings import ServerLimits
from kvtide.tier.buffers import copy_bytes

# Bodies up to this size, nearly all, are received where they stay; larger ones are copied when they outgrow a buffer.
_FIRST_BYTES = 4 << 20
_GROWTH = 4


class ReceivedBody(NamedTuple):
    """A whole body in a buffer. `give_back` gives that back; call it once, from any thread."""

    view: memoryview
    give_back: Callable[[], None]


def take_buffer(buffers: BodyBuffers, size: int, tenant: str, held_bytes: int = 0) -> memoryview:
    """Return a buffer, for one of `held_bytes` that the tenant gives back next.

    RequestRefused: 429 if the tenant has its share, 503 if all are in use.
    """
    try:
        buffer = buffers.take(size, tenant, held_bytes)
    except QueueFull as error:
        raise RequestRefused(429, str(error), retry_after_s=1.0) from error
    if buffer is None:
        raise RequestRefused(503, "every buffer is in use", retry_after_s=1.0)
    return buffer


async def receive(exchange: Exchange, buffers: BodyBuffers, limits: ServerLimits, size: int) -> ReceivedBody:
    """Read a request's body of `size` bytes.

    RequestRefused (429, 503) if there is no room for it, TimeoutError if it comes too slowly.
    """
    tenant, pace = exchange.caller.tenant, limits.pace(exchange.stream.now_s())
    await exchange.expect_body(pace)
    # Two buffers are held while one is copied.
    first = size if size + size // _GROWTH >= limits.buffer_bytes_max else min(size, _FIRST_BYTES)
    buffer, done = take_buffer(buffers, first, tenant), 0
    try:
        while True:
            stop = min(size, len(buffer))
            await exchange.stream.read_into(buffer[done:stop], pace)
            done = stop
            if done == size:
                break
            larger = take_buffer(buffers, min(size, _GROWTH * len(buffer)), tenant, len(buffer))
            copy_bytes(larger[:done], buffer[:done])
            buffers.give_back(buffer, tenant)
            buffer = larger
    except BaseException:
        buffers.give_back(buffer, tenant)
        raise
    exchange.note_received(size)
    return ReceivedBody(buffer[:size], partial(buffers.give_back, buffer, tenant))
