"""Learned and hinted policies of others, as far as a trace of keys and times allows; none is part of the product.

Name, after whom, what it uses here; what else theirs would use:
- `lpc`, LPC (2025): turn, new blocks, length, as odds that a session goes on, learned online; the conversation's text
- `types`, SAECache (2026): place in the request (shared, body, tail) and turn; system, tool and thought tokens marked
- `ttl`, Continuum (2025): gaps before each turn, held until most would have come back; which tool was called
- `flops`, Marconi (2024): compute saved a byte, by place in the prompt, beside recency; states of hybrid models
- `laru`, LARU (2025): the odds of `lpc`, to order what a phase left unmarked; a trained predictor

Invariant: all of them learn from requests that have come, never from later ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvtide.evict.policies import PolicyOf
from kvtide.index import HeapPolicy, Run, Use

_TURN_MAX = 6
_RATE = 0.05
_GAPS_REMEMBERED = 200
_TTL_QUANTILE = 0.8
# As many later requests without a use are an answer too.
_OPEN_MAX = 1000
_PROTECTED = float(1 << 40)


def _turn(path: Sequence[Run], use: Use) -> int:
    """Return how many requests went the same way before: the turn of a session, roughly."""
    known = [run for run in path if run.uses > 1]
    return min(_TURN_MAX, known[-1].uses - 1) if known and 2 * use.known_blocks >= use.blocks else 0


class _Odds:
    """The odds that a request is gone on from: a logistic model learned request by request."""

    def __init__(self) -> None:
        self._weights = [0.0] * 5

    def features(self, turn: int, use: Use) -> list[float]:
        """Return what is known when a request has been served."""
        fresh = math.log2(1 + use.blocks - use.known_blocks)
        return [1.0, turn / _TURN_MAX, float(turn > 0), fresh / 8, math.log2(1 + use.blocks) / 8]

    def of(self, features: Sequence[float]) -> float:
        """Return the chance."""
        return 1 / (1 + math.exp(-sum(w * f for w, f in zip(self._weights, features, strict=True))))

    def learn(self, features: Sequence[float], has_gone_on: bool) -> None:
        """Take one outcome in."""
        step = _RATE * (has_gone_on - self.of(features))
        self._weights = [w + step * f for w, f in zip(self._weights, features, strict=True)]


class ContinuationPolicy(HeapPolicy):
    """Sessions that are not likely to go on leave first, within both parts the one used longest ago."""

    def __init__(self, blocks_max: int) -> None:
        super().__init__()
        self.ghost_blocks_max = blocks_max
        self._odds = _Odds()
        self._mean = 0.5
        # Ends of requests whose outcome is not known yet.
        self._open: OrderedDict[Run, list[float]] = OrderedDict()
        self._chance: defaultdict[Run, float] = defaultdict(float)

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Learn from the sessions that go on and from those that are silent for long; rate this one."""
        for run in path:
            features = self._open.pop(run, None)
            if features is not None:
                self._odds.learn(features, True)
        features = self._odds.features(_turn(path, use), use)
        chance = self._odds.of(features)
        self._mean += 0.01 * (chance - self._mean)
        for run in path:
            self._chance[run] = chance
        self._open[path[-1]] = features
        if len(self._open) > _OPEN_MAX:
            self._odds.learn(self._open.popitem(last=False)[1], False)

    def priority(self, run: Run) -> float:
        """Return the latest use, raised for a session that is likelier than most to go on."""
        return run.last_use + (_PROTECTED if self._chance[run] >= self._mean else 0.0)

    def forget(self, run: Run, count: int) -> None:
        """Drop what is known of a run that is gone."""
        if not run.keys:
            self._open.pop(run, None)
            self._chance.pop(run, None)


class MarkedPolicy(ContinuationPolicy):
    """Marks what is used; of the unmarked the least likely leaves. Once all are marked a new phase begins.

    A phase bounds the loss to that of LRU by a constant, whatever the predictions are worth.
    """

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._blocks_max = blocks_max
        self._phase_from = self._used_blocks = 0

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Mark the runs; begin a phase when as many blocks as fit were used in this one."""
        super().touch(path, use)
        self._used_blocks += use.blocks - use.held_blocks
        if self._used_blocks > self._blocks_max:
            self._phase_from, self._used_blocks = path[-1].last_use, 0

    def priority(self, run: Run) -> float:
        """Return the chance of an unmarked run, and the latest use of a marked one above all chances."""
        return float(run.last_use) if run.last_use > self._phase_from else self._chance[run] - 1.0


class TypePolicy(HeapPolicy):
    """Ranks by how often blocks of a run's type have been used, ageing as GDSF does."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: defaultdict[int, list[float]] = defaultdict(lambda: [1.0, 1.0])
        self._type: dict[Run, int] = {}
        self._inflation = 0.0

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Count a use for the type that each run had, and give it its type now."""
        turn = _turn(path, use)
        for at, run in enumerate(path):
            if run in self._type:
                self._uses[self._type[run]][0] += 1
            role = 0 if run.uses > turn + 2 else 1 if at < len(path) - 1 else 2
            self._type[run] = role * (_TURN_MAX + 1) + turn
            self._uses[self._type[run]][1] += 1

    def priority(self, run: Run) -> float:
        """Return the type's rate above what left last."""
        uses, runs = self._uses[self._type.get(run, 0)]
        return self._inflation + uses / runs

    def victim(self) -> Run | None:
        """Return the candidate of lowest priority, and age the others by it."""
        run = super().victim()
        if run is not None:
            self._inflation = max(self._inflation, self._heap[0][0])
        return run

    def forget(self, run: Run, count: int) -> None:
        """Drop the type of a run that is gone."""
        if not run.keys:
            self._type.pop(run, None)


class TtlPolicy(HeapPolicy):
    """Holds a turn until most turns of its number would have been answered; who is overdue longest leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self._gaps_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_GAPS_REMEMBERED))
        # When it was used, as which turn.
        self._used: dict[Run, tuple[float, int]] = {}

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Learn the gap before this turn."""
        turn, known = _turn(path, use), [run for run in path if run in self._used]
        if turn and known:
            before_s, number = self._used[known[-1]]
            self._gaps_s[number].append(use.now_s - before_s)
        self._used.update(dict.fromkeys(path, (use.now_s, turn)))

    def priority(self, run: Run) -> float:
        """Return when it is overdue."""
        used_s, turn = self._used.get(run, (0.0, 0))
        gaps_s = sorted(self._gaps_s[turn])
        return used_s + (gaps_s[int(_TTL_QUANTILE * len(gaps_s))] if gaps_s else 0.0)

    def forget(self, run: Run, count: int) -> None:
        """Drop the times of a run that is gone."""
        if not run.keys:
            self._used.pop(run, None)


class FlopsPolicy(HeapPolicy):
    """Adds to recency what a block's bytes save in compute, each as its share among the candidates' (Marconi)."""

    def __init__(self) -> None:
        super().__init__()
        self._costs: deque[float] = deque(maxlen=_GAPS_REMEMBERED)
        self._span = 1.0

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Keep how far back what is held was used."""
        oldest = min((entry[2].last_use for entry in self._heap[:1]), default=0)
        self._span = max(1.0, path[-1].last_use - oldest)

    def priority(self, run: Run) -> float:
        """Return the latest use, later by a part of the span for those that cost most."""
        self._costs.append(run.cost)
        return run.last_use + self._span * bisect_right(sorted(self._costs), run.cost) / len(self._costs)


LEARNED: Mapping[str, PolicyOf] = MappingProxyType(
    {
        "lpc": ContinuationPolicy,
        "types": lambda blocks_max: TypePolicy(),
        "ttl": lambda blocks_max: TtlPolicy(),
        "flops": lambda blocks_max: FlopsPolicy(),
        "laru": MarkedPolicy,
    }
)
