"""Results of `kvtide-lab bench codec-levers` as a table."""

from __future__ import annotations

from rich.table import Table

from kvtide_lab.bench.codec_levers import CodecLevers


def render(result: CodecLevers) -> Table:
    """Return the table that people read."""
    title = (
        f"{result.model}, {result.profile}, {result.contexts} contexts of {result.context_tokens} tokens, "
        f"fitted on {result.fitted_tokens}"
    )
    table = Table("lever", "KL", "bits", "over today", "at equal error", "MFLOP a token more", title=title)
    for row in result.rows:
        bits = "" if row.bits is None else f"{row.bits:.3f}"
        over = ("" if each is None else f"{each:.3f}" for each in (row.over_today, row.over_today_equal_error))
        table.add_row(row.lever, f"{row.kl:g}", bits, *over, f"{row.mflop:.1f}")
    return table
