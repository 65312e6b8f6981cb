"""When a selection can't be trusted: the paper's test of agreement between heads, and one that fails when it should.

Both are pure; they look at a layer at a time.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide.importance.probe import Floats, top_tokens

__all__ = ["CapturedMass", "Finding", "Guard", "HeadsAgree", "jaccard", "random_jaccard"]

ALPHA = 0.6
# Between ordinary prompts and adversarial ones (decision 0013 has the measurements).
BETA = 0.2


class Finding(NamedTuple):
    """What a probe found in a layer: importance by head, (rows, prefix), the tokens taken, and those kept anyway."""

    importance: Floats
    selected: NDArray[np.int64]
    kept: NDArray[np.int64]


class Guard(Protocol):
    """Judges a selection by what it says of each layer: it falls back if the median over layers is below the limit."""

    @property
    def name(self) -> str:
        """Return the name in tables."""

    def score(self, finding: Finding) -> float:
        """Return how far a layer's selection may stand for the whole, from 0 to 1."""

    def limit(self, ratio: float) -> float:
        """Return the median that is enough when a share of the tokens is selected."""


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
        self._alpha = _exponent(alpha)

    def score(self, finding: Finding) -> float:
        """Return the mean similarity of pairs of heads; one head agrees with itself."""
        tops = [top_tokens(row, len(finding.selected)) for row in finding.importance]
        pairs = [jaccard(a, b) for a, b in combinations(tops, 2)]
        return float(np.mean(pairs)) if pairs else 1.0

    def limit(self, ratio: float) -> float:
        """Return t."""
        return float(random_jaccard(ratio) ** self._alpha)


class CapturedMass:
    """Ours: of the attention that the prefix gets beyond its kept tokens, the selected ones get more than ratio^beta.

    A random selection would get the ratio. Heads may agree well on attention that is spread over everything.
    """

    name = "captured-mass"

    def __init__(self, beta: float = BETA) -> None:
        self._beta = _exponent(beta)

    def score(self, finding: Finding) -> float:
        """Return the share that the selected tokens get; 1 if there is nothing to get."""
        mass = finding.importance.mean(axis=0).astype(np.float64)
        mass[finding.kept] = 0.0
        total = float(mass.sum())
        return float(mass[finding.selected].sum()) / total if total > 0 else 1.0

    def limit(self, ratio: float) -> float:
        """Return the share that is enough."""
        if not 0 < ratio <= 1:
            raise ValueError(f"a ratio is in (0, 1], got {ratio}")
        return float(ratio**self._beta)


def _exponent(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"an exponent in (0, 1] is expected, got {value}")
    return value
