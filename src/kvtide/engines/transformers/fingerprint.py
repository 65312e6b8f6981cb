"""Says what a Hugging Face model's KV cache looks like and where its blocks belong, or why kvtide can't serve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import DynamicCache

from kvtide.block import BlockLayout
from kvtide.engines.transformers.generation import cache_argument
from kvtide.engines.transformers.groups import ModelGroup, is_plain, model_groups
from kvtide.engines.transformers.watch import ModelWatch, foreign_code
from kvtide.errors import UnsupportedModel
from kvtide.keys import NamespaceSpec
from kvtide.types import Namespace

# Their rotary frequencies depend on the length of the sequence: keys from a short prompt are wrong in a long one.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def groups_of(model: Any, block_tokens: int) -> tuple[ModelGroup, ...]:
    """Return the groups of the model's cache, found by running two tokens through it.

    UnsupportedModel, with the reason, for a model whose cache can't be restored exactly, or depends on later tokens or
    on the length of the prompt.
    """
    _refuse_by_config(model)
    first, second = _probe(model, [0, 1]), _probe(model, [0, 2])
    groups = model_groups(model, first, block_tokens)
    for number in (number for each in groups if each.rows for number in each.group.layers):
        one, other = first.layers[number].keys[:, :, :1], second.layers[number].keys[:, :, :1]
        if not torch.allclose(one, other, rtol=1e-2, atol=1e-2):
            raise UnsupportedModel("keys of a token change with later tokens: the model is not causal")
    return groups


def model_layout(model: Any, block_tokens: int) -> BlockLayout:
    """Return the layout of a model's blocks. UnsupportedModel as in `groups_of`, and for a model of several groups."""
    return plain_layout(groups_of(model, block_tokens))


def plain_layout(groups: Sequence[ModelGroup]) -> BlockLayout:
    """Return the layout of blocks. UnsupportedModel for several groups."""
    if not is_plain(groups):
        names = ", ".join(each.group.name for each in groups)
        raise UnsupportedModel(f"importance and streams take models of one group, not {names}")
    return groups[0].group.layout


def _refuse_by_config(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models keep a cache that depends on the encoder's input")
    if model.training:
        raise UnsupportedModel("the model is in training mode, where dropout changes the cache; call model.eval()")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel("the model has adapters that can be switched at any time; merge them into the weights")
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
    given: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    try:
        with torch.inference_mode():
            model(torch.tensor([tokens], device=model.device), **given)
    except (ValueError, IndexError) as error:
        raise UnsupportedModel(f"the model takes no usual cache: {error}") from error
    return cache


class NamespaceSettings(NamedTuple):
    """Settings besides the model that decide which blocks it may use.

    fingerprint: the user's, for the model as it was when it got its cache.
    """

    block_tokens: int
    tenant_salt: bytes
    fingerprint: bytes | None
    is_exact: bool

    def namespaces(self, fingerprint: bytes, groups: Sequence[ModelGroup]) -> tuple[Namespace, ...]:
        """Return the namespace of each group of a model.

        Blocks of lossy codecs, and what was computed on top of them, are apart from exact ones (decision 0005).
        """
        layout = groups[0].group.layout
        plain = f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}"
        # What a state's tensors mean is the library's own affair.
        library = f" by transformers {'.'.join(transformers.__version__.split('.')[:2])}"
        texts = [f"{each.group.text}{library if each.states else ''}" for each in groups]
        if is_plain(groups):
            texts = [plain]
        return tuple(
            NamespaceSpec(
                fingerprint,
                each.group.layout.dtype,
                f"{text} {'exact' if self.is_exact else 'approximate'}",
                self.block_tokens,
                self.tenant_salt,
            ).digest()
            for text, each in zip(texts, groups, strict=True)
        )


class ModelIdentity:
    """A live model's groups and their namespaces, kept up with changes of the model.

    `refusal` says why its cache can't be named or restored now, None if it can. UnsupportedModel at the beginning, as
    in `groups_of`.
    """

    def __init__(self, model: Any, settings: NamespaceSettings) -> None:
        self._model = model
        self._settings = settings
        self._watch = ModelWatch(model)
        self.tenant_salt = settings.tenant_salt
        # The user's, until the model changes.
        self.given_fingerprint = settings.fingerprint
        self.fingerprint = b""
        self.groups = groups_of(model, settings.block_tokens)
        self.namespaces: tuple[Namespace, ...] = ()
        self.refusal = self._identify()

    @property
    def is_plain(self) -> bool:
        """Tell whether the model has blocks and not several parts of each."""
        return is_plain(self.groups)

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of the first group's parts: of blocks, where it is the only one."""
        return self.groups[0].group.layout

    @property
    def namespace(self) -> Namespace:
        """Return the namespace in which prompts are named: the first group's. Empty before the model has a name."""
        return self.namespaces[0] if self.namespaces else Namespace(b"")

    def follow(self) -> str | None:
        """Look whether the model has changed and return the `refusal`; see `ModelWatch` for what is seen."""
        if self._watch.follow():
            self.given_fingerprint = None
            self.refusal = self._identify()
        return self.refusal

    def renew(self, fingerprint: bytes | None) -> None:
        """Take the model as it is now, also what can't be seen of it; `fingerprint` is the user's new one."""
        self._watch.renew()
        self.given_fingerprint = fingerprint
        self.refusal = self._identify()

    def _identify(self) -> str | None:
        code = foreign_code(self._model) if self.given_fingerprint is None else None
        if code is not None:
            return f"{code}, may change the cache and can't be named; give a fingerprint= that covers it"
        try:
            self.groups = groups_of(self._model, self._settings.block_tokens)
            self.fingerprint = self.given_fingerprint or self._watch.fingerprint()
        except UnsupportedModel as error:
            return str(error)
        self.namespaces = self._settings.namespaces(self.fingerprint, self.groups)
        return None
