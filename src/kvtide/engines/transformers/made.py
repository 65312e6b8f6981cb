"""The cache that a call asks for, as transformers makes it, filled with what was restored."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

from kvtide.engines.transformers.generation import CallSettings

# What transformers generates where nobody says how much.
NEW_TOKENS = 20


class MadeCache(NamedTuple):
    """A call's cache. past: what `generate` runs on. rows: what blocks are read from when the call has ended."""

    past: Any
    rows: Any

    def settled(self) -> Any:
        """Return the rows, once all that the call began to move between devices is there."""
        if self.rows.offloading:
            torch.cuda.synchronize()
        return self.rows


def made_cache(model: Any, past: DynamicCache, tokens: int, call: CallSettings) -> MadeCache:
    """Return a cache as a call of so many tokens wants it, with what `past` holds."""
    how = call.settings.cache_implementation
    if how == "quantized":
        return _quantised(model, past, call)
    if how in ("static", "offloaded_static"):
        made: Any = StaticCache(model.config, _static_tokens(tokens, call), offloading=how != "static")
    elif how == "offloaded":
        made = DynamicCache(config=model.config, offloading=True)
    else:
        return MadeCache(past, past)
    # By `update`: an offloaded cache moves each layer out and the next one in.
    for number, layer in enumerate(past.layers if past.get_seq_length() else ()):
        made.update(layer.keys, layer.values, number)
    return MadeCache(made, made)


def _static_tokens(tokens: int, call: CallSettings) -> int:
    settings = call.settings
    length: int = tokens + (settings.max_new_tokens or NEW_TOKENS)
    if settings.max_new_tokens is None:
        length = max(length, settings.max_length or 0)
    return max(length, settings.max_cache_len or 0)


def _quantised(model: Any, past: DynamicCache, call: CallSettings) -> MadeCache:
    """Return a quantised cache whose first pass goes on from `past`."""
    options = copy.deepcopy(call.settings.cache_config or {})
    made = QuantizedCache(options.pop("backend", "quanto"), **{"config": model.config, **options})
    rows = DynamicCache(config=model.config)
    rows.layers = [_FirstPass(made.layers, number, layer) for number, layer in enumerate(past.layers)]
    made.layers[:] = rows.layers
    return MadeCache(made, rows)


class _FirstPass(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Stands for a quantised layer in its first pass.

    Such a layer attends to the first pass's tokens as they are, and quantises them together: restored tokens and the
    next ones go to it as one pass. The exact rows stay, in main memory, to be stored.
    """

    def __init__(self, layers: list[Any], number: int, restored: DynamicLayer) -> None:
        super().__init__()
        self._layers = layers
        self._number = number
        self._quantised = layers[number]
        if restored.get_seq_length():
            self.lazy_initialization(restored.keys, restored.values)
            self.keys: torch.Tensor = restored.keys
            self.values: torch.Tensor = restored.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give way to the quantised layer."""
        keys, values = super().update(key_states, value_states)
        self._layers[self._number] = self._quantised
        attended: tuple[torch.Tensor, torch.Tensor] = self._quantised.update(keys, values, *arguments, **named)
        self.keys, self.values = keys.cpu(), values.cpu()
        return attended
