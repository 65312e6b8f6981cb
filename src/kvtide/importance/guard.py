"""When a selection can't be trusted: the paper's test of agreement between heads, and one that fails when it should.

Both are pure; they look at a layer at a time.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide.importance.probe import Floats, top_tokens

__all__ = ["Finding", "Guard", "HeadsAgree", "NeighboursAgree", "jaccard", "random_jaccard"]

ALPHA = 0.6
# Between ordinary prompts and adversarial ones (decision 0013 has the measurements).
ALIKE = 0.18
# A token's importance is compared with the mean of so many on each side: near tokens get more for being near.
AROUND = 16
# Below this a token's mass, in even shares, is rounding.
MASS_MIN = 1e-6
# Logarithms of importance that differ by less are attention to everything alike.
SPREAD_MIN = 0.1
# Fewer tokens have no neighbours to speak of; loading them whole costs little.
TOKENS_MIN = 32


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
    return _share(ratio) / (2 - ratio)


def jaccard(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Return |a and b| / |a or b| of two sets; 1 for two empty ones."""
    both = len(np.intersect1d(a, b))
    either = len(a) + len(b) - both
    return both / either if either else 1.0


class HeadsAgree:
    """IMPRESS: the top tokens of the probed heads are more alike than t = j^alpha, j being the level of chance."""

    name = "jaccard"

    def __init__(self, alpha: float = ALPHA) -> None:
        self._alpha = _share(alpha)

    def score(self, finding: Finding) -> float:
        """Return the mean similarity of pairs of heads; one head agrees with itself."""
        tops = [top_tokens(row, len(finding.selected)) for row in finding.importance]
        pairs = [jaccard(a, b) for a, b in combinations(tops, 2)]
        return float(np.mean(pairs)) if pairs else 1.0

    def limit(self, ratio: float) -> float:
        """Return t."""
        return float(random_jaccard(ratio) ** self._alpha)


class NeighboursAgree:
    """Ours: neighbouring tokens matter alike, since what a text says takes several of them.

    In shuffled text and in noise a token's importance says next to nothing of the next one's: single tokens stand out,
    whatever is asked. Length and ratio hardly move the score, as nothing is counted against the whole.
    """

    name = "neighbours"

    def __init__(self, alike: float = ALIKE) -> None:
        """alike: the correlation that is enough. ValueError outside (0, 1]."""
        self._alike = _share(alike)

    def score(self, finding: Finding) -> float:
        """Return the correlation of each token's importance with the next one's, by logarithms, above the local mean.

        0 for a negative one, for attention to everything alike, and for a prefix that is too short to tell.
        """
        mass = np.delete(finding.importance.mean(axis=0).astype(np.float64), finding.kept)
        if len(mass) < TOKENS_MIN:
            return 0.0
        stands_out = np.log(mass + MASS_MIN)
        stands_out -= _local_mean(stands_out)
        power = float(stands_out @ stands_out)
        if power < len(mass) * SPREAD_MIN**2:
            return 0.0
        return max(0.0, float(stands_out[1:] @ stands_out[:-1]) / power)

    def limit(self, ratio: float) -> float:
        """Return the correlation that is enough, whatever the ratio."""
        _share(ratio)
        return self._alike


def _local_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of those around each value, itself included; at the ends of fewer."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    start, stop = np.maximum(0, places - AROUND), np.minimum(len(values), places + AROUND + 1)
    mean: NDArray[np.float64] = (total[stop] - total[start]) / (stop - start)
    return mean


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"a number in (0, 1] is expected, got {value}")
    return value
