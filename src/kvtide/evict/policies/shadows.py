"""Several policies on one stream of prompts, each in a shadow of its own, and a last one that goes by all of them.

A block that some shadows hold and others do not is of a class, named by bits: which of them hold it. `Agreement`
learns how often the blocks of each class are asked for, and evicts those of the class that is asked for least.
Invariant: `Shadows` knows of each block that a shadow holds which ones do; so it tells how far any two are apart.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvtide.evict.policies.reuse import namespace_of
from kvtide.index import EvictionPolicy, RadixIndex, Run
from kvtide.types import BlockKey

_log = logging.getLogger(__name__)

AGREEMENT = "agreement"
# What a class has before anything is known: hits for it, for the first shadow and for each other one among its holders,
# and the time in which as many come on average.
_PRIOR_HITS, _PRIOR_FIRST_HITS, _PRIOR_OTHER_HITS, _PRIOR_TIME = 1.2, 1.2, 0.3, 2.0
# Classes are put in order at each of the first requests, then after each 64th part of them, at the latest after these.
_ORDER_SHARE, _ORDER_EVERY_MAX = 64, 16


class Agreement(EvictionPolicy):
    """Evicts what is asked for least, by which of some shadows of the same size hold it."""

    splits_tail = True

    def __init__(self, shadows: Sequence[RadixIndex]) -> None:
        self._shadows = shadows
        classes = 1 << len(shadows)
        # By class: what was asked for of it, and blocks of it times requests; both fade. What none holds goes first.
        self._prior_hits = [
            _PRIOR_HITS + _PRIOR_FIRST_HITS * (held & 1) + _PRIOR_OTHER_HITS * (held >> 1).bit_count()
            for held in range(classes)
        ]
        self._hits = list(self._prior_hits)
        self._times = [0.0] * classes
        self._order = sorted(range(classes), key=lambda at: (at > 0, self._hits[at]))
        self._requests = self._order_next = 0
        self._ends: dict[BlockKey, Run] = {}
        # Where each candidate ends, and its class; by class those that came to it longest ago first.
        self._end_of: dict[Run, tuple[BlockKey, int]] = {}
        self._queues: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(classes)]

    def learn(self, lengths: Sequence[int], held: Sequence[int], faded: float) -> None:
        """Note how much of a request each shadow has, and how many blocks there are of each class."""
        holders, before = len(self._queues) - 1, 0
        for length, at in sorted((length, at) for at, length in enumerate(lengths)):
            self._hits[holders] += length - before
            before = length
            holders &= ~(1 << at)
        self._requests += 1
        if self._requests < self._order_next:
            return
        passed = min(1 + self._requests // _ORDER_SHARE, _ORDER_EVERY_MAX)
        self._order_next = self._requests + passed
        keep = faded**passed
        self._hits = [prior + keep * (hits - prior) for hits, prior in zip(self._hits, self._prior_hits, strict=True)]
        self._times = [keep * time + passed * count for time, count in zip(self._times, held, strict=True)]
        mean_time = (1.0 + sum(self._times)) / (1.0 + sum(self._hits) - sum(self._prior_hits))
        worth = [hits / (time + _PRIOR_TIME * mean_time) for hits, time in zip(self._hits, self._times, strict=True)]
        self._order.sort(key=lambda at: (at > 0, worth[at]))

    def give_up(self, at: int, keys: Sequence[BlockKey]) -> None:
        """Note what a shadow, by its number, has given up."""
        for key in keys:
            run = self._ends.get(key)
            if run is not None:
                self._file(run, key, self._end_of[run][1] & ~(1 << at))

    def _file(self, run: Run, end: BlockKey, holders: int) -> None:
        if run in self._end_of:
            self._queues[self._end_of[run][1]].pop(run, None)
        self._end_of[run] = end, holders
        self._queues[holders][run] = None

    def enter(self, run: Run) -> None:
        """Note where the run ends and who holds that."""
        end = run.keys[run.held - 1]
        self._ends[end] = run
        self._file(run, end, sum(shadow.is_held(end) << at for at, shadow in enumerate(self._shadows)))

    def leave(self, run: Run) -> None:
        """Forget where the run ended."""
        end, holders = self._end_of.pop(run)
        del self._ends[end], self._queues[holders][run]

    def resize(self, run: Run, delta: int) -> None:
        """Note where a candidate ends now."""
        if run in self._end_of and run.held:
            self.leave(run)
            self.enter(run)

    def victim(self) -> Run | None:
        """Return the candidate of the least class that has been of it longest."""
        return next((next(iter(self._queues[at])) for at in self._order if self._queues[at]), None)

    def spared(self, run: Run) -> int:
        """Return how many of the run's blocks somebody holds who does not hold its end."""
        holders, spared = self._end_of[run][1], 0
        for at, shadow in enumerate(self._shadows):
            if not holders >> at & 1:
                held = bisect_left(range(run.held - 1), True, key=lambda i: not shadow.is_held(run.keys[i]))
                spared = max(spared, held)
        return spared


class Shadows:
    """Indexes of one size, each under a policy of its own, that see the same prompts."""

    def __init__(self, shadows: Mapping[str, RadixIndex], agreement: Agreement, agreeing: RadixIndex) -> None:
        """agreement: the policy that goes by all the others. agreeing: its shadow, the last one."""
        self.names = [*shadows, AGREEMENT]
        self._shadows = [*shadows.values(), agreeing]
        self._agreement = agreement
        # Of each block that any of them holds, the numbers of those that do, as bits; and how many blocks there are by
        # these.
        self._holders: dict[BlockKey, int] = {}
        self._counts = [0] * (1 << len(self._shadows))

    def __getitem__(self, name: str) -> RadixIndex:
        return self._shadows[self.names.index(name)]

    def lengths(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return how many leading blocks of a prompt each of them holds."""
        return [len(shadow.match(keys).blocks) for shadow in self._shadows]

    def learn(self, lengths: Sequence[int], faded: float) -> None:
        """Have the last one learn from a request of which they held so much."""
        half = len(self._counts) // 2
        held = map(sum, zip(self._counts[half:], self._counts[:half], strict=True))
        self._agreement.learn(lengths[:-1], list(held), faded)

    def insert(self, keys: Sequence[BlockKey], parent: BlockKey | None, like: Run) -> dict[str, list[BlockKey]]:
        """Note a use in each of them; return what each gave up, blocks of the prompt that it does not hold too.

        like: the run whose namespace, value, cost and size new blocks have.
        """
        given_up = {}
        for at, (name, shadow) in enumerate(zip(self.names, self._shadows, strict=True)):
            try:
                gone = insert_like(shadow, keys, parent, like)
            except ValueError as error:
                # A shadow remembers other blocks than the cache: keys that are no chain can come to light here alone.
                _log.debug("no prefix: %s", error)
                gone = []
            if keys and not shadow.is_held(keys[-1]):
                gone += [key for key in keys if not shadow.is_held(key)]
            given_up[name] = gone
            self._note(at, keys, gone)
        return given_up

    def plan(self, blocks_max: int) -> None:
        """Tell all policies that so many blocks fit by now."""
        for shadow in self._shadows:
            shadow.plan(blocks_max)

    def measure(self, key: BlockKey, size: int) -> None:
        """Tell all of them what room a block takes."""
        for shadow in self._shadows:
            shadow.measure(key, size)

    def shrink(self) -> dict[str, list[BlockKey]]:
        """Have each of them give a block up, for want of bytes; return which."""
        given_up = {}
        for at, (name, shadow) in enumerate(zip(self.names, self._shadows, strict=True)):
            given_up[name] = shadow.victims(1)
            self._note(at, (), given_up[name])
        return given_up

    def _note(self, at: int, keys: Sequence[BlockKey], gone: Sequence[BlockKey]) -> None:
        bit, counts, holders = 1 << at, self._counts, self._holders
        for key in keys:
            old = holders.get(key, 0)
            if not old & bit:
                counts[old] -= 1
                counts[old | bit] += 1
                holders[key] = old | bit
        for key in gone:
            old = holders.get(key, 0)
            if old & bit:
                counts[old] -= 1
                counts[old ^ bit] += 1
                if old == bit:
                    del holders[key]
                else:
                    holders[key] = old ^ bit
        counts[0] = 0
        if at < len(self._shadows) - 1:
            self._agreement.give_up(at, gone)

    def apart(self, one: str, other: str) -> int:
        """Return how many blocks one of them holds and the other does not."""
        here, there = 1 << self.names.index(one), 1 << self.names.index(other)
        return sum(count for held, count in enumerate(self._counts) if held & here and not held & there)


def insert_like(index: RadixIndex, keys: Sequence[BlockKey], parent: BlockKey | None, like: Run) -> list[BlockKey]:
    """Note a use in another index, whose new blocks are what those of a run are; return what it gave up."""
    return index.insert(namespace_of(like), keys, parent, value=like.value, cost=like.given_cost, size=like.size)
