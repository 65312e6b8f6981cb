"""Tokens of a prefix that a suffix attends to, from its queries and some, or rough, keys; guards against errors.

Pure: arrays in, arrays out. Importance is attention mass: 1 for a token that gets its even share. Guards look at a
layer at a time, and then at what all layers gave: the paper's test of agreement between heads, and one that fails when
it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ALPHA = 0.6
# Between ordinary prompts and adversarial ones (decision 0013 has the measurements).
ALIKE = 0.1
# Tokens so far apart are compared with neighbours; further ones differ by place, too.
APART = (2, 3)
# Below this a token's mass, in even shares, is rounding.
MASS_MIN = 1e-5
# Logarithms of importance that differ by less are attention to everything alike.
SPREAD_MIN = 0.1
# Of fewer tokens a mean is chance; loading them whole costs little.
TOKENS_MIN = 128


class ProbeQuestion(NamedTuple):
    """One layer's question: who of the prefix matters to the suffix.

    queries: (heads, suffix, head_dim); keys: (kv_heads, prefix, head_dim), as good as they are; suffix_keys:
    (kv_heads, suffix, head_dim). Heads are in groups: head h reads KV head h // (heads / kv_heads).
    """

    layer: int
    queries: Floats
    keys: Floats
    suffix_keys: Floats
    scaling: float


class Selector(Protocol):
    """Finds the importance of the tokens of a prefix in a layer."""

    @property
    def name(self) -> str:
        """Return the name in tables."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return the query heads that are asked, whose keys must be there; none if no key is looked at."""

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return (rows, prefix): a row for each head that was asked, or one. ValueError for arrays that don't fit."""


class Heads:
    """Asks heads by their queries: all of them, or those that a subclass names."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return all heads."""
        return list(range(heads))

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return the attention mass that each head's suffix gives to each token of the prefix."""
        return attention_mass(ask, self.heads(len(ask.queries), len(ask.keys)))


class AllHeads(Heads):
    """Every head (H2O); with low-bit keys, our probe."""

    def __init__(self, name: str = "all-heads") -> None:
        self.name = name


class FirstHeads(Heads):
    """The first heads of the layer (IMPRESS takes three)."""

    def __init__(self, count: int = 3) -> None:
        if count < 1:
            raise ValueError(f"a probe asks at least one head, got {count}")
        self.name = f"first-{count}"
        self._count = count

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return the first heads."""
        return list(range(min(self._count, heads)))


def attention_mass(ask: ProbeQuestion, heads: list[int]) -> Floats:
    """Return what each head's suffix tokens attend to, in the mean over them: (heads, prefix), 1 on average at most.

    The suffix's own keys take their share, causally.
    """
    _check(ask)
    group = len(ask.queries) // len(ask.keys)
    prefix, suffix = ask.keys.shape[1], ask.queries.shape[1]
    causal = np.triu(np.full((suffix, suffix), -np.inf, dtype=np.float32), 1)
    mass = np.empty((len(heads), prefix), dtype=np.float32)
    for row, head in enumerate(heads):
        queries = ask.queries[head] * np.float32(ask.scaling)
        before, own = queries @ ask.keys[head // group].T, queries @ ask.suffix_keys[head // group].T + causal
        peak = np.maximum(before.max(axis=1), own.max(axis=1))[:, None]
        weights = np.exp(before - peak)
        total = weights.sum(axis=1) + np.exp(own - peak).sum(axis=1)
        mass[row] = (weights / total[:, None]).mean(axis=0) * prefix
    return mass


def _check(ask: ProbeQuestion) -> None:
    heads, suffix, head_dim = ask.queries.shape
    kv_heads = len(ask.keys)
    if not kv_heads or heads % kv_heads or suffix < 1 or ask.keys.shape[1] < 1:
        raise ValueError(f"{heads} heads over {kv_heads} KV heads, {suffix} of suffix, {ask.keys.shape[1]} of prefix")
    if ask.keys.shape[2] != head_dim or ask.suffix_keys.shape != (kv_heads, suffix, head_dim):
        raise ValueError(f"keys {ask.keys.shape} and {ask.suffix_keys.shape} do not fit queries {ask.queries.shape}")


def top_tokens(importance: Floats, count: int) -> NDArray[np.int64]:
    """Return the `count` most important tokens, ascending; among equals the earliest."""
    if not 0 <= count <= len(importance):
        raise ValueError(f"{count} of {len(importance)} tokens")
    return np.sort(np.argsort(-importance, kind="stable")[:count])


class ProbeFinding(NamedTuple):
    """A probe's result in a layer: importance by head, (rows, prefix), how many tokens are taken, those kept."""

    importance: Floats
    taken: int
    kept: NDArray[np.int64]


class Guard(Protocol):
    """Judges a selection layer by layer, and then by what it found in all of them."""

    @property
    def name(self) -> str:
        """Return the name in tables."""

    def score(self, finding: ProbeFinding) -> float:
        """Return how far a layer's selection may stand for the whole, from 0 to 1."""

    def trusts(self, scores: Sequence[float], ratio: float) -> bool:
        """Tell from the scores of all layers, one or more, whether a selection of a share of the tokens will do."""


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

    def score(self, finding: ProbeFinding) -> float:
        """Return the mean similarity of pairs of heads; one head agrees with itself."""
        tops = [top_tokens(row, finding.taken) for row in finding.importance]
        pairs = [jaccard(a, b) for a, b in combinations(tops, 2)]
        return float(np.mean(pairs)) if pairs else 1.0

    def trusts(self, scores: Sequence[float], ratio: float) -> bool:
        """Compare the median over layers with t."""
        return bool(median(scores) >= random_jaccard(ratio) ** self._alpha)


class NeighboursAgree:
    """Ours: neighbouring tokens matter alike, since what a text says takes several of them.

    In shuffled text and in noise a token's importance says next to nothing of the next one's: single tokens stand out,
    whatever is asked. Length and ratio hardly move the score, as nothing is counted against the whole. Only the deeper
    half of the layers is asked: the first ones attend by token and distance.
    """

    name = "neighbours"

    def __init__(self, alike: float = ALIKE) -> None:
        """alike: the score that is enough. ValueError outside (0, 1]."""
        self._alike = _share(alike)

    def score(self, finding: ProbeFinding) -> float:
        """Return how much less neighbours differ than tokens two and three apart, in the median over heads.

        Differences are of logarithms of importance. 0 where neighbours differ more, for attention to everything alike,
        and for a prefix that is too short to tell.
        """
        mass = np.delete(finding.importance, finding.kept, axis=1)
        if mass.shape[1] < TOKENS_MIN:
            return 0.0
        mass += np.float32(MASS_MIN)
        known = np.log(mass, out=mass)
        near, far = _difference(known, 1), np.mean([_difference(known, apart) for apart in APART], axis=0)
        alike = np.where(far > SPREAD_MIN, 1 - near / np.maximum(far, SPREAD_MIN), 0.0)
        return max(0.0, float(np.median(alike)))

    def trusts(self, scores: Sequence[float], ratio: float) -> bool:
        """Compare the median over the deeper half of the layers with what is enough, whatever the ratio."""
        _share(ratio)
        return median(scores[len(scores) // 2 :]) >= self._alike


def _difference(values: Floats, apart: int) -> Floats:
    """Return how much values that far apart differ, in the mean of each row."""
    found: Floats = np.abs(values[:, apart:] - values[:, :-apart]).mean(axis=1)
    return found


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"a number in (0, 1] is expected, got {value}")
    return value
