"""How much the model's next tokens depend on its cached keys and values: the diagonal of the Fisher information."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvtide.codec.tide import APART_TOKENS

__all__ = ["cache_sensitivity"]

# Labels drawn from the model's own distribution, as the Fisher information wants it.
_SAMPLES = 2


def cache_sensitivity(
    model: Any, past: DynamicCache, continuation: Sequence[int], generator: torch.Generator
) -> NDArray[np.float64]:
    """Return the mean squared gradient of sampled tokens' log-likelihood by each cached value: (layers, 2).

    past: a cache of the text before `continuation`; it is not changed. The first tokens, which tide keeps whole, are
    left out. Rotation does not change the length of a gradient: keys need not be turned back.
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
    total = np.zeros(len(leaves))
    for sample in range(_SAMPLES):
        drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
        loss = likelihood.gather(-1, drawn).sum()
        gradients = torch.autograd.grad(loss, leaves, retain_graph=sample + 1 < _SAMPLES)
        total += [float(gradient[:, :, APART_TOKENS:].double().pow(2).mean()) for gradient in gradients]
    return (total / _SAMPLES).reshape(-1, 2)
