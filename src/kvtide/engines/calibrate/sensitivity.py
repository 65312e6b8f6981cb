"""How much the model's next tokens depend on its cached keys and values: the diagonal of the Fisher information."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvtide.block import KVDtype
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import APART_TOKENS

# Labels drawn from the model's own distribution, as the Fisher information wants it.
_SAMPLES = 2


def cache_sensitivity(
    model: Any,
    past: DynamicCache,
    continuation: Sequence[int],
    rotary: Rotary | None,
    generator: torch.Generator,
) -> NDArray[np.float64]:
    """Return the mean squared gradient of sampled tokens' log-likelihood by cached values: (layers, 2, channels).

    Keys are those before RoPE. past: a cache of the text before `continuation`; it is not changed. The first tokens,
    which tide keeps whole, are left out. The model's weights are told not to ask for gradients.
    """
    leaves: list[torch.Tensor] = []
    copy = DynamicCache(config=model.config)
    for source, target in zip(past.layers, copy.layers, strict=True):
        keys, values = (tensor.detach().clone().requires_grad_(True) for tensor in (source.keys, source.values))
        target.lazy_initialization(keys, values)
        target.keys, target.values = keys, values
        leaves += [keys, values]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    logits = model(torch.tensor([continuation]), past_key_values=copy, use_cache=True).logits[0].float()
    likelihood = logits.log_softmax(-1)
    total: list[NDArray[np.float64]] = [np.zeros(1)] * len(leaves)
    for sample in range(_SAMPLES):
        drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
        loss = likelihood.gather(-1, drawn).sum()
        gradients = torch.autograd.grad(loss, leaves, retain_graph=sample + 1 < _SAMPLES)
        for i, gradient in enumerate(gradients):
            total[i] = total[i] + _square(gradient, None if i % 2 else rotary, i // 2)
    return np.stack(total).reshape(len(past.layers), 2, -1) / _SAMPLES


def _square(gradient: torch.Tensor, rotary: Rotary | None, layer: int) -> NDArray[np.float64]:
    """Return the mean square of a gradient by channel, turned back as the keys are."""
    by_token = gradient[0].float().transpose(0, 1).contiguous().numpy()
    if rotary is not None:
        turned = rotary.inverse_tables(0, len(by_token), layer)
        by_token = rotary.load(by_token.view(np.uint32), KVDtype.FLOAT32, turned)
    squares: NDArray[np.float64] = (by_token[APART_TOKENS:].astype(np.float64) ** 2).mean(axis=0).reshape(-1)
    return squares
