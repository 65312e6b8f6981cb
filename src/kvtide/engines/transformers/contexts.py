"""Contexts as a model's groups of layers keep them, and caches made of them again: what profiles are fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import ProfileShape
from kvtide.codec.rotary import Frequencies, Pairs, Rotary
from kvtide.codec.tide import AllRows
from kvtide.engines.transformers.groups import (
    ModelGroup,
    RestoredRoom,
    StateRoom,
    block_bits,
    groups_of,
    halves_of,
    profile_shapes,
    read_states,
)
from kvtide.errors import UnsupportedModel
from kvtide.group import GroupKind
from kvtide.keys import block_keys
from kvtide.types import BlockKey, Namespace, ObjectId


class Context(NamedTuple):
    """A prefilled context, exact: full blocks of each group of rows, and the states after its last token."""

    metas: list[list[BlockMeta]]
    blocks: list[list[BlockBits]]
    states: list[BlockBits]

    @property
    def tokens(self) -> int:
        """Return how many tokens it has."""
        return len(self.metas[0]) * self.metas[0][0].layout.tokens


class ModelContexts:
    """A model, asked what it keeps of contexts, by group. `shapes`: of the groups of rows. UnsupportedModel, too."""

    def __init__(self, model: Any, block_tokens: int) -> None:
        self.model = model
        groups = groups_of(model, block_tokens)
        self._rows = [each for each in groups if each.rows]
        self._states = [each for each in groups if each.states]
        self.shapes: list[ProfileShape] = profile_shapes(groups)

    def rotaries(self) -> list[Rotary | None]:
        """Return how the keys of each group of rows turn. UnsupportedModel where that is unknown."""
        return [_rotary(each, self.model) for each in self._rows]

    def all_rows(self) -> AllRows | None:
        """Return the rows of all groups as blocks of all layers have them; None for a plain model or many shapes."""
        groups = [each.group for each in self._rows]
        shapes = {(each.layout.kv_heads, each.layout.head_dim, each.kind) for each in groups}
        if not self.shapes[0].group or len(shapes) > 1 or groups[0].kind is not GroupKind.KV:
            return None
        numbers = sorted(number for each in groups for number in each.layers)
        places = tuple(tuple(map(numbers.index, each.layers)) for each in groups)
        layout = groups[0].layout
        whole = BlockLayout(len(numbers), layout.tokens, layout.kv_heads, layout.head_dim, layout.dtype)
        return AllRows(whole, places, rotary_of(self.model, numbers))

    def capture(self, ids: Sequence[int]) -> Context:
        """Prefill token ids, whole blocks of them, and return what is kept."""
        past = DynamicCache(config=self.model.config)
        for layer in past.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        with torch.no_grad():
            self.model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
        metas = [_metas(ids, each) for each in self._rows]
        blocks = [[block_bits(past, meta, each) for meta in mine] for each, mine in zip(self._rows, metas, strict=True)]
        return Context(metas, blocks, [read_states(past, each) for each in self._states])

    def restored(self, context: Context, blocks: Sequence[Sequence[BlockBits]] | None = None) -> DynamicCache:
        """Return a cache of a context, or of these blocks in place of its own, by group; states are the context's."""
        past = DynamicCache(config=self.model.config)
        parts = [*(context.blocks if blocks is None else blocks), *([states] for states in context.states)]
        for each, mine in zip([*self._rows, *self._states], parts, strict=True):
            tokens = context.tokens
            room = RestoredRoom(each.group.layout, tokens, group=each) if each.rows else StateRoom(each)
            for position, bits in enumerate(mine):
                room.write(position, bits)
            room.fill(past, tokens, self.model.device)
        return past

    def ask_gradients(self, past: DynamicCache) -> list[list[torch.Tensor]]:
        """Make a restored cache's keys and values ask for gradients, and no weights; return them by group and layer."""
        self.model.requires_grad_(False)
        found = []
        for each in self._rows:
            found.append(list[torch.Tensor]())
            for layer in (past.layers[number] for number in each.group.layers):
                layer.keys, layer.values = (
                    tensor.detach().clone().requires_grad_(True) for tensor in (layer.keys, layer.values)
                )
                found[-1] += [layer.keys, layer.values]
        return found

    def halves(self, group: int, keys: torch.Tensor, values: torch.Tensor) -> NDArray[np.float32]:
        """Return tensors of a layer of a group of rows as a block has them: (2, tokens, kv_heads, head_dim)."""
        parts = (tensor[0].float().transpose(0, 1).contiguous().numpy() for tensor in (keys, values))
        rows = self._rows[group].rows
        assert rows is not None
        return np.stack(halves_of(rows, *parts))


def _metas(ids: Sequence[int], group: ModelGroup) -> list[BlockMeta]:
    # Objects are made only to be measured: any namespace will do.
    namespace, layout = Namespace(bytes(32)), group.group.layout
    keys = [BlockKey(namespace), *block_keys(namespace, np.array(ids, dtype=np.uint32), layout.tokens)]
    return [
        BlockMeta(ObjectId(namespace, key), parent, number * layout.tokens, layout)
        for number, (parent, key) in enumerate(pairwise(keys))
    ]


def _rotary(group: ModelGroup, model: Any) -> Rotary | None:
    found = rotary_of(model, group.group.layers)
    if found is None or group.group.kind is GroupKind.KV:
        return found
    rows, dims = group.rows, found.dim_stop - found.dim_start
    if rows is None or rows.value != (1, dims) or rows.key != (1, found.dim_start):
        raise UnsupportedModel(f"keys can't be turned back: {group.group.name} is no latent beside {dims} rotated dims")
    # They come first in a row.
    return Rotary(found.pairs, 0, dims, found.kinds, found.layer_kinds)


# By `model_type`; tests hold each one against the family's own code.
_HALVES = (
    *("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "phi", "phi3", "olmo", "olmo2", "olmo3", "granite", "granitemoehybrid", "starcoder2", "falcon"),
    *("falcon_h1", "mixtral", "smollm3", "gpt_oss", "gpt_neox", "stablelm", "persimmon", "nemotron", "lfm2"),
    # DeepSeek's third version puts neighbours into halves before it keeps them.
    "deepseek_v3",
)
_NEIGHBOURS = "gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "helium", "ernie4_5", "deepseek_v2", "llama4_text"
FAMILIES = dict.fromkeys(_HALVES, Pairs.HALVES) | dict.fromkeys(_NEIGHBOURS, Pairs.NEIGHBOURS)
# Learned positions, ALiBi or none: nothing is done to keys.
UNROTATED_FAMILIES = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "mpt", "kimi_linear", "nemotron_h"})


def rotary_of(model: Any, layers: Sequence[int] = ()) -> Rotary | None:
    """Return how a model turns the keys that it caches, None if it does not. UnsupportedModel where that is unknown.

    layers: those that count, in this order, numbered from 0 in what is returned; none for all. Of a model with parts
    its text part counts. Of latent attention the cached row is the latent, then the rotated part.
    """
    config = model.config.get_text_config()
    name = config.model_type
    is_rotated = getattr(config, "position_embedding_type", "rope") == "rope" or name != "granitemoehybrid"
    if name in UNROTATED_FAMILIES or getattr(config, "alibi", False) or not is_rotated:
        return None
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"keys can't be turned back: not known how models of type {name!r} rotate, only of {sorted(FAMILIES)}"
        )
    # What says how fast keys turn, by type of layer if that differs; None for layers that leave them as they are.
    embedding = next((each for each in model.get_decoder().modules() if hasattr(each, "rope_type")), None)
    which = [_speeds_name(embedding, config, layer) for layer in layers or range(config.num_hidden_layers)]
    kinds = {each: _frequencies(embedding, config, each) for each in dict.fromkeys(which) if each is not None}
    pairs = {len(each.values) for each in kinds.values()} or {len(_frequencies(embedding, config, "").values)}
    if len(pairs) > 1:
        raise UnsupportedModel("keys can't be turned back: layers rotate different numbers of dims")
    dims = 2 * pairs.pop()
    order: list[str | None] = [*kinds, None] if None in which else [*kinds]
    still = [Frequencies((0.0,) * (dims // 2), 1.0, 0)] * (None in which)
    layer_kinds = tuple(map(order.index, which)) if len(order) > 1 else ()
    start = getattr(config, "kv_lora_rank", None) or 0
    try:
        return Rotary(FAMILIES[name], start, start + dims, (*kinds.values(), *still), layer_kinds)
    except ValueError as error:
        raise UnsupportedModel(f"keys can't be turned back: {error}") from error


def _speeds_name(embedding: Any, config: Any, layer: int) -> str | None:
    """Return what the attributes of a layer's frequencies begin with, None for a layer whose keys stay."""
    of_type = (getattr(config, "layer_types", None) or [""] * (layer + 1))[layer]
    if config.model_type in {"smollm3", "llama4_text"}:
        return "" if config.no_rope_layers[layer] else None
    if config.model_type == "cohere2":
        return "" if of_type == "sliding_attention" else None
    return f"{of_type}_" if hasattr(embedding, f"{of_type}_inv_freq") else ""


def _frequencies(embedding: Any, config: Any, name: str) -> Frequencies:
    if embedding is None:
        # GPT-J and CodeGen, which have tables instead.
        values = 10_000.0 ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)
        return Frequencies(tuple(values.astype(np.float32).tolist()), 1.0, 0)
    # They hold for prompts of any length: `groups_of` refuses models of which they don't.
    values, scale = getattr(embedding, f"{name}inv_freq").float(), getattr(embedding, f"{name}attention_scaling")
    return Frequencies(tuple(values.tolist()), float(np.float32(scale)), 0)
