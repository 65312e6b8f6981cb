"""Median and quartiles of what was measured a few times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


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
    quarter, middle, three_quarters = (float(np.percentile(values, share)) for share in (25, 50, 75))
    return Spread(middle, quarter, three_quarters)
