"""Attention functions in place of a model's usual one: they tell what a suffix attends to in a prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtide.importance import Floats

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
    """Attention of the first pass after a prefix to its tokens, for learning from uses. Answers are as without it."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        # Importance of each token by layer.
        self.importance: dict[int, Floats] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> Any:
        """Attend as usual; the first time of each layer note what the last tokens attend to."""
        layer = int(module.layer_idx)
        if layer not in self.importance:
            asked, heads = query[0, :, -PROBE_TOKENS:].float(), list(range(query.shape[1]))
            mass = attention_mass(asked, key[0].float(), heads, self._tokens, float(arguments["scaling"]))
            self.importance[layer] = mass.mean(axis=0)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> Any:
    """Do what the usual function does without a copy of keys and values for each head of a group.

    The heads of a group become more queries of one head: copies of 4,096 tokens take longer than a short suffix's sums.
    """
    _, heads, suffix, head_dim = query.shape
    group = heads // key.shape[1]
    is_plain = attention_mask is not None and attention_mask.shape[1] == 1 and query.shape[0] == 1
    if group == 1 or not is_plain or any(arguments.get(name) is not None for name in ("softcap", "position_bias")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    assert attention_mask is not None
    packed = query.reshape(1, heads // group, group * suffix, head_dim)
    mask = attention_mask.repeat(1, 1, group, 1)
    scaling = arguments["scaling"]
    found = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(1, heads, suffix, -1).transpose(1, 2).contiguous(), None


class WeightRoom:
    """Memory for the weights of one layer after the other: 3 MiB of fresh memory take as long as filling them."""

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None

    def of(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return room for a tensor, with anything in it; what was returned before is no longer valid."""
        size = math.prod(shape)
        if self._room is None or self._room.numel() < size:
            self._room = like.new_empty(size)
        return self._room[:size].view(shape)


def weighed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int, scaling: float, room: WeightRoom
) -> tuple[torch.Tensor, Floats]:
    """Do what `grouped_attention` does, and find what `attention_mass` does of the same weights.

    query: (1, heads, suffix, head_dim), a short suffix, of which each token sees the prefix and those before it.
    """
    _, heads, suffix, head_dim = query.shape
    kv_heads, rows = key.shape[1], heads // key.shape[1] * suffix
    packed = query.reshape(kv_heads, rows, head_dim) * scaling
    weights = room.of(query, (kv_heads, rows, key.shape[2]))
    torch.bmm(packed, key[0].transpose(1, 2), out=weights)
    by_head = weights.view(heads, suffix, -1)
    hidden = torch.ones(suffix, suffix, dtype=torch.bool, device=key.device).triu(1)
    by_head[:, :, tokens:].masked_fill_(hidden, -torch.inf)
    torch.softmax(weights, -1, out=weights)
    output = torch.bmm(weights, value[0]).view(1, heads, suffix, -1).transpose(1, 2).contiguous()
    mass: Floats = (by_head[:, -PROBE_TOKENS:, :tokens].mean(dim=1) * tokens).cpu().numpy()
    return output, mass


def attention_mass(query: torch.Tensor, key: torch.Tensor, heads: list[int], tokens: int, scaling: float) -> Floats:
    """Return what `importance.probe.attention_mass` does, by the engine's own threads.

    numpy's would be a second team, whose waiting costs seconds beside busy neighbours (2 s a prompt at load 11).
    query: (heads, asked, head_dim), the last ones of the suffix; key: (kv_heads, tokens and suffix, head_dim).
    """
    asked, group = query.shape[1], len(query) // len(key)
    suffix = key.shape[1] - tokens
    if heads == list(range(len(query))):
        # The heads of a group are more queries of one: keys are not copied for each.
        chosen = query.reshape(len(key), group * asked, -1) * scaling
        logits = torch.bmm(chosen, key.transpose(1, 2)).view(len(query), asked, -1)
    else:
        logits = torch.bmm(query[heads] * scaling, key[[head // group for head in heads]].transpose(1, 2))
    hidden = torch.ones(asked, suffix, dtype=torch.bool, device=key.device).triu(1 + suffix - asked)
    logits[:, :, tokens:].masked_fill_(hidden, -torch.inf)
    mass: Floats = (logits.softmax(-1)[:, :, :tokens].mean(dim=1) * tokens).cpu().numpy()
    return mass
