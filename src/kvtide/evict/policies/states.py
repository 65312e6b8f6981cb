"""States of a hybrid model, each linked to the block after which it was taken: without one the other saves nothing.

A prompt is restored from its deepest state, and only where all rows before that are here. So a state has no rank of its
own: it leaves just before its block. The state at a prompt's end leaves first once the session's next one is here, as
the session goes on from that; one where prompts branch, or that was asked for again, stays with its block.
Invariant: a state is announced or here, never both; those that are superseded are here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvtide.types import BlockKey, ObjectId

# Links of states that may come, those of the latest prompts.
ANNOUNCED_MAX = 1 << 14


class _Link(NamedTuple):
    """The state's block, the deepest state of its prompt before it, and whether a prompt ended there."""

    block: BlockKey
    before: ObjectId | None
    is_end: bool


class LinkedStates:
    """The states that are here, by block, and those that may come. Not thread-safe: its order locks."""

    def __init__(self) -> None:
        self._announced: OrderedDict[ObjectId, _Link] = OrderedDict()
        self._links: dict[ObjectId, _Link] = {}
        self._of: dict[BlockKey, list[ObjectId]] = {}
        self._superseded: set[ObjectId] = set()

    def __contains__(self, state: ObjectId) -> bool:
        return state in self._links

    def announce(self, keys: Sequence[BlockKey], states: Sequence[ObjectId]) -> None:
        """Link the states that a prompt may leave, one a block, to its blocks."""
        before = None
        for block, state in zip(keys, states, strict=True):
            if state in self._links:
                before = state
            else:
                self._announce(state, _Link(block, before, block == keys[-1]))

    def _announce(self, state: ObjectId, link: _Link) -> None:
        self._announced[state] = link
        self._announced.move_to_end(state)
        if len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)

    def block_of(self, state: ObjectId) -> BlockKey | None:
        """Return the block of a state that is announced or here; None for an object that no prompt named."""
        link = self._links.get(state) or self._announced.get(state)
        return None if link is None else link.block

    def enter(self, state: ObjectId) -> ObjectId | None:
        """Note that an announced state is here; return the one that it supersedes, if it does."""
        link = self._links[state] = self._announced.pop(state)
        self._of.setdefault(link.block, []).append(state)
        before = link.before
        if before is None or before in self._superseded or before not in self._links or not self._links[before].is_end:
            return None
        self._superseded.add(before)
        return before

    def use(self, state: ObjectId) -> None:
        """Note a read of a state that is here. One that was superseded is where prompts branch: it stays."""
        if state in self._superseded:
            self._superseded.remove(state)
            self._links[state] = self._links[state]._replace(is_end=False)

    def leave(self, state: ObjectId) -> None:
        """Note that a state is not here any more; it may come back."""
        link = self._links.pop(state)
        self._of[link.block].remove(state)
        if not self._of[link.block]:
            del self._of[link.block]
        self._superseded.discard(state)
        self._announce(state, link)

    def of(self, block: BlockKey) -> Sequence[ObjectId]:
        """Return the states of a block that are here."""
        return self._of.get(block, ())

    def current_of(self, block: BlockKey) -> list[ObjectId]:
        """Return those of them that are not superseded."""
        return [state for state in self.of(block) if state not in self._superseded]
