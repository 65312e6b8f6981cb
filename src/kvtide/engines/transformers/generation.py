"""Facts about a call of `generate`: whether the cache can help, how to restore, when a token is there."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation import GenerationMode

from kvtide.clock import Clock
from kvtide.plan import Speed

# What `generate` may be told besides its GenerationConfig without the keys and values depending on it.
_NEUTRAL_ARGUMENTS = {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
}


# Outputs that have a part for each token that was run: with a restored prefix these would be fewer.
_OF_ALL_TOKENS = ("output_hidden_states", "output_attentions")
# The slower way gets another chance after this long.
MEMORY_S = 600.0


class RestoreWay(Enum):
    """A way to load a prefix."""

    PART = "in part"
    WHOLE = "whole"


class Ways:
    """Chooses between loading a prefix in part and whole, by what either took here. Pure: the time is passed in.

    Tokens a second from the look-up to the first new token, by way, apart for prefixes in the fastest tier.
    """

    def __init__(self) -> None:
        self._speeds = {(way, is_near): Speed() for way in RestoreWay for is_near in (False, True)}

    def choose(self, is_near: bool, now_s: float) -> RestoreWay:
        """Return the faster way; first the part, then the whole once, while one of them is unknown."""
        part, whole = (self._speeds[way, is_near].known(now_s, MEMORY_S) for way in RestoreWay)
        if part is None:
            return RestoreWay.PART
        return RestoreWay.WHOLE if whole is None or whole > part else RestoreWay.PART

    def note(self, way: RestoreWay, is_near: bool, tokens: int, seconds: float, now_s: float) -> None:
        """Take what a load of so many tokens took; short ones are ignored."""
        self._speeds[way, is_near].note(tokens, seconds, now_s)


class FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Notes when the first token is there; never stops anything."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seen_s = math.nan

    def __call__(self, input_ids: torch.Tensor, scores: Any, **arguments: Any) -> torch.Tensor:
        """Look at the clock when it is called first."""
        if math.isnan(self.seen_s):
            self.seen_s = self._clock.monotonic_s()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def bypass_reason(model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> str | None:
    """Return why the cache can't help with this call, or None if it can."""
    if input_ids.shape[0] != 1:
        return f"{input_ids.shape[0]} sequences in one call; kvtide restores one"
    if model.training:
        return "the model is in training mode"
    settings = GenerationConfig.from_dict((arguments.get("generation_config") or model.generation_config).to_dict())
    given = {name: value for name, value in arguments.items() if value is not None}
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast computes keys and values in another precision"
    foreign = sorted(set(settings.update(**given)) - _NEUTRAL_ARGUMENTS)
    if foreign:
        return f"the answer may depend on {', '.join(foreign)}"
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value} keeps a cache of its own shape"
    if settings.use_cache is False or settings.cache_implementation is not None:
        return f"use_cache={settings.use_cache}, cache_implementation={settings.cache_implementation}"
    if (settings.num_return_sequences or 1) != 1:
        return f"num_return_sequences={settings.num_return_sequences}"
    wanted = [name for name in _OF_ALL_TOKENS if getattr(settings, name)]
    if wanted:
        return f"{wanted[0]} wants every token of the prompt to run"
    return "the attention mask hides tokens" if _hides_tokens(input_ids, arguments, settings) else None


def _hides_tokens(input_ids: torch.Tensor, arguments: dict[str, Any], settings: GenerationConfig) -> bool:
    mask = arguments.get("attention_mask")
    if mask is not None:
        return not bool(mask.all())
    # What transformers makes of a prompt without a mask.
    pad, eos = settings.pad_token_id, settings.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    return pad is not None and pad not in ends and bool((input_ids == pad).any())
