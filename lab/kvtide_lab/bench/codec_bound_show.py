"""Results of `kvtide-lab bench codec-bound` as tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from kvtide_lab.bench.codec_bound import BoundRow, CodecBound


def render(result: CodecBound) -> Group:
    """Return the tables that people read."""
    return Group(_distances(result), _rows(result), _surface(result))


def _distances(result: CodecBound) -> Table:
    table = Table(
        "profile", "KL", "bits", "ideal", "over it", "±", "Shannon's bound", title="tide beside an ideal quantiser"
    )
    for each in result.distances:
        over = (f"{100 * each.over_ideal:+.1f} %", f"{100 * each.over_ideal_stderr:.1f}")
        bits = (f"{each.kl:g}", f"{each.bits:.3f}", f"{each.ideal_bits:.3f}")
        table.add_row(each.profile, *bits, *over, f"{each.bound_bits:.3f}")
    return table


def _rows(result: CodecBound) -> Table:
    title = f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, KV in {result.kv_dtype}"
    table = Table("profile", "coder", "quality", "refinements", "bits", "bound", "KL", "±", title=title)
    for row in result.rows:
        bound = "" if row.bound_bits is None else f"{row.bound_bits:.3f}"
        asked = (row.profile, row.coder, f"{row.quality:g}", str(row.refinements))
        table.add_row(*asked, f"{row.bits:.3f}", bound, f"{row.kl:.5f}", f"{row.kl_stderr:.5f}")
    return table


def _surface(result: CodecBound) -> Table:
    table = Table("cache", "bits", "decoder, MFLOP a token", "of prefill", "KL", title="bits, decoder and KL")
    for each in result.surface:
        cost = (f"{each.decoder_mflop:.1f}", f"{each.of_prefill:.3f}")
        table.add_row(each.name, f"{each.bits:.3f}", *cost, f"{each.kl:.5f}")
    return table


def plot(result: CodecBound, path: Path) -> str | None:
    """Draw bits against KL, and bits against the decoder's work; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    quality, surface = figure.subplots(1, 2)
    for number, profile in enumerate(dict.fromkeys(row.profile for row in result.rows)):
        rows = sorted((row for row in result.rows if row.profile == profile), key=lambda row: row.bits)
        tide, ideal = ([row for row in rows if row.coder == coder] for coder in ("tide", "ideal"))
        colour = f"C{number}"
        quality.plot(*_points(tide), "o-", color=colour, label=profile, markersize=4)
        quality.plot(*_points(ideal), "s--", color=colour, label="an ideal quantiser of it", markersize=4)
        quality.plot(
            [row.bound_bits for row in ideal], [row.kl for row in ideal], ":", color=colour, label="Shannon's bound"
        )
    quality.set(yscale="log", xlabel="bits per KV element", ylabel="KL of the continuation, nats")
    shown = [each for each in result.surface if each.kl or each.bits < 3]
    dots = surface.scatter(
        [each.bits for each in shown],
        [each.of_prefill for each in shown],
        c=[math.log10(max(each.kl, 1e-4)) for each in shown],
        cmap="viridis",
    )
    figure.colorbar(dots, label="log10 of KL; recomputed: 0")
    surface.set(xlabel="bits per KV element", ylabel="decoder's products over those of prefill")
    for axes in (quality, surface):
        axes.grid(alpha=0.3)
    quality.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return str(path)


def _points(rows: Sequence[BoundRow]) -> tuple[list[float], list[float]]:
    return [row.bits for row in rows], [row.kl for row in rows]
