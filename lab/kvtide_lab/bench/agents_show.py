"""Results of `kvtide-lab bench agents` as people read them."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from kvtide_lab.bench.agents_rows import ANSWER_TOKENS_MIN, NATIVE_RATIO_MIN, NO_REUSE, TIE, AgentsBench


def render(result: AgentsBench) -> Group:
    """Return all rows, then the goals and whether they are met."""
    memory = f"memory for {result.room_tokens:,} of {result.working_set_tokens:,} tokens"
    rows = Table(
        *("sessions, restart", "engine", "p90 int.", "TTFT p50, p90", "hits", "CPU s/1k", "changed"),
        title=f"{result.model}, {result.sessions} agent sessions, {memory}",
        caption=f"p90 int.: 1 / p90 of (seconds / tokens of an answer of {ANSWER_TOKENS_MIN} and more), tokens/s",
    )
    for row in result.rows:
        where = NO_REUSE if row.row == NO_REUSE else f"{row.row}, {row.phase}"
        times = (f"{row.p90_interactivity:.2f}", f"{row.ttft_p50_s:.2f}, {row.ttft_p90_s:.2f} s")
        counts = (f"{row.hit_tokens / row.prompt_tokens:.0%}", f"{row.cpu_s_per_1k_tokens:.2f}")
        rows.add_row(where, row.engine, *times, *counts, f"{row.answers_changed} of {row.requests}")
    missing = [f"{name} did not run: {failure}" for name, failure in result.failures.items()]
    goals = Table("goal", "wanted", "found", "met")
    least = result.least_ratio
    if least is not None:
        found = f"{least.ratio:.3f} ({least.row}, {least.phase}, {least.other})"
        goals.add_row(
            "p90 int. over every contender's, least row",
            f">= 1 (tied: {TIE})",
            found,
            _met(least.ratio >= TIE),
        )
    if result.after_restart_vs_native is not None:
        ratio = result.after_restart_vs_native
        goals.add_row(
            "… over native tiering's after the restart",
            f">= {NATIVE_RATIO_MIN}",
            f"{ratio:.3f}",
            _met(ratio >= NATIVE_RATIO_MIN),
        )
    goals.add_row(
        "nothing shared: plain's seconds over kvtide's",
        f">= {TIE}",
        f"{result.no_reuse_vs_plain:.3f}",
        _met(result.no_reuse_vs_plain >= TIE),
    )
    changed = result.answers_changed_exact
    goals.add_row("answers changed, exact codecs", "0", str(changed), _met(changed == 0))
    goals.add_row("requests failed", "0", str(result.failed_requests), _met(result.failed_requests == 0))
    return Group(rows, *missing, goals)


def _met(is_met: bool) -> str:
    return "yes" if is_met else "no"
