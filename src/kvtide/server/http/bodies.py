"""Page-aligned buffers for bodies, and bodies on their way into them.

Invariant: free + lent <= bytes_max, and no tenant takes so much that it has more than its share, or than is then left
for the others; a buffer is lent to one holder at a time. Whoever sends nothing holds nothing, and who holds a large
buffer has sent a quarter of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvtide.errors import QueueFull, RequestRefused
from kvtide.server.http.exchange import Exchange
from kvtide.server.settings import ServerLimits
from kvtide.tier.buffers import aligned_buffer, copy_bytes

_SIZE_MIN = 64 << 10
# Sizes of buffers are these parts of a power of two, so that at most a fifth of one is empty.
_STEPS = 4
# Bodies up to this size, nearly all, are received where they stay; larger ones are copied when they outgrow a buffer.
_FIRST_BYTES = 4 << 20
_GROWTH = 4


def _buffer_bytes(size: int) -> int:
    """Return the size of the buffer that a body of `size` bytes gets."""
    if size <= _SIZE_MIN:
        return _SIZE_MIN
    step = 1 << max((size - 1).bit_length() - _STEPS.bit_length(), 0)
    return -(-size // step) * step


class BodyBuffers:
    """Lends buffers of at most `bytes_max` in sum, `tenant_bytes_max` to a tenant. Thread-safe; never waits.

    Who has no name may have them all.
    """

    def __init__(self, bytes_max: int, tenant_bytes_max: int | None = None) -> None:
        if bytes_max <= 0 or (tenant_bytes_max is not None and tenant_bytes_max <= 0):
            raise ValueError(f"bounds of the body buffers must be positive, got {bytes_max}, {tenant_bytes_max}")
        self._bytes_max = bytes_max
        # One buffer of the largest body that fits is always allowed, rounded up as it is.
        self._tenant_bytes_max = bytes_max if tenant_bytes_max is None else _buffer_bytes(tenant_bytes_max)
        self._tenants: dict[str, int] = {}
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        self._lent_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Return the bytes that are lent now."""
        return self._lent_bytes

    def take(self, size: int, tenant: str = "", returning_bytes: int = 0) -> memoryview | None:
        """Return a buffer of at least `size` bytes, its content whatever was left in it; None if there is none for it.

        QueueFull if the tenant has its share: of `tenant_bytes_max`, and as much as it leaves free, so that however
        many tenants take what they may, the next one finds some. `returning_bytes` of what the tenant holds don't
        count: they come back when the new buffer is here.
        """
        wanted = _buffer_bytes(size)
        with self._lock:
            held = self._tenants.get(tenant, 0) - returning_bytes
            share = min(self._tenant_bytes_max, self._bytes_max - self._lent_bytes - wanted + returning_bytes)
            if tenant and held + wanted > share:
                if not held:
                    return None
                raise QueueFull(f"bodies of a tenant may hold {max(share, 0)} bytes of buffers now, {held} are held")
            free = self._free.get(wanted)
            if free:
                self._free_bytes -= wanted
                self._lend(wanted, tenant)
                return free.pop()
            if self._lent_bytes + wanted > self._bytes_max:
                return None
            self._make_room(wanted)
            self._lend(wanted, tenant)
        return aligned_buffer(wanted)

    def _lend(self, size: int, tenant: str) -> None:
        self._lent_bytes += size
        if tenant:
            self._tenants[tenant] = self._tenants.get(tenant, 0) + size

    def _make_room(self, wanted: int) -> None:
        """Let go of free buffers until `wanted` more bytes fit."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._lent_bytes + self._free_bytes + wanted > self._bytes_max:
                self._free[size].pop()
                self._free_bytes -= size

    def give_back(self, buffer: memoryview, tenant: str = "") -> None:
        """Take a buffer back, as `take` returned it to this tenant."""
        with self._lock:
            self._lent_bytes -= len(buffer)
            if tenant:
                self._tenants[tenant] -= len(buffer)
                if not self._tenants[tenant]:
                    del self._tenants[tenant]
            self._free_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        with self._lock:
            assert self._free_bytes == sum(size * len(buffers) for size, buffers in self._free.items())
            assert all(len(buffer) == size for size, buffers in self._free.items() for buffer in buffers)
            assert self._lent_bytes >= sum(self._tenants.values())
            assert all(0 < held <= self._bytes_max for held in self._tenants.values())
            assert self._free_bytes + self._lent_bytes <= self._bytes_max


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
