from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from kvtide.engines.transformers import CachedModel, attach
from kvtide.errors import UnsupportedModel

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def answer(model: Any, store: Path | str, prompt: torch.Tensor, **arguments: Any) -> tuple[Any, CachedModel]:
    """Answer in a cache of its own, as a new process would."""
    with attach(model, str(store), block_tokens=16) as cached:
        output = cached.generate(prompt, **{**GREEDY, **arguments})
        assert cached.cache.flush(10)
    return output, cached


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restored_answer_is_that_of_the_plain_model(
    dtype: torch.dtype, tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model).to(dtype)
    cold, first = answer(model, tmp_path, prompt)
    warm, second = answer(model, tmp_path, prompt)
    assert (first.last.hit_tokens, second.last.hit_tokens) == (0, 96)
    assert torch.equal(cold, warm)
    if dtype is torch.float32:
        assert torch.equal(warm, model.generate(prompt, **GREEDY))


def test_restored_cache_is_bit_exact(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    arguments = {"return_dict_in_generate": True}
    cold, _ = answer(tiny_model, tmp_path, prompt, **arguments)
    warm, _ = answer(tiny_model, tmp_path, prompt, **arguments)
    for one, other in zip(cold.past_key_values.layers, warm.past_key_values.layers, strict=True):
        assert torch.equal(one.keys[:, :, :96], other.keys[:, :, :96])
        assert torch.equal(one.values[:, :, :96], other.values[:, :, :96])


def test_longer_prompt_hits_the_shared_prefix(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    answer(tiny_model, tmp_path, prompt[:, :50])
    longer, cached = answer(tiny_model, tmp_path, prompt)
    assert cached.last.hit_tokens == 48
    assert torch.equal(longer, tiny_model.generate(prompt, **GREEDY))


def test_next_turn_hits_the_answer_too(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    first, _ = answer(tiny_model, tmp_path, prompt, max_new_tokens=20, min_new_tokens=20)
    turn = torch.cat([first, prompt[:, :5]], dim=1)
    second, cached = answer(tiny_model, tmp_path, turn)
    assert cached.last.hit_tokens == 112  # 100 + 20 tokens, the last one not run: 119 // 16 * 16
    assert torch.equal(second, tiny_model.generate(turn, **GREEDY))


def test_prompt_of_whole_blocks_runs_its_last_token(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    answer(tiny_model, tmp_path, prompt[:, :96])
    output, cached = answer(tiny_model, tmp_path, prompt[:, :96])
    assert cached.last.hit_tokens == 80
    assert torch.equal(output, tiny_model.generate(prompt[:, :96], **GREEDY))


def test_prompt_shorter_than_a_block_works(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    output, cached = answer(tiny_model, tmp_path, prompt[:, :3], max_new_tokens=4)
    assert (cached.last.hit_tokens, cached.last.blocks_queued) == (0, 0)
    assert output.shape[1] <= 7


@pytest.mark.parametrize("shape", [(1, 0), (2, 0), (5,)])
def test_empty_or_flat_prompt_is_a_value_error(shape: tuple[int, ...], tiny_model: Any, tmp_path: Path) -> None:
    cached = attach(tiny_model, str(tmp_path), block_tokens=16)
    with pytest.raises(ValueError, match="at least one token"):
        cached.generate(torch.zeros(shape, dtype=torch.long))


def test_other_weights_or_dtype_on_one_store_miss(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    answer(tiny_model, tmp_path, prompt)
    tuned = copy.deepcopy(tiny_model)
    with torch.no_grad():
        tuned.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
    for other in (tuned, copy.deepcopy(tiny_model).to(torch.bfloat16)):
        output, cached = answer(other, tmp_path, prompt)
        assert cached.last.hit_tokens == 0
        assert torch.equal(output, other.generate(prompt, **GREEDY))


def test_weights_changed_under_a_running_cache_miss(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    with attach(model, str(tmp_path), block_tokens=16) as cached:
        cached.generate(prompt, **GREEDY)
        cached.cache.flush(10)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        output = cached.generate(prompt, **GREEDY)
        assert cached.last is not None and cached.last.hit_tokens == 0
        assert torch.equal(output, model.generate(prompt, **GREEDY))


def test_looking_up_and_restoring_follow_the_model_as_generate_does(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    with attach(model, str(tmp_path), block_tokens=16) as cached:
        cached.generate(prompt, **GREEDY)
        hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1)
        assert (cached.hit_tokens(prompt), cached.restored(prompt).get_seq_length()) == (0, 0)
        hook.remove()
        assert cached.restored(prompt).get_seq_length() == cached.hit_tokens(prompt) == 96
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert (cached.restored(prompt).get_seq_length(), cached.hit_tokens(prompt)) == (0, 0)


@pytest.mark.parametrize("other", [{"tenant_salt": b"other"}, {"block_tokens": 32}])
def test_other_tenant_or_block_size_misses(
    other: dict[str, Any], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    answer(tiny_model, tmp_path, prompt)
    with attach(tiny_model, str(tmp_path), **{"block_tokens": 16, **other}) as cached:
        assert cached.hit_tokens(prompt) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"do_sample": True, "num_return_sequences": 2},
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4, pad_token_id=0)},
        {"position_ids": None, "attention_mask": "a hole"},
    ],
)
def test_what_the_cache_cannot_help_with_runs_without_it(
    arguments: dict[str, Any], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    if arguments.get("attention_mask") == "a hole":
        mask = torch.ones_like(prompt)
        mask[:, 3:5] = 0
        arguments = {"attention_mask": mask}
    torch.manual_seed(0)
    output, cached = answer(tiny_model, tmp_path, prompt, **arguments)
    torch.manual_seed(0)
    assert torch.equal(output, tiny_model.generate(prompt, **{**GREEDY, **arguments}))
    assert cached.last is not None and cached.last.bypass
    assert cached.last.blocks_queued == 0


def test_sampling_with_a_seed_gives_the_same_answer_warm(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(answer(tiny_model, tmp_path, prompt, do_sample=True, top_k=0)[0])
    assert torch.equal(outputs[0], outputs[1])


def test_streamer_and_stopping_criteria_of_the_caller_are_kept(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    class Count(TextStreamer):  # type: ignore[misc]
        calls = 0

        def __init__(self) -> None:
            pass

        def put(self, value: Any) -> None:
            self.calls += 1

        def end(self) -> None:
            pass

    streamer = Count()
    output, _ = answer(
        tiny_model, tmp_path, prompt, streamer=streamer, stopping_criteria=[lambda ids, scores: ids.shape[1] >= 104]
    )
    assert output.shape[1] == 104
    assert streamer.calls == 5


def test_unsupported_model_or_bad_settings_are_refused_before_any_work(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="eval"):
        attach(copy.deepcopy(tiny_model).train(), str(tmp_path))
    with pytest.raises(ValueError, match="unknown codec"):
        attach(tiny_model, str(tmp_path), codec="zip")
    with pytest.raises(ValueError, match="tokens"):
        attach(tiny_model, str(tmp_path), block_tokens=0)
    with pytest.raises(ValueError, match="store"):
        attach(tiny_model, "")
    assert list(tmp_path.iterdir()) == []


def test_failing_cache_never_fails_the_answer(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_model.generate(prompt, **GREEDY)
    answer(tiny_model, tmp_path, prompt)
    with attach(tiny_model, str(tmp_path), block_tokens=16) as cached:

        def broken(*arguments: Any) -> Any:
            raise RuntimeError("anything")

        monkeypatch.setattr(cached.cache.tiers, "get_into", broken)
        assert torch.equal(cached.generate(prompt, **GREEDY), plain)
        assert cached.last is not None and cached.last.hit_tokens == 0
