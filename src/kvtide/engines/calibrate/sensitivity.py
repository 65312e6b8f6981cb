"""Measures what a model minds in its cache: gradients of what it says by cached values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import APART_TOKENS
from kvtide.engines.calibrate.loss_shares import turned_back
from kvtide.engines.transformers import Context, ModelContexts

# Labels drawn from the model's own distribution, as the Fisher information wants it.
_SAMPLES = 2


def cache_sensitivity(
    contexts: ModelContexts,
    context: Context,
    continuation: Sequence[int],
    rotaries: Sequence[Rotary | None],
    generator: torch.Generator,
) -> list[NDArray[np.float64]]:
    """Return the mean squared gradient of sampled tokens' log-likelihood by cached values, of each group of rows.

    Each is (layers, 2, channels), keys before RoPE. continuation: what comes after the context. The first tokens, which
    tide keeps whole, are left out; of a window, what has left it. The model's weights are told to ask for no gradients.
    """
    past = contexts.restored(context)
    by_group = contexts.ask_gradients(past)
    logits = contexts.model(torch.tensor([continuation]), past_key_values=past, use_cache=True).logits[0].float()
    likelihood = logits.log_softmax(-1)
    leaves = [leaf for mine in by_group for leaf in mine]
    total: list[NDArray[np.float64]] = [np.zeros(1)] * len(by_group)
    for sample in range(_SAMPLES):
        drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
        loss = likelihood.gather(-1, drawn).sum()
        gradients = iter(torch.autograd.grad(loss, leaves, retain_graph=sample + 1 < _SAMPLES))
        for group, mine in enumerate(by_group):
            halves = [contexts.halves(group, next(gradients), next(gradients)) for _ in range(len(mine) // 2)]
            total[group] = total[group] + _squares(halves, rotaries[group], context.tokens)
    return [each / _SAMPLES for each in total]


def _squares(halves: Sequence[NDArray[np.float32]], rotary: Rotary | None, stop: int) -> NDArray[np.float64]:
    """Return the mean squares of gradients of layers by channel, K's turned back as the keys are.

    stop: the position after the last token. halves: (2, tokens, kv_heads, head_dim) of each layer.
    """
    found = []
    for before in turned_back(halves, rotary, stop):
        rest = before[:, max(0, APART_TOKENS - (stop - before.shape[1])) :].astype(np.float64)
        found.append((rest**2).mean(axis=1).reshape(2, -1))
    return np.stack(found)
