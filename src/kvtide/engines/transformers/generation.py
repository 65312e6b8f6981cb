"""Facts about a call of `generate`: whether the cache can help, which cache it asks for, when a token is there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache, StoppingCriteria
from transformers.generation import GenerationMode

from kvtide.clock import Clock
from kvtide.engines.transformers.selective import SelectedLayers
from kvtide.plan import PrefillSpeed
from kvtide.store.load.streamed import StreamedReport

# What `generate` may be told besides its GenerationConfig without the keys and values depending on it.
_NEUTRAL_ARGUMENTS = {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "tokenizer",
}


class GenerateReport(NamedTuple):
    """The cache's part in the last call. `bypass` names the reason if it was left out.

    selected: what was loaded of the restored tokens, where only a part was. ended_by: the group of layers without whose
    part the hit would have gone on. found_in: the tiers that the restored tokens came from.
    """

    prompt_tokens: int
    hit_tokens: int = 0
    load_s: float = 0.0
    stored_bytes_read: int = 0
    blocks_queued: int = 0
    bypass: str | None = None
    streamed: StreamedReport | None = None
    selected: SelectedLayers | None = None
    ended_by: str | None = None
    found_in: str = ""

    def told(self, prefill: PrefillSpeed | None) -> str:
        """One line: did it work, and what was gained. prefill: the engine's speed as far as it was measured."""
        if self.bypass is not None:
            return f"0 of {self.prompt_tokens} tokens restored: {self.bypass}"
        came = f"{self.hit_tokens} of {self.prompt_tokens} tokens restored"
        if self.hit_tokens:
            came += f" from {self.found_in} in {self.load_s:.3f} s"
            if prefill is None:
                came += "; what that saved is known once the engine was timed"
            else:
                saved_s = prefill.seconds(0, self.hit_tokens) - self.load_s
                came += f", about {abs(saved_s):.3f} s {'saved' if saved_s >= 0 else 'lost'}"
        return f"{came}; {self.blocks_queued} blocks to be stored"


class FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Notes when the first token is there; never stops anything."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seen_s = math.nan

    def __call__(self, input_ids: torch.Tensor, scores: Any, **arguments: Any) -> torch.Tensor:
        if math.isnan(self.seen_s):
            self.seen_s = self._clock.monotonic_s()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextmanager
def leaving_out(model: Any, tokens: int) -> Iterator[None]:
    """Let a call's first pass leave out the leading tokens, which a cache of states alone has and does not count."""

    def leave_out(module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hook.remove()
        return arguments, {**named, "input_ids": named["input_ids"][:, tokens:], "attention_mask": None}

    with model.register_forward_pre_hook(leave_out, with_kwargs=True) as hook:
        yield


class CallSettings(NamedTuple):
    """A call of `generate` as transformers takes it.

    input_ids: (rows, tokens). settings: the model's with the call's own. others: names of the arguments that are none
    of them. mask: as input_ids, 1 for tokens. is_single: of one sequence without padding. ends: the tokens that end an
    answer. special_cache: the kind of cache it wants, where that is not the usual one (which "hybrid" came to mean).
    """

    input_ids: torch.Tensor
    settings: GenerationConfig
    others: frozenset[str]
    mask: torch.Tensor
    is_single: bool
    ends: list[int | None]
    special_cache: str | None

    @classmethod
    def of(cls, model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> Self:
        """Return what a call's arguments say."""
        # What a given configuration leaves open, the model's own says.
        configs: Any = filter(None, (model.generation_config, arguments.get("generation_config")))
        said = {name: value for each in configs for name, value in each.to_dict().items() if value is not None}
        settings = GenerationConfig.from_dict(said)
        # None overrides a configuration, and says nothing where it is no field of one.
        others = frozenset(name for name in settings.update(**arguments) if arguments[name] is not None)
        eos, pad, mask = settings.eos_token_id, settings.pad_token_id, arguments.get("attention_mask")
        ends = [None] if eos is None else torch.as_tensor(eos).reshape(-1).tolist()
        is_padded = mask is None and pad is not None and pad not in ends
        if mask is None:
            mask = (input_ids != pad) if is_padded else torch.ones_like(input_ids)
        is_single = len(input_ids) == 1 and bool(mask.all())
        how = None if settings.cache_implementation in ("dynamic", "hybrid") else settings.cache_implementation
        return cls(input_ids, settings, others, mask.long(), is_single, ends, how)


def bypass_reason(model: Any, call: CallSettings) -> str | None:
    """Return why the cache can't help with this call, or None if it can."""
    if model.training:
        return "the model is in training mode"
    input_ids, settings, mask = call.input_ids, call.settings, call.mask
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast computes keys and values in another precision"
    if foreign := sorted(call.others - _NEUTRAL_ARGUMENTS):
        return f"the answer may depend on {', '.join(foreign)}"
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value} keeps a cache of its own shape"
    # A static cache is filled as transformers makes it.
    if settings.use_cache is False or call.special_cache not in (None, "static"):
        return f"use_cache={settings.use_cache}, cache_implementation={settings.cache_implementation}"
    if (settings.num_return_sequences or 1) != 1:
        return f"num_return_sequences={settings.num_return_sequences}"
    # Outputs with a part for each token that was run: a restored prefix has none. Healing changes the prompt meanwhile.
    for name in ("output_hidden_states", "output_attentions", "token_healing"):
        if getattr(settings, name):
            return f"{name} wants every token of the prompt to run"
    if not mask.all() and "position_ids" not in signature(model.forward).parameters:
        return "padded sequences, of a model that counts positions by itself"
    # Left padding: once a row has begun, it goes on.
    is_left = mask.shape == input_ids.shape and bool((mask[:, -1] == 1).all() and (mask.diff() >= 0).all())
    return None if is_left else "the attention mask hides tokens"


def misfit_reason(call: CallSettings, is_plain: bool, has_importance: bool) -> str | None:
    """Return why the cache can't help with a call on its model, plain or of several groups, with its settings."""
    if call.special_cache and (not is_plain or (has_importance and call.is_single)):
        return f"cache_implementation={call.special_cache}, of a model with several groups or with importance"
    if has_importance and call.settings.guidance_scale not in (None, 1):
        return "guidance_scale has the model read a second prompt, of which importance knows nothing"
    if not call.is_single and not is_plain:
        return "several or padded sequences, of a model with several groups of layers"
    return None


# What transformers generates where nobody says how much.
NEW_TOKENS = 20


def made_cache(model: Any, past: DynamicCache, call: CallSettings) -> Any:
    """Return the static cache that a call wants, with what `past` holds."""
    settings = call.settings
    length: int = call.input_ids.shape[1] + (settings.max_new_tokens or NEW_TOKENS)
    if settings.max_new_tokens is None:
        length = max(length, settings.max_length or 0)
    made = StaticCache(model.config, max(length, settings.max_cache_len or 0))
    for number, layer in enumerate(past.layers if past.get_seq_length() else ()):
        made.update(layer.keys, layer.values, number)
    return made
