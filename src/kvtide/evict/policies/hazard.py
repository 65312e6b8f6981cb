"""The likelihood that a run is used again, by its kind and age, learned online; and the worth of keeping it.

Ages fall into bins. For each kind of run and bin two decaying counts are kept: runs that reached the bin, and runs that
were used in it; their quotient is the hazard (Kaplan and Meier's estimate of survival, in pieces). Kinds with little
data lean on their group, groups on all runs together. Runs of sessions are grouped by turn and by whether the turn
brought few new blocks or many; where few ends is learned too: the cut that best tells runs that were used again from
those that were not.
The worth of holding a run at an age is the best ratio, over all stopping times, of the chance of a use until then to
the expected time held until then (Gittins' index of a job with a known distribution of its length).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        self.prior_hazard = _PRIOR_HAZARD_PER_OCTAVE / per_octave
        prior = np.full((1, bins), self.prior_hazard)
        self.prior_worth: list[float] = _worth(prior, self.widths_s)[0].tolist()

    def __len__(self) -> int:
        return len(self.edges_s)


class Kind(NamedTuple):
    """The kind of a run: role in requests; for those of a session (`is_session`) turn, new blocks and advice too."""

    role: str
    level: int
    size: int = 0
    is_session: bool = False
    mark: int = 0


def size_bucket(blocks: int) -> int:
    """Return the bucket of a number of blocks, finer where numbers are small."""
    return bisect_right(_SIZE_EDGES, blocks)


class HazardModel:
    """Counts of all kinds, and the worth of each (row, age bin) as of the latest `learn`.

    The policy counts into `reached` and `used`; of a kind that has not been learned yet only the age counts.
    """

    def __init__(self, half_life_runs: float, blocks_max: int = 0) -> None:
        """blocks_max: what the cache holds, which decides how finely ages are told apart."""
        self.ages = FINE_AGES if blocks_max <= _FINE_BLOCKS_MAX else COARSE_AGES
        self._half_life_runs = half_life_runs
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
        keep = 0.5 ** (reached[:, 0].sum() / self._half_life_runs)
        # Advice that comes later takes runs from one row to another: less may be left there than they counted.
        self._runs = np.maximum(0.0, np.concatenate([self._runs * keep, fresh]) + reached)
        self._uses = np.concatenate([self._uses * keep, fresh]) + used
        self.reached = [[0.0] * len(self.ages) for _ in reached]
        self.used = [[0.0] * len(self.ages) for _ in used]
        for is_first_turn in self._cuts:
            self._cuts[is_first_turn] = self._best_cut(is_first_turn)
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
        group = _leaning(group_runs, group_uses, common, _COMMON_RUNS, _GROUP_FACTOR_USES)
        return np.minimum(_HAZARD_MAX, _leaning(runs, uses, group[group_of], _GROUP_RUNS, _KIND_FACTOR_USES))


def _leaning(runs: _Counts, uses: _Counts, base: _Counts, base_runs: float, factor_uses: float) -> _Counts:
    """Return uses / runs, leaning on `base` times a factor for each row as if seen on `base_runs` more runs."""
    factor = (uses.sum(1) + factor_uses) / ((runs * base).sum(1) + factor_uses)
    leaning: _Counts = (uses + base_runs * base * factor[:, None]) / (runs + base_runs)
    return leaning


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
