"""When a selection can't be trusted: the paper's test of agreement between heads, and one that fails when it should.

Both are pure and judge one layer; a load falls back when more layers fail than a share.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide.importance.probe import Floats, top_tokens

__all__ = ["CapturedMass", "Finding", "Guard", "HeadsAgree", "jaccard", "random_jaccard"]

ALPHA = 0.6
# Share of the attention beyond the always kept tokens that the selected ones must get (decision 0013).
CAPTURED_MIN = 0.55


class Finding(NamedTuple):
    """What a probe found in a layer: importance by head, (rows, prefix), the tokens taken, and those kept anyway."""

    importance: Floats
    selected: NDArray[np.int64]
    kept: NDArray[np.int64]


class Guard(Protocol):
    """Judges a layer."""

    @property
    def name(self) -> str:
        """Return the name in tables."""

    def passes(self, finding: Finding) -> bool:
        """Tell whether the selection may stand for the whole."""


def random_jaccard(ratio: float) -> float:
    """Return the similarity of two random selections of a share of the tokens."""
    if not 0 < ratio <= 1:
        raise ValueError(f"a ratio is in (0, 1], got {ratio}")
    return ratio / (2 - ratio)


def jaccard(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Return |a and b| / |a or b| of two sets; 1 for two empty ones."""
    both = len(np.intersect1d(a, b))
    either = len(a) + len(b) - both
    return both / either if either else 1.0


class HeadsAgree:
    """IMPRESS: the top tokens of the probed heads are more alike than t = j^alpha, j being the level of chance."""

    name = "jaccard"

    def __init__(self, alpha: float = ALPHA) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is in (0, 1], got {alpha}")
        self._alpha = alpha

    def passes(self, finding: Finding) -> bool:
        """Tell whether the heads agree; one head agrees with itself."""
        prefix = finding.importance.shape[1]
        count = len(finding.selected)
        tops = [top_tokens(row, count) for row in finding.importance]
        pairs = [jaccard(a, b) for a, b in combinations(tops, 2)]
        return not pairs or float(np.mean(pairs)) >= random_jaccard(max(count, 1) / prefix) ** self._alpha


class CapturedMass:
    """Ours: of the attention that the prefix gets beyond its kept tokens, the selected ones get at least a share."""

    name = "captured-mass"

    def __init__(self, captured_min: float = CAPTURED_MIN) -> None:
        if not 0 <= captured_min <= 1:
            raise ValueError(f"a share is in [0, 1], got {captured_min}")
        self._captured_min = captured_min

    def passes(self, finding: Finding) -> bool:
        """Tell whether enough is captured; nothing to capture is enough."""
        return self.captured(finding) >= self._captured_min

    def captured(self, finding: Finding) -> float:
        """Return the share that the selected tokens get."""
        mass = finding.importance.mean(axis=0).astype(np.float64)
        mass[finding.kept] = 0.0
        total = float(mass.sum())
        return float(mass[finding.selected].sum()) / total if total > 0 else 1.0
