"""What plain transformers says on the same state of the same model, and how far a cache may be from it.

Logits and caches are held to it number by number; splitting a prefill moves them by some 1e-5, another prompt's cache
or another model's by 1e-2 and more.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.block import BlockBits
from kvtide.codec import Codec
from kvtide.engines.transformers import CachedModel
from kvtide.engines.transformers.groups import block_bits
from kvtide.errors import UnencodableBlock
from kvtide_lab.judge.quality import block_metas

TOLERANCE = 1e-3
# What a codec may lose on a restored block, in times of what it loses on the true one.
LOSS_MAX = 1.5


class WrongAnswer(AssertionError):
    """A cached model said or restored something else than the plain one."""


def prefill(model: Any, ids: torch.Tensor) -> DynamicCache:
    """The cache of a prompt, by one pass."""
    past = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
    return past


def check_answer(model: Any, ids: torch.Tensor, output: Any, arguments: dict[str, Any]) -> None:
    """Compare an answer with logits to the plain one, up to where two tokens are equally good."""
    true = model.generate(ids, **arguments)
    if len(true.logits) == 0 or output.sequences.shape[1] <= ids.shape[1]:
        raise WrongAnswer(f"an answer of {output.sequences.shape[1] - ids.shape[1]} tokens")
    for step, (ours, theirs) in enumerate(zip(output.logits, true.logits, strict=False)):
        off = float((ours - theirs).abs().max())
        if not off < TOLERANCE:
            raise WrongAnswer(f"logits of token {step} behind {ids.shape[1]} are {off:.2g} off")
        at = ids.shape[1] + step
        if output.sequences[0, at] != true.sequences[0, at]:
            return
    if not torch.equal(output.sequences, true.sequences):
        raise WrongAnswer(f"an answer of {output.sequences.shape[1]} tokens, not {true.sequences.shape[1]}")


def check_shapes(model: Any, ids: torch.Tensor, output: Any, arguments: dict[str, Any]) -> None:
    """Compare the shapes of all that a call returns besides tokens and its cache."""
    true = model.generate(ids, **arguments)
    for name in ("hidden_states", "attentions", "logits"):
        ours, theirs = _shapes(output.get(name)), _shapes(true.get(name))
        if ours != theirs:
            raise WrongAnswer(f"{name} of shapes {str(ours)[:60]}, not {str(theirs)[:60]}")


def _shapes(value: Any) -> Any:
    return [_shapes(each) for each in value] if isinstance(value, tuple) else getattr(value, "shape", None)


def check_restored(cached: CachedModel, ids: torch.Tensor) -> None:
    """Compare all that is restored of a prompt with its prefill."""
    past = cached.restored(ids)
    tokens: int = past.get_seq_length()
    if not tokens:
        return
    if tokens >= ids.shape[1]:
        raise WrongAnswer(f"restored {tokens} tokens of {ids.shape[1]}")
    true = prefill(cached.model, ids)
    for number, (ours, theirs) in enumerate(zip(past.layers, true.layers, strict=True)):
        for name in ("keys", "values"):
            off = float((getattr(ours, name) - getattr(theirs, name)[:, :, :tokens]).abs().max())
            if not off < TOLERANCE:
                raise WrongAnswer(f"restored {tokens} of {ids.shape[1]} tokens, {name} of layer {number} {off:.2g} off")


def check_quality(cached: CachedModel, ids: torch.Tensor, asked: Codec, others: Sequence[Codec]) -> None:
    """Hold a restored prompt's first block, which nothing approximate came before, against what codecs lose of it.

    Those that lose as little by their own word as what was asked for may have kept it as well.
    """
    past = cached.restored(ids)
    if not past.get_seq_length():
        return
    meta = block_metas(ids[0].tolist(), cached.identity.layout)[0]
    true, decoded = block_bits(prefill(cached.model, ids), meta), np.empty(cached.identity.layout.shape, np.uint32)
    own = 0.0
    for codec in [asked, *(other for other in others if other.quality <= asked.quality)]:
        # What a codec refuses is kept losslessly.
        with suppress(UnencodableBlock):
            codec.decode(meta, codec.encode(meta, true), decoded)
            own = max(own, _loss(true, decoded))
    lost = _loss(true, block_bits(past, meta))
    if not lost <= LOSS_MAX * own:
        raise WrongAnswer(f"restored a block {lost:.2g} off, of which {asked.codec_id} as asked for loses {own:.2g}")


def _loss(true: BlockBits, other: BlockBits) -> float:
    return float(np.sqrt(np.mean((true.view(np.float32) - other.view(np.float32)) ** 2)))
