"""Selectors that ours are measured against: one head a group, the newest tokens, chance, what is known already."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.engines.transformers.selective import SparsePrefix, SparseSettings
from kvtide.importance import AllHeads, Floats
from kvtide.store.load.sparse import SparseLoad

# Better keys than the rough ones, (kv_heads, prefix, head_dim) of a layer: for probes that load keys of their own.
KeySource = Callable[[int], Floats]


class GroupHeads(AllHeads):
    """The first head of each group that shares a KV head: the first heads of a layer may all share one."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return list(range(0, heads, heads // kv_heads))


class Blind(AllHeads):
    """Looks at no key."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return []

    def importance(self, layer: int, tokens: int) -> Floats:
        """Return what matters in a layer of so many tokens: (rows, tokens)."""
        raise NotImplementedError


class Recency(Blind):
    """The last tokens; with the first ones, which are always kept, StreamingLLM."""

    def importance(self, layer: int, tokens: int) -> Floats:
        return np.arange(1, tokens + 1, dtype=np.float32)[None]


class Random(Blind):
    """Tokens by chance."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def importance(self, layer: int, tokens: int) -> Floats:
        drawn: Floats = self._rng.random((1, tokens), dtype=np.float32)
        return drawn


class KnownScores(Blind):
    """Scores from earlier uses, (layers, prefix): no probe at all."""

    def __init__(self, scores: Floats) -> None:
        self._scores = scores

    def importance(self, layer: int, tokens: int) -> Floats:
        scores: Floats = self._scores[layer][None]
        return scores


class ComparedPrefix(SparsePrefix):
    """A selection by any of these, or by better keys than the engine's."""

    def __init__(self, load: SparseLoad, settings: SparseSettings, keys: KeySource | None = None) -> None:
        super().__init__(load, settings)
        self._keys = keys

    def _is_weighed(self, query: torch.Tensor) -> bool:
        return self._keys is None and super()._is_weighed(query)

    def _by_head(self, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> Floats:
        if isinstance(self._settings.selector, Blind):
            return self._settings.selector.importance(layer, self._tokens)
        if self._keys is not None:
            known = key.float()
            key = torch.cat([torch.from_numpy(self._keys(layer)).to(known), known[:, self._tokens :]], dim=1)
        return super()._by_head(layer, query, key, scaling)

    def _selected(self, layer: int, importance: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if isinstance(self._settings.selector, Blind):
            importance = self._settings.selector.importance(layer, self._tokens).mean(axis=0)
        return super()._selected(layer, importance)
