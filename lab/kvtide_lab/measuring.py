"""Spreads of a few values, turns, threads and a process' memory, as benches and simulations measure them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

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
