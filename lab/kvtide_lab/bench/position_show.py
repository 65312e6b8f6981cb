"""Results of `kvtide-lab bench position` as tables and as a heat map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table

from kvtide_lab.bench.position import PositionBench, PositionRow


def render(result: PositionBench) -> Group:
    """Return the tables that people read: held-out rows beside the law, then what spending by it saves."""
    close = f"within 25 %: {_share(result.law_close_goes_on)} that go on, {_share(result.law_close_copies)} of copies"
    title = f"{result.model}, {result.codec}, {result.answer_tokens} tokens of answer, held-out texts; {close}"
    rows = Table("prefix", "cache", "answer", "texts", "KL", "±", "law", "law / KL", title=title)
    for row in result.rows:
        if row.stage == "held" and row.law is not None:
            answer = "goes on" if row.passage is None else f"copies from {row.passage}"
            spread = "" if row.kl_stderr is None else f"{row.kl_stderr:.4f}"
            figures = (f"{row.kl:.4f}", spread, f"{row.law:.4f}", f"{row.law / row.kl:.2f}" if row.kl > 0 else "")
            rows.add_row(str(row.prefix_tokens), row.mixture, answer, str(row.texts), *figures)
    columns = ("prefix", "load", "bits", "KL goes on", "KL copies", "bytes_vs_flat", "vs stored", "KL vs flat: goes on")
    spending = Table(*columns, "copies", title="Bytes by the law, held-out texts")
    for way in result.spending:
        ratios = (way.bytes_vs_flat, way.bytes_vs_stored, way.kl_vs_flat_goes_on, way.kl_vs_flat_copies)
        kls = (f"{way.kl_goes_on:.4f}", f"{way.kl_copies:.4f}")
        shown = ("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        spending.add_row(str(way.prefix_tokens), way.way, f"{way.bits:.3f}", *kls, *shown)
    return Group(rows, spending)


def _share(share: float | None) -> str:
    return "none" if share is None else f"{share:.0%}"


def plot(result: PositionBench, path: Path) -> str | None:
    """Draw KL by range and refinement, a panel an answer; None without matplotlib or a map."""
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError:
        return None
    found = [row for row in result.rows if row.stage == "map"]
    answers = list(dict.fromkeys(row.passage for row in found))
    if not found:
        return None
    figure = Figure(figsize=(4.5 * len(answers), 6), layout="constrained")
    for axes, passage in zip(figure.subplots(1, len(answers), squeeze=False)[0], answers, strict=True):
        here = [row for row in found if row.passage == passage]
        names = list(dict.fromkeys(map(_range_of, here)))
        kinds = list(dict.fromkeys(map(_kind_of, here)))
        grid = np.full((len(names), len(kinds)), np.nan)
        for row in here:
            grid[names.index(_range_of(row)), kinds.index(_kind_of(row))] = max(row.kl, 1e-6)
        image = axes.imshow(grid, aspect="auto", norm=LogNorm(1e-5, 1.0), cmap="magma")
        axes.set_xticks(range(len(kinds)), kinds, rotation=60, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.set_title("text that goes on" if passage is None else f"copy of tokens from {passage}", fontsize=9)
        figure.colorbar(image, ax=axes, label="KL, nats")
    worst = max(found, key=lambda row: row.kl)
    finding = f"{_kind_of(worst)} in {_range_of(worst)} costs most, {worst.kl:.2g} nats"
    figure.suptitle(f"{result.codec}, {found[0].prefix_tokens} tokens, one range rough: {finding}", fontsize=10)
    figure.savefig(path, dpi=150)
    return str(path)


def _range_of(row: PositionRow) -> str:
    return row.mixture.removesuffix(", rest exact").rpartition(" ")[0].partition(", layers")[0]


def _kind_of(row: PositionRow) -> str:
    what = row.mixture.removesuffix(", rest exact")
    layers = what.partition(", layers ")[2].rpartition(" ")[0]
    return f"{what.rpartition(' ')[2]} kept" + (f", layers {layers}" if layers else "")
