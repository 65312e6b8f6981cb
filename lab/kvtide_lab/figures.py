"""Results as people read them, of all benches and simulations alike: by the names that `--json` has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from kvtide_lab.measuring import Spread


def tables_of(result: msgspec.Struct) -> Group:
    """Return a line for each field that has something to say, then a table for each list of rows."""
    said, tables = Table(show_header=False, box=None), list[Table]()
    for name in result.__struct_fields__:
        value = getattr(result, name)
        if _has_rows(value):
            tables.append(_table_of(value, _words(name)))
        elif value not in (None, [], {}, ""):
            said.add_row(_words(name), _shown(value))
    return Group(said, *tables)


def _has_rows(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(each, msgspec.Struct) for each in value[:1])


def _table_of(rows: Sequence[msgspec.Struct], title: str) -> Table:
    """Return a table with a column for each field but those that are rows themselves."""
    names = [name for name in rows[0].__struct_fields__ if not any(_has_rows(getattr(row, name)) for row in rows)]
    table = Table(title=title)
    for name in names:
        is_name = isinstance(getattr(rows[0], name), str)
        table.add_column(_words(name), justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*(_shown(getattr(row, name)) for name in names))
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> str:
    """Return figures to four digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Spread):
        return value.shown()
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return " … ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
