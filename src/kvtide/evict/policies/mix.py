"""Lets the best of several policies rule: each of them runs in a shadow, and the one that hits most there leads.

A shadow is an index of its own, which holds as many blocks as the cache; what the ruler's shadow gave up is what the
cache gives up, and one more policy goes by which of the shadows hold a block. A large cache asks a small one, which
sees a share of the prompts (SHARDS), of a million blocks one in 488: the policy that rules there ranks the large one's
own runs.
A session is in the sample as a whole: a run that is hung below one of few uses follows that one, below a prefix that
many share its own first key decides.

Worst case: beside what fades, the ruler's shadow is behind the best one by as many hits at most as that holds blocks
which the ruler's does not, or by two, and a switch costs no more: both together two hits for each block by which they
are apart, two at least.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from kvtide.clock import Clock, ManualClock
from kvtide.evict.policies.order import PolicyOf, insert_chain
from kvtide.evict.policies.reuse import AdvisedPolicy, ReusePolicy
from kvtide.index import EvictionPolicy, RadixIndex, Run, Use
from kvtide.types import BlockKey

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
        end = run.keys[run.held - 1]
        self._ends[end] = run
        self._file(run, end, sum(shadow.is_held(end) << at for at, shadow in enumerate(self._shadows)))

    def leave(self, run: Run) -> None:
        end, holders = self._end_of.pop(run)
        del self._ends[end], self._queues[holders][run]

    def resize(self, run: Run, delta: int) -> None:
        if run in self._end_of and run.held:
            self.leave(run)
            self.enter(run)

    def victim(self) -> Run | None:
        """Return the candidate of the least class that has been of it longest."""
        return next((next(iter(self._queues[at])) for at in self._order if self._queues[at]), None)

    def spared(self, run: Run) -> int:
        """Return how many of the run's blocks somebody holds who does not hold its end."""
        holders = self._end_of[run][1]
        others = (shadow for at, shadow in enumerate(self._shadows) if not holders >> at & 1)
        return max((_held_before_end(run, shadow) for shadow in others), default=0)


def _held_before_end(run: Run, shadow: RadixIndex) -> int:
    return bisect_left(range(run.held - 1), True, key=lambda at: not shadow.is_held(run.keys[at]))


class Shadows:
    """Indexes of one size, each under a policy of its own, that see the same prompts; the last goes by all others."""

    def __init__(self, policies: Mapping[str, PolicyOf], clock: Clock, blocks_max: int) -> None:
        self.names = [*policies, AGREEMENT]
        self._shadows = [RadixIndex(clock, policy_of, blocks_max) for policy_of in policies.values()]
        self._agreement = agreement = Agreement(tuple(self._shadows))
        self._shadows.append(RadixIndex(clock, lambda _: agreement, blocks_max))
        # By block, the numbers of those that hold it, as bits; and how many blocks there are by these.
        self._holders: dict[BlockKey, int] = {}
        self._counts = [0] * (1 << len(self._shadows))

    def __getitem__(self, name: str) -> RadixIndex:
        return self._shadows[self.names.index(name)]

    def __iter__(self) -> Iterator[RadixIndex]:
        return iter(self._shadows)

    def lengths(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return how many leading blocks of a prompt each of them holds."""
        return [shadow.match(keys) for shadow in self._shadows]

    def learn(self, lengths: Sequence[int], faded: float) -> None:
        """Have the last one learn from a request of which they held so much."""
        half = len(self._counts) // 2
        held = map(sum, zip(self._counts[half:], self._counts[:half], strict=True))
        self._agreement.learn(lengths[:-1], list(held), faded)

    def insert(self, keys: Sequence[BlockKey], parent: BlockKey | None, like: Run) -> dict[str, list[BlockKey]]:
        """Note a use in each of them; return what each gave up, blocks of the prompt that it does not hold too.

        like: the run whose namespace and size new blocks have.
        """
        given_up = {}
        for at, (name, shadow) in enumerate(zip(self.names, self._shadows, strict=True)):
            # It remembers other blocks than the cache: keys that are no chain can come to light here alone.
            gone = insert_chain(shadow, like.root.state, keys, parent, like.size)
            if keys and not shadow.is_held(keys[-1]):
                gone += [key for key in keys if not shadow.is_held(key)]
            given_up[name] = gone
            self._note(at, keys, gone)
        return given_up

    def shrink(self) -> dict[str, list[BlockKey]]:
        """Have each of them give a block up, for want of bytes; return which."""
        given_up = {}
        for at, (name, shadow) in enumerate(zip(self.names, self._shadows, strict=True)):
            given_up[name] = shadow.victims(1)
            self._note(at, (), given_up[name])
        return given_up

    def _note(self, at: int, keys: Sequence[BlockKey], gone: Sequence[BlockKey]) -> None:
        bit, counts, holders = 1 << at, self._counts, self._holders
        for changed, held in ((keys, bit), (gone, 0)):
            for key in changed:
                old = holders.get(key, 0)
                if old & bit == held:
                    continue
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


# Caches of at most so many blocks have shadows of their own size, larger ones ask a cache of so many.
FULL_BLOCKS_MAX = 4096
SAMPLED_BLOCKS = 2048
# Hits fade to a half over requests of as many blocks as this many caches hold, and not before so many requests.
_HALF_LIFE_CACHES = 8
_HALF_LIFE_REQUESTS_MIN = 1024
# Where policies hold the same a switch is free, but not the way back: a lead of no more hits than this is chance.
_LEAD_HITS_MIN = 2.0
# Evicted blocks that are forgotten a request when a policy rules that remembers fewer: the lock is not held for long.
FORGOTTEN_MAX = 1024
# What hangs below a run of more uses than this is a prompt of its own.
_SHARED_USES = 8
_HASHES = 1 << 32


class MixPolicy(AdvisedPolicy):
    """Evicts what a shadow does not hold, the one that has hit most lately, in the order in which it gave that up.

    Both sets are closed under prefixes: while the cache holds more, some candidate's end is not held there.
    Invariant: `_doomed` are the candidates whose last held block the ruler's shadow does not hold.
    """

    splits_tail = True

    def __init__(self, others_of: Mapping[str, PolicyOf], blocks_max: int, reuse: ReusePolicy | None = None) -> None:
        """others_of: makers of the policies beside `reuse`, which rules until another one proves better.

        reuse: a `reuse` of that size that somebody else looks after too; by default the cache's own.
        """
        super().__init__()
        self._clock = ManualClock()
        self._reuse = reuse = reuse or ReusePolicy(blocks_max)
        self._shadows = Shadows({"reuse": lambda _: reuse, **others_of}, self._clock, blocks_max)
        self._hits = dict.fromkeys(self._shadows.names, 0.0)
        self._end_of: dict[Run, BlockKey] = {}
        self._ends: dict[BlockKey, Run] = {}
        self._doomed: OrderedDict[Run, None] = OrderedDict()
        self._follow("reuse")
        self.trust = reuse.trust
        self.plan(blocks_max)

    def _follow(self, ruler: str) -> None:
        """Evict from now on what another shadow does not hold."""
        self.ruler, self._shadow = ruler, self._shadows[ruler]
        ends = sorted(self._end_of.items(), key=lambda item: item[0].last_use)
        self._doomed = OrderedDict.fromkeys(run for run, end in ends if not self._shadow.is_held(end))

    def plan(self, blocks_max: int) -> None:
        self._half_life_blocks = max(1, _HALF_LIFE_CACHES * blocks_max)
        for shadow in self._shadows:
            shadow.plan(blocks_max)

    def hear(self, mark: int) -> None:
        self._reuse.hear(mark)

    def advise(self, path: Sequence[Run]) -> None:
        self._shadows["reuse"].advise(path[-1].keys[-1])

    def measure(self, run: Run, key: BlockKey) -> None:
        for shadow in self._shadows:
            shadow.measure(key, run.size)

    def adopt(self, run: Run, count: int) -> None:
        if len(run.keys) > count:
            self._replay(run, run.keys[-count:], run.keys[-count - 1])

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Replay a request through the shadows; let the best one rule."""
        self._clock.advance(max(0.0, use.now_s - self._clock.monotonic_s()))
        keys = [key for run in path for key in run.keys]
        faded = 0.5 ** min(len(keys) / self._half_life_blocks, 1 / _HALF_LIFE_REQUESTS_MIN)
        lengths = self._shadows.lengths(keys)
        for name, length in zip(self._shadows.names, lengths, strict=True):
            self._hits[name] = faded * self._hits[name] + length
        self._shadows.learn(lengths, faded)
        self._replay(path[-1], keys, None)
        best = max(self._hits, key=self._hits.__getitem__)
        lead = self._hits[best] - self._hits[self.ruler]
        # Ski rental: as many as a change may cost.
        if lead > _LEAD_HITS_MIN and lead > self._shadows.apart(best, self.ruler):
            self._follow(best)

    def _replay(self, end: Run, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Tell the shadows of keys that end with a run: what is new of them is like it."""
        self._give_up(self._shadows.insert(keys, parent, end)[self.ruler])

    def _give_up(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key in self._ends:
                self._doomed[self._ends[key]] = None

    def enter(self, run: Run) -> None:
        end = self._end_of[run] = run.keys[run.held - 1]
        self._ends[end] = run
        if not self._shadow.is_held(end):
            self._doomed[run] = None

    def leave(self, run: Run) -> None:
        del self._ends[self._end_of.pop(run)]
        self._doomed.pop(run, None)

    def resize(self, run: Run, delta: int) -> None:
        if run in self._end_of and run.held:
            self.leave(run)
            self.enter(run)

    def victim(self) -> Run | None:
        """Return the first candidate that the shadow does not hold; if it holds all, all shadows give up as many."""
        while self._end_of and not self._doomed:
            keys = self._shadows.shrink()[self.ruler]
            assert keys, "what an empty shadow does not hold is doomed"
            self._give_up(keys)
        return next(iter(self._doomed), None)

    def spared(self, run: Run) -> int:
        return _held_before_end(run, self._shadow)


class SampledMixPolicy(AdvisedPolicy):
    """Evicts as the policy does that rules a small cache which sees a share of the prompts."""

    splits_tail = True

    def __init__(self, others_of: Mapping[str, PolicyOf], blocks_max: int) -> None:
        super().__init__()
        self._others_of = others_of
        self._clock = ManualClock()
        # `reuse` learns from all runs while it rules, from the sample while it does not and others remember less.
        self._reuse = ReusePolicy(blocks_max)
        self._sampled_reuse = ReusePolicy(SAMPLED_BLOCKS, self._reuse.model)
        self._sampled_reuse.counts = False
        small = self._small = MixPolicy(others_of, SAMPLED_BLOCKS, self._sampled_reuse)
        self._sample = RadixIndex(self._clock, lambda _: small, SAMPLED_BLOCKS)
        self._hashes_sampled = _HASHES * SAMPLED_BLOCKS // blocks_max
        # Whether their prompts are in the sample.
        self._runs: dict[Run, bool] = {}
        self.ruler = "reuse"
        # What follows the runs, the ruler last. `reuse` always does: its history can't be made up later.
        self._live: list[EvictionPolicy] = [self._reuse]
        # Who ranks all runs judges tenants; the small cache hears a part of them.
        self.trust = self._reuse.trust
        self.plan(blocks_max)

    def plan(self, blocks_max: int) -> None:
        """Tell those who follow the runs how many blocks fit by now, and the sample its share of that."""
        self._blocks_max = blocks_max
        for policy in self._live:
            policy.plan(blocks_max)
        self._sample.plan(max(1, round(blocks_max * self._hashes_sampled / _HASHES)))
        self.ghost_blocks_max = max(policy.ghost_blocks_max for policy in self._live)

    def hear(self, mark: int) -> None:
        self._small.hear(mark)
        self._reuse.hear(mark)

    def advise(self, path: Sequence[Run]) -> None:
        self._reuse.advise(path)
        if self._runs[path[-1]]:
            self._sample.advise(path[-1].keys[-1])

    def measure(self, run: Run, key: BlockKey) -> None:
        if self._runs[run]:
            self._sample.measure(key, run.size)

    def adopt(self, run: Run, count: int) -> None:
        """Sample a new run or not; let the sample grow with one that grows."""
        for policy in self._live:
            policy.adopt(run, count)
        if len(run.keys) == count:
            before = run.parent
            is_below = before is not None and before.parent is not None and before.uses <= _SHARED_USES
            is_sampled = zlib.crc32(run.keys[0]) < self._hashes_sampled
            self._runs[run] = self._runs[before] if before is not None and is_below else is_sampled
        elif self._runs[run]:
            insert_chain(self._sample, run.root.state, run.keys[-count:], run.keys[-count - 1], run.size)

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Have the sample see a request of its; let who rules there rule here."""
        for policy in self._live:
            policy.touch(path, use)
        self.ghost_blocks_max = max(self._live[-1].ghost_blocks_max, self.ghost_blocks_max - FORGOTTEN_MAX)
        if self._runs[path[-1]]:
            self._clock.advance(max(0.0, use.now_s - self._clock.monotonic_s()))
            keys = [key for run in path for key in run.keys]
            insert_chain(self._sample, path[0].root.state, keys, None, path[-1].size)
            if self._small.ruler not in (self.ruler, AGREEMENT):
                self._crown(self._small.ruler)

    def _crown(self, name: str) -> None:
        self.ruler = name
        self._reuse.counts = name == "reuse"
        self._sampled_reuse.counts = not self._reuse.counts
        self._live = [self._reuse]
        if name != "reuse":
            # It takes the runs over as if they had come in the order of their latest uses.
            ruler = self._others_of[name](self._blocks_max)
            self._live.append(ruler)
            for run in sorted(self._runs, key=lambda run: run.last_use):
                ruler.adopt(run, len(run.keys))
                ruler.resize(run, run.held)
                if run.is_candidate:
                    ruler.enter(run)

    def resize(self, run: Run, delta: int) -> None:
        for policy in self._live:
            policy.resize(run, delta)

    def split(self, upper: Run, lower: Run) -> None:
        for policy in self._live:
            policy.split(upper, lower)
        self._runs[upper] = self._runs[lower]

    def enter(self, run: Run) -> None:
        for policy in self._live:
            policy.enter(run)

    def leave(self, run: Run) -> None:
        for policy in self._live:
            policy.leave(run)

    def victim(self) -> Run | None:
        return self._live[-1].victim()

    def spared(self, run: Run) -> int:
        return self._live[-1].spared(run)

    def forget(self, run: Run, count: int) -> None:
        for policy in self._live:
            policy.forget(run, count)
        if not run.keys:
            del self._runs[run]
