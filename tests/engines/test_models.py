"""Which models are served, by what they keep and what they attend to; and how they are known, by their weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.doors.user import PROMPT
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines.transformers import attach
from kvtide.engines.transformers.fingerprint import fingerprint_in, model_fingerprint
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
    own = {"ffn_dim": 32, "word_embed_proj_dim": 32} if family == "OPT" else {}
    sizes = {**GROUPED, **own, "pad_token_id": 0, "head_dim": 8, "sliding_window": None}
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
    # Its rotary frequencies are computed from it, and of the old one's here: the config alone is another.
    twin = copy.deepcopy(tiny_model)
    twin.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    assert model_fingerprint(twin) != model_fingerprint(tiny_model)


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


BLOCK = 16
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
_SIDES = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
_BART: dict[str, Any] = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDES.items()},
    **{"vocab_size": 256, "d_model": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "is_encoder_decoder": True},
}
_DECODER = {"is_encoder_decoder": False, "is_decoder": True, "encoder_layers": 1}
_GPT2: dict[str, Any] = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
_IMAGES: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "image_size": 28},
    **{"intermediate_size": 32, "patch_size": 14, "max_num_tiles": 1, "vision_output_dim": 64},
    **{"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]},
}
_TEXT: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0},
}


@pytest.mark.parametrize(
    ("family", "head", "sizes", "reason"),
    [
        ("Bart", "ForConditionalGeneration", _BART, "depends on the encoder's input"),
        ("Rwkv", "ForCausalLM", {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}, "has no usual one"),
        ("xLSTM", "ForCausalLM", {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2}, "takes no usual cache"),
        # Its cache is made for the encoder's layers; transformers alone fails too.
        ("Bart", "ForCausalLM", {**_BART, **_DECODER}, "takes no usual cache"),
    ],
)
def test_what_keeps_more_than_a_prefix_or_nothing_is_refused(
    family: str, head: str, sizes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{family}Config")(**sizes)
    with pytest.raises(UnsupportedModel, match=reason):
        attach(getattr(transformers, f"{family}{head}")(config).eval(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def with_an_encoder() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2, add_cross_attention=True)).eval()
    return model, {"encoder_hidden_states": torch.randn(1, 7, 32)}


def with_images() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(
        transformers.MllamaConfig(vision_config=_IMAGES, text_config=_TEXT)
    ).eval()
    for layer in (1, 3):
        gates = model.model.language_model.layers[layer]
        for gate in (gates.cross_attn_attn_gate, gates.cross_attn_mlp_gate):
            torch.nn.init.ones_(gate)
    return model, {
        "pixel_values": torch.randn(1, 1, 1, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 100, 1, 1, dtype=torch.long),
    }


@pytest.mark.parametrize("make", [with_an_encoder, with_images])
def test_text_is_restored_and_what_attends_to_another_input_runs_without_the_cache(
    make: Callable[[], tuple[Any, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    model, other = make()
    plain, answer = model.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY, **other)
    # Else nothing would be shown.
    assert not torch.equal(plain, answer)
    for hit_tokens in (0, 96):
        with attach(model, tmp_path, block_tokens=BLOCK) as cached:
            assert torch.equal(cached.generate(PROMPT, **GREEDY, **other), answer)
            assert cached.last is not None and str(cached.last.bypass).startswith("the answer may depend on")
            assert cached.last.blocks_queued == 0
            assert torch.equal(cached.generate(PROMPT, **GREEDY), plain)
            assert cached.last.hit_tokens == hit_tokens
            assert cached.flush(60)
            cached.cache.check()


@pytest.mark.usefixtures("unhurried")
def test_positions_of_the_last_image_are_nothing_to_a_prompt_of_text(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    parts: dict[str, Any] = {"text_config": {**GROUPED, "rope_parameters": rope, "initializer_range": 0.5}}
    parts["vision_config"] = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2}
    model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**parts)).eval()
    prompt = torch.randint(3, 60, (1, 40))
    plain = model.generate(prompt, **GREEDY)
    with attach(model, tmp_path, block_tokens=16) as cached:
        # As two prompts with an image leave it, and one of two sequences.
        for moved in ([[-2]], [[-2]], [[0], [0]]):
            model.model.rope_deltas = torch.tensor(moved)
            assert torch.equal(cached.generate(prompt, **GREEDY), plain)
            assert cached.flush(60)
        assert cached.last is not None and cached.last.hit_tokens == 32


@pytest.mark.usefixtures("unhurried")
def test_padded_rows_of_a_model_that_counts_positions_by_itself_are_not_stored(tmp_path: Path) -> None:
    # Its positions are columns, so that padding moves them.
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    model = model_of(transformers.BartConfig(**sizes, decoder_attention_heads=4, init_std=0.5, pad_token_id=0))
    prompt = torch.randint(3, 60, (1, 40))
    plain = model.generate(prompt, **GREEDY)
    with attach(model, tmp_path, block_tokens=16) as cached:
        cached.generate(torch.nn.functional.pad(prompt, (7, 0)), **GREEDY)
        assert cached.flush(60)
        assert torch.equal(cached.generate(prompt, **GREEDY), plain)


def test_cache_that_is_handed_back_has_what_the_plain_model_s_has(tmp_path: Path) -> None:
    # To go on with: windows of 16 tokens, whatever was kept to be stored.
    model = model_of(transformers.MistralConfig(**GROUPED, sliding_window=16))
    prompt, asked = torch.randint(3, 60, (1, 40)), {**GREEDY, "return_dict_in_generate": True}
    with attach(model, tmp_path, block_tokens=16) as cached:
        mine, its = (each.generate(prompt, **asked).past_key_values for each in (cached, model))
    for layer, plain in zip(mine.layers, its.layers, strict=True):
        assert torch.equal(layer.keys, plain.keys) and not layer.record_past
