"""Models that say what a Llama says and keep another cache: made of its weights by changes that are exact.

A key's coordinates may be changed by any matrix that turns with RoPE if queries take the inverse, those of values by
any if the output projection does. What is left is rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

# How much louder a few dims of the biased model's keys are, and how many pairs of each head.
BIAS, BIASED_PAIRS = 50.0, 2
# Scales of the scaled model: powers of two from a quarter to four, which round nothing.
_OCTAVES = 2


def derived_model(kind: str, model: Any, ids: list[int]) -> Any:
    """Return a new model of a kind in DERIVED. ids: a text whose keys say which dims have a bias."""
    with torch.no_grad():
        made: Any = DERIVED[kind](model, torch.tensor([ids]))
    return made.eval()


def _rotated(model: Any, ids: torch.Tensor) -> Any:
    """Turn each head's values at random, and each of its keys' pairs."""
    rng, (layers, heads, dims) = torch.Generator().manual_seed(1), _shape(model)
    values = torch.linalg.qr(torch.randn(layers, heads, dims, dims, generator=rng, dtype=torch.float64)).Q
    angles = 2 * torch.pi * torch.rand(layers, heads, dims // 2, generator=rng, dtype=torch.float64)
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    keys = torch.cat([torch.cat([cos, -sin], dim=-1), torch.cat([sin, cos], dim=-1)], dim=-2)
    return _changed(model, keys, values)


def _scaled(model: Any, ids: torch.Tensor) -> Any:
    """Scale each pair of a key's dims, and each dim of a value."""
    rng, (layers, heads, dims) = torch.Generator().manual_seed(2), _shape(model)
    drawn = torch.randint(-_OCTAVES, _OCTAVES + 1, (layers, heads, dims + dims // 2), generator=rng)
    scales = 2.0 ** drawn.double()
    pairs = scales[..., dims:]
    return _changed(model, torch.diag_embed(torch.cat([pairs, pairs], dim=-1)), torch.diag_embed(scales[..., :dims]))


def _biased(model: Any, ids: torch.Tensor) -> Any:
    """Make the pairs of dims in which keys have the largest means louder, as Qwen's biases do."""
    past = DynamicCache(config=model.config)
    model(ids, past_key_values=past, use_cache=True)
    means = torch.stack([layer.keys[0].mean(dim=1) for layer in past.layers])
    _, _, dims = _shape(model)
    power = means[..., : dims // 2] ** 2 + means[..., dims // 2 :] ** 2
    loudest = power.topk(BIASED_PAIRS, dim=-1).indices
    pairs = torch.ones_like(power, dtype=torch.float64).scatter(-1, loudest, BIAS)
    keys = torch.diag_embed(torch.cat([pairs, pairs], dim=-1))
    return _changed(model, keys, torch.eye(dims, dtype=torch.float64).expand_as(keys))


def _repeated(model: Any, ids: torch.Tensor) -> Any:
    """Give each query head keys and values of its own: copies."""
    times = model.config.num_attention_heads // model.config.num_key_value_heads
    made = _copy(model, num_key_value_heads=model.config.num_attention_heads)
    for old, new in zip(model.model.layers, made.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            weight = getattr(old.self_attn, name).weight.unflatten(0, (-1, model.config.head_dim))
            getattr(new.self_attn, name).weight.copy_(weight.repeat_interleave(times, dim=0).flatten(0, 1))
    return made


# In the order in which they are judged.
DERIVED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "rotated": _rotated,
    "scaled": _scaled,
    "repeated": _repeated,
    "biased": _biased,
}


def _shape(model: Any) -> tuple[int, int, int]:
    """Return (layers, kv heads, dims of a head)."""
    config = model.config
    return config.num_hidden_layers, config.num_key_value_heads, config.head_dim


def _changed(model: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
    """Return the model with keys and values times these matrices: (layers, kv heads, dims, dims) each."""
    made = _copy(model)
    times = model.config.num_attention_heads // model.config.num_key_value_heads
    for old, new, key, value in zip(model.model.layers, made.model.layers, keys, values, strict=True):
        back, forth = key.inverse().mT.repeat_interleave(times, dim=0), value.inverse().repeat_interleave(times, dim=0)
        for name, matrix in (("q_proj", back), ("k_proj", key), ("v_proj", value)):
            weight = getattr(old.self_attn, name).weight.double().unflatten(0, (len(matrix), -1))
            getattr(new.self_attn, name).weight.copy_((matrix @ weight).flatten(0, 1))
        output = old.self_attn.o_proj.weight.double().unflatten(1, (len(forth), -1)).transpose(0, 1)
        new.self_attn.o_proj.weight.copy_((output @ forth).transpose(0, 1).flatten(1))
    return made


def _copy(model: Any, **changes: int) -> Any:
    """Return a model of the same weights, but for those whose shape changes."""
    made = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), **changes}))
    own = made.state_dict()
    fitting = {name: each for name, each in model.state_dict().items() if own[name].shape == each.shape}
    made.load_state_dict(fitting, strict=False)
    return made
