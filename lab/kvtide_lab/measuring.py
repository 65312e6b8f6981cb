"""Spreads of values, turns, threads and memory, as benches measure them; tables of what they found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Group
from rich.table import Table

_Each = TypeVar("_Each")
# Called with what is being done, how much of it is done, and how much there is.
Show = Callable[[str, int, int], None]


class Spread(msgspec.Struct, frozen=True):
    """A median and the quartiles around it."""

    median: float
    quarter: float
    three_quarters: float

    def shown(self, digits: int = 2) -> str:
        """Return it as tables have it: `1.20 (1.10 … 1.31)`, the median alone where there is no spread."""
        if self.quarter == self.three_quarters:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.quarter:.{digits}f} … {self.three_quarters:.{digits}f})"


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    quarter, middle, three_quarters = np.percentile(values, (25, 50, 75)).tolist()
    return Spread(middle, quarter, three_quarters)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    spread = spread_of(values)
    return spread.quarter, spread.three_quarters


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the values lies; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def extremes(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the most."""
    return min(values), max(values)


def in_turns(all_of_them: Sequence[_Each], turn: int) -> list[_Each]:
    """Return them beginning with another one at each turn: no one is always the first."""
    first = turn % len(all_of_them)
    return [*all_of_them[first:], *all_of_them[:first]]


def together(work: Callable[[int], None], count: int) -> None:
    """Run the work in so many threads, each with its number."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


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
