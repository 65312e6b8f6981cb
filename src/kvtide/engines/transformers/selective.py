"""Attention over a prefix of which each layer loads only the chunks that matter to the suffix (IMPRESS).

Layer by layer the suffix's queries meet the rough keys of all tokens; the most important chunks are loaded exactly, the
rest stays rough or is left out. Keys carry their rotation, so that positions are right whatever is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtide.block import KVDtype
from kvtide.engines.transformers.attention import (
    PROBE_TOKENS,
    WeightRoom,
    attending,
    attention_mass,
    grouped_attention,
    weighed_attention,
)
from kvtide.engines.transformers.fingerprint import TORCH_DTYPES
from kvtide.importance import (
    AllHeads,
    Floats,
    Guard,
    NeighboursAgree,
    ProbeFinding,
    ProbeQuestion,
    Selector,
    select_chunks,
    top_tokens,
)
from kvtide.store.load.sparse import ChunkBits, SparseLoad

# KL divergence of the next token that a selection of part of a prefix is taken for, in nats: SmolLM2-135M at ratios of
# .1 to .5 (`kvtide-lab bench importance`: .0100, .0077, .0002).
SELECTED_QUALITY = 1e-2
# Always attended to: the first tokens draw attention from all others, the last ones are what the suffix goes on from.
FIRST_TOKENS = 4
LAST_TOKENS = 32
# Up to so many tokens of a suffix attention's own weights are looked at; those of more would not stay in caches.
WEIGHED_TOKENS = 64

# Better keys than the rough ones, (kv_heads, prefix, head_dim) of a layer: for probes that load keys of their own.
KeySource = Callable[[int], Floats]


class Rest(Enum):
    """The fate of tokens that are not selected: they stay rough, or are left out (the paper)."""

    BASE = "base"
    DROP = "drop"


class SparseSettings(NamedTuple):
    """The share of a prefix that is loaded exactly, and how that is chosen.

    by_chunks: whole chunks by their mean importance, all of whose tokens count; else single tokens, with the chunks
    that they lie in. What the guard refuses is loaded whole. ahead: the part of the chunks that uses choose,
    in blocks that were packed by them: they are loaded with the bases. lag: how many layers further down the chunks
    lie that a layer's probe chooses, so that they are read while those between are computed; only with `by_chunks`.
    With one layer the engine waited for its reads for a tenth of the time.
    """

    ratio: float
    selector: Selector = AllHeads("base-keys")
    guard: Guard | None = NeighboursAgree()
    rest: Rest = Rest.BASE
    by_chunks: bool = True
    ahead: float = 0.5
    lag: int = 3

    def tokens_ahead(self, block_tokens: int) -> int:
        """Return how many tokens of a block are loaded ahead."""
        return int(self.ratio * self.ahead * block_tokens) if self.by_chunks else 0


class SelectedLayers(NamedTuple):
    """The outcome of a selection: whether it fell back to the whole, share of the tokens loaded exactly, bytes read."""

    is_fallback: bool
    tokens_share: float
    read_bytes: int
    whole_bytes: int


def check_ratio(ratio: float) -> None:
    """Raise ValueError for a ratio that is not in (0, 1]."""
    if not 0 < ratio <= 1:
        raise ValueError(f"importance is the share of the tokens to load, in (0, 1], got {ratio!r}")


def kept_tokens(prefix: int) -> NDArray[np.int64]:
    """Return the tokens that are always attended to."""
    first = np.arange(min(FIRST_TOKENS, prefix))
    return np.unique(np.concatenate([first, np.arange(max(0, prefix - LAST_TOKENS), prefix)]))


class _Wanted(NamedTuple):
    """The chunks that a layer is to have exactly, and those being read."""

    chunks: NDArray[np.int64]
    selected: NDArray[np.int64]
    loading: Future[ChunkBits]


class SparsePrefix:
    """One prefix in one engine, from its suffix's first pass on. Use `active` around every pass of the model."""

    def __init__(self, load: SparseLoad, settings: SparseSettings, keys: KeySource | None = None) -> None:
        """load: open, of all blocks in the engine's cache. ValueError for a ratio that is not in (0, 1]."""
        check_ratio(settings.ratio)
        self._load = load
        self._settings = settings
        self._keys = keys
        self._attended: dict[int, torch.Tensor | None] = {}
        self._wanted: dict[int, _Wanted] = {}
        self._loaded_tokens = 0
        # A selection of everything is the plain model, bit for bit.
        self._loaded_all = settings.ratio == 1.0
        self._guard_scores: list[float] = []
        self._is_fallback = False
        # Importance of each token by layer, for those who learn from uses.
        self.importance: dict[int, Floats] = {}
        self._tokens = load.tokens
        self._count = max(1, round(settings.ratio * self._tokens))
        self._kept = kept_tokens(self._tokens)
        self._ahead = load.ahead_chunks()
        self._is_ahead = np.zeros(load.blocks * load.chunks_per_block, dtype=bool)
        self._is_ahead[self._ahead] = True
        self._ahead_tokens = sum(len(part) for part in _places(load, 0, self._ahead))
        self._weights = WeightRoom()

    def active(self, model: Any) -> AbstractContextManager[None]:
        """Have the model attend through this selection."""
        return attending(model, self._attend)

    def report(self) -> SelectedLayers:
        """Return what has been done so far."""
        layers = len(self._attended)
        share = self._loaded_tokens / (layers * self._tokens) if layers else 0.0
        return SelectedLayers(self._is_fallback, share, self._load.read_bytes, self._load.whole_bytes)

    @property
    def is_refused(self) -> bool:
        """Tell whether the guard, if there is one, does not trust what the layers selected so far."""
        guard = self._settings.guard
        if guard is None or not self._guard_scores:
            return False
        return not guard.trusts(self._guard_scores, self._settings.ratio)

    def fall_back(self, past: DynamicCache) -> None:
        """Load what is missing: `past` is then the whole prefix, exact, and all of it is attended to from now on."""
        self._is_fallback = True
        chunks = np.arange(self._load.blocks * self._load.chunks_per_block)
        missing = [
            self._load.start(layer, np.setdiff1d(chunks, self._wanted[layer].chunks)) for layer in self._attended
        ]
        for number, layer in enumerate(past.layers):
            layer.keys, layer.values = layer.keys[..., : self._tokens, :], layer.values[..., : self._tokens, :]
            loaded = missing[number].result()
            self._loaded_tokens += len(loaded.tokens)
            _put(loaded, self._load.layout.dtype, layer.keys, layer.values)
            self._attended[number] = None

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> Any:
        layer = int(module.layer_idx)
        if layer not in self._attended:
            scaling = float(arguments["scaling"])
            if layer in self._wanted and self._is_weighed(query):
                self._attended[layer] = self._take(layer, key, value)
                output, by_head = weighed_attention(query, key, value, self._tokens, scaling, self._weights)
                self._choose(layer, by_head, scaling)
                return output, None
            self._choose(layer, self._by_head(layer, query[0], key[0], scaling), scaling)
            self._attended[layer] = self._take(layer, key, value)
        if self._is_fallback or self._loaded_all:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        attended = self._attended[layer]
        if attended is not None:
            behind = torch.arange(self._tokens, key.shape[2], device=key.device)
            places = torch.cat([attended, behind])
            key, value = key.index_select(2, places), value.index_select(2, places)
            attention_mask = None if attention_mask is None else attention_mask.index_select(-1, places)
        return grouped_attention(module, query, key, value, attention_mask, **arguments)

    def _is_weighed(self, query: torch.Tensor) -> bool:
        """Tell whether attending itself says what matters: all heads ask for it, by the keys that they attend to."""
        _, heads, suffix, _ = query.shape
        asked = self._settings.selector.heads(heads, self._load.layout.kv_heads)
        return (
            self._settings.rest is Rest.BASE
            and not self._loaded_all
            and self._keys is None
            and asked == list(range(heads))
            and suffix <= WEIGHED_TOKENS
            and query.dtype is torch.float32
        )

    def _choose(self, layer: int, by_head: Floats, scaling: float) -> None:
        """Note what matters, and begin to read it for layers further down, and for this one if nothing was yet."""
        settings = self._settings
        importance = self.importance[layer] = by_head.mean(axis=0)
        if settings.guard is not None:
            self._guard_scores.append(settings.guard.score(ProbeFinding(by_head, self._count, self._kept)))
        for other in range(layer, min(self._reach(layer), self._load.layout.layers - 1) + 1):
            if other not in self._wanted:
                self._wanted[other] = self._want(other, self._known_importance(other, importance, scaling))

    def _reach(self, layer: int) -> int:
        """Return the last layer that a layer's probe may choose for: less far for the first ones, which differ most."""
        return min(2 * layer + 1, layer + self._settings.lag) if self._settings.by_chunks else layer

    def _take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """Put what was read of a layer into the engine's cache; return the tokens to attend to, None for all."""
        wanted = self._wanted[layer]
        loaded = wanted.loading.result()
        self._loaded_tokens += len(loaded.tokens) + self._ahead_tokens
        _put(loaded, self._load.layout.dtype, key, value)
        if self._settings.rest is Rest.BASE or len(wanted.selected) == self._tokens:
            return None
        return torch.from_numpy(np.union1d(wanted.selected, self._kept)).to(key.device)

    def _known_importance(self, layer: int, importance: Floats, scaling: float) -> Floats:
        """Return what is known of a layer: what its selector says without a probe, else what this one's probe found."""
        if self._settings.selector.heads(1, 1):
            return importance
        nothing = np.empty((1, self._tokens, 1), dtype=np.float32)
        known: Floats = self._settings.selector.importance(
            ProbeQuestion(layer, nothing, nothing, nothing, scaling)
        ).mean(axis=0)
        return known

    def _want(self, layer: int, importance: Floats) -> _Wanted:
        chunks, selected = self._selected(layer, importance)
        return _Wanted(chunks, selected, self._load.start(layer, chunks[~self._is_ahead[chunks]]))

    def _by_head(self, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> Floats:
        """Return (rows, prefix). query: (heads, suffix, head_dim), key: (kv_heads, prefix and suffix, head_dim)."""
        selector, tokens = self._settings.selector, self._tokens
        heads = selector.heads(len(query), len(key))
        if not heads:
            nothing = np.empty((1, tokens, 1), dtype=np.float32)
            return selector.importance(ProbeQuestion(layer, nothing, nothing, nothing, scaling))
        known = key.float()
        if self._keys:
            known = torch.cat([torch.from_numpy(self._keys(layer)).to(known), known[:, tokens:]], dim=1)
        return attention_mass(query[:, -PROBE_TOKENS:].float(), known, heads, tokens, scaling)

    def _selected(self, layer: int, importance: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunks to have and the tokens that are then exact and wanted."""
        load, orders, count = self._load, self._load.orders(layer), self._count
        if not self._settings.by_chunks:
            selected = top_tokens(importance, count)
            needed = np.union1d(selected, self._kept) if self._settings.rest is Rest.DROP else selected
            return load.chunks_with(layer, needed), selected
        wanted = importance.reshape(orders.shape).copy()
        for block, number in zip(*np.divmod(self._ahead, load.chunks_per_block), strict=True):
            wanted[block, orders[block, number * load.chunk_tokens :][: load.chunk_tokens]] = np.inf
        chunks = select_chunks(wanted, orders, count, load.chunk_tokens)
        return chunks, np.sort(np.concatenate(_places(load, layer, chunks)))


def _places(load: SparseLoad, layer: int, chunks: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the tokens of each chunk."""
    orders = load.orders(layer)
    blocks, numbers = np.divmod(chunks, load.chunks_per_block)
    return [
        block * orders.shape[1] + orders[block, number * load.chunk_tokens :][: load.chunk_tokens].astype(np.int64)
        for block, number in zip(blocks.tolist(), numbers.tolist(), strict=True)
    ]


def _put(loaded: ChunkBits, dtype: KVDtype, key: torch.Tensor, value: torch.Tensor) -> None:
    if not len(loaded.tokens):
        return
    signed = torch.from_numpy(np.ascontiguousarray(loaded.bits).view(f"<i{loaded.bits.itemsize}"))
    places = torch.from_numpy(loaded.tokens).to(key.device)
    with torch.inference_mode():
        for target, found in zip((key, value), signed.view(TORCH_DTYPES[dtype]), strict=True):
            # The engine's cache keeps these very tensors.
            target[0].index_copy_(1, places, found.transpose(0, 1).to(key))
