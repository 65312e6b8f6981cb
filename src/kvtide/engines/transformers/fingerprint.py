"""Says what a Hugging Face model's KV cache looks like and where its blocks belong, or why kvtide can't serve it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines.transformers.watch import ModelWatch, foreign_code
from kvtide.errors import UnsupportedModel
from kvtide.keys import NamespaceSpec
from kvtide.types import Namespace

TORCH_DTYPES = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.BFLOAT16: torch.bfloat16,
}
# Their rotary frequencies depend on the length of the sequence: keys from a short prompt are wrong in a long one.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


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


class NamespaceSettings(NamedTuple):
    """Settings besides the model that decide which blocks it may use.

    fingerprint: the user's, for the model as it was when it got its cache.
    """

    block_tokens: int
    tenant_salt: bytes
    fingerprint: bytes | None
    is_exact: bool

    def namespace(self, fingerprint: bytes, layout: BlockLayout) -> Namespace:
        """Return the namespace of a model's blocks.

        Blocks of lossy codecs, and what was computed on top of them, are apart from exact ones (decision 0005).
        """
        shape = f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}"
        text = f"{shape} {'exact' if self.is_exact else 'approximate'}"
        return NamespaceSpec(fingerprint, layout.dtype, text, self.block_tokens, self.tenant_salt).digest()


def model_layout(model: Any, block_tokens: int) -> BlockLayout:
    """Return the layout of a model's blocks. UnsupportedModel as in `model_shape`."""
    shape = model_shape(model)
    return BlockLayout(shape.layers, block_tokens, shape.kv_heads, shape.head_dim, shape.dtype)


class ModelIdentity:
    """A live model's layout and namespace, kept up with changes of the model.

    `refusal` says why its cache can't be named or restored now, None if it can. UnsupportedModel at the beginning, as
    in `model_shape`.
    """

    def __init__(self, model: Any, settings: NamespaceSettings) -> None:
        self._model = model
        self._settings = settings
        self._watch = ModelWatch(model)
        # The user's, until the model changes.
        self._fingerprint = settings.fingerprint
        self.layout = model_layout(model, settings.block_tokens)
        self.namespace = Namespace(b"")
        self.refusal = self._identify()

    def follow(self) -> str | None:
        """Look whether the model has changed and return the `refusal`; see `ModelWatch` for what is seen."""
        if self._watch.follow():
            self._fingerprint = None
            self.refusal = self._identify()
        return self.refusal

    def renew(self, fingerprint: bytes | None) -> None:
        """Take the model as it is now, also what can't be seen of it; `fingerprint` is the user's new one."""
        self._watch.renew()
        self._fingerprint = fingerprint
        self.refusal = self._identify()

    def _identify(self) -> str | None:
        code = foreign_code(self._model) if self._fingerprint is None else None
        if code is not None:
            return f"{code}, may change the cache and can't be named; give a fingerprint= that covers it"
        try:
            self.layout = model_layout(self._model, self._settings.block_tokens)
            fingerprint = self._fingerprint or self._watch.fingerprint()
        except UnsupportedModel as error:
            return str(error)
        self.namespace = self._settings.namespace(fingerprint, self.layout)
        return None
