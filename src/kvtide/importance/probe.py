"""Which tokens of a prefix a suffix attends to: importance from its queries and some, or rough, keys of the prefix.

Pure: arrays in, arrays out. Importance is attention mass: 1 for a token that gets its even share.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


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


class _Heads:
    """Asks some heads."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return all heads."""
        return list(range(heads))

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return the attention mass that each head's suffix gives to each token of the prefix."""
        return attention_mass(ask, self.heads(len(ask.queries), len(ask.keys)))


class AllHeads(_Heads):
    """Every head (H2O); with low-bit keys, our probe."""

    def __init__(self, name: str = "all-heads") -> None:
        self.name = name


class FirstHeads(_Heads):
    """The first heads of the layer (IMPRESS takes three)."""

    def __init__(self, count: int = 3) -> None:
        if count < 1:
            raise ValueError(f"a probe asks at least one head, got {count}")
        self.name = f"first-{count}"
        self._count = count

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return the first heads."""
        return list(range(min(self._count, heads)))


class GroupHeads(_Heads):
    """The first head of each group that shares a KV head: the first heads of a layer may all share one."""

    name = "one-per-group"

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return one head a group."""
        return list(range(0, heads, heads // kv_heads))


class _Blind:
    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return none."""
        return []


class Recency(_Blind):
    """The last tokens; with the first ones, which are always kept, StreamingLLM."""

    name = "recency"

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return more for later tokens."""
        return np.arange(1, ask.keys.shape[1] + 1, dtype=np.float32)[None]


class Random(_Blind):
    """Tokens by chance."""

    name = "random"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return chance."""
        drawn: Floats = self._rng.random((1, ask.keys.shape[1]), dtype=np.float32)
        return drawn


class KnownScores(_Blind):
    """What earlier uses found: no probe at all."""

    name = "past-uses"

    def __init__(self, scores: Floats) -> None:
        """scores: (layers, prefix)."""
        self._scores = scores

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return the layer's scores."""
        scores: Floats = self._scores[ask.layer][None]
        return scores


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
