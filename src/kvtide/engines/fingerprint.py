"""Says what a Hugging Face model's KV cache looks like and whose it is, or why kvtide can't serve the model.

Invariant: two models share a fingerprint only if config and every weight are the same.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
import xxhash
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtide.block import BlockLayout, KVDtype
from kvtide.errors import UnsupportedModel
from kvtide.keys import NamespaceSpec
from kvtide.types import Namespace

__all__ = [
    "ModelShape",
    "NamespaceSettings",
    "model_fingerprint",
    "model_layout",
    "model_shape",
    "weights_version",
]

TORCH_DTYPES = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.BFLOAT16: torch.bfloat16,
}
# Their rotary frequencies depend on the length of the sequence: keys from a short prompt are wrong in a long one.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Config entries that say where a model came from or how it is written down, not what it computes.
_VOLATILE_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}


class ModelShape(NamedTuple):
    """The KV cache of one model: what `BlockLayout` needs, save for the tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KVDtype


def model_shape(model: Any) -> ModelShape:
    """Return the shape of the model's KV cache, found by running two tokens through it.

    UnsupportedModel, with the reason, for a model whose cache is not plain per-token keys and values of one shape,
    or depends on later tokens or on the length of the prompt.
    """
    _refuse_by_config(model)
    first, second = _probe(model, [0, 1]), _probe(model, [0, 2])
    keys, values = first.layers[0].keys, first.layers[0].values
    shapes = {tuple(tensor.shape) for layer in first.layers for tensor in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise UnsupportedModel(f"keys and values of all layers must have one shape, this model has {sorted(shapes)}")
    batch, kv_heads, tokens, head_dim = keys.shape
    if (batch, tokens) != (1, 2):
        raise UnsupportedModel(f"expected a cache of (1, heads, 2, head_dim) after two tokens, got {tuple(keys.shape)}")
    dtypes = [dtype for dtype, torch_dtype in TORCH_DTYPES.items() if keys.dtype == values.dtype == torch_dtype]
    if not dtypes:
        raise UnsupportedModel(f"KV dtype must be float32, float16 or bfloat16, got {keys.dtype} and {values.dtype}")
    for one, other in zip(first.layers, second.layers, strict=True):
        if not torch.allclose(one.keys[:, :, :1], other.keys[:, :, :1], rtol=1e-2, atol=1e-2):
            raise UnsupportedModel("keys of a token change with later tokens: the model is not causal")
    return ModelShape(len(first.layers), kv_heads, head_dim, dtypes[0])


def _refuse_by_config(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models keep a cache that depends on the encoder's input")
    if model.training:
        raise UnsupportedModel("the model is in training mode, where dropout changes the cache; call model.eval()")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel("the model has adapters that can be switched at any time; merge them into the weights")
    layers = DynamicCache(config=model.config).layers
    foreign = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if foreign:
        raise UnsupportedModel(f"layers that keep only part of the past or a state can't be restored: {foreign}")
    if not layers:
        raise UnsupportedModel("the model's config does not say how many layers its cache has")
    rope_type = _rope_types(getattr(config, "rope_parameters", None)) & _LENGTH_DEPENDENT_ROPE
    if rope_type:
        raise UnsupportedModel(f"rotary scaling {sorted(rope_type)} depends on the length of the prompt")


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def _probe(model: Any, tokens: list[int]) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([tokens], device=model.device), past_key_values=cache, use_cache=True)
    empty = [position for position, layer in enumerate(cache.layers) if layer.get_seq_length() == 0]
    if empty:
        raise UnsupportedModel(f"layers {empty} keep no keys of their own: layers that share a cache are not supported")
    return cache


def model_fingerprint(model: Any) -> bytes:
    """Return a digest of the model's config and of every weight. Reads all weights once."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE_CONFIG}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor!r}".encode())
            continue
        data = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(data)}\n".encode())
    return digest.digest()


def weights_version(model: Any) -> int:
    """Return a number that changes when a weight is replaced or written in place; cheap, reads no weight."""
    return hash(tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()))


class NamespaceSettings(NamedTuple):
    """What besides the model decides which blocks it may use."""

    block_tokens: int
    tenant_salt: bytes
    fingerprint: bytes | None
    is_exact: bool

    def namespace(self, model: Any, layout: BlockLayout) -> Namespace:
        """Return the namespace of the model's blocks; reads all weights unless a fingerprint was given.

        Blocks of lossy codecs, and what was computed on top of them, are apart from exact ones (decision 0005).
        """
        shape = f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}"
        text = f"{shape} {'exact' if self.is_exact else 'approximate'}"
        fingerprint = self.fingerprint or model_fingerprint(model)
        return NamespaceSpec(fingerprint, layout.dtype, text, self.block_tokens, self.tenant_salt).digest()


def model_layout(model: Any, block_tokens: int) -> BlockLayout:
    """Return the layout of a model's blocks. UnsupportedModel as in `model_shape`."""
    shape = model_shape(model)
    return BlockLayout(shape.layers, block_tokens, shape.kv_heads, shape.head_dim, shape.dtype)
