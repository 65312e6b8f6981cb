"""Replays a trace through the real index and a real policy, on a clock that only the trace moves; beside the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvtide.clock import ManualClock
from kvtide.evict.policies.advised import AdvisedPolicy
from kvtide.index import RadixIndex
from kvtide_lab.figures import new_figure, shown, table_of
from kvtide_lab.sim.belady import belady_hits
from kvtide_lab.sim.hints import hints_of
from kvtide_lab.sim.policies import policy_named
from kvtide_lab.sim.workload import Trace, tenant_namespace

BELADY = "belady"
# Of the order of magnitude of today's models of 8 billion parameters.
TOKENS_OF_EQUAL_COST = 16_384
# Where LRU and the bound are closer, the share of the gap between them says nothing.
GAP_MIN = 0.002


class TenantHits(msgspec.Struct, frozen=True):
    """One tenant's blocks: asked for and hit."""

    tenant: str
    requests: int
    blocks: int
    hit_blocks: int
    hit_rate: float


class ReplayResult(msgspec.Struct, frozen=True):
    """A replay: leading held blocks of the requests, counted before each request is stored.

    `saved_s_share` is the share of the time of all prefills that the hits save, attention included; None for the bound,
    which is one of hits.
    """

    policy: str
    capacity_blocks: int
    blocks: int
    hit_blocks: int
    saved_s_share: float | None
    tenants: tuple[TenantHits, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Return the share of the blocks of all requests that were hit."""
        return self.hit_blocks / max(1, self.blocks)


class TraceRow(msgspec.Struct, frozen=True):
    """One policy at one capacity, between LRU and the bound; `gap_closed` is None where these two hit the same."""

    policy: str
    capacity_share: float
    capacity_blocks: int
    hit_blocks: int
    hit_rate: float
    lru_hit_rate: float
    belady_hit_rate: float
    gap_closed: float | None
    saved_s_share: float | None
    tenants: tuple[TenantHits, ...]


class TraceReport(msgspec.Struct, frozen=True):
    """All replays of one trace. Hit rates are by blocks, prefix-closed; `saved_s_share` is by prefill time."""

    trace: str
    block_tokens: int
    requests: int
    blocks: int
    unique_blocks: int
    rows: list[TraceRow]


class PolicyStanding(msgspec.Struct, frozen=True):
    """One policy at one capacity of one trace, beside the best of the fixed ones: `regret` is what that hits more.

    `lru_room`: how many times as many blocks LRU needs for as many hits; None if it was not looked for, or has none.
    """

    trace: str
    capacity_share: float
    capacity_blocks: int
    hit_rates: dict[str, float]
    best: str
    regret: float
    gap_closed: float | None
    lru_room: float | None


class StandingReport(msgspec.Struct, frozen=True):
    """A policy beside fixed ones on several traces.

    gap_closed_mean: over rows where LRU and the bound are GAP_MIN of hit rate apart at least; None if there is none.
    """

    policy: str
    regret_max: float
    gap_closed_mean: float | None
    rows: list[PolicyStanding]


def capacity_blocks(trace: Trace, share: float) -> int:
    """Return a share of the trace's unique blocks in blocks, at least one. ValueError unless 0 < share <= 1."""
    if not 0 < share <= 1:
        raise ValueError(f"a capacity is a share of the unique blocks, more than 0 and at most 1, got {share}")
    return max(1, int(share * trace.unique_blocks))


def prefill_cost(blocks: float, block_tokens: int) -> float:
    """Return the cost of prefilling a prompt's first blocks, a block without attention 1.

    A token's attention costs as much as its matrices once TOKENS_OF_EQUAL_COST come before it.
    """
    return blocks * (1 + blocks * block_tokens / (2 * TOKENS_OF_EQUAL_COST))


def replay(
    trace: Trace, policy: str, blocks_max: int, weighs_cost: bool = False, hints: str | None = None
) -> ReplayResult:
    """Match and insert every request in order; `weighs_cost` tells the policy what blocks cost to prefill.

    hints: the kind of advice that comes with the requests, for policies that take any. ValueError for an unknown
    policy or kind.
    """
    clock = ManualClock(trace.requests[0].at_s if trace.requests else 0.0)
    ranks = policy_named(policy)(blocks_max)
    index = RadixIndex(clock, lambda _: ranks, blocks_max)
    said = hints_of(trace, hints) if hints else []
    namespaces = {request.tenant: tenant_namespace(request.tenant) for request in trace.requests}
    requests, blocks, hits = Counter[str](), Counter[str](), Counter[str]()
    saved = total = 0.0
    for number, (at_s, tenant, keys) in enumerate(trace.requests):
        clock.advance(at_s - clock.monotonic_s())
        if said and isinstance(ranks, AdvisedPolicy):
            ranks.hear(said[number].mark)
        hit, length = index.match(keys), len(keys)
        requests[tenant] += 1
        blocks[tenant] += length
        hits[tenant] += hit
        saved += prefill_cost(hit, trace.block_tokens)
        total += prefill_cost(length, trace.block_tokens)
        cost = 1 + (hit + length) * trace.block_tokens / (2 * TOKENS_OF_EQUAL_COST) if weighs_cost else None
        index.insert(namespaces[tenant], keys, cost=cost)
    index.check()
    tenants = tuple(
        TenantHits(name, requests[name], blocks[name], hits[name], hits[name] / max(1, blocks[name]))
        for name in sorted(requests)
    )
    return ReplayResult(policy, blocks_max, blocks.total(), hits.total(), saved / max(total, 1.0), tenants)


def compare(
    trace: Trace,
    policies: Sequence[str],
    shares: Sequence[float],
    weighs_cost: bool = False,
    hints: str | None = None,
) -> list[TraceRow]:
    """Replay every policy at every capacity, against LRU and Belady's bound of hits."""
    rows = []
    for share in shares:
        blocks_max = capacity_blocks(trace, share)
        lru = replay(trace, "lru", blocks_max)
        bound = ReplayResult(BELADY, blocks_max, lru.blocks, belady_hits(trace, blocks_max), None)
        gap = bound.hit_rate - lru.hit_rate
        for policy in (*policies, BELADY):
            known = {BELADY: bound, "lru": lru}.get(policy)
            found = known or replay(trace, policy, blocks_max, weighs_cost, hints)
            closed = (found.hit_rate - lru.hit_rate) / gap if gap > 0 else None
            rates = (found.hit_blocks, found.hit_rate, lru.hit_rate, bound.hit_rate, closed, found.saved_s_share)
            rows.append(TraceRow(policy, share, blocks_max, *rates, found.tenants))
    return rows


def trace_report(trace: Trace, rows: list[TraceRow]) -> TraceReport:
    """Return what `kvtide-lab sim trace --json` prints."""
    blocks = sum(len(request.keys) for request in trace.requests)
    return TraceReport(trace.name, trace.block_tokens, len(trace.requests), blocks, trace.unique_blocks, rows)


def standing(
    trace: Trace, policy: str, fixed: Sequence[str], share: float, with_room: bool = False, hints: str | None = None
) -> PolicyStanding:
    """Replay a policy and those that it is to be as good as; `lru` is to be one of them."""
    rows = {row.policy: row for row in compare(trace, [*fixed, policy], [share], hints=hints)}
    hit_rates = {name: row.hit_rate for name, row in rows.items()}
    best = max(fixed, key=lambda name: hit_rates[name])
    found = rows[policy]
    room = lru_room(trace, found.hit_blocks, found.capacity_blocks) if with_room else None
    regret = hit_rates[best] - hit_rates[policy]
    return PolicyStanding(trace.name, share, found.capacity_blocks, hit_rates, best, regret, found.gap_closed, room)


def standing_report(policy: str, standings: Sequence[PolicyStanding]) -> StandingReport:
    """Return what `kvtide-lab sim trace --compare --json` prints of several traces."""
    rates = [(row.gap_closed, row.hit_rates[BELADY] - row.hit_rates["lru"]) for row in standings]
    gaps = [closed for closed, gap in rates if closed is not None and gap >= GAP_MIN]
    mean = sum(gaps) / len(gaps) if gaps else None
    return StandingReport(policy, max((each.regret for each in standings), default=0.0), mean, list(standings))


def lru_room(trace: Trace, hit_blocks: int, blocks_max: int) -> float | None:
    """Return how many times as many blocks as `blocks_max` LRU needs for so many hits, to one part in 50."""
    low, high = 0.0, trace.unique_blocks / blocks_max
    if replay(trace, "lru", trace.unique_blocks).hit_blocks < hit_blocks:
        return None
    while high - low > 0.02 * high:
        middle = (low + high) / 2 if low else high / 2
        is_enough = replay(trace, "lru", max(1, int(middle * blocks_max))).hit_blocks >= hit_blocks
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def render_trace(report: TraceReport) -> Table:
    """Return the replays as a table."""
    title = f"{report.trace}: {report.requests:,} requests, {report.blocks:,} blocks, {report.unique_blocks:,} unique"
    return table_of(report.rows, title, without=("hit_blocks", "tenants"))


def render_standings(report: StandingReport) -> Table:
    """Return a line for each trace and capacity; `room` is how much more LRU needs for the same hits."""
    title = f"{report.policy}: at most {report.regret_max:.4f} below the best fixed policy"
    if report.gap_closed_mean is not None:
        title += f", {report.gap_closed_mean:.2f} of the gap closed in the mean"
    columns = ("trace", "size", "lru", "best fixed", report.policy, "bound", "regret", "gap", "room")
    table = Table(*columns, title=title, padding=(0, 0))
    for row in report.rows:
        lru, best, found, bound = (shown(row.hit_rates[name]) for name in ("lru", row.best, report.policy, BELADY))
        place = (row.trace.removeprefix("mooncake_").split(".")[0], f"{100 * row.capacity_share:g}%")
        rest = (f"{row.regret:+.4f}", shown(row.gap_closed), shown(row.lru_room))
        table.add_row(*place, lru, f"{row.best} {best}", found, bound, *rest)
    return table


def plot_trace(report: TraceReport, path: Path) -> None:
    """Draw hit rate against capacity for every policy. ValueError if matplotlib is not installed."""
    figure = new_figure()
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in report.rows):
        rows = sorted((row for row in report.rows if row.policy == policy), key=lambda row: row.capacity_share)
        style = "k--" if policy == BELADY else ".-"
        axes.plot([row.capacity_share for row in rows], [row.hit_rate for row in rows], style, label=policy)
    axes.set(xscale="log", xlabel="capacity, share of unique blocks", ylabel="hit rate by blocks")
    axes.set_ylim(bottom=0)
    # Where policies differ most from the best possible.
    rows = [row for row in report.rows if row.policy != BELADY]
    best = max(rows, key=lambda row: (row.belady_hit_rate - row.lru_hit_rate, row.hit_rate))
    axes.set_title(
        f"{report.trace}: with room for {best.capacity_share:.0%} {best.policy} hits {best.hit_rate:.1%} of blocks, "
        f"lru {best.lru_hit_rate:.1%}, at best {best.belady_hit_rate:.1%}",
        fontsize="medium",
    )
    axes.legend()
    figure.savefig(path)
