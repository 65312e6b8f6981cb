"""Shares of a server that owners (tenants, addresses) may have: amounts, buffers, turns, requests a second, threads.

Invariant: what is free goes to the owners who wait in turn, however many of their requests wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from kvtide.errors import RequestRefused
from kvtide.tier.buffers import aligned_buffer

# Owners that no tenant or address can be called like.
STRANGERS = "(strangers)"
HEALTH = "(health)"
# More of them save passes of the loop, at some 20 us each, and make the others wait for as many.
REQUESTS_A_PASS = 4
# Owners whose requests are counted before all counts start over.
_OWNERS_MAX = 1024
# So few are kept without a look at whether they are full again.
_KNOWN_MIN = 64
_SIZE_MIN = 64 << 10
# Sizes of buffers are these parts of a power of two, so that at most a fifth of one is empty.
_STEPS = 4
_Result = TypeVar("_Result")


class _Claim(NamedTuple):
    amount: int
    turn: asyncio.Future[None]


class Shares:
    """At most `amount_max` in all and `owner_max` of one owner, but that one claim alone is always met. Of one loop."""

    def __init__(self, amount_max: int, owner_max: int) -> None:
        assert 0 < owner_max <= amount_max
        self._amount_max, self._owner_max = amount_max, owner_max
        self._held, self._held_in_all = Counter[str](), 0
        # The owner who comes next first.
        self._waiting: dict[str, deque[_Claim]] = {}

    def is_waited_for(self, owner: str) -> bool:
        """True if one of the owner's claims waits for another to be given back."""
        return owner in self._waiting

    def take_at_once(self, owner: str, amount: int = 1) -> bool:
        """Hold so much more of an owner's share. False if that has no room now."""
        if owner in self._waiting or not self._has_room(owner, amount):
            return False
        self._hold(owner, amount)
        return True

    async def take(self, owner: str, amount: int = 1) -> None:
        """Wait for an owner's share to have room, and hold so much of it."""
        if self.take_at_once(owner, amount):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(_Claim(amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._grant()
            else:
                self.give_back(owner, amount)
            raise

    def give_back(self, owner: str, amount: int = 1) -> None:
        """Hold so much less, as it was taken."""
        self._held[owner] -= amount
        self._held_in_all -= amount
        if not self._held[owner]:
            del self._held[owner]
        self._grant()

    def _has_room(self, owner: str, amount: int) -> bool:
        held = self._held.get(owner, 0)
        has_all_room = self._held_in_all + amount <= self._amount_max or not self._held_in_all
        return has_all_room and (held + amount <= self._owner_max or not held)

    def _hold(self, owner: str, amount: int) -> None:
        self._held[owner] += amount
        self._held_in_all += amount

    def _grant(self) -> None:
        """Meet claims, one of each owner in turn, until none of those in front has room."""
        is_any_met = True
        while is_any_met:
            is_any_met = False
            for owner, claims in list(self._waiting.items()):
                while claims and claims[0].turn.done():
                    claims.popleft()
                if claims and self._has_room(owner, claims[0].amount):
                    amount, turn = claims.popleft()
                    self._hold(owner, amount)
                    turn.set_result(None)
                    is_any_met = True
                    self._waiting[owner] = self._waiting.pop(owner)
                if not claims:
                    del self._waiting[owner]

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        assert self._held_in_all == self._held.total()
        assert all(held > 0 for held in self._held.values())


def _buffer_bytes(size: int) -> int:
    if size <= _SIZE_MIN:
        return _SIZE_MIN
    step = 1 << max((size - 1).bit_length() - _STEPS.bit_length(), 0)
    return -(-size // step) * step


class BodyBuffers:
    """Lends buffers of `bytes_max` in sum, and `tenant_bytes_max` to each with a name. Thread-safe; never waits."""

    def __init__(self, bytes_max: int, tenant_bytes_max: int | None = None) -> None:
        self._bytes_max = bytes_max
        # One buffer of the largest body that fits is always allowed, rounded up as it is.
        self._tenant_bytes_max = bytes_max if tenant_bytes_max is None else _buffer_bytes(tenant_bytes_max)
        # What is lent to each, and to nobody's name.
        self._tenants: Counter[str] = Counter()
        self._lock = threading.Lock()
        # By size.
        self._free: dict[int, list[memoryview]] = {}
        self.lent_bytes = 0

    def take(self, size: int, tenant: str = "", returning_bytes: int = 0) -> memoryview:
        """Return a buffer of at least `size` bytes with any content. RequestRefused (503) if there is none for it.

        429 if the tenant has its share: of `tenant_bytes_max`, and as much as it leaves free, so that the next one
        finds some. `returning_bytes` of what it holds don't count: they come back when the new buffer is here.
        """
        wanted = _buffer_bytes(size)
        with self._lock:
            held = self._tenants[tenant] - returning_bytes
            share = min(self._tenant_bytes_max, self._bytes_max - self.lent_bytes - wanted + returning_bytes)
            has_share = not tenant or held + wanted <= share
            if held and not has_share:
                text = f"bodies of a tenant may hold {max(share, 0)} bytes of buffers now, {held} are held"
                raise RequestRefused(429, text, retry_after_s=1.0)
            free = self._free.get(wanted)
            if not (has_share and (free or self.lent_bytes + wanted <= self._bytes_max)):
                raise RequestRefused(503, "every buffer is in use", retry_after_s=1.0)
            if not free:
                self._make_room(wanted)
            # First: memory that the machine refuses is not lent.
            buffer = free.pop() if free else aligned_buffer(wanted)
            self.lent_bytes += wanted
            self._tenants[tenant] += wanted
            return buffer

    def _make_room(self, wanted: int) -> None:
        """Let go of free buffers until `wanted` more bytes fit."""
        room = self._bytes_max - self.lent_bytes - self._free_bytes()
        for size in sorted(self._free, reverse=True):
            while self._free[size] and room < wanted:
                self._free[size].pop()
                room += size

    def _free_bytes(self) -> int:
        return sum(size * len(buffers) for size, buffers in self._free.items())

    def give_back(self, buffer: memoryview, tenant: str = "") -> None:
        """Take a buffer back, as `take` returned it to this tenant."""
        with self._lock:
            self.lent_bytes -= len(buffer)
            self._tenants[tenant] -= len(buffer)
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            self._free.setdefault(len(buffer), []).append(buffer)

    def check(self) -> None:
        """AssertionError if the accounting is off."""
        with self._lock:
            assert all(len(buffer) == size for size, buffers in self._free.items() for buffer in buffers)
            assert self.lent_bytes == self._tenants.total()
            assert all(0 < held <= self._bytes_max for held in self._tenants.values())
            assert self._free_bytes() + self.lent_bytes <= self._bytes_max


class Turns:
    """Gives turns on one event loop. Counts start over in the pass after the one in which an owner had all of its."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._taken: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_next_due = False

    async def take(self, owner: str) -> None:
        """Wait for the owner's next turn, unless it has some left."""
        if owner not in self._waiting and self._taken.get(owner, 0) < REQUESTS_A_PASS:
            self._count(owner)
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _count(self, owner: str) -> None:
        self._taken[owner] = taken = self._taken.get(owner, 0) + 1
        if (taken == REQUESTS_A_PASS or len(self._taken) > _OWNERS_MAX) and not self._is_next_due:
            self._is_next_due = True
            self._loop.call_soon(self._next_pass)

    def _next_pass(self) -> None:
        """Give every owner who waits their turns."""
        self._is_next_due = False
        self._taken.clear()
        for owner, turns in list(self._waiting.items()):
            while turns and self._taken.get(owner, 0) < REQUESTS_A_PASS:
                turn = turns.popleft()
                if not turn.done():
                    self._count(owner)
                    turn.set_result(None)
            if not turns:
                del self._waiting[owner]


class Rates:
    """Lets an owner make `requests_s()` requests a second, as it is now, with a burst of one second's."""

    def __init__(self, requests_s: Callable[[], float], owners_max: int = 16384) -> None:
        self._requests_s, self._owners_max = requests_s, owners_max
        # What is left of the burst, and when that was; below 0 what others wait for. Last used last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def _burst(self) -> float:
        return max(1.0, self._requests_s())

    def owe(self, owner: str, now_s: float, count: int) -> None:
        """Count requests that were not asked for one by one, as a debt of one burst at most."""
        self._note(owner, max(-self._burst, self._refilled(owner, now_s) - count), now_s)

    def take(self, owner: str, now_s: float, wait_s_max: float = 0.0) -> float:
        """Count one request; return how long it has to wait. RequestRefused (429) if that is over `wait_s_max`."""
        left = self._refilled(owner, now_s) - 1
        wait_s = max(0.0, -left / self._requests_s())
        if wait_s > wait_s_max:
            raise RequestRefused(429, "too many requests", retry_after_s=wait_s)
        self._note(owner, left, now_s)
        return wait_s

    def _refilled(self, owner: str, now_s: float) -> float:
        left, then_s = self._left.get(owner, (self._burst, now_s))
        return min(self._burst, left + (now_s - then_s) * self._requests_s())

    def _note(self, owner: str, left: float, now_s: float) -> None:
        self._left[owner] = (left, now_s)
        self._left.move_to_end(owner)
        while len(self._left) > _KNOWN_MIN:
            oldest = next(iter(self._left))
            if len(self._left) <= self._owners_max and self._refilled(oldest, now_s) < self._burst:
                return
            del self._left[oldest]


class Workers:
    """`io_threads` threads for reading, and one more so that a write finds one. Used from one event loop."""

    def __init__(self, io_threads: int) -> None:
        self._executor, may_rest = ThreadPoolExecutor(io_threads + 1, "kvtide-tiers"), threading.Event()
        try:
            # All at once: a machine that has too few ends the start, and takes nobody's share later.
            for _ in range(io_threads + 1):
                self._executor.submit(may_rest.wait)
        finally:
            may_rest.set()
        owner_max = max(1, io_threads - 1)
        self._reading, self._writing = Shares(io_threads, owner_max), Shares(io_threads, owner_max)

    def close(self) -> None:
        """Wait for what runs."""
        self._executor.shutdown()

    async def read(
        self, owner: str, action: Callable[[], _Result], undo: Callable[[_Result], None] = lambda result: None
    ) -> _Result:
        """Run what may wait for a tier. If we are cancelled meanwhile, its result goes to `undo`."""
        await self._reading.take(owner)
        future = self._begun(self._reading, owner, action)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(partial(_undo, undo))
            raise

    async def write(
        self, owner: str, action: Callable[[], _Result], drop: Callable[[], None] = lambda: None
    ) -> _Result:
        """Run what may wait for a tier to take something, or call `drop` if we are cancelled before a thread has it."""
        try:
            await self._writing.take(owner)
        except asyncio.CancelledError:
            if drop is not None:
                drop()
            raise
        return await asyncio.shield(self._begun(self._writing, owner, action))

    def _begun(self, shares: Shares, owner: str, action: Callable[[], _Result]) -> asyncio.Future[_Result]:
        future = asyncio.get_running_loop().run_in_executor(self._executor, action)
        # The thread is the owner's until it is done, also if nobody waits for it any more, or would hear of its fault.
        future.add_done_callback(lambda _: shares.give_back(owner))
        future.add_done_callback(asyncio.Future.exception)
        return future


def _undo(undo: Callable[[_Result], None], future: asyncio.Future[_Result]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())
