"""Results of `kvtide-lab bench importance` as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kvtide_lab.bench.importance import ImportanceBench


def render(result: ImportanceBench) -> Table:
    """Return the table that people read: rows, then guards and the ablation below them."""
    title = f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, KV in {result.kv_dtype}"
    columns = ("selector", "rest", "order", "ratio", "bytes read", "KL", "top-1", "answer", "right", "TTFT s")
    table = Table(*columns, title=f"{title}, disk of {result.disk_bytes_s / 1e6:.0f} MB/s")
    for row in result.rows:
        head = (row.selector, row.rest, row.order, f"{row.ratio:g}", f"{row.bytes_read_share:.3f}")
        table.add_row(
            *head,
            f"{row.kl:.4f}",
            f"{row.top1:.3f}",
            f"{row.answer_match:.2f}",
            f"{row.right:.2f}",
            f"{row.ttft_s:.3f}",
        )
    table.add_section()
    for guard in result.guards:
        where = f"{guard.prompt}, {guard.tokens}, of {guard.prompts}"
        shares = (f"{guard.fallback_share:.2f}", f"{guard.bytes_read_share:.3f}", f"{guard.kl:.4f}")
        cost = ("", "", "")
        if guard.fallback_bytes_share is not None:
            over = f"{guard.fallback_over_whole or 0:.2f} of the whole"
            cost = (f"back {guard.fallback_bytes_share:.3f}", f"{guard.fallback_reads:.0f} reads", over)
        table.add_row(f"{guard.guard} falls back", guard.rest, where, *shares, *cost, _s(guard.ttft_s))
    table.add_section()
    for needle in result.needles:
        found = (f"whole {needle.found_whole}", f"part {needle.found_part}", f"both {needle.found_both}")
        where = f"depth {needle.depth:g}, of {needle.needles}"
        table.add_row("needles", needle.kind, where, "", f"{needle.bytes_read_share:.3f}", *found, "", "")
    table.add_section()
    for each in result.ttft:
        spread = f"{each.speedup:.2f} times ({each.speedup_low:.2f} … {each.speedup_high:.2f})"
        disk = f"disk {each.whole_disk_s:.2f}, {each.selective_disk_s:.2f} s"
        times = (f"{each.whole_s:.3f}", f"{each.selective_s:.3f}")
        table.add_row("TTFT, whole and selective", each.question, disk, spread, "", "", "", "", *times)
    table.add_section()
    for asked in result.engine:
        shares = (f"{asked.front_share:.3f}", f"behind {asked.behind_share:.3f}", f"{asked.ratio:.2f} of the whole")
        both = (f"part {_s(asked.part_s)}", f"whole {_s(asked.whole_s)}", _s(asked.ttft_s))
        table.add_row("attach", asked.place, f"{asked.use}, {asked.tokens}", asked.decided, *shares, *both)
    table.add_section()
    for step in result.ablation:
        shares = (f"memory {step.memory_share:.2f}", f"{step.disk_read_share:.3f}", f"{step.kl:.4f}")
        up = f"up {step.copied_up_share:.3f}"
        table.add_row(step.step, "cache", step.cache, *shares, up, "", "", _s(step.disk_s))
    return table


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"


def plot(result: ImportanceBench, path: Path) -> str | None:
    """Draw KL against bytes read; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for series in sorted({row.series for row in result.curve}):
        points = sorted((row.bytes_read_share, row.kl) for row in result.curve if row.series == series)
        axes.plot(*zip(*points, strict=True), "o-", label=series, markersize=4)
    axes.set_yscale("log")
    axes.set_xlabel("bytes read, of the raw cache")
    axes.set_ylabel("KL of the answer, nats")
    finding = f"a selection is restored {result.ttft_speedup:.1f} times as fast as all of it"
    axes.set_title(f"{result.model}: {finding} (lower left is better)", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return str(path)
