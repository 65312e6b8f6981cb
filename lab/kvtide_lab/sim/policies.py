"""Eviction policies by name: those that users choose, what `mix` is made of, and others that they are compared with.

SIEVE has one queue in order of arrival, and a hand that moves from old to new, sparing what was used since it passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvtide.evict.policies import CHOSEN, INGREDIENTS, PolicyOf
from kvtide.index import EvictionPolicy, HeapPolicy, Run, Use

# Uses count in whole steps, recency below them: more requests than this would round off.
_USES_PER_STEP = float(1 << 40)
_PROTECTED_SHARE = 0.8
# A block's attention costs as much as its matrices once this many blocks come before it (16k tokens of 256 a block,
# the order of magnitude of today's 8B models).
_BLOCKS_OF_EQUAL_COST = 64
# Any protected run ranks above any that is not: uses are fewer than this.
_PROTECTED = float(1 << 52)


class SlruPolicy(HeapPolicy):
    """Segmented LRU: runs used twice are protected, up to four fifths of the blocks; the others go first.

    Scans pass through the unprotected part and leave the protected one alone.
    """

    def __init__(self, blocks_max: int) -> None:
        super().__init__()
        self._protected: OrderedDict[Run, None] = OrderedDict()
        self._protected_blocks = 0
        self.plan(blocks_max)

    def plan(self, blocks_max: int) -> None:
        self._protected_max = int(_PROTECTED_SHARE * blocks_max)

    def priority(self, run: Run) -> float:
        """Return the latest use, raised for a protected run."""
        return run.last_use + (_PROTECTED if run in self._protected else 0.0)

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Protect the runs that are used again, deepest first so that deeper ones lose it first."""
        for run in reversed(path):
            if run.uses > 1 and run.held:
                if run not in self._protected:
                    self._protected_blocks += run.held
                self._protected[run] = None
                self._protected.move_to_end(run)
        while self._protected_blocks > self._protected_max:
            run, _ = self._protected.popitem(last=False)
            self._protected_blocks -= run.held
            if run.is_candidate:
                self.leave(run)
                self.enter(run)

    def resize(self, run: Run, delta: int) -> None:
        if run in self._protected:
            self._protected_blocks += delta
            if not run.held:
                del self._protected[run]

    def split(self, upper: Run, lower: Run) -> None:
        """Protect the upper part as the lower one is."""
        if lower in self._protected:
            if upper.held:
                self._protected[upper] = None
            if not lower.held:
                del self._protected[lower]


class LfuPolicy(HeapPolicy):
    """Ranks by the number of uses while known; what was evicted starts over."""

    def priority(self, run: Run) -> float:
        """Return the number of uses, and the latest one as a fraction."""
        return run.uses + run.last_use / _USES_PER_STEP


class GdsfPolicy(HeapPolicy):
    """Greedy dual, size and frequency: uses times what a block costs to recompute, plus the worth of the latest victim.

    All blocks have one size; cost grows with the position: attention over what comes before is part of the price.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inflation = 0.0

    def priority(self, run: Run) -> float:
        """Return inflation plus uses times the mean cost of the run's blocks."""
        return self._inflation + run.uses * (1 + (run.start + run.held / 2) / _BLOCKS_OF_EQUAL_COST)

    def victim(self) -> Run | None:
        """Return the candidate of lowest priority, and age the others by it."""
        run = super().victim()
        if run is not None:
            self._inflation = self._heap[0][0]
        return run


class SievePolicy(EvictionPolicy):
    """Candidates in a linked list, newest at the head; `tag` is the mark of a run used since the hand passed."""

    def __init__(self) -> None:
        self._newer: dict[Run, Run | None] = {}
        self._older: dict[Run, Run | None] = {}
        self._newest: Run | None = None
        self._oldest: Run | None = None
        self._hand: Run | None = None

    def touch(self, path: Sequence[Run], use: Use) -> None:
        for run in path:
            run.tag = 1 if run.uses > 1 else 0

    def split(self, upper: Run, lower: Run) -> None:
        upper.tag = lower.tag

    def enter(self, run: Run) -> None:
        self._older[run] = self._newest
        self._newer[run] = None
        if self._newest is not None:
            self._newer[self._newest] = run
        self._newest = run
        if self._oldest is None:
            self._oldest = run

    def leave(self, run: Run) -> None:
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


POLICIES: Mapping[str, PolicyOf] = MappingProxyType(
    {
        **INGREDIENTS,
        **CHOSEN,
        "lfu": lambda blocks_max: LfuPolicy(),
        "slru": SlruPolicy,
        "sieve": lambda blocks_max: SievePolicy(),
        "gdsf": lambda blocks_max: GdsfPolicy(),
    }
)


def policy_named(name: str) -> PolicyOf:
    """Return the maker of a policy. ValueError for an unknown name; the message lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}") from None
