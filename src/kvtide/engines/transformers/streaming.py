"""A Hugging Face model as the engine of a streamed context: it computes from the start while blocks are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.transformers.groups import cut_to, filled_cache
from kvtide.plan import PrefillSpeed
from kvtide.plan.base import CHUNK_TOKENS
from kvtide.plan.policies import policy_named
from kvtide.store.load import QUALITY_SLACK
from kvtide.store.load.run import LoadRequest


class StreamSettings(NamedTuple):
    """The end of a load: time and quality. ValueError from `checked` for values that are out of range.

    start_within_s: seconds until the model starts with what has come; None for no deadline. quality: KL divergence, in
    nats, at which it starts earlier; None for the codec's. chunk_tokens: of what a level is picked for.
    """

    start_within_s: float | None = None
    quality: float | None = None
    policy: str | None = None
    chunk_tokens: int = CHUNK_TOKENS

    def checked(self) -> StreamSettings:
        """Return itself."""
        if self.start_within_s is not None and not 0 <= self.start_within_s < math.inf:
            raise ValueError(f"start_within_s is a number of seconds from 0 on, got {self.start_within_s!r}")
        if self.quality is not None and not 0 <= self.quality < math.inf:
            raise ValueError(f"quality is a KL divergence from 0 on, got {self.quality!r}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is a number from 1 on, got {self.chunk_tokens!r}")
        policy_named(self.policy)
        return self

    def asked(self, start_within_s: float | None, quality: float | None) -> StreamSettings:
        """Return these settings with what a call says of its own. ValueError for a bad one."""
        own = {"start_within_s": start_within_s, "quality": quality}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return self._replace(**given).checked()

    def request(self, prefill: PrefillSpeed, codec_quality: float) -> LoadRequest:
        """Return when a load should end. Exact blocks, which have no rougher form, are wanted as soon as can be."""
        goal = (codec_quality if self.quality is None else self.quality) * (1 + QUALITY_SLACK)
        if self.start_within_s is None:
            return LoadRequest(prefill, math.inf if goal else 0.0, goal)
        return LoadRequest(prefill, self.start_within_s, goal)


class _StoppedError(Exception):
    """Ends a forward pass between two layers."""


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that asks, each time a layer adds to it, whether that is still wanted."""

    is_wanted: Callable[[], bool] | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        if self.is_wanted is not None and not self.is_wanted():
            raise _StoppedError
        return super().update(keys, values, layer, *rest, **more)


class StreamedPrefill:
    """Keys and values of a context, from its start: computed tokens and appended blocks. `past` is for `generate`."""

    def __init__(self, model: Any, ids: Sequence[int], layout: BlockLayout) -> None:
        """ids: at least the tokens that will be computed."""
        self._model = model
        self._ids = torch.tensor([list(ids)], device=model.device)
        self._layout = layout
        self._past = _WatchedCache(config=model.config)
        # Appended, but not in the cache yet: it is copied once for all of them.
        self._waiting: list[BlockBits] = []

    @property
    def past(self) -> _WatchedCache:
        """Return the engine's cache, with all that was appended."""
        if self._waiting:
            loaded = filled_cache(self._model, self._layout, self._waiting)
            self._waiting.clear()
            for number, layer in enumerate(loaded.layers):
                self._past.update(layer.keys, layer.values, number)
        return self._past

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Compute tokens [start, stop) after those that are there. False, and nothing changed, if no longer wanted."""
        past = self.past
        assert past.get_seq_length() == start
        past.is_wanted = is_wanted
        try:
            with torch.inference_mode():
                self._model(self._ids[:, start:stop], past_key_values=past, use_cache=True, logits_to_keep=1)
        except _StoppedError:
            cut_to(past, start)
            return False
        finally:
            past.is_wanted = None
        return True

    def append(self, block: int, bits: BlockBits) -> None:
        """Put a loaded block after what is there; the bits are copied."""
        assert self._past.get_seq_length() == (block - len(self._waiting)) * self._layout.tokens
        self._waiting.append(bits.copy())
