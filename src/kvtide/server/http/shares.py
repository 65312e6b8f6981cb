"""An amount of something (threads, bytes) that owners hold for a while, each at most a share of it.

Invariant: what is free goes to the owners who wait in turn, however many of their requests wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import NamedTuple


class _Claim(NamedTuple):
    amount: int
    turn: asyncio.Future[None]


class Shares:
    """At most `amount_max` in all and `owner_max` of one owner, but that one claim alone is always met.

    All calls come from one event loop.
    """

    def __init__(self, amount_max: int, owner_max: int) -> None:
        if not 0 < owner_max <= amount_max:
            raise ValueError(f"an owner's share is from 1 to all of it, got {owner_max} of {amount_max}")
        self._amount_max = amount_max
        self._owner_max = owner_max
        self._held: Counter[str] = Counter()
        self._held_in_all = 0
        # The owner who comes next first.
        self._waiting: dict[str, deque[_Claim]] = {}

    def is_waited_for(self, owner: str) -> bool:
        """Tell whether one of the owner's claims waits for another to be given back."""
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
