"""Output of `kvtide-lab sim stream`: a table, figures, and kvtide beside CacheGen's rule and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvtide_lab.sim.curves import CURVES
from kvtide_lab.sim.report import new_figure
from kvtide_lab.sim.stream_sweep import ORACLE, StreamRow, StreamSetup

# What kvtide is held against; all other policies are its own.
_RIVALS = ("fixed", "cachegen", "cachegen-tide")


class Standing(msgspec.Struct, frozen=True):
    """The best policy of kvtide over all rows: fewest misses, then least loss, each row's for the worse purpose.

    miss_over_oracle_max, miss_over_cachegen_max: the worst row. halved_share: of all rows, those with at most half of
    CacheGen's loss at no more misses. None where oracle's or CacheGen's rows are not there.
    """

    policy: str
    miss_over_oracle_max: float | None
    miss_over_cachegen_max: float | None
    halved_share: float | None


class StreamReport(msgspec.Struct, frozen=True):
    """All rows with what they rest on: the model, and what the codecs cost and lose."""

    kv_bytes_per_token: int
    prefill: str
    setup: StreamSetup
    curves: dict[str, dict[str, list[float] | str]]
    standing: Standing | None
    rows: list[StreamRow]


def stream_report(setup: StreamSetup, rows: Sequence[StreamRow]) -> StreamReport:
    """Return what `kvtide-lab sim stream --json` prints."""
    speed = (
        f"{setup.prefill_tokens_per_s:g} tokens/s at the start of a context, half of it at token "
        f"{setup.prefill_double_at:g}"
    )
    curves: dict[str, dict[str, list[float] | str]] = {
        curve.name: {"bits": list(curve.bits), "kl": list(curve.kl), "source": curve.source}
        for curve in CURVES.values()
    }
    return StreamReport(2 * setup.kv_elements, speed, setup, curves, _standing(rows), list(rows))


def _standing(rows: Sequence[StreamRow]) -> Standing | None:
    names = [name for name in dict.fromkeys(row.policy for row in rows) if name not in (*_RIVALS, ORACLE)]
    if not names:
        return None
    totals = {
        name: (
            sum(row.miss_rate for row in rows if row.policy == name),
            sum(_kl(row) for row in rows if row.policy == name),
        )
        for name in names
    }
    best = min(names, key=lambda name: totals[name])
    ours = [row for row in rows if row.policy == best]
    bounds, rivals = ([row for row in rows if row.policy == name] for name in (ORACLE, "cachegen"))
    if not rivals:
        return Standing(best, _worst(ours, bounds), None, None)
    halved = [
        _kl(own) <= _kl(rival) / 2 and own.miss_rate <= rival.miss_rate for own, rival in zip(ours, rivals, strict=True)
    ]
    return Standing(best, _worst(ours, bounds), _worst(ours, rivals), sum(halved) / len(halved))


def _kl(row: StreamRow) -> float:
    return max(row.kl_mean, row.kl_copy_mean)


def _worst(ours: Sequence[StreamRow], others: Sequence[StreamRow]) -> float:
    return max(own.miss_rate - other.miss_rate for own, other in zip(ours, others, strict=True))


def render_stream(report: StreamReport) -> Table:
    """Return all rows as one table."""
    title = (
        f"{report.setup.trials} requests a row; {report.kv_bytes_per_token / 1024:g} KiB of KV a token in 16 bits; "
        f"prefill {report.prefill}; {report.setup.decode_cores} cores decode; chunks of {report.setup.chunk_tokens}"
    )
    caption = _caption(report.standing) if report.standing else None
    table = Table(title=title, caption=caption)
    for column in (
        "link",
        "tokens",
        "SLO",
        "policy",
        "misses",
        "KL goes on",
        "copies",
        "TTFT p50",
        "p95",
        "recomputed",
    ):
        table.add_column(column, justify="left" if column in ("link", "policy") else "right", no_wrap=True)
    for row in report.rows:
        where = (row.link, f"{row.context_tokens:,}", f"{row.slo_s:g} s", row.policy)
        seconds = (f"{row.ttft_p50_s:.2f} s", f"{row.ttft_p95_s:.2f} s")
        lost = (f"{row.kl_mean:.2g}", f"{row.kl_copy_mean:.2g}")
        figures = (f"{100 * row.miss_rate:.1f} %", *lost, *seconds, f"{100 * row.text_share:.0f} %")
        table.add_row(*where, *figures, end_section=row.policy == ORACLE)
    return table


def _caption(standing: Standing) -> str:
    parts = [
        f"{standing.policy}: at most {100 * (standing.miss_over_oracle_max or 0):+.1f} points to the oracle's misses"
    ]
    if standing.miss_over_cachegen_max is not None and standing.halved_share is not None:
        parts.append(f"{100 * standing.miss_over_cachegen_max:+.1f} to CacheGen's rule's")
        parts.append(f"half of its loss or less at no more misses on {100 * standing.halved_share:.0f} % of rows")
    return ", ".join(parts)


def plot_stream(report: StreamReport, path: Path) -> None:
    """Draw misses against loss, a panel for each context and SLO. ValueError if matplotlib is not installed."""
    figure = new_figure((12, 7))
    contexts = sorted({row.context_tokens for row in report.rows})
    slos = sorted({row.slo_s for row in report.rows})
    panels = figure.subplots(len(contexts), len(slos), squeeze=False, sharex=True, sharey=True)
    for tokens, across in zip(contexts, panels, strict=True):
        for slo_s, axes in zip(slos, across, strict=True):
            here = [row for row in report.rows if (row.context_tokens, row.slo_s) == (tokens, slo_s)]
            for policy in dict.fromkeys(row.policy for row in here):
                rows = [row for row in here if row.policy == policy]
                style = "kx" if policy == ORACLE else "o"
                # A log axis has no 0, and nobody sees a loss of 1e-6.
                losses = [max(1e-6, _kl(row)) for row in rows]
                axes.plot([100 * row.miss_rate for row in rows], losses, style, label=policy, alpha=0.7)
            axes.set(yscale="log", title=f"{tokens:,} tokens, {slo_s:g} s", xlabel="misses, %", ylabel="KL, the worse")
    panels[0, 0].legend(fontsize="small")
    finding = _caption(report.standing) if report.standing else "no oracle beside them"
    figure.suptitle(f"{finding}\n(lower left is better)", fontsize="medium")
    figure.savefig(path)
