"""Caches of other kinds: restored as transformers makes them; what a call leaves in them is a prefix for any other."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.families import model_of_family
from transformers import DynamicCache, GenerationConfig, QuantizedCache, cache_utils

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
FP8: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
# Its exact rest is quantised again within the answer.
GROUPS: dict[str, Any] = {
    "cache_implementation": "quantized",
    "cache_config": {"backend": "hqq", "residual_length": 8},
}


class _Eighths(cache_utils.QuantizedLayer):  # type: ignore[misc]  # transformers is not typed
    """Quantises groups of 16 values to 8 bits, as the packages do that this environment lacks."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        groups = tensor.reshape(-1, 16)
        scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 127
        return (groups / scale).round().to(torch.int8), scale, tensor.shape

    def _dequantize(self, quantised: Any) -> torch.Tensor:
        values, scale, shape = quantised
        found: torch.Tensor = (values * scale).reshape(shape)
        return found


@pytest.fixture(autouse=True)
def group_wise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_utils, "HQQQuantizedLayer", _Eighths)


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


@pytest.mark.parametrize("how", [FP8, GROUPS], ids=["fp8", "groups"])
def test_a_quantised_cache_goes_on_as_if_all_had_run_at_once(
    how: dict[str, Any], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    for hit_tokens in (0, 96):
        with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
            found, last = said(cached, prompt, **how)
        assert (last.hit_tokens, last.bypass) == (hit_tokens, None)
        assert isinstance(found.past_key_values, QuantizedCache)
        assert found.past_key_values.get_seq_length() == 111


@pytest.mark.parametrize("how", [FP8, GROUPS], ids=["fp8", "groups"])
def test_what_a_quantised_cache_leaves_is_the_prompt_and_exact(
    how: dict[str, Any], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    plain = DynamicCache(config=tiny_model.config)
    with torch.no_grad():
        tiny_model(prompt, past_key_values=plain)
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        # Of 139 tokens in the cache, the answer's are computed on top of rounded ones.
        assert said(cached, prompt, **how, max_new_tokens=40)[1].blocks_queued == 6
        restored = cached.restored(prompt)
        assert said(cached, prompt)[1].hit_tokens == 96
    for one, other in zip(restored.layers, plain.layers, strict=True):
        assert torch.equal(one.keys, other.keys[:, :, :96]) and torch.equal(one.values, other.values[:, :, :96])


def test_rows_without_padding_restore_into_a_quantised_cache(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    batch = torch.cat([prompt, prompt.flip(1)])
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        assert said(cached, batch, **FP8)[1].hit_tokens == 0
        assert said(cached, batch, **FP8)[1].hit_tokens == 2 * 96
        assert said(cached, prompt)[1].hit_tokens == 96


@pytest.mark.parametrize("arguments", [{"attention_mask": "left"}, {"prefill_chunk_size": 32}])
def test_scales_of_padding_and_of_chunks_are_left_to_transformers(
    arguments: dict[str, Any], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    if "attention_mask" in arguments:
        arguments = {"attention_mask": (torch.arange(100) >= 5).long()[None]}
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        last = said(cached, prompt, **FP8, **arguments)[1]
        assert last.bypass is not None and "scales of its own" in last.bypass


def test_a_model_of_several_groups_makes_its_quantised_cache_itself(tmp_path: Path) -> None:
    with attach(model_of_family("deepseek_v3"), tmp_path, block_tokens=BLOCK) as cached:
        last = said(cached, torch.arange(3, 53)[None], **FP8)[1]
        assert last.bypass == "cache_implementation=quantized, of a model with several groups or with importance"


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
