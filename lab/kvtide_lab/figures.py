"""Tables and pictures, as all benches and simulations show theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table_of(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]] = (),
    title: str | None = None,
    caption: str | None = None,
    left: Collection[str] = (),
) -> Table:
    """Return a table of figures, which stand to the right; names, in the columns of `left`, don't wrap."""
    table = Table(title=title, caption=caption)
    for column in columns:
        is_name = column in left
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name and column != "")
    for row in rows:
        table.add_row(*row)
    return table


def bar(share: float) -> str:
    """Return a share of 1 as a bar."""
    return "█" * round(30 * share)


def new_figure(inches: tuple[float, float] = (9, 5)) -> Figure:
    """Return an empty figure. ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: install kvtide[plot]") from error
    return Figure(figsize=inches, layout="constrained")
