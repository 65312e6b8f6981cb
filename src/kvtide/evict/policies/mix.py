"""Lets the best of several policies rule: each of them runs in a shadow, and the one that hits most there leads.

A shadow is an index of its own. Up to SHADOW_BLOCKS_MAX blocks it holds as many as the cache, and what the ruler's
shadow gave up is what the cache gives up. For larger caches it holds that many and sees as large a share of the
prompts (SHARDS): of a cache with a million blocks one in 122. Then the ruling policy ranks the cache's own runs.
A session is in the sample as a whole: a run that is hung below one of few uses follows that one, below a prefix that
many share its own first key decides.

Worst case: over any stretch the ruler's shadow hits at most SWITCH_GAIN of the blocks less than the best one, beside
what is granted and what fades; a switch costs a hit for each block at most that the new ruler's shadow held and the
cache did not.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvtide.clock import ManualClock
from kvtide.evict.policies.reuse import ReusePolicy
from kvtide.index import EvictionPolicy, RadixIndex, Run, Use
from kvtide.types import BlockKey, Namespace

_log = logging.getLogger(__name__)

# Blocks that each shadow holds at most.
SHADOW_BLOCKS_MAX = 8192
# Another policy rules once its shadow's recent hit rate is higher by this.
SWITCH_GAIN = 0.002
# Hits fade to a half over requests of as many blocks as this many caches hold, and not before so many requests.
_HALF_LIFE_CACHES = 8
_HALF_LIFE_REQUESTS_MIN = 1024
# Hits that the ruler is granted beyond that, in mean requests (a few of them prove nothing) and as a share of the
# shadow's blocks (that many may be missing after a switch).
_GRANTED_REQUESTS = 5.0
_GRANTED_SHARE = 0.05
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

    def __init__(self, shadow: RadixIndex, shadows: Sequence[RadixIndex]) -> None:
        self._shadow = shadow
        self._shadows = shadows
        self._end_of: dict[Run, BlockKey] = {}
        self._ends: dict[BlockKey, Run] = {}
        self._doomed: OrderedDict[Run, None] = OrderedDict()

    def follow(self, shadow: RadixIndex) -> None:
        """Evict from now on what another shadow does not hold."""
        self._shadow = shadow
        ends = sorted(self._end_of.items(), key=lambda item: item[0].last_use)
        self._doomed = OrderedDict.fromkeys(run for run, end in ends if not shadow.is_held(end))

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
            given_up = [(shadow, shadow.victims(1)) for shadow in self._shadows]
            keys = next(keys for shadow, keys in given_up if shadow is self._shadow)
            assert keys, "what an empty shadow does not hold is doomed"
            self.give_up(keys)
        return next(iter(self._doomed), None)

    def spared(self, run: Run) -> int:
        """Return how many of the run's blocks the shadow holds."""
        return bisect_left(range(run.held - 1), True, key=lambda at: not self._shadow.is_held(run.keys[at]))


class MixPolicy(EvictionPolicy):
    """Evicts as the policy does whose shadow has hit most lately."""

    splits_tail = True

    def __init__(self, others_of: Mapping[str, Callable[[int], EvictionPolicy]], blocks_max: int) -> None:
        """others_of: makers of the policies beside `reuse`, which rules until another one proves better."""
        shadow_blocks = min(blocks_max, SHADOW_BLOCKS_MAX)
        self._blocks_max = blocks_max
        self._clock = ManualClock()
        self._others_of = others_of
        shadowed = ReusePolicy(shadow_blocks)
        self._shadows = {"reuse": RadixIndex(self._clock, lambda _: shadowed, shadow_blocks)}
        self._shadows |= {name: RadixIndex(self._clock, of, shadow_blocks) for name, of in others_of.items()}
        self._hits = dict.fromkeys(self._shadows, 0.0)
        self._asked = self._requests = 0.0
        self._granted_blocks = _GRANTED_SHARE * shadow_blocks
        self._half_life_blocks = max(1, _HALF_LIFE_CACHES * shadow_blocks)
        self._hashes_sampled = _HASHES * shadow_blocks // max(1, blocks_max)
        # Whether their prompts are in the sample.
        self._runs: dict[Run, bool] = {}
        self.ruler = "reuse"
        self._follower: _Follower | None = None
        # What follows the cache's runs, the ruler last. `reuse` always does: its history can't be made up later.
        self._live: list[EvictionPolicy]
        if shadow_blocks == blocks_max:
            self._follower = _Follower(self._shadows["reuse"], list(self._shadows.values()))
            self._live = [self._follower]
        else:
            self._reuse = ReusePolicy(blocks_max, shadowed.model)
            self._live = [self._reuse]
        self.ghost_blocks_max = self._live[-1].ghost_blocks_max

    def adopt(self, run: Run, count: int) -> None:
        """Sample a new run or not; let the shadows grow one that grows."""
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
        """Replay a sampled request through the shadows; let the best one rule."""
        for policy in self._live:
            policy.touch(path, use)
        self.ghost_blocks_max = max(self._live[-1].ghost_blocks_max, self.ghost_blocks_max - FORGOTTEN_MAX)
        if not self._runs[path[-1]]:
            return
        self._clock.advance(max(0.0, use.now_s - self._clock.monotonic_s()))
        keys = [key for run in path for key in run.keys]
        faded = 0.5 ** min(len(keys) / self._half_life_blocks, 1 / _HALF_LIFE_REQUESTS_MIN)
        self._asked = faded * self._asked + len(keys)
        self._requests = faded * self._requests + 1
        for name, shadow in self._shadows.items():
            self._hits[name] = faded * self._hits[name] + len(shadow.match(keys).blocks)
        self._replay(path[-1], keys, None)
        best = max(self._hits, key=self._hits.__getitem__)
        granted = self._asked * (SWITCH_GAIN + _GRANTED_REQUESTS / self._requests) + self._granted_blocks
        if self._hits[best] > self._hits[self.ruler] + granted:
            self._crown(best)

    def _replay(self, end: Run, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Tell the shadows of keys that end with a run: what is new of them is like it."""
        namespace = _namespace(end)
        for name, shadow in self._shadows.items():
            try:
                given_up = shadow.insert(namespace, keys, parent, value=end.value, cost=end.given_cost)
            except ValueError as error:
                # A shadow remembers other blocks than the cache: keys that are no chain can come to light here alone.
                _log.debug("no prefix: %s", error)
                continue
            if self._follower is not None and name == self.ruler:
                self._follower.give_up(given_up)

    def _crown(self, name: str) -> None:
        """Let another policy rule."""
        self.ruler = name
        if self._follower is not None:
            self._follower.follow(self._shadows[name])
            return
        self._reuse.counts = name == "reuse"
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


def _namespace(run: Run) -> Namespace:
    while run.parent is not None:
        run = run.parent
    namespace: Namespace = run.state
    return namespace
