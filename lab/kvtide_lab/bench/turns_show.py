"""Results of `kvtide-lab bench turns` as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group
from rich.table import Table

from kvtide_lab.bench.turns import Trend, TurnsBench


def render(result: TurnsBench) -> Group:
    """Return the tables that people read: turn by turn, then what they say of each codec."""
    what = f"texts: {result.texts}, turns of {result.user_tokens} + {result.answer_tokens} tokens"
    title = f"{result.model}, {what}, blocks of {result.block_tokens}, KV in {result.kv_dtype}"
    turns = Table("codec", "turn", "restored", "KL", "once", "0.9 of tokens", "top-1", title=title)
    for row in result.rows:
        figures = (f"{row.kl:.5f}", f"{row.kl_once:.5f}", f"{row.kl_q90:.5f}", f"{row.top1:.4f}")
        turns.add_row(row.codec, str(row.turn), str(row.hit_tokens), *figures)
    share = (
        f"largest KL of a token behind lossless {result.exact_kl_max:g}, check of the model {result.identity_share:.2%}"
    )
    trends = Table("codec", "of", "last turn", "a turn", "±", "p", "grows", title=share)
    last = {row.codec: row for row in result.rows}
    for codec, trend in result.trend.items():
        trends.add_row(codec, "KL", f"{last[codec].kl:.5f}", *_figures(trend))
        added = last[codec].kl - last[codec].kl_once
        trends.add_row(codec, "KL over once", f"{added:.5f}", *_figures(result.trend_added[codec]))
    return Group(turns, trends)


def _figures(trend: Trend) -> tuple[str, ...]:
    spread = "" if trend.slope_stderr is None else f"{trend.slope_stderr:.6f}"
    return f"{trend.slope:+.6f}", spread, f"{trend.p:.3f}", "yes" if trend.has_trend else "not shown"


def plot(result: TurnsBench, path: Path) -> str | None:
    """Draw KL over turns; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for codec in result.trend:
        rows = [row for row in result.rows if row.codec == codec and row.kl > 0]
        if rows:
            turns = [row.turn for row in rows]
            (line,) = axes.plot(turns, [row.kl for row in rows], "o-", label=codec, markersize=4)
            axes.plot(turns, [row.kl_once for row in rows], ":", label=f"{codec}, coded once", color=line.get_color())
    axes.set_xlabel("turn")
    axes.set_ylabel("KL of the turn's tokens, nats")
    axes.set_ylim(bottom=0)
    growing = [codec for codec, trend in result.trend.items() if trend.has_trend]
    finding = f"the loss of {', '.join(growing)} grows" if growing else "no codec's loss is seen to grow"
    axes.set_title(f"{result.model}, each turn on what was kept of those before: {finding}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return str(path)
