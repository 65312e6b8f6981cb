"""Output of simulations: tables for the terminal, PNG files where matplotlib is installed, structs for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from kvtide_lab.sim.fairness import FairnessReport
from kvtide_lab.sim.prompts import PromptPoint, PromptSetup
from kvtide_lab.sim.replay import BELADY, Comparison, PolicyStanding
from kvtide_lab.sim.workload import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR_CELLS = 30
# Where LRU and the bound are closer, the share of the gap between them says nothing.
GAP_MIN = 0.002


class TenantRow(msgspec.Struct, frozen=True):
    """One tenant of one replay."""

    tenant: str
    requests: int
    blocks: int
    hit_rate: float


class TraceRow(msgspec.Struct, frozen=True):
    """One policy at one capacity."""

    policy: str
    capacity_share: float
    capacity_blocks: int
    hit_rate: float
    lru_hit_rate: float
    belady_hit_rate: float
    gap_closed: float | None
    saved_s_share: float | None
    tenants: list[TenantRow]


class TraceReport(msgspec.Struct, frozen=True):
    """All replays of one trace. Hit rates are by blocks, prefix-closed; `saved_s_share` is by prefill time."""

    trace: str
    block_tokens: int
    requests: int
    blocks: int
    unique_blocks: int
    rows: list[TraceRow]


class StandingReport(msgspec.Struct, frozen=True):
    """A policy beside fixed ones on several traces.

    gap_closed_mean: over rows where LRU and the bound are GAP_MIN of hit rate apart at least; None if there is none.
    """

    policy: str
    regret_max: float
    gap_closed_mean: float | None
    rows: list[PolicyStanding]


class PromptReport(msgspec.Struct, frozen=True):
    """Both figures of the report's experiment; `identical` is its case of one single prompt."""

    prompt_tokens: int
    block_tokens: int
    requests: int
    rows: list[dict[str, float]]
    identical: dict[str, float]


def trace_report(trace: Trace, comparisons: Sequence[Comparison]) -> TraceReport:
    """Return what `kvtide-lab sim trace --json` prints."""
    rows = []
    for comparison in comparisons:
        result = comparison.result
        tenants = [TenantRow(each.tenant, each.requests, each.blocks, each.hit_rate) for each in result.tenants]
        place = (result.policy, comparison.capacity_share, result.capacity_blocks)
        rates = (result.hit_rate, comparison.lru_hit_rate, comparison.belady_hit_rate)
        rows.append(TraceRow(*place, *rates, comparison.gap_closed, result.saved_s_share, tenants))
    blocks = sum(len(request.keys) for request in trace.requests)
    return TraceReport(trace.name, trace.block_tokens, len(trace.requests), blocks, trace.unique_blocks, rows)


def render_trace(report: TraceReport) -> Table:
    """Return the replays as a table with bars."""
    title = f"{report.trace}: {report.requests:,} requests, {report.blocks:,} blocks, {report.unique_blocks:,} unique"
    table = Table(title=title)
    for column in ("capacity", "policy", "hit rate", "gap closed", "prefill time saved", ""):
        table.add_column(column, justify="right" if column not in ("capacity", "policy", "") else "left")
    best = max((row.hit_rate for row in report.rows), default=1.0) or 1.0
    for row in report.rows:
        gap = "" if row.gap_closed is None else f"{row.gap_closed:+.3f}"
        bar = "█" * round(_BAR_CELLS * row.hit_rate / best)
        saved = "" if row.saved_s_share is None else f"{row.saved_s_share:.4f}"
        capacity = f"{100 * row.capacity_share:g} % = {row.capacity_blocks:,}"
        table.add_row(capacity, row.policy, f"{row.hit_rate:.4f}", gap, saved, bar, end_section=row.policy == BELADY)
    return table


def standing_report(policy: str, standings: Sequence[PolicyStanding]) -> StandingReport:
    """Return what `kvtide-lab sim trace --compare --json` prints of several traces."""
    rates = [(row.gap_closed, row.hit_rates[BELADY] - row.hit_rates["lru"]) for row in standings]
    gaps = [closed for closed, gap in rates if closed is not None and gap >= GAP_MIN]
    mean = sum(gaps) / len(gaps) if gaps else None
    return StandingReport(policy, max((each.regret for each in standings), default=0.0), mean, list(standings))


def render_standings(report: StandingReport) -> Table:
    """Return a line for each trace and capacity; `room` is how much more LRU needs for the same hits."""
    title = f"{report.policy}: at most {report.regret_max:.4f} below the best fixed policy"
    if report.gap_closed_mean is not None:
        title += f", {report.gap_closed_mean:.2f} of the gap closed in the mean"
    table = Table(title=title, padding=(0, 0))
    for column in ("trace", "size", "lru", "best fixed", report.policy, "bound", "regret", "gap", "room"):
        table.add_column(column, justify="left" if column == "trace" else "right", no_wrap=True)
    for at, row in enumerate(report.rows, 1):
        rates = {name: f"{rate:.4f}".lstrip("0") for name, rate in row.hit_rates.items()}
        gap = "" if row.gap_closed is None else f"{max(-9.99, row.gap_closed):+.2f}"
        room = "" if row.lru_room is None else f"{row.lru_room:.2f}"
        is_last = at == len(report.rows) or report.rows[at].trace != row.trace
        cells = (rates["lru"], f"{row.best} {rates[row.best]}", rates[report.policy], rates[BELADY])
        place = (row.trace.removeprefix("mooncake_").split(".")[0], f"{100 * row.capacity_share:g}%")
        table.add_row(*place, *cells, f"{row.regret:+.4f}".replace("0.", "."), gap, room, end_section=is_last)
    return table


def prompt_report(setup: PromptSetup, points: Sequence[PromptPoint], identical: PromptPoint) -> PromptReport:
    """Return what `kvtide-lab sim prompts --json` prints."""
    rows = [point._asdict() for point in points]
    return PromptReport(setup.prompt_tokens, setup.block_tokens, setup.requests, rows, identical._asdict())


def render_prompts(report: PromptReport) -> Table:
    """Return both figures as one table."""
    table = Table(title=f"{report.requests} requests of {report.prompt_tokens} tokens, blocks of {report.block_tokens}")
    for column in ("p", "hit rate", "of all blocks", "items/s", "without cache", ""):
        table.add_column(column, justify="right" if column else "left")
    for name, row in [(f"{row['p']:.1f}", row) for row in report.rows] + [("one prompt", report.identical)]:
        speed = (f"{row['items_per_s']:.1f}", f"{row['items_per_s_uncached']:.1f}")
        rates = (f"{row['hit_rate']:.3f}", f"{row['hit_rate_all']:.3f}")
        table.add_row(name, *rates, *speed, "█" * round(_BAR_CELLS * row["hit_rate"]))
    return table


def trace_finding(report: TraceReport) -> str:
    """Return in one line which policy is best where policies differ most from the best possible."""
    rows = [row for row in report.rows if row.policy != BELADY]
    row = max(rows, key=lambda row: (row.belady_hit_rate - row.lru_hit_rate, row.hit_rate))
    return (
        f"{report.trace}: with room for {row.capacity_share:.0%} of the blocks {row.policy} hits {row.hit_rate:.1%}, "
        f"lru {row.lru_hit_rate:.1%}, at best {row.belady_hit_rate:.1%}"
    )


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
    axes.set_title(trace_finding(report), fontsize="medium")
    axes.legend()
    figure.savefig(path)


def plot_prompts(report: PromptReport, path: Path) -> None:
    """Draw hit rate, and items per second with and without the cache, against p. ValueError without matplotlib."""
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    p = [row["p"] for row in report.rows]
    left.plot(p, [row["hit_rate"] for row in report.rows], marker=".")
    left.set(xlabel="p", ylabel="hit rate")
    right.plot(p, [row["items_per_s"] for row in report.rows], marker=".", label="with cache")
    right.plot(p, [row["items_per_s_uncached"] for row in report.rows], linestyle="--", label="without")
    right.set(xlabel="p", ylabel="items per second")
    right.set_ylim(bottom=0)
    right.legend()
    last = report.rows[-1]
    gain = last["items_per_s"] / last["items_per_s_uncached"] - 1
    figure.suptitle(
        f"At p = {last['p']:g} {last['hit_rate']:.0%} of the blocks hit, and the engine does {gain:+.0%} items"
    )
    figure.savefig(path)


def render_fairness(report: FairnessReport) -> Table:
    """Return the policies as a table with bars for the index."""
    link = f"{report.clients} clients, {report.link_mbit_s:g} Mbit/s, {report.slots} slots"
    table = Table(
        title=f"{link}, {report.slice_bytes >> 10} KiB slices: a round of them takes {report.slice_round_ms:.1f} ms"
    )
    table.add_column("policy", no_wrap=True)
    for column in ("Jain", "MB/s", "small bodies' wait, ms: p50", "p99", "to the last byte: p99"):
        table.add_column(column, justify="right")
    table.add_column("Jain")
    for row in report.rows:
        waits = (row.small_wait_ms_p50, row.small_wait_ms_p99, row.small_request_ms_p99)
        cells = (f"{row.throughput_mb_s:.1f}", *(f"{wait:.1f}" for wait in waits))
        table.add_row(row.policy, f"{row.jain:.4f}", *cells, "█" * round(_BAR_CELLS / 3 * row.jain))
    return table


def plot_fairness(report: FairnessReport, path: Path) -> None:
    """Draw Jain's index and the small bodies' waits for every policy. ValueError without matplotlib."""
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    policies = [row.policy for row in report.rows]
    left.bar(policies, [row.jain for row in report.rows])
    left.set(ylabel="Jain's index of bytes", ylim=(0, 1.05))
    right.bar(policies, [row.small_wait_ms_p99 for row in report.rows], color="lightgrey", label="p99")
    right.bar(policies, [row.small_wait_ms_p50 for row in report.rows], label="p50")
    right.axhline(3 * report.slice_round_ms, linestyle="--", color="black", label="three rounds of slices")
    right.set(ylabel="wait of the smallest bodies, ms", yscale="log")
    right.legend()
    fairest, other = (pick(report.rows, key=lambda row: row.jain) for pick in (max, min))
    figure.suptitle(
        f"Jain's index and a small body's wait at p99: {fairest.policy} {fairest.jain:.3f}, "
        f"{fairest.small_wait_ms_p99:.0f} ms; {other.policy} {other.jain:.3f}, {other.small_wait_ms_p99:.0f} ms"
    )
    figure.savefig(path)


def new_figure(inches: tuple[float, float] = (9, 5)) -> Figure:
    """Return an empty figure. ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: install kvtide[plot]") from error
    return Figure(figsize=inches, layout="constrained")
