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

import logging
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvtide.clock import ManualClock
from kvtide.evict.hint import AdvisedPolicy
from kvtide.evict.policies.reuse import ReusePolicy
from kvtide.evict.policies.shadows import AGREEMENT, Agreement, Shadows, insert_like
from kvtide.index import EvictionPolicy, RadixIndex, Run, Use
from kvtide.types import BlockKey

_log = logging.getLogger(__name__)

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


class _Follower(EvictionPolicy):
    """Evicts what a shadow of the same size does not hold, in the order in which it gave that up.

    Both sets are closed under prefixes: while the cache holds more, some candidate's end is not held there.
    Invariant: `_doomed` are the candidates whose last held block the shadow does not hold.
    """

    def __init__(self, ruler: str, shadows: Shadows) -> None:
        self._ruler = ruler
        self._shadow = shadows[ruler]
        self._shadows = shadows
        self._end_of: dict[Run, BlockKey] = {}
        self._ends: dict[BlockKey, Run] = {}
        self._doomed: OrderedDict[Run, None] = OrderedDict()

    def follow(self, ruler: str) -> None:
        """Evict from now on what another shadow does not hold."""
        self._ruler, self._shadow = ruler, self._shadows[ruler]
        ends = sorted(self._end_of.items(), key=lambda item: item[0].last_use)
        self._doomed = OrderedDict.fromkeys(run for run, end in ends if not self._shadow.is_held(end))

    def give_up(self, keys: Sequence[BlockKey]) -> None:
        """Note what the shadow has given up."""
        for key in keys:
            if key in self._ends:
                self._doomed[self._ends[key]] = None

    def enter(self, run: Run) -> None:
        """Note where the run ends."""
        end = self._end_of[run] = run.keys[run.held - 1]
        self._ends[end] = run
        if not self._shadow.is_held(end):
            self._doomed[run] = None

    def leave(self, run: Run) -> None:
        """Forget where the run ended."""
        del self._ends[self._end_of.pop(run)]
        self._doomed.pop(run, None)

    def resize(self, run: Run, delta: int) -> None:
        """Note where a candidate ends now."""
        if run in self._end_of and run.held:
            self.leave(run)
            self.enter(run)

    def victim(self) -> Run | None:
        """Return the first candidate that the shadow does not hold; if it holds all, all shadows give up as many."""
        while self._end_of and not self._doomed:
            keys = self._shadows.shrink()[self._ruler]
            assert keys, "what an empty shadow does not hold is doomed"
            self.give_up(keys)
        return next(iter(self._doomed), None)

    def spared(self, run: Run) -> int:
        """Return how many of the run's blocks the shadow holds."""
        return bisect_left(range(run.held - 1), True, key=lambda at: not self._shadow.is_held(run.keys[at]))


class MixPolicy(AdvisedPolicy):
    """Evicts as the policy does whose shadow has hit most lately."""

    splits_tail = True

    def __init__(
        self,
        others_of: Mapping[str, Callable[[int], EvictionPolicy]],
        blocks_max: int,
        reuse: ReusePolicy | None = None,
    ) -> None:
        """others_of: makers of the policies beside `reuse`, which rules until another one proves better.

        reuse: a `reuse` of that size that somebody else looks after too; by default the cache's own.
        """
        super().__init__()
        self._clock = ManualClock()
        self._reuse = reuse = reuse or ReusePolicy(blocks_max)
        fixed = {"reuse": RadixIndex(self._clock, lambda _: reuse, blocks_max)}
        fixed |= {name: RadixIndex(self._clock, of, blocks_max) for name, of in others_of.items()}
        agreement = Agreement(list(fixed.values()))
        self._shadows = Shadows(fixed, agreement, RadixIndex(self._clock, lambda _: agreement, blocks_max))
        self._hits = dict.fromkeys(self._shadows.names, 0.0)
        self.ruler = "reuse"
        self._follower = _Follower(self.ruler, self._shadows)
        self.trust = reuse.trust
        self.plan(blocks_max)

    def plan(self, blocks_max: int) -> None:
        """Tell the shadows how many blocks fit by now."""
        self._half_life_blocks = max(1, _HALF_LIFE_CACHES * blocks_max)
        self._shadows.plan(blocks_max)

    def hear(self, mark: int) -> None:
        """Pass advice on to who takes it."""
        self._reuse.hear(mark)

    def advise(self, path: Sequence[Run]) -> None:
        """Pass advice about an earlier request on."""
        self._shadows["reuse"].advise(path[-1].keys[-1])

    def measure(self, run: Run, key: BlockKey) -> None:
        """Have the shadows measure it too."""
        self._shadows.measure(key, run.size)

    def adopt(self, run: Run, count: int) -> None:
        """Let the shadows grow a run that grows."""
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
            self.ruler = best
            self._follower.follow(best)

    def _replay(self, end: Run, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Tell the shadows of keys that end with a run: what is new of them is like it."""
        given_up = self._shadows.insert(keys, parent, end)
        self._follower.give_up(given_up[self.ruler])

    def resize(self, run: Run, delta: int) -> None:
        """Tell the follower."""
        self._follower.resize(run, delta)

    def enter(self, run: Run) -> None:
        """Tell the follower."""
        self._follower.enter(run)

    def leave(self, run: Run) -> None:
        """Tell the follower."""
        self._follower.leave(run)

    def victim(self) -> Run | None:
        """Return what the ruler's shadow does not hold."""
        return self._follower.victim()

    def spared(self, run: Run) -> int:
        """Return what of a run the ruler's shadow holds."""
        return self._follower.spared(run)


class SampledMixPolicy(AdvisedPolicy):
    """Evicts as the policy does that rules a small cache which sees a share of the prompts."""

    splits_tail = True

    def __init__(self, others_of: Mapping[str, Callable[[int], EvictionPolicy]], blocks_max: int) -> None:
        """others_of: makers of the policies beside `reuse`, which rules until another one proves better."""
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
        """Pass advice on to those who take it."""
        self._small.hear(mark)
        self._reuse.hear(mark)

    def advise(self, path: Sequence[Run]) -> None:
        """Pass advice about an earlier request on."""
        self._reuse.advise(path)
        if self._runs[path[-1]]:
            self._sample.advise(path[-1].keys[-1])

    def measure(self, run: Run, key: BlockKey) -> None:
        """Have the sample measure it too."""
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
            self._replay(run, run.keys[-count:], run.keys[-count - 1])

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Have the sample see a request of its; let who rules there rule here."""
        for policy in self._live:
            policy.touch(path, use)
        self.ghost_blocks_max = max(self._live[-1].ghost_blocks_max, self.ghost_blocks_max - FORGOTTEN_MAX)
        if self._runs[path[-1]]:
            self._clock.advance(max(0.0, use.now_s - self._clock.monotonic_s()))
            self._replay(path[-1], [key for run in path for key in run.keys], None)
            if self._small.ruler not in (self.ruler, AGREEMENT):
                self._crown(self._small.ruler)

    def _replay(self, end: Run, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Use keys that end with a run in the sample: what is new of them is like it."""
        try:
            insert_like(self._sample, keys, parent, end)
        except ValueError as error:
            # The sample remembers other blocks than the cache: keys that are no chain can come to light here alone.
            _log.debug("no prefix: %s", error)

    def _crown(self, name: str) -> None:
        """Let another policy rule."""
        self.ruler = name
        self._reuse.counts = name == "reuse"
        self._sampled_reuse.counts = not self._reuse.counts
        self._live = [self._reuse]
        if name == "reuse":
            return
        # It takes the runs over as if they had come in the order of their latest uses.
        ruler = self._others_of[name](self._blocks_max)
        self._live.append(ruler)
        for run in sorted(self._runs, key=lambda run: run.last_use):
            ruler.adopt(run, len(run.keys))
            ruler.resize(run, run.held)
            if run.is_candidate:
                ruler.enter(run)

    def resize(self, run: Run, delta: int) -> None:
        """Tell who follows the runs."""
        for policy in self._live:
            policy.resize(run, delta)

    def split(self, upper: Run, lower: Run) -> None:
        """Tell who follows the runs; both parts are sampled or neither."""
        for policy in self._live:
            policy.split(upper, lower)
        self._runs[upper] = self._runs[lower]

    def enter(self, run: Run) -> None:
        """Tell who follows the runs."""
        for policy in self._live:
            policy.enter(run)

    def leave(self, run: Run) -> None:
        """Tell who follows the runs."""
        for policy in self._live:
            policy.leave(run)

    def victim(self) -> Run | None:
        """Return the ruler's victim."""
        return self._live[-1].victim()

    def spared(self, run: Run) -> int:
        """Return what the ruler spares."""
        return self._live[-1].spared(run)

    def forget(self, run: Run, count: int) -> None:
        """Tell who follows the runs."""
        for policy in self._live:
            policy.forget(run, count)
        if not run.keys:
            del self._runs[run]
