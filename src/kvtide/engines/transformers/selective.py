"""Attention over a prefix of which each layer loads only the chunks that matter to the suffix (IMPRESS).

The suffix's queries meet the rough keys of all tokens; the most important chunks are loaded exactly, the rest stays
rough or is left out. Keys carry their rotation, so that positions are right whatever is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtide.block import KVDtype
from kvtide.engines.transformers.groups import TORCH_DTYPES, cut_to
from kvtide.importance import (
    AllHeads,
    FirstHeads,
    Floats,
    Guard,
    HeadsAgree,
    NeighboursAgree,
    select_chunks,
    top_tokens,
)
from kvtide.store.load.sparse import ChunkBits, SparseLoad

# Of a long suffix the last tokens are asked: the answer goes on from them, and all would cost as much as attending.
PROBE_TOKENS = 32


@contextmanager
def attending(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Have the model attend through a function with the arguments and masks of the usual one (sdpa)."""
    usual = model.config._attn_implementation
    # Functions are looked up by name in the whole process: each has a name of its own.
    name = f"kvtide-{id(attend):x}"
    AttentionMaskInterface.register(name, sdpa_mask)
    ALL_ATTENTION_FUNCTIONS[name] = attend
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = usual
        del ALL_ATTENTION_FUNCTIONS[name]
        # There is no public way back, and names must not add up.
        AttentionMaskInterface._global_mapping.pop(name)


class ObservedPrefix:
    """Attention of the last tokens of a prompt's first pass to its first ones, for learning. Answers are as without."""

    def __init__(self, tokens: int, settings: SparseSettings) -> None:
        """tokens: the first ones, all of the prompt maybe. settings: whose guard is asked of what its heads choose."""
        self.tokens = tokens
        # Of each token, by layer.
        self.importance: dict[int, Floats] = {}
        self._settings = settings
        self._scores: list[float] = []

    @property
    def is_refused(self) -> bool:
        """Tell whether the guard trusts no selection of what was attended to."""
        guard = self._settings.guard
        return guard is not None and bool(self._scores) and not guard.trusts(self._scores, self._settings.ratio)

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
    ) -> Any:
        """Attend as usual; the first time that a layer has all tokens note what the last ones attend to."""
        layer = int(module.layer_idx)
        if layer not in self.importance and key.shape[2] >= self.tokens:
            asked, heads = query[0, :, -PROBE_TOKENS:].float(), list(range(query.shape[1]))
            mass = attention_mass(asked, key[0].float(), heads, self.tokens, float(arguments["scaling"]))
            self.importance[layer] = mass.mean(axis=0)
            settings = self._settings
            if settings.guard is not None:
                chosen, count = settings.selector.heads(len(heads), key.shape[1]), settings.exact_tokens(self.tokens)
                self._scores.append(settings.guard.score(mass[chosen], count, kept_tokens(self.tokens)))
        return sdpa_attention_forward(module, query, key, value, mask, **arguments)


def grouped_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
) -> Any:
    """Attend as usual, heads as queries of their group: copying 4,096 tokens for each takes longer than the sums."""
    _, heads, suffix, head_dim = query.shape
    group = heads // key.shape[1]
    is_plain = mask is not None and mask.shape[1] == 1 and query.shape[0] == 1
    if group == 1 or not is_plain or any(arguments.get(name) is not None for name in ("softcap", "position_bias")):
        return sdpa_attention_forward(module, query, key, value, mask, **arguments)
    assert mask is not None
    packed = query.reshape(1, heads // group, group * suffix, head_dim)
    found = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask.repeat(1, 1, group, 1), scale=arguments["scaling"]
    )
    return found.reshape(1, heads, suffix, -1).transpose(1, 2).contiguous(), None


def weighed_attention(query: Tensor, key: Tensor, value: Tensor, tokens: int, scaling: float) -> tuple[Tensor, Floats]:
    """Do what `grouped_attention` and `attention_mass` do by the same weights, for a short causal suffix."""
    _, heads, suffix, _ = query.shape
    weights = _causal_weights(query[0], key[0], tokens, scaling)
    output = torch.bmm(weights.view(key.shape[1], -1, key.shape[2]), value[0]).view(1, heads, suffix, -1)
    return output.transpose(1, 2).contiguous(), _mass_of(weights[:, -PROBE_TOKENS:], tokens)


def attention_mass(query: Tensor, key: Tensor, heads: list[int], tokens: int, scaling: float) -> Floats:
    """Return what the suffix of each head attends to, its own keys beside: (heads, tokens), 1 on average at most.

    By torch: numpy's threads would wait for seconds beside busy neighbours (2 s a prompt at load 11).
    query: (heads, asked, head_dim), of the last tokens; key: (kv_heads, tokens and suffix, head_dim).
    """
    if heads != list(range(len(query))):
        group = len(query) // len(key)
        query, key = query[heads], key[[head // group for head in heads]]
    return _mass_of(_causal_weights(query, key, tokens, scaling), tokens)


def _causal_weights(query: Tensor, key: Tensor, tokens: int, scaling: float) -> Tensor:
    """Return the weights of the last tokens' queries, (heads, asked, head_dim), over all keys."""
    heads, asked, head_dim = query.shape
    own = max(asked, key.shape[1] - tokens)
    # The heads of a group are more queries of one: keys are not copied for each.
    packed = query.reshape(len(key), -1, head_dim) * scaling
    weights = torch.bmm(packed, key.transpose(1, 2)).view(heads, asked, -1)
    hidden = torch.ones(asked, own, dtype=torch.bool, device=key.device).triu(1 + own - asked)
    weights[:, :, -own:].masked_fill_(hidden, -torch.inf)
    return torch.softmax(weights, -1, out=weights)


def _mass_of(weights: Tensor, tokens: int) -> Floats:
    mass: Floats = (weights[:, :, :tokens].mean(dim=1) * tokens).cpu().numpy()
    return mass


# Always attended to: the first tokens draw attention from all others, the last ones are what the suffix goes on from.
FIRST_TOKENS = 4
LAST_TOKENS = 32


def kept_tokens(prefix: int) -> NDArray[np.int64]:
    """Return the tokens that are always attended to."""
    return np.union1d(np.arange(min(FIRST_TOKENS, prefix)), np.arange(max(0, prefix - LAST_TOKENS), prefix))


_log = logging.getLogger(__name__)

# KL divergence of the next token that a selection of part of a prefix is taken for, in nats: SmolLM2-135M at ratios of
# .1 to .5 (`kvtide-lab bench importance`: .0100, .0077, .0002).
SELECTED_QUALITY = 1e-2
# The same where the rest is left out: up to .53 at a ratio of .1.
DROPPED_QUALITY = 0.6
# Layers that a fallback reads by one request a block: the first ones attend while the next ones are read.
FALLBACK_LAYERS = 6
# Up to so many tokens of a suffix attention's own weights are looked at; those of more would not stay in caches.
WEIGHED_TOKENS = 64


class Rest(Enum):
    """The fate of tokens that are not selected: they stay rough, or are left out (the paper)."""

    BASE = "base"
    DROP = "drop"


class SparseSettings(NamedTuple):
    """The share of a prefix that is loaded exactly, and how that is chosen. What the guard refuses is loaded whole.

    by_chunks: chooses chunks by their mean importance, else single tokens, with the chunks that they lie in. ahead: the
    part that past uses choose, loaded with the bases. With `by_chunks`, lag: how many layers further down a layer's
    probe chooses, so that chunks are read while those between are computed; together: for how many at once.
    """

    ratio: float
    selector: AllHeads = AllHeads()
    guard: Guard | None = NeighboursAgree()
    rest: Rest = Rest.BASE
    by_chunks: bool = True
    ahead: float = 0.5
    lag: int = 3
    together: int = 5

    @property
    def quality(self) -> float:
        """Return the KL that what is computed on such a prefix is taken for."""
        return DROPPED_QUALITY if self.rest is Rest.DROP else SELECTED_QUALITY

    def tokens_ahead(self, block_tokens: int) -> int:
        """Return how many tokens of a block are loaded ahead."""
        return int(self.ratio * self.ahead * block_tokens) if self.by_chunks else 0

    def exact_tokens(self, tokens: int) -> int:
        """Return how many tokens of a prefix are selected."""
        return max(1, round(self.ratio * tokens))


@dataclass(frozen=True, slots=True)
class Impress:
    """The paper's own way: some heads choose a share of the tokens, the others are left out. A step for each field.

    heads: how many choose for all, whose keys are read alone; None for all heads. is_guarded: loads the whole where
    they don't agree more than chance. is_reordered: stores important tokens together. is_scored: memory keeps what is
    used often and has many of them; else what was used last.
    """

    ratio: float
    heads: int | None = 3
    is_guarded: bool = True
    is_reordered: bool = True
    is_scored: bool = True

    def settings(self) -> SparseSettings:
        """Return how such a prefix is loaded."""
        selector = AllHeads() if self.heads is None else FirstHeads(self.heads)
        guard = HeadsAgree() if self.is_guarded else None
        return SparseSettings(self.ratio, selector, guard, Rest.DROP, by_chunks=False)

    def codec(self, heads: int, kv_heads: int) -> str:
        """Return what stores the keys of the choosing heads apart, of a model with so many."""
        asked = self.settings().selector.heads(heads, kv_heads)
        return f"impress:{1 + asked[-1] // (heads // kv_heads)}"


class SelectedLayers(NamedTuple):
    """The outcome of a selection: whether it fell back to the whole, share of tokens that are exact, what was read."""

    is_fallback: bool
    tokens_share: float
    read_bytes: int
    whole_bytes: int
    reads: int


class _Refused(Exception):
    """Ends a pass whose selection the guard does not trust."""


class _Wanted(NamedTuple):
    """The chunks that a layer is to have exactly, and those being read."""

    chunks: NDArray[np.int64]
    selected: NDArray[np.int64]
    loading: Sequence[Future[dict[int, ChunkBits]]]


class SparsePrefix:
    """One prefix in one engine, from its suffix's first pass on. Use `active` around every pass of the model."""

    def __init__(self, load: SparseLoad, settings: SparseSettings) -> None:
        """load: open, of all blocks in the engine's cache."""
        self._load = load
        self._settings = settings
        self._attended: dict[int, Tensor | None] = {}
        self._wanted: dict[int, _Wanted] = {}
        self._guard_scores: list[float] = []
        self._is_fallback = False
        # Importance of each token by layer, for those who learn from uses.
        self.importance: dict[int, Floats] = {}
        self._tokens = load.tokens
        self._count = settings.exact_tokens(self._tokens)
        self._kept = kept_tokens(self._tokens)
        self._ahead = load.ahead_chunks()
        self._ahead_tokens = len(_places(load, 0, self._ahead))
        self._layers = range(load.layout.layers)
        # What came after the leading chunks.
        self._is_exact = np.zeros((load.layout.layers, self._tokens), dtype=bool)

    def active(self, model: Any) -> AbstractContextManager[None]:
        """Have the model attend through this selection."""
        return attending(model, self._attend)

    def report(self) -> SelectedLayers:
        """Return what has been done so far."""
        layers, load = len(self._attended), self._load
        exact = int(self._is_exact.sum()) + layers * self._ahead_tokens
        share = exact / (layers * self._tokens) if layers else 0.0
        whole_bytes = load.blocks * load.layout.raw_bytes
        return SelectedLayers(self._is_fallback, share, load.read_bytes, whole_bytes, load.reads)

    def probe(self, model: Any, suffix: Tensor, past: DynamicCache) -> None:
        """Run the suffix but for its last token; where the guard, if any, refuses, load all and forget that it ran."""
        if self._settings.guard is None:
            return
        asked = suffix[:, :-1] if suffix.shape[1] > 1 else suffix
        try:
            with torch.inference_mode(), self.active(model):
                model(asked, past_key_values=past, use_cache=True, logits_to_keep=1)
        except _Refused as refused:
            _log.debug("the rest of a prefix is loaded: %s", refused)
            self.fall_back(past)
        else:
            if asked is suffix:
                cut_to(past, self._tokens)

    def fall_back(self, past: DynamicCache) -> None:
        """Begin to load what is missing, a few layers after the other; a layer is exact when it attends."""
        self._is_fallback = True
        cut_to(past, self._tokens)
        chunks, every = np.arange(self._load.blocks * self._load.chunks_per_block), np.arange(self._tokens)
        for first in self._layers[::FALLBACK_LAYERS]:
            layers = self._layers[first : first + FALLBACK_LAYERS]
            had = {layer: self._wanted.get(layer, _Wanted(self._ahead, self._ahead, ())) for layer in layers}
            rest = self._load.start({layer: np.setdiff1d(chunks, found.chunks) for layer, found in had.items()})
            for layer, found in had.items():
                loading = rest if layer in self._attended else [*found.loading, *rest]
                self._wanted[layer] = _Wanted(chunks, every, loading)
        self._attended = {}

    def _ask_guard(self, by_head: Floats) -> None:
        """Note a layer's score. _Refused as soon as no score of those behind it can change the verdict."""
        guard, scores = self._settings.guard, self._guard_scores
        if guard is None:
            return
        scores.append(guard.score(by_head, self._count, self._kept))
        best = [1.0] * (len(self._layers) - len(scores))
        if not guard.trusts([*scores, *best], self._settings.ratio):
            raise _Refused(f"{type(guard).__name__} after {len(scores)} layers of {len(self._layers)}")

    def _attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
    ) -> Any:
        layer = int(module.layer_idx)
        if layer not in self._attended:
            scaling = float(arguments["scaling"])
            if self._is_fallback:
                self._attended[layer] = self._take(layer, key, value)
            elif layer in self._wanted and self._is_weighed(query):
                self._attended[layer] = self._take(layer, key, value)
                output, by_head = weighed_attention(query, key, value, self._tokens, scaling)
                self._choose(layer, by_head)
                return output, None
            else:
                self._choose(layer, self._by_head(layer, query[0], key[0], scaling))
                self._attended[layer] = self._take(layer, key, value)
        attended = self._attended[layer]
        if attended is None and self._is_fallback:
            return sdpa_attention_forward(module, query, key, value, mask, **arguments)
        if attended is not None:
            behind = torch.arange(self._tokens, key.shape[2], device=key.device)
            places = torch.cat([attended, behind])
            key, value = key.index_select(2, places), value.index_select(2, places)
            mask = None if mask is None else mask.index_select(-1, places)
        return grouped_attention(module, query, key, value, mask, **arguments)

    def _is_weighed(self, query: Tensor) -> bool:
        """Tell whether attending itself says what matters: all heads ask for it, by the keys that they attend to."""
        _, heads, suffix, _ = query.shape
        asked = self._settings.selector.heads(heads, self._load.layout.kv_heads)
        return (
            self._settings.rest is Rest.BASE
            and asked == list(range(heads))
            and suffix <= WEIGHED_TOKENS
            and query.dtype is torch.float32
        )

    def _choose(self, layer: int, by_head: Floats) -> None:
        """Note what matters, and begin to read it for layers further down, and for this one if nothing was yet."""
        importance = self.importance[layer] = by_head.mean(axis=0)
        self._ask_guard(by_head)
        fresh = [each for each in range(layer, self._reach(layer) + 1) if each not in self._wanted]
        chosen = {each: self._selected(each, importance) for each in fresh}
        loading = self._load.start({each: np.setdiff1d(chunks, self._ahead) for each, (chunks, _) in chosen.items()})
        self._wanted |= {each: _Wanted(*found, loading) for each, found in chosen.items()}

    def _reach(self, layer: int) -> int:
        """Return the last layer that a layer's probe chooses for: less far for the first ones, which differ most."""
        settings = self._settings
        if not settings.by_chunks:
            return layer
        most = min(2 * layer + 1, self._load.layout.layers - 1)
        near = min(layer + settings.lag, most)
        return near if near in self._wanted else min(near + settings.together - 1, most)

    def _take(self, layer: int, key: Tensor, value: Tensor) -> Tensor | None:
        """Put what was read of a layer into the engine's cache; return the tokens to attend to, None for all."""
        wanted = self._wanted[layer]
        parts = [block.result() for block in wanted.loading]
        loaded = self._load.joined([part[layer] for part in parts if layer in part])
        self._is_exact[layer, loaded.tokens] = True
        _put(loaded, self._load.layout.dtype, key, value)
        if self._settings.rest is Rest.BASE:
            return None
        tokens = np.union1d(wanted.selected, self._kept)
        if not self._settings.by_chunks:
            # A single one that could not be had is left out.
            tokens = tokens[self._is_exact[layer, tokens]]
        return None if len(tokens) == self._tokens else torch.from_numpy(tokens).to(key.device)

    def _by_head(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> Floats:
        """Return (rows, prefix). query: (heads, suffix, head_dim), key: (kv_heads, prefix and suffix, head_dim)."""
        heads = self._settings.selector.heads(len(query), len(key))
        return attention_mass(query[:, -PROBE_TOKENS:].float(), key.float(), heads, self._tokens, scaling)

    def _selected(self, layer: int, importance: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunks to have and the tokens that are then exact and wanted."""
        load, orders, count = self._load, self._load.orders(layer), self._count
        if not self._settings.by_chunks:
            selected = top_tokens(importance, count)
            needed = np.union1d(selected, self._kept) if self._settings.rest is Rest.DROP else selected
            return load.chunks_with(layer, needed), selected
        wanted = importance.copy()
        wanted[_places(load, layer, self._ahead)] = np.inf
        chunks = select_chunks(wanted.reshape(orders.shape), orders, count, load.chunk_tokens)
        return chunks, np.sort(_places(load, layer, chunks))


def _places(load: SparseLoad, layer: int, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens of chunks of a layer, numbered through."""
    orders, found = load.orders(layer), [np.empty(0, dtype=np.int64)]
    for block, number in zip(*np.divmod(chunks, load.chunks_per_block), strict=True):
        tokens = orders[block, number * load.chunk_tokens :][: load.chunk_tokens]
        found.append(block * orders.shape[1] + tokens.astype(np.int64))
    return np.concatenate(found)


def _put(loaded: ChunkBits, dtype: KVDtype, key: Tensor, value: Tensor) -> None:
    signed = torch.from_numpy(np.ascontiguousarray(loaded.bits).view(f"<i{loaded.bits.itemsize}"))
    places = torch.from_numpy(loaded.tokens).to(key.device)
    with torch.inference_mode():
        for target, found in zip((key, value), signed.view(TORCH_DTYPES[dtype]), strict=True):
            # The engine's cache keeps these very tensors.
            target[0].index_copy_(1, places, found.transpose(0, 1).to(key))
