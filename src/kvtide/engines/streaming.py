"""A Hugging Face model as the engine of a streamed context: it computes from the start while blocks are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.pages import Pages

__all__ = ["StreamedPrefill"]


class _StoppedError(Exception):
    """Ends a forward pass between two layers."""


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that asks, each time a layer adds to it, whether that is still wanted."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.is_wanted: Callable[[], bool] = lambda: True

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        """Add a layer's keys and values, as DynamicCache does."""
        if not self.is_wanted():
            raise _StoppedError
        return super().update(keys, values, layer, *rest, **more)


class StreamedPrefill:
    """Keys and values of a context, from its start on: computed tokens and appended blocks in any order of the two.

    `past` is the engine's cache: hand it to `generate` with the whole prompt once the context is there.
    """

    def __init__(self, model: Any, ids: Sequence[int], layout: BlockLayout) -> None:
        """ids: at least the tokens that will be computed."""
        self._model = model
        self._ids = torch.tensor([list(ids)], device=model.device)
        self._layout = layout
        self.past = _WatchedCache(model.config)

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Compute tokens [start, stop) behind those that are there. False, and nothing changed, if no longer wanted."""
        assert self.past.get_seq_length() == start
        self.past.is_wanted = is_wanted
        try:
            with torch.inference_mode():
                self._model(self._ids[:, start:stop], past_key_values=self.past, use_cache=True, logits_to_keep=1)
        except _StoppedError:
            self._cut(start)
            return False
        finally:
            self.past.is_wanted = lambda: True
        return True

    def _cut(self, tokens: int) -> None:
        # Not `crop`: it asks the first layer for the length, and layers differ after a stop.
        for layer in self.past.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]

    def first_token(self, ids: Sequence[int]) -> int:
        """Run what of `ids` is behind the tokens that are there; return the most likely next token."""
        rest = torch.tensor([list(ids[self.past.get_seq_length() :])], device=self._model.device)
        with torch.inference_mode():
            output = self._model(rest, past_key_values=self.past, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def append(self, block: int, bits: BlockBits) -> None:
        """Put a loaded block behind what is there."""
        assert self.past.get_seq_length() == block * self._layout.tokens
        pages = Pages(self._layout, 1)
        pages.write(0, bits)
        loaded = DynamicCache(config=self._model.config)
        pages.fill(loaded, 1, self._model.device)
        for number, layer in enumerate(loaded.layers):
            self.past.update(layer.keys, layer.values, number)
