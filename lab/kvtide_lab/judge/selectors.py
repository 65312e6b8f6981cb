"""Selectors that ours are measured against: one head a group, the newest tokens, chance, what is known already."""

from __future__ import annotations

import numpy as np

from kvtide.importance import AllHeads, Floats, ProbeQuestion


class GroupHeads(AllHeads):
    """The first head of each group that shares a KV head: the first heads of a layer may all share one."""

    def __init__(self) -> None:
        super().__init__("one-per-group")

    def heads(self, heads: int, kv_heads: int) -> list[int]:
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
    """Scores from earlier uses: no probe at all."""

    name = "past-uses"

    def __init__(self, scores: Floats) -> None:
        """scores: (layers, prefix)."""
        self._scores = scores

    def importance(self, ask: ProbeQuestion) -> Floats:
        """Return the layer's scores."""
        scores: Floats = self._scores[ask.layer][None]
        return scores
