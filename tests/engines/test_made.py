"""Caches of other kinds: restored as transformers makes them; what a call leaves in them is a prefix for any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import model_of_family
from transformers import GenerationConfig, cache_utils

from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.generation import GenerateReport

BLOCK = 16
GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def said(cached: CachedModel, ids: torch.Tensor, **arguments: Any) -> tuple[Any, GenerateReport]:
    """Answer, and hold the answer and its logits to the plain model's."""
    wanted = {**GREEDY, **arguments}
    found, plain = cached.generate(ids, **wanted), cached.model.generate(ids, **wanted)
    assert torch.equal(found.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), rtol=0, atol=1e-4)
    assert type(found.past_key_values) is type(plain.past_key_values)
    kinds = [type(layer) for layer in found.past_key_values.layers]
    assert kinds == [type(layer) for layer in plain.past_key_values.layers]
    assert cached.flush(10) and cached.last is not None
    return found, cached.last


def test_a_model_of_several_groups_makes_its_special_cache_itself(tmp_path: Path) -> None:
    with attach(model_of_family("deepseek_v3"), tmp_path, block_tokens=BLOCK) as cached:
        last = said(cached, torch.arange(3, 53)[None], cache_implementation="static")[1]
        assert last.bypass == "cache_implementation=static, of a model with several groups or with importance"


def test_a_configuration_of_the_model_counts_where_a_given_one_is_silent(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    model.generation_config.num_beams = 2
    given = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    with attach(model, tmp_path, block_tokens=BLOCK) as cached:
        assert torch.equal(cached.generate(prompt, given), model.generate(prompt, given))
        assert cached.last is not None and "beam" in str(cached.last.bypass)
        model.generation_config.num_beams, model.generation_config.cache_implementation = 1, "static"
        output = cached.generate(prompt, given, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, cache_utils.StaticCache)


def test_a_static_cache_has_room_for_what_nobody_bounds(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        with pytest.warns(UserWarning, match="generation length"):
            output = cached.generate(prompt, cache_implementation="static", do_sample=False, eos_token_id=None)
        with pytest.warns(UserWarning, match="generation length"):
            plain = tiny_model.generate(prompt, do_sample=False, eos_token_id=None)
    assert torch.equal(output, plain)
