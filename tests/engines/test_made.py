"""Caches of other kinds: restored as transformers makes them; what a call leaves in them is a prefix for any other."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
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


class _Stream:
    """A stream of a device that does at once what it is told."""

    def wait_stream(self, other: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *raised: object) -> None: ...


@pytest.mark.parametrize("how", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_is_filled_as_it_is_made(
    how: str, tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[None] = []
    monkeypatch.setattr(cache_utils.torch, "Stream", _Stream)
    monkeypatch.setattr(
        cache_utils.torch,
        "cuda",
        SimpleNamespace(default_stream=lambda device: _Stream(), synchronize=lambda: waits.append(None)),
    )
    for hit_tokens in (0, 96):
        with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
            found, last = said(cached, prompt, cache_implementation=how)
        assert (last.hit_tokens, last.bypass) == (hit_tokens, None)
        assert found.past_key_values.offloading
    # Once a call, before blocks are read from it.
    assert len(waits) == 2
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        assert said(cached, prompt)[1].hit_tokens == 96


def test_without_a_device_to_offload_from_transformers_says_so(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        for model in (tiny_model, cached):
            with pytest.raises(AssertionError, match="CUDA"):
                model.generate(prompt, **GREEDY, cache_implementation="offloaded")


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
