"""Whose request begins next: each owner gets as many in a pass of the event loop as every other.

Invariant: however many requests one owner sends, another's waits for at most `REQUESTS_A_PASS` of each.
"""

from __future__ import annotations

import asyncio
from collections import deque

# Owners that no tenant or address can be called like.
STRANGERS = "(strangers)"
HEALTH = "(health)"
# More of them save passes of the loop, at some 20 us each, and make the others wait for as many.
REQUESTS_A_PASS = 4
# Owners whose requests are counted before all counts begin anew.
_OWNERS_MAX = 1024


class Turns:
    """Gives turns on one event loop. Counts begin anew in the pass behind the one in which an owner had all of its."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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
