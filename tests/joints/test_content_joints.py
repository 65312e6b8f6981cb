"""What is stored under a prompt's keys is that prompt's cache of this very model, whatever is done to either later."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.joints.changes import CHANGES, USES, make_model, use_cache
from tests.joints.conftest import HoldBack, attached
from transformers import DynamicCache

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
WITH_CACHE = {**GREEDY, "return_dict_in_generate": True}


@pytest.mark.parametrize("use", USES)
def test_use_of_the_returned_cache_changes_nothing_that_was_queued(
    use: str, tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, held_back: HoldBack
) -> None:
    with attached(tiny_model, tmp_path) as cached:
        gate = held_back(cached.cache)
        use_cache(use, tiny_model, cached.generate(prompt, **WITH_CACHE).past_key_values, prompt, back=60)
        gate.set()
    plain = DynamicCache(config=tiny_model.config)
    with torch.inference_mode():
        tiny_model(prompt, past_key_values=plain)
    with attached(tiny_model, tmp_path) as again:
        restored = again.restored(prompt)
        assert restored.get_seq_length() == 96
        for one, other in zip(restored.layers, plain.layers, strict=True):
            assert torch.allclose(one.keys, other.keys[:, :, :96], atol=1e-5)
            assert torch.allclose(one.values, other.values[:, :, :96], atol=1e-5)
        assert torch.equal(again.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))


def test_queued_blocks_keep_no_cache_alive(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, held_back: HoldBack
) -> None:
    with attached(tiny_model, tmp_path) as cached:
        gate = held_back(cached.cache)
        output = cached.generate(prompt, **WITH_CACHE)
        layers = [weakref.ref(layer.keys) for layer in output.past_key_values.layers]
        del output
        gc.collect()
        assert cached.last is not None and cached.last.blocks_queued == 6
        assert not any(layer() is not None for layer in layers)
        gate.set()


def test_loadings_that_differ_in_buffers_alone_share_nothing(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    """As `from_pretrained(dtype=bfloat16)`, which keeps frequencies in float32, and `.to(bfloat16)`, which does not."""
    cast = copy.deepcopy(tiny_model).to(torch.bfloat16)
    loaded = copy.deepcopy(cast)
    loaded.model.rotary_emb.inv_freq = tiny_model.model.rotary_emb.inv_freq.clone()
    with attached(cast, tmp_path) as first:
        first.generate(prompt, **GREEDY)
        assert first.flush(10)
    with attached(loaded, tmp_path) as second:
        assert second.hit_tokens(prompt) == 0
    with attached(copy.deepcopy(loaded), tmp_path) as third:
        third.generate(prompt, **GREEDY)
        assert third.last is not None and third.last.hit_tokens == 0


def key_weight(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.model.layers[1].self_attn.k_proj.weight
    return weight


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("is_inferred", [False, True])
def test_a_changed_model_is_another_model_until_it_is_changed_back(
    kind: str, is_inferred: bool, prompt: torch.Tensor, tmp_path: Path
) -> None:
    with torch.inference_mode(is_inferred):
        model = make_model()
    ids = prompt % model.config.vocab_size
    with attached(model, tmp_path) as cached:
        plain = cached.generate(ids, **GREEDY)
        assert cached.flush(10)
        with CHANGES[kind](model):
            answer = cached.generate(ids, **GREEDY)
            assert cached.last is not None and cached.last.hit_tokens == 0
            assert torch.equal(answer, model.generate(ids, **GREEDY))
            # Nor does what it computes now go under the old name, or the old answer to the new one.
            assert torch.equal(cached.generate(ids, **GREEDY), answer)
    with attached(model, tmp_path) as cached:
        assert torch.equal(cached.generate(ids, **GREEDY), plain)


def test_a_fingerprint_of_the_users_own_names_the_model_until_it_changes(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    with attached(model, tmp_path, fingerprint=b"release 7") as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10) and cached.hit_tokens(prompt) == 96
        key_weight(model).data.mul_(1.5)
        cached.generate(prompt, **GREEDY)
        assert cached.last is not None and cached.last.hit_tokens == 0
        cached.weights_changed(b"release 8")
        assert cached.hit_tokens(prompt) == 0


def test_autocast_is_left_alone(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    with attached(tiny_model, tmp_path) as cached, torch.autocast("cpu", torch.bfloat16):
        cached.generate(prompt, **GREEDY)
        assert cached.last is not None and "autocast" in str(cached.last.bypass)


def test_padding_that_transformers_hides_is_hidden(tiny_model: Any, tmp_path: Path) -> None:
    padded = torch.tensor([[0] * 8 + list(range(1, 60))])
    with attached(tiny_model, tmp_path) as cached:
        hits = []
        for _ in range(2):
            assert torch.equal(cached.generate(padded, **GREEDY), tiny_model.generate(padded, **GREEDY))
            assert cached.last is not None and cached.last.bypass is None
            hits.append(cached.last.hit_tokens)
            assert cached.flush(10)
        # Its tokens alone have names: the padding before them is nobody's.
        assert hits == [0, 48]
        assert cached.hit_tokens(padded[:, 8:]) == 48
        padded[0, 20] = 0
        assert torch.equal(cached.generate(padded, **GREEDY), tiny_model.generate(padded, **GREEDY))
        assert "hides tokens" in str(cached.last.bypass)
