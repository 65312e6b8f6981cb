from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines.transformers.fingerprint import ModelWatch, fingerprint_in, model_fingerprint
from kvtide.engines.transformers.groups import groups_of, model_layout
from kvtide.engines.transformers.smollm2 import load_model
from kvtide.errors import UnsupportedModel

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def model_of(config: Any) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).eval()


def test_shape_is_that_of_the_cache(tiny_model: Any) -> None:
    assert model_layout(tiny_model, 16) == BlockLayout(3, 16, kv_heads=2, head_dim=16, dtype=KVDtype.FLOAT32)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "GPT2", "GPTNeoX", "Phi", "OPT"])
def test_plain_families_are_served(family: str) -> None:
    sizes = {**GROUPED, "pad_token_id": 0, "head_dim": 8, "sliding_window": None}
    if family == "OPT":
        sizes = {**sizes, "ffn_dim": 32, "word_embed_proj_dim": 32}
    config = getattr(transformers, f"{family}Config")(**sizes)
    assert model_layout(model_of(config), 16).layers == 2


def test_rotations_that_depend_on_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        groups_of(model_of(LlamaConfig(**SMALL, rope_parameters=rope)), 16)


def test_model_that_sees_later_tokens_is_refused(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model)
    embed = model.model.embed_tokens.forward
    # As in a bidirectional model, every token sees the sum of all.
    monkeypatch.setattr(
        model.model.embed_tokens,
        "forward",
        lambda ids: embed(ids).sum(1, keepdim=True).expand(-1, ids.shape[1], -1) * 50,
    )
    with pytest.raises(UnsupportedModel, match="not causal"):
        groups_of(model, 16)


def test_equal_weights_have_one_fingerprint_and_any_change_another(tiny_model: Any) -> None:
    twin = copy.deepcopy(tiny_model)
    assert model_fingerprint(twin) == model_fingerprint(tiny_model)
    with torch.no_grad():
        twin.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert model_fingerprint(twin) != model_fingerprint(tiny_model)


def test_config_that_changes_the_keys_changes_the_fingerprint(tiny_model: Any) -> None:
    config = LlamaConfig(
        **{**tiny_model.config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    )
    other = LlamaForCausalLM(config).eval()
    other.load_state_dict(tiny_model.state_dict())
    assert model_fingerprint(other) != model_fingerprint(tiny_model)


def test_watch_follows_writes_in_place(tiny_model: Any) -> None:
    model = copy.deepcopy(tiny_model)
    watch = ModelWatch(model)
    before = watch.fingerprint()
    assert not watch.follow()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert watch.follow() and watch.fingerprint() != before
    assert not watch.follow()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma", "GPTNeoX"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fingerprint_in_another_dtype_is_that_of_the_folder_loaded_so(
    family: str, stored: torch.dtype, tmp_path: Path
) -> None:
    sizes = {**GROUPED, "pad_token_id": 0, "head_dim": 8}
    model_of(getattr(transformers, f"{family}Config")(**sizes)).to(stored).save_pretrained(tmp_path)
    model, told = load_model(tmp_path), 0
    for dtype in ("float32", "bfloat16", "float16"):
        found = fingerprint_in(model, dtype)
        assert found in (None, model_fingerprint(load_model(tmp_path, dtype)))
        told += found is not None
    assert told == 3 or family not in ("Llama", "Qwen2", "Qwen3")
