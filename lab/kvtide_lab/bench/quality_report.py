"""The rows of `codec-quality` as tables and as a drawing."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group
from rich.table import Table

from kvtide_lab.bench.codec_quality import TEXT_KL, CodecQuality, QualityRow


def render(result: CodecQuality) -> Group:
    """Return the tables that people read."""
    return Group(_render_rows(result), _render_goals(result), _render_texts(result))


def _render_texts(result: CodecQuality) -> Table:
    table = Table("codec", "text", f"bits at {TEXT_KL:g}", "KL over asked", title="text by text")
    for each in result.by_text:
        over = ", ".join(f"{ratio:.2f}" for ratio in each.kls_over_asked)
        table.add_row(each.codec, each.text, "" if each.bits is None else f"{each.bits:.2f}", over)
    return table


def _render_goals(result: CodecQuality) -> Table:
    table = Table("codec", "coder", "tables", "KL", "bits", "between (bits at KL)", "best row", title="bits at a KL")
    for each in result.at_kl:
        bits, of_row = ("" if bits is None else f"{bits:.3f}" for bits in (each.bits_per_element, each.bits_of_row))
        between = ", ".join(f"{point.bits_per_element:.2f} at {point.kl:.2g}" for point in each.between or ())
        table.add_row(each.codec, each.coder, each.profile, f"{each.kl:g}", bits, between, of_row)
    return table


def quality_finding(result: CodecQuality) -> str:
    """Return in one line the fewest bits of each codec at one KL; nothing where fewer than two reach one."""
    for kl in sorted({each.kl for each in result.at_kl}):
        fewest: dict[str, float] = {}
        for each in result.at_kl:
            if each.kl == kl and each.bits_per_element is not None:
                fewest[each.codec] = min(each.bits_per_element, fewest.get(each.codec, each.bits_per_element))
        if len(fewest) > 1:
            ranked = sorted(fewest.items(), key=lambda item: item[1])
            return (
                f"{result.model}, at a KL of {kl:g}: "
                + ", ".join(f"{name} {bits:.2f}" for name, bits in ranked)
                + " bits"
            )
    return ""


def _render_rows(result: CodecQuality) -> Table:
    title = f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, KV in {result.kv_dtype}"
    columns = (
        "codec",
        "level",
        "refinements",
        "coder",
        "tables",
        "bits",
        "KL",
        "±",
        "ppl %",
        "top-1",
        "greedy",
        "× rans",
        "over single %",
        "enc",
        "dec MB/s",
    )
    table = Table(*columns, title=title)
    for row in result.rows:
        table.add_row(
            row.codec,
            f"{row.quality:g}" if row.quality else str(row.level),
            str(row.refinements),
            row.coder,
            row.profile,
            f"{row.bits_per_element:.3f}",
            f"{row.kl:.5f}",
            f"{row.kl_stderr:.5f}",
            f"{row.ppl_change_pct:+.2f}",
            f"{row.top1:.3f}",
            f"{row.greedy_match:.1f}",
            f"{row.size_vs_rans:.3f}" if row.size_vs_rans else "",
            "" if row.over_single is None else f"{100 * row.over_single:+.2f}",
            f"{row.encode_mb_s:.0f}",
            f"{row.decode_mb_s:.0f}",
        )
    return table


def plot(result: CodecQuality, path: Path) -> str | None:
    """Draw rate against distortion, KL on a log scale; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[QualityRow]] = {}
    whole: dict[tuple[str, int], int] = {}
    for row in result.rows:
        whole[row.codec, row.level] = max(row.refinements, whole.get((row.codec, row.level), 0))
    for row in result.rows:
        if row.kl > 0:
            is_part = row.level and row.refinements < whole[row.codec, row.level]
            part = f", level {row.level} in part" if is_part else ""
            lines.setdefault(f"{row.codec}, {row.coder}, {row.profile} tables{part}", []).append(row)
    for rows in lines.values():
        rows.sort(key=lambda row: row.bits_per_element)
    for name, rows in lines.items():
        style = "o-" if "rans" in name else "s--"
        axes.plot([row.bits_per_element for row in rows], [row.kl for row in rows], style, label=name, markersize=4)
    axes.set_yscale("log")
    axes.set_xlabel("bits per KV element, everything counted")
    axes.set_ylabel("KL of the continuation, nats")
    axes.set_title(quality_finding(result) or f"{result.model}: lower left is better", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return str(path)
