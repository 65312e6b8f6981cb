"""A Hugging Face model as the engine of a streamed context: it computes from the start while blocks are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.transformers.pages import RestoredRoom
from kvtide.outcomes import Choice, DecisionCounter, Why
from kvtide.plan import Way
from kvtide.store.load import ContextReport
from kvtide.tier.source import Source
from kvtide.types import Namespace

WHY_OF_WAY: Mapping[Way, Why] = MappingProxyType(
    {
        Way.LOAD: Why.LINK_FASTER,
        Way.BOTH: Why.BOTH_ENDS,
        Way.UNKNOWN_LINK: Why.UNKNOWN_LINK,
        Way.RECOMPUTE: Why.LINK_SLOWER,
    }
)


class Streaming(NamedTuple):
    """Where blocks are streamed from, and until when.

    kl: loss with each refinement of the stored objects (0 for exact ones). deadline_s: when the model should start,
    0 for as soon as it can. kl_goal: loss at which it starts earlier. is_kept: whether loaded blocks are completed
    and stored in the cache's own tiers afterwards, in the background.
    """

    sources: Sequence[Source]
    kl: Sequence[float]
    deadline_s: float = 0.0
    kl_goal: float = 0.0
    is_kept: bool = True


def count_streamed(counter: DecisionCounter, report: ContextReport, full_tokens: int, namespace: Namespace) -> None:
    """Count what became of a prompt's full blocks: loaded, computed although stored, or stored nowhere."""
    if report.decision is not None:
        loaded = report.tokens - report.computed_tokens if report.fetch is not None else 0
        why = WHY_OF_WAY[report.decision.way]
        counter.add(Choice.LOAD, why, loaded, namespace)
        counter.add(Choice.RECOMPUTE, why, report.stored_tokens - loaded, namespace)
    counter.add_absent(full_tokens - report.stored_tokens, namespace)


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

    Hand `past` to `generate` with the whole prompt once the context is there.
    """

    def __init__(self, model: Any, ids: Sequence[int], layout: BlockLayout) -> None:
        """ids: at least the tokens that will be computed."""
        self._model = model
        self._ids = torch.tensor([list(ids)], device=model.device)
        self._layout = layout
        self._past = _WatchedCache(model.config)
        # Appended, but not in the cache yet: it is copied once for all of them.
        self._waiting: list[BlockBits] = []

    @property
    def past(self) -> DynamicCache:
        """Return the engine's cache, with all that was appended."""
        return self._filled()

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Compute tokens [start, stop) behind those that are there. False, and nothing changed, if no longer wanted."""
        past = self._filled()
        assert past.get_seq_length() == start
        past.is_wanted = is_wanted
        try:
            with torch.inference_mode():
                self._model(self._ids[:, start:stop], past_key_values=past, use_cache=True, logits_to_keep=1)
        except _StoppedError:
            self._cut(start)
            return False
        finally:
            past.is_wanted = lambda: True
        return True

    def _cut(self, tokens: int) -> None:
        # Not `crop`: it asks the first layer for the length, and layers differ after a stop.
        for layer in self._past.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]

    def first_token(self, ids: Sequence[int]) -> int:
        """Run what of `ids` is behind the tokens that are there; return the most likely next token."""
        past = self._filled()
        rest = torch.tensor([list(ids[past.get_seq_length() :])], device=self._model.device)
        with torch.inference_mode():
            output = self._model(rest, past_key_values=past, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def append(self, block: int, bits: BlockBits) -> None:
        """Put a loaded block behind what is there; the bits are copied."""
        waiting_tokens = len(self._waiting) * self._layout.tokens
        assert self._past.get_seq_length() + waiting_tokens == block * self._layout.tokens
        self._waiting.append(bits.copy())

    def _filled(self) -> _WatchedCache:
        if self._waiting:
            blocks = len(self._waiting)
            pages = RestoredRoom(self._layout, blocks)
            for position, bits in enumerate(self._waiting):
                pages.write(position, bits)
            self._waiting.clear()
            loaded = DynamicCache(config=self._model.config)
            pages.fill(loaded, blocks, self._model.device)
            for number, layer in enumerate(loaded.layers):
                self._past.update(layer.keys, layer.values, number)
        return self._past
