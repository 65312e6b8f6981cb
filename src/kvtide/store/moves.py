"""Notes of where objects are: the index's tiers, and a journal for an engine that tells routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvtide.index import RadixIndex
from kvtide.types import BlockKey, ObjectId

MOVES_MAX = 1 << 16


class Move(NamedTuple):
    """An object that was placed in a tier, by the name that the stack has for it, or left it."""

    key: BlockKey
    tier: str
    is_placed: bool


class Moves:
    """The last MOVES_MAX moves that nobody has taken; older ones are dropped. Safe to use from several threads."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=MOVES_MAX)

    def note(self, move: Move) -> None:
        """Add a move."""
        self._moves.append(move)

    def take(self) -> tuple[Move, ...]:
        """Return the moves since this was called last, oldest first."""
        return tuple(self._moves.popleft() for _ in range(len(self._moves)))


class PlaceNotes:
    """Keeps the index's tiers up to date, and the journal, if there is one."""

    def __init__(self, index: RadixIndex, moves: Moves | None, tier_names: Sequence[str]) -> None:
        self._index, self._moves, self._names = index, moves, tier_names

    def placed(self, object_id: ObjectId, tier: int, size: int) -> None:
        """An object of so many bytes was stored in a tier."""
        self._index.place(object_id.key, tier)
        if self._moves is not None:
            self._moves.note(Move(object_id.key, self._names[tier], True))

    def removed(self, object_id: ObjectId, tier: int) -> None:
        """An object is no longer in a tier."""
        self._index.remove(object_id.key, tier)
        if self._moves is not None:
            self._moves.note(Move(object_id.key, self._names[tier], False))
