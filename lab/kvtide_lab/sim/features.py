"""Each thing that a ranking could be told, alone: what it saves without knowing it and with it.

Facts and advice are told to the policy as marks, of which it learns; costs, sizes, states and what the tier below holds
as the index or the order takes them. All else is equal in a row's two replays.
Invariant: what is said of a request is known by the time that its blocks are stored, but for `ends`, which looks ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from types import MappingProxyType

import msgspec
from rich.table import Table

from kvtide.clock import ManualClock
from kvtide.evict.policies import PolicyOrder
from kvtide.evict.policies.reuse import ReusePolicy
from kvtide.index import HeapPolicy, RadixIndex, Run
from kvtide.types import BlockKey, ObjectId
from kvtide_lab.sim.groups import STATE_BLOCKS, OrderedRoom, run_groups
from kvtide_lab.sim.hints import FACTS, carries
from kvtide_lab.sim.policies import policy_named
from kvtide_lab.sim.replay import capacity_blocks, prefill_cost, replay
from kvtide_lab.sim.workload import Trace, tenant_namespace

HIT_RATE, TIME_SAVED = "hit rate", "prefill time saved"
# What pays, in the mean of the rows: hit rate or share of the prefill time.
PAYS_FROM = 0.003
# The second, fourth, … tenant's objects take this part of the others' bytes: what `tide` leaves of lossless ones.
SMALL_SHARE = 0.2
_BLOCK_BYTES = 1 << 12
# How many times as much the tier below holds, and what loading a block costs of computing it: 64 MB at 3 GB/s beside
# 512 tokens of a model of 8 billion parameters.
_BELOW_ROOMS = 3
_LOAD_SHARE = 0.4

KNOWS = MappingProxyType(
    {
        "role": "who spoke last in the prompt",
        "template": "how the prompt begins",
        "depth": "main agent or one below it",
        "pause": "how long the client paused before",
        "answer": "the answer's length, or whether it calls a tool",
        "turn": "the session's name: its turn, counted",
        "left": "the session's name: where it went on elsewhere",
        "retain": "agent_hint, TTL: when nine of ten sessions have gone on so far",
        "ends": "agent_hint: the session's last request, true",
        "cost": "what a block costs to compute at its place",
        "size": "bytes by codec: every other tenant's are a fifth",
        "below": "what the tier below holds, which ranks alike",
        "below, oldest": "the same, which drops what is oldest",
        "states": "which block a hybrid model's state goes on from",
    }
)


class FeatureRow(msgspec.Struct, frozen=True):
    """A feature at one capacity of a trace; `gain` is what is saved with it and not without."""

    feature: str
    knows: str
    trace: str
    capacity_share: float
    measure: str
    without: float
    told: float

    @property
    def gain(self) -> float:
        """Return the difference."""
        return self.told - self.without


class FeatureMean(msgspec.Struct, frozen=True):
    """The mean gain of a feature by one measure."""

    feature: str
    measure: str
    rows: int
    gain: float
    pays: bool


class FeatureReport(msgspec.Struct, frozen=True):
    """All features on the traces that carry them."""

    policy: str
    means: list[FeatureMean]
    rows: list[FeatureRow]


def run_features(
    traces: Sequence[tuple[Trace, float]], policy: str, features: Sequence[str] | None = None
) -> FeatureReport:
    """Measure features (None: all) on traces, each with a share of its blocks. ValueError for an unknown feature."""
    for feature in features or ():
        if feature not in KNOWS:
            raise ValueError(f"unknown feature {feature!r}, expected one of {', '.join(KNOWS)}")
    rows: list[FeatureRow] = []
    for trace, share in traces:
        plain = replay(trace, policy, capacity_blocks(trace, share))
        for feature in features or KNOWS:
            for measure, without, told in _measured(trace, policy, share, feature, plain.hit_rate, plain.saved_s_share):
                rows.append(FeatureRow(feature, KNOWS[feature], trace.name, share, measure, without, told))
    return FeatureReport(policy, _means(rows), rows)


def _means(rows: Sequence[FeatureRow]) -> list[FeatureMean]:
    gains: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        gains.setdefault((row.feature, row.measure), []).append(row.gain)
    return [FeatureMean(*name, len(each), fmean(each), fmean(each) >= PAYS_FROM) for name, each in gains.items()]


def _measured(
    trace: Trace, policy: str, share: float, feature: str, hit_rate: float, saved: float | None
) -> Iterable[tuple[str, float, float]]:
    """Yield what a feature changes, if the trace carries it: the measure, without it, with it."""
    blocks_max = capacity_blocks(trace, share)
    if feature in ("retain", "ends") or (feature in FACTS and carries(trace, feature)):
        yield HIT_RATE, hit_rate, replay(trace, policy, blocks_max, hints=feature).hit_rate
    elif feature == "cost":
        told = replay(trace, policy, blocks_max, weighs_cost=True)
        assert saved is not None
        assert told.saved_s_share is not None
        yield HIT_RATE, hit_rate, told.hit_rate
        yield TIME_SAVED, saved, told.saved_s_share
    elif feature == "size" and len({request.tenant for request in trace.requests}) > 1:
        without, with_sizes = (_hit_rate_of_bytes(trace, policy, share, is_told) for is_told in (False, True))
        yield HIT_RATE, without, with_sizes
    elif feature.startswith("below"):
        oldest = feature == "below, oldest"
        without, with_below = (_saved_of_two(trace, blocks_max, oldest, is_told) for is_told in (False, True))
        yield TIME_SAVED, without, with_below
    elif feature == "states":
        named = [run_groups(trace, policy, [share], STATE_BLOCKS, (0,), each).rows[0] for each in (False, True)]
        yield HIT_RATE, named[0].hit_rate, named[1].hit_rate


def _hit_rate_of_bytes(trace: Trace, policy: str, share: float, is_told: bool) -> float:
    """Replay objects of unlike size through an order; one that is not told plans for as many as fit in the mean."""
    tenants = sorted({request.tenant for request in trace.requests})
    sizes = {each: int(_BLOCK_BYTES * (SMALL_SHARE if at % 2 else 1)) for at, each in enumerate(tenants)}
    unique = {key: sizes[request.tenant] for request in trace.requests for key in request.keys}
    clock, bytes_max = ManualClock(trace.requests[0].at_s), int(share * sum(unique.values()))
    planned = None if is_told else capacity_blocks(trace, share)
    held = OrderedRoom(PolicyOrder(policy_named(policy), clock, bytes_max, planned), bytes_max)
    asked = hits = 0
    for at_s, tenant, keys, _ in trace.requests:
        clock.advance(at_s - clock.monotonic_s())
        space = tenant_namespace(tenant)
        blocks = [ObjectId(space, key) for key in keys]
        held.order.note_request(space, keys)
        hit = next((at for at, each in enumerate(blocks) if each not in held.sizes), len(blocks))
        for at, each in enumerate(blocks):
            held.put(each, BlockKey(keys[at - 1] if at else space), sizes[tenant])
        asked, hits = asked + len(keys), hits + hit
    return hits / max(1, asked)


class _Oldest(HeapPolicy):
    """First come, first to leave, as a disk's segments do."""

    def __init__(self) -> None:
        super().__init__()
        self._came = 0

    def adopt(self, run: Run, count: int) -> None:
        """Note when the run came."""
        if len(run.keys) == count:
            self._came += 1
            run.tag = self._came

    def split(self, upper: Run, lower: Run) -> None:
        """Take the upper part as old as the lower one."""
        upper.tag = lower.tag

    def priority(self, run: Run) -> float:
        """Return when it came."""
        return run.tag


class _KnowsBelow(ReusePolicy):
    """Weighs what evicting a run loses: computing it, or loading it if the tier below holds it."""

    def __init__(self, blocks_max: int, is_below: Callable[[BlockKey], bool]) -> None:
        super().__init__(blocks_max)
        self._is_below = is_below

    def victim(self) -> Run | None:
        """Return the run of least worth, those that came to stand too low or too high ranked again."""
        while (run := super().victim()) is not None:
            cost = _LOAD_SHARE if self._is_below(run.keys[run.held - 1]) else 1.0
            if run.given_cost == cost:
                break
            self.leave(run)
            run.given_cost = cost
            self.enter(run)
        return run


def _saved_of_two(trace: Trace, blocks_max: int, oldest: bool, is_told: bool) -> float:
    """Return the share of the prefill time that memory and a tier below save, both of which get all that is stored."""
    clock, below_max = ManualClock(trace.requests[0].at_s), _BELOW_ROOMS * blocks_max
    below_policy = _Oldest() if oldest else ReusePolicy(below_max)
    below = RadixIndex(clock, lambda _: below_policy, below_max)
    policy = _KnowsBelow(blocks_max, below.is_held) if is_told else ReusePolicy(blocks_max)
    memory = RadixIndex(clock, lambda _: policy, blocks_max)
    saved = total = 0.0
    for at_s, tenant, keys, _ in trace.requests:
        clock.advance(at_s - clock.monotonic_s())
        near = len(memory.match(keys).blocks)
        far = max(near, len(below.match(keys).blocks))
        near_s, far_s, all_s = (prefill_cost(each, trace.block_tokens) for each in (near, far, len(keys)))
        saved, total = saved + near_s + (1 - _LOAD_SHARE) * (far_s - near_s), total + all_s
        for index in (below, memory):
            index.insert(tenant_namespace(tenant), keys)
    return saved / max(total, 1.0)


def render_features(report: FeatureReport) -> Table:
    """Return a line for each feature, trace and capacity, and the means."""
    table = Table(title=f"{report.policy}: what a ranking could be told, each alone", padding=(0, 0))
    for column in ("feature", "trace", "size", "of", "without", "told", "gain"):
        table.add_column(column, justify="left" if column in ("feature", "trace", "of") else "right", no_wrap=True)
    for at, row in enumerate(report.rows, 1):
        cells = (f"{row.without:.4f}", f"{row.told:.4f}", f"{row.gain:+.4f}")
        is_last = at == len(report.rows)
        place = (row.feature, row.trace.removeprefix("mooncake_").split(".")[0], f"{100 * row.capacity_share:g}%")
        table.add_row(*place, row.measure, *cells, end_section=is_last)
    for mean in report.means:
        pays = "pays" if mean.pays else ""
        table.add_row(mean.feature, f"mean of {mean.rows}", "", mean.measure, "", pays, f"{mean.gain:+.4f}")
    return table
