"""SIEVE: a queue in order of arrival, and a hand that moves from old to new, sparing what was used since it passed."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.index import EvictionPolicy, Run, Use


class SievePolicy(EvictionPolicy):
    """Candidates in a linked list, newest at the head; `tag` is the mark of a run used since the hand passed."""

    def __init__(self) -> None:
        self._newer: dict[Run, Run | None] = {}
        self._older: dict[Run, Run | None] = {}
        self._newest: Run | None = None
        self._oldest: Run | None = None
        self._hand: Run | None = None

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Mark the runs that are used again."""
        for run in path:
            run.tag = 1 if run.uses > 1 else 0

    def split(self, upper: Run, lower: Run) -> None:
        """Mark the upper part as the lower one is."""
        upper.tag = lower.tag

    def enter(self, run: Run) -> None:
        """Put the run at the head."""
        self._older[run] = self._newest
        self._newer[run] = None
        if self._newest is not None:
            self._newer[self._newest] = run
        self._newest = run
        if self._oldest is None:
            self._oldest = run

    def leave(self, run: Run) -> None:
        """Take the run out; a hand on it moves on."""
        newer, older = self._newer.pop(run), self._older.pop(run)
        if self._hand is run:
            self._hand = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer

    def victim(self) -> Run | None:
        """Move the hand to the first run without a mark, taking marks off, and return that."""
        run = self._hand or self._oldest
        while run is not None and run.tag:
            run.tag = 0
            run = self._newer[run] or self._oldest
        self._hand = run
        return run
