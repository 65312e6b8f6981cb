"""Holds what is likely to be used soonest, for its age and its place in a session; learned online, from the past alone.

A session is seen in the tree: a request that goes on after most of an earlier one is that one's next turn. Runs of a
session share its fate, so that they share its kind: the turn, and how much that turn brought. Runs used more often than
their session's turns explain are shared by sessions. The last block of a request is a run of its own: where prompts
end inside a block it is never used again, which is learned like everything else.
All blocks cost the same to recompute: what is saved is hits. Worth is told by the room that a block takes.
Invariants: each run that is counted or a candidate is in the queue of its kind and age bin, longest unused first, and
among that queue's candidates exactly if it is a candidate; a tenant whose sessions go on after their announced ends is
not believed until fewer of them do.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.evict.hint import LAST, TENANTS_MAX
from kvtide.evict.ranking import Recent
from kvtide.index import USUAL_SIZE, EvictionPolicy, Run, Use
from kvtide.types import Namespace

# In caches of at most this many blocks ages are told apart finely; in larger ones runs would move too often.
_FINE_BLOCKS_MAX = 1 << 17
# Bin 0 is [0, 8) s, the others go up to half a day: rhythms of agents and people.
_FIRST_S, _OCTAVES = 8.0, 12.5
_SIZE_EDGES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128)
# Before anything is seen: one run in fifty is used again in each octave of age.
_PRIOR_HAZARD_PER_OCTAVE = 0.02
_HAZARD_MAX = 0.95
# How much the prior, the common hazard and the group's weigh, in runs.
_PRIOR_RUNS = 10.0
_COMMON_RUNS = 60.0
_GROUP_RUNS = 60.0
# The factor between two levels is (uses + this) / (expected uses + this).
_GROUP_FACTOR_USES = 2.0
_KIND_FACTOR_USES = 30.0
# What is seen an octave of age away says this much as much of a factor: what was popular may be so no more.
_NEAR_PER_OCTAVE = 0.4
# Advice makes no more rows beyond this many.
ROWS_MAX = 256
# A cut must leave this many runs on both sides and gain this much log-likelihood.
_CUT_RUNS_MIN = 20.0
_CUT_GAIN_MIN = 4.0
_TINY_S = 1e-9
_Counts = NDArray[np.float64]


class Ages:
    """Bins of age, `per_octave` of them an octave, and what holds for all kinds in them.

    `spread`: the shares that a bin's counts have in it and its neighbours, as neighbouring ages are alike.
    """

    def __init__(self, per_octave: int, spread: tuple[float, ...]) -> None:
        bins = int(_OCTAVES * per_octave) + 2
        self.edges_s = (0.0, *(_FIRST_S * 2 ** (step / per_octave) for step in range(bins - 1)))
        self.widths_s = np.diff(np.array([*self.edges_s, 2 * self.edges_s[-1]]))
        self.spread = spread
        ages = np.arange(bins)
        self._nearness = _NEAR_PER_OCTAVE ** (np.abs(ages[:, None] - ages) / per_octave)
        self.prior_hazard = _PRIOR_HAZARD_PER_OCTAVE / per_octave
        prior = np.full((1, bins), self.prior_hazard)
        self.prior_worth: list[float] = _worth(prior, self.widths_s)[0].tolist()

    def __len__(self) -> int:
        return len(self.edges_s)

    def leaning(self, runs: _Counts, uses: _Counts, base: _Counts, base_runs: float, factor_uses: float) -> _Counts:
        """Return uses / runs, leaning on `base` times a factor at ages nearby, as if seen on `base_runs` more runs."""
        factor = (uses @ self._nearness + factor_uses) / ((runs * base) @ self._nearness + factor_uses)
        leaning: _Counts = (uses + base_runs * base * factor) / (runs + base_runs)
        return leaning


class Kind(NamedTuple):
    """The kind of a run: role in requests; for those of a session (`is_session`) turn, new blocks and advice too.

    size: the bucket of new blocks, by `_SIZE_EDGES`: finer where numbers are small.
    """

    role: str
    level: int
    size: int = 0
    is_session: bool = False
    mark: int = 0


class HazardModel:
    """Counts of all kinds, and the worth of each (row, age bin) as of the latest `learn`.

    The policy counts into `reached` and `used`; of a kind that has not been learned yet only the age counts.
    """

    def __init__(self, blocks_max: int) -> None:
        """blocks_max: what the cache holds, which decides how finely ages are told apart."""
        self.ages = FINE_AGES if blocks_max <= _FINE_BLOCKS_MAX else COARSE_AGES
        self._rows: dict[Kind, int] = {}
        # By row.
        self.kinds: list[Kind] = []
        self._runs: _Counts = np.zeros((0, len(self.ages)))
        self._uses: _Counts = np.zeros((0, len(self.ages)))
        self._cuts = {False: 0, True: 0}
        self.reached: list[list[float]] = []
        self.used: list[list[float]] = []
        self.worth: list[list[float]] = []

    def row(self, kind: Kind) -> int:
        """Return the row of a kind, made if need be."""
        row = self._rows.get(kind)
        if row is None:
            if kind.mark and len(self._rows) >= ROWS_MAX:
                return self.row(kind._replace(mark=0))
            row = self._rows[kind] = len(self._rows)
            self.kinds.append(kind)
            self.reached.append([0.0] * len(self.ages))
            self.used.append([0.0] * len(self.ages))
            self.worth.append(self.ages.prior_worth)
        return row

    def learn(self) -> None:
        """Take in what was counted since the last call, and update `worth`."""
        reached, used = np.array(self.reached), np.array(self.used)
        fresh = np.zeros((len(reached) - len(self._runs), len(self.ages)))
        keep = 0.5 ** (reached[:, 0].sum() / HALF_LIFE_RUNS)
        # Advice that comes later takes runs from one row to another: less may be left there than they counted.
        self._runs = np.maximum(0.0, np.concatenate([self._runs * keep, fresh]) + reached)
        self._uses = np.concatenate([self._uses * keep, fresh]) + used
        self.reached = [[0.0] * len(self.ages) for _ in reached]
        self.used = [[0.0] * len(self.ages) for _ in used]
        self._cuts = {is_first_turn: self._best_cut(is_first_turn) for is_first_turn in (False, True)}
        shares = self.ages.spread
        hazard = self._hazard(_spread(self._runs, shares), _spread(self._uses, shares))
        self.worth = _worth(hazard, self.ages.widths_s).tolist()

    def _best_cut(self, is_first_turn: bool) -> int:
        """Return the size bucket that best parts sessions' runs into those used again and others; 0 for none."""
        runs, uses = np.zeros(len(_SIZE_EDGES) + 1), np.zeros(len(_SIZE_EDGES) + 1)
        for kind, row in self._rows.items():
            if kind.is_session and (kind.level == 0) == is_first_turn:
                runs[kind.size] += self._runs[row, 0]
                uses[kind.size] += self._uses[row].sum()
        below_runs, below_uses = runs.cumsum()[:-1], uses.cumsum()[:-1]
        above_runs, above_uses = runs.sum() - below_runs, uses.sum() - below_uses
        gain = _log_likelihood(below_runs, below_uses) + _log_likelihood(above_runs, above_uses)
        gain -= _log_likelihood(runs.sum(keepdims=True), uses.sum(keepdims=True))
        gain[np.minimum(below_runs, above_runs) < _CUT_RUNS_MIN] = 0.0
        best = int(gain.argmax())
        return best + 1 if gain[best] > _CUT_GAIN_MIN else 0

    def _group(self, kind: Kind) -> Hashable:
        if not kind.is_session:
            return kind.role
        return kind.level, kind.size >= self._cuts[kind.level == 0], kind.mark

    def _hazard(self, runs: _Counts, uses: _Counts) -> _Counts:
        groups: dict[Hashable, int] = {}
        group_of = np.array([groups.setdefault(self._group(kind), len(groups)) for kind in self._rows])
        in_session = np.array([kind.is_session for kind in self._rows])
        prior_uses = _PRIOR_RUNS * self.ages.prior_hazard
        common = (uses[in_session].sum(0) + prior_uses) / (runs[in_session].sum(0) + _PRIOR_RUNS)
        group_runs, group_uses = np.zeros((2, len(groups), len(self.ages)))
        np.add.at(group_runs, group_of, runs)
        np.add.at(group_uses, group_of, uses)
        group = self.ages.leaning(group_runs, group_uses, common, _COMMON_RUNS, _GROUP_FACTOR_USES)
        hazard = self.ages.leaning(runs, uses, group[group_of], _GROUP_RUNS, _KIND_FACTOR_USES)
        return np.minimum(_HAZARD_MAX, hazard)


def _spread(counts: _Counts, shares: Sequence[float]) -> _Counts:
    spread, edge = counts.copy(), len(shares) // 2
    bins = counts.shape[1] - 2 * edge
    spread[:, edge:-edge] = sum(share * counts[:, at : bins + at] for at, share in enumerate(shares))
    return spread


def _log_likelihood(runs: _Counts, uses: _Counts) -> _Counts:
    """Return the log-likelihood of that many uses under their own rate."""
    rate = (uses + 1) / (np.maximum(runs, uses) + 2)
    likelihood: _Counts = uses * np.log(rate) + np.maximum(runs - uses, 0) * np.log1p(-rate)
    return likelihood


def _worth(hazard: _Counts, widths_s: _Counts) -> _Counts:
    """Return, for each row and bin, max over stops of P(use until the stop) / E(time held until use or stop)."""
    alive = np.cumprod(1 - hazard, axis=1)
    alive = np.concatenate([np.ones((len(hazard), 1)), alive[:, :-1]], axis=1)
    zero = np.zeros((len(hazard), 1))
    gain = np.concatenate([zero, np.cumsum(alive * hazard, axis=1)], axis=1)
    held_s = np.concatenate([zero, np.cumsum(alive * widths_s * (1 - hazard / 2), axis=1)], axis=1)
    worth = np.empty_like(hazard)
    for start in range(hazard.shape[1]):
        rise = gain[:, start + 1 :] - gain[:, start : start + 1]
        cost_s = held_s[:, start + 1 :] - held_s[:, start : start + 1] + _TINY_S
        worth[:, start] = (rise / cost_s).max(axis=1)
    return worth


FINE_AGES = Ages(4, (0.1, 0.2, 0.4, 0.2, 0.1))
COARSE_AGES = Ages(2, (0.25, 0.5, 0.25))

# Reuse that comes after eviction must be seen to be learned from: small caches remember 16 times what they hold, large
# ones half as much again and this many.
GHOST_BLOCKS_MAX = 1 << 18
_GHOSTS_PER_BLOCK = 16
# Sessions change over hours: counts fade to a half over this many runs.
HALF_LIFE_RUNS = 100_000.0
# Learn again after so many uses, and later when there are so many times more.
_LEARN_USES_MIN = 16
_LEARN_SHARE = 100
# An age is exact to one part in this many.
_AGE_STEPS = 16
# A clock that has stood still for this many requests tells no ages: from then on each request is a second.
_STILL_USES_MAX = 64
_TURN_MAX = 6
# A request that keeps less than this of an earlier one is not its next turn but another branch.
_NEXT_TURN_SHARE = 0.5
# Sizes that differ by less than a class are alike; beyond the bound it makes no difference.
_SIZE_CLASSES_PER_OCTAVE = 2
_SIZE_CLASS_MAX = 24
# Turns that a session's runs may miss (a repeated question, a split) before they count as shared.
_UNEXPLAINED_USES = 1


@dataclass(slots=True, eq=False)
class _Queue:
    row: int
    age_bin: int
    runs: OrderedDict[Run, None] = field(default_factory=OrderedDict)
    # By size class.
    candidates: defaultdict[int, OrderedDict[Run, None]] = field(default_factory=partial(defaultdict, OrderedDict))


@dataclass(slots=True, eq=False)
class _Trace:
    """The policy's memory of a run: `reach` blocks had the latest request that used it, its session's turn `turn`.

    A run that is counted (`weight` 1) stands for its request; other runs of the same request would count it twice.
    `mark` is the advice that came with that request.
    """

    queue: _Queue
    at_s: float = 0.0
    weight: float = 0.0
    turn: int = 0
    mark: int = 0
    reach: int = 0
    size_class: int = 0


# Counts of a tenant's announcements are halved beyond this many: what was long ago fades.
_SAID_MAX = 64
# A tenant is believed while at most this share of its ends, beside a few, turned out wrong.
_BROKEN_SHARE_MAX = 0.25
_BROKEN_GRANTED = 2


class Trust:
    """Compares what tenants announce with what their sessions do."""

    def __init__(self) -> None:
        # Pieces of advice that were not believed.
        self.ignored = 0
        # Ends that were announced, and those after which the session went on.
        self._ends: Recent[Namespace, tuple[float, float]] = Recent(TENANTS_MAX)

    def believed(self, tenant: Namespace, mark: int) -> int:
        """Note a mark; return it, or 0 if its tenant is not believed."""
        if not mark:
            return 0
        said, broken = self._ends.get(tenant, (0.0, 0.0))
        is_liar = broken > _BROKEN_GRANTED + _BROKEN_SHARE_MAX * said
        said += mark == LAST
        if said > _SAID_MAX:
            said, broken = said / 2, broken / 2
        self._ends[tenant] = said, broken
        self.ignored += is_liar
        return 0 if is_liar else mark

    def note_next_turn(self, tenant: Namespace, announced: int) -> None:
        """Note that a session went on whose latest request had this mark, believed or not."""
        if announced == LAST and tenant in self._ends:
            said, broken = self._ends[tenant]
            self._ends[tenant] = said, broken + 1


class AdvisedPolicy(EvictionPolicy):
    """A policy that takes advice. `trust` says whom it believes."""

    def __init__(self) -> None:
        self.trust = Trust()
        self._mark = 0

    def hear(self, mark: int) -> None:
        """Take a mark as that of the uses and of the advice that come from now on; 0 for requests without advice."""
        self._mark = mark


class ReusePolicy(AdvisedPolicy):
    """Ranks kinds and ages by the worth of holding on; evicts the longest unused run of the least worth."""

    splits_tail = True

    def __init__(self, blocks_max: int, model: HazardModel | None = None) -> None:
        """model: one that is shared; what this policy sees is counted there while `counts`."""
        super().__init__()
        self.plan(blocks_max)
        self.model = model or HazardModel(blocks_max)
        self._edges_s = self.model.ages.edges_s
        self.counts = True
        self._queues: list[list[_Queue]] = []
        # (worth, first run's last use, row, age bin, size class) of every line of candidates. A line's first run may
        # have left since: its successor's use is later, so that looking again at the top is enough.
        self._ranking: list[tuple[float, int, int, int, int]] = []
        self._uses = 0
        self._learn_next = 1
        self._still_uses = 0
        self._clock_s = self._now_s = 0.0
        # When to look again for runs that leave an age bin.
        self._age_next_s = [0.0] * len(self._edges_s)

    def plan(self, blocks_max: int) -> None:
        self.ghost_blocks_max = min(_GHOSTS_PER_BLOCK * blocks_max, blocks_max // 2 + GHOST_BLOCKS_MAX)

    def adopt(self, run: Run, count: int) -> None:
        """Queue a new run as one of no session until its first use says more."""
        if len(run.keys) == count:
            trace = run.state = _Trace(self._queue(Kind("new", 0)))
            trace.queue.runs[run] = None

    def _queue(self, kind: Kind) -> _Queue:
        row = self.model.row(kind)
        while len(self._queues) <= row:
            self._queues.append([_Queue(len(self._queues), age_bin) for age_bin in range(len(self._edges_s))])
        return self._queues[row][0]

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Count the uses at the ages they came, and file the runs under what they are now."""
        self._tick(use.now_s)
        known = [run for run in path if run.uses > 1]
        turn, tenant = 0, path[0].root.state
        if known:
            latest: _Trace = known[-1].state
            if 1 < use.known_blocks >= _NEXT_TURN_SHARE * latest.reach:
                # The same prompt once more is no turn: what is asked often is shared.
                turn = latest.turn + (use.known_blocks < use.blocks)
                self.trust.note_next_turn(tenant, latest.mark)
        size = bisect_right(_SIZE_EDGES, use.blocks - use.known_blocks)
        mark = self.trust.believed(tenant, self._mark) if self._mark else 0
        session = Kind("session", min(turn, _TURN_MAX), size, True, mark)
        has_tail = 0 < len(path) - 1 >= len(known) and len(path[-1].keys) == 1 and path[-1].stop == use.blocks
        body = path[-2] if has_tail else path[-1]
        for run in path:
            trace: _Trace = run.state
            self.model.used[trace.queue.row][trace.queue.age_bin] += trace.weight * self.counts
            trace.queue.runs.pop(run, None)
            trace.turn, trace.reach, trace.at_s, trace.mark = turn, use.blocks, self._now_s, self._mark
            if has_tail and run is path[-1]:
                self._file(run, Kind("tail", min(turn, 1)), 1.0)
            elif run.uses > turn + 1 + _UNEXPLAINED_USES:
                self._file(run, Kind("shared", min(_TURN_MAX, run.uses.bit_length() - 1)), 1.0)
            else:
                self._file(run, session, 1.0 if run is body else 0.0)
        self._uses += 1
        if self._uses >= self._learn_next:
            self._learn_next = self._uses + max(_LEARN_USES_MIN, self._uses // _LEARN_SHARE)
            self._learn()

    def _file(self, run: Run, kind: Kind, weight: float) -> None:
        queue = self._queue(kind)
        trace: _Trace = run.state
        trace.queue, trace.weight = queue, weight
        if weight:
            queue.runs[run] = None
            self.model.reached[queue.row][0] += weight * self.counts

    def _tick(self, clock_s: float) -> None:
        """Move the time by which ages are counted, and whoever grew older."""
        if clock_s > self._clock_s:
            self._now_s += clock_s - self._clock_s
            self._clock_s = clock_s
            self._still_uses = 0
        else:
            self._still_uses += 1
            self._now_s += self._still_uses > _STILL_USES_MAX
        now_s = self._now_s
        for age_bin in range(len(self._edges_s) - 1):
            if now_s < self._age_next_s[age_bin]:
                continue
            self._age_next_s[age_bin] = now_s + self._edges_s[age_bin + 1] / _AGE_STEPS
            due_s = now_s - self._edges_s[age_bin + 1]
            for queues in self._queues:
                runs = queues[age_bin].runs
                if runs and next(iter(runs)).state.at_s <= due_s:
                    self._grow_older(queues[age_bin], queues[age_bin + 1], due_s)

    def _grow_older(self, young: _Queue, old: _Queue, due_s: float) -> None:
        """Move the runs last used at `due_s` or before. Most of the policy's time is spent here: kept flat."""
        runs, reached = young.runs, 0.0
        aged: list[Run] = []
        lines: dict[int, list[Run]] = {}
        for run in runs:
            trace: _Trace = run.state
            if trace.at_s > due_s:
                break
            aged.append(run)
            trace.queue = old
            reached += trace.weight
            if run.is_candidate:
                lines.setdefault(trace.size_class, []).append(run)
        for run in aged:
            del runs[run]
        old.runs.update(dict.fromkeys(aged))
        self.model.reached[old.row][old.age_bin] += reached * self.counts
        for size_class, line in lines.items():
            self._line_up(line, size_class, old)
            for run in line:
                del young.candidates[size_class][run]

    def _line_up(self, runs: Sequence[Run], size_class: int, queue: _Queue) -> None:
        line = queue.candidates[size_class]
        is_new = not line
        line.update(dict.fromkeys(runs))
        if is_new:
            heapq.heappush(self._ranking, self._rank(queue, size_class))

    def _learn(self) -> None:
        self.model.learn()
        queues = [queue for row in self._queues for queue in row]
        self._ranking = [self._rank(queue, name) for queue in queues for name, line in queue.candidates.items() if line]
        heapq.heapify(self._ranking)

    def _rank(self, queue: _Queue, size_class: int) -> tuple[float, int, int, int, int]:
        worth = self.model.worth[queue.row][queue.age_bin] * 2.0 ** (size_class / _SIZE_CLASSES_PER_OCTAVE)
        return worth, next(iter(queue.candidates[size_class])).last_use, queue.row, queue.age_bin, size_class

    def advise(self, path: Sequence[Run]) -> None:
        """File what the latest request of the path used, its session's runs, under what is said of it now."""
        end: _Trace = path[-1].state
        if end.mark == self._mark:
            return
        mark = self.trust.believed(path[0].root.state, self._mark)
        for run in path:
            trace: _Trace = run.state
            old, kind = trace.queue, self.model.kinds[trace.queue.row]
            if trace.at_s == end.at_s:
                trace.mark = self._mark
            if not kind.is_session or trace.at_s != end.at_s:
                continue
            if run.is_candidate:
                self.leave(run)
            new = trace.queue = self._queues[self._queue(kind._replace(mark=mark)).row][old.age_bin]
            if run in old.runs:
                del old.runs[run]
                new.runs[run] = None
            self.model.reached[old.row][old.age_bin] -= trace.weight * self.counts
            self.model.reached[new.row][new.age_bin] += trace.weight * self.counts
            if run.is_candidate:
                self.enter(run)

    def split(self, upper: Run, lower: Run) -> None:
        """Let the upper part stand for the request: what is used again is a prefix."""
        old: _Trace = lower.state
        trace = upper.state = replace(old)
        old.weight = 0.0
        if lower in old.queue.runs:
            trace.queue.runs[upper] = None

    def enter(self, run: Run) -> None:
        """Rank the run with its queue; one that was not counted has stayed where it was filed meanwhile."""
        trace: _Trace = run.state
        queue = trace.queue
        if run not in queue.runs:
            age_bin = bisect_right(self._edges_s, self._now_s - trace.at_s) - 1
            queue = trace.queue = self._queues[queue.row][age_bin]
            queue.runs[run] = None
        trace.size_class = _size_class(run)
        self._line_up([run], trace.size_class, queue)

    def leave(self, run: Run) -> None:
        trace: _Trace = run.state
        del trace.queue.candidates[trace.size_class][run]

    def victim(self) -> Run | None:
        """Return the first candidate of the queue of least worth."""
        while self._ranking:
            _, last_use, row, age_bin, size_class = self._ranking[0]
            queue = self._queues[row][age_bin]
            first = next(iter(queue.candidates[size_class]), None)
            if first is None:
                heapq.heappop(self._ranking)
            elif first.last_use == last_use:
                return first
            else:
                heapq.heapreplace(self._ranking, self._rank(queue, size_class))
        return None

    def forget(self, run: Run, count: int) -> None:
        if not run.keys:
            run.state.queue.runs.pop(run, None)


def _size_class(run: Run) -> int:
    """Class of the room that a block takes, the smaller the higher: worth is for room."""
    if run.size == USUAL_SIZE:
        return 0
    octaves = math.log2(USUAL_SIZE / run.size)
    return max(-_SIZE_CLASS_MAX, min(round(_SIZE_CLASSES_PER_OCTAVE * octaves), _SIZE_CLASS_MAX))
