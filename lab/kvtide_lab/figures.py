"""Tables and pictures, as all benches and simulations show theirs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from kvtide_lab.measuring import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table_of(
    rows: Sequence[msgspec.Struct], title: str | None = None, caption: str | None = None, without: Collection[str] = ()
) -> Table:
    """Return a table with a column for each field but those left out, by the names that `--json` has."""
    names = [name for name in rows[0].__struct_fields__ if name not in without] if rows else []
    table = Table(title=title, caption=caption)
    for name in names:
        is_name = isinstance(getattr(rows[0], name), str)
        table.add_column(name.replace("_", " "), justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*(shown(getattr(row, name)) for name in names))
    return table


def shown(value: Any) -> str:
    """Return a value as tables have it: figures to four digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Spread):
        return value.shown()
    if isinstance(value, (tuple, list)):
        return " … ".join(map(shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def new_figure(inches: tuple[float, float] = (9, 5)) -> Figure:
    """Return an empty figure. ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: install kvtide[plot]") from error
    return Figure(figsize=inches, layout="constrained")
