"""What is stored under a prompt's keys is that prompt's cache of this very model, whatever is done to either later."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtide.config import Limits
from kvtide.engines.transformers import CachedModel, attach

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
WITH_CACHE = {**GREEDY, "return_dict_in_generate": True}


def attached(model: Any, store: Path, **settings: Any) -> CachedModel:
    return attach(model, str(store), block_tokens=16, **settings)


def held_back(cached: CachedModel) -> threading.Event:
    """Let nothing be stored until the event is set."""
    gate, put = threading.Event(), cached.cache.tiers.put_from
    cached.cache.tiers.put_from = lambda *rest: gate.wait(30) and put(*rest)  # type: ignore[method-assign]
    return gate


def continued(model: Any, past: DynamicCache, prompt: torch.Tensor) -> None:
    model.generate(torch.cat([prompt, prompt[:, :30]], dim=1), past_key_values=past, **GREEDY)


def cropped(model: Any, past: DynamicCache, prompt: torch.Tensor) -> None:
    past.crop(-60)
    model.generate((prompt + 7) % 256, past_key_values=past, **GREEDY)


def reset(model: Any, past: DynamicCache, prompt: torch.Tensor) -> None:
    past.reset()


def overwritten(model: Any, past: DynamicCache, prompt: torch.Tensor) -> None:
    for layer in past.layers:
        layer.keys.fill_(3.0)
        layer.values[..., 5:, :] = 0


@pytest.mark.parametrize("use", [continued, cropped, reset, overwritten])
def test_use_of_the_returned_cache_changes_nothing_that_was_queued(
    use: Callable[[Any, DynamicCache, torch.Tensor], None], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    with attached(tiny_model, tmp_path) as cached:
        gate = held_back(cached)
        use(tiny_model, cached.generate(prompt, **WITH_CACHE).past_key_values, prompt)
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


def test_queued_blocks_keep_no_cache_alive(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    with attached(tiny_model, tmp_path) as cached:
        gate = held_back(cached)
        output = cached.generate(prompt, **WITH_CACHE)
        layers = [weakref.ref(layer.keys) for layer in output.past_key_values.layers]
        del output
        gc.collect()
        assert cached.last is not None and cached.last.blocks_queued == 6
        assert not any(layer() is not None for layer in layers)
        gate.set()


def test_the_queue_takes_no_more_than_its_bound(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    with attached(tiny_model, tmp_path, limits=Limits(store_queue_bytes_max=2 * block_bytes)) as cached:
        gate = held_back(cached)
        cached.generate(prompt, **GREEDY)
        assert cached.last is not None and cached.last.blocks_queued == 2
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


def through_data(model: Any) -> None:
    key_weight(model).data.mul_(1.5)


def by_a_small_delta(model: Any) -> None:
    key_weight(model).data += 1e-2 * torch.randn_like(key_weight(model))


def by_a_numpy_view(model: Any) -> None:
    key_weight(model).detach().numpy()[:] *= 1.5


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        key_weight(model).mul_(1.5)


def of_a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def of_the_scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def by_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)


def by_a_hook_on_all_modules(model: Any) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.5 if module is model.model.layers[0] else None
    )
    model.undo = handle.remove


def by_a_replaced_forward(model: Any) -> None:
    layer = model.model.layers[0]
    usual = layer.forward
    layer.forward = lambda *args, **named: usual(*args, **named) * 1.5


def by_another_module(model: Any) -> None:
    projection = model.model.layers[0].self_attn.k_proj
    other = torch.nn.Linear(projection.in_features, projection.out_features, bias=False)
    model.model.layers[0].self_attn.k_proj = other


CHANGES = [
    through_data,
    by_a_small_delta,
    by_a_numpy_view,
    in_inference_mode,
    of_a_buffer,
    of_the_scaling,
    by_a_hook,
    by_a_hook_on_all_modules,
    by_a_replaced_forward,
    by_another_module,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_another_model(
    change: Callable[[Any], None], tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    with attached(model, tmp_path) as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10)
        change(model)
        try:
            answer = cached.generate(prompt, **GREEDY)
            assert cached.last is not None and cached.last.hit_tokens == 0
            assert torch.equal(answer, model.generate(prompt, **GREEDY))
            # Nor does what it computes now go under the old name, or the old answer to the new one.
            assert torch.equal(cached.generate(prompt, **GREEDY), answer)
        finally:
            getattr(model, "undo", lambda: None)()
    with attached(tiny_model, tmp_path) as cached:
        assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))


def test_weights_made_in_inference_mode_are_watched_too(prompt: torch.Tensor, tiny_model: Any, tmp_path: Path) -> None:
    with torch.inference_mode():
        model = copy.deepcopy(tiny_model)
    with attached(model, tmp_path) as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10)
        with torch.inference_mode():
            key_weight(model).mul_(1.5)
        cached.generate(prompt, **GREEDY)
        assert cached.last is not None and cached.last.hit_tokens == 0


def test_what_can_not_be_seen_can_be_said(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    with attached(model, tmp_path) as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10) and cached.hit_tokens(prompt) == 96
        key_weight(model).data[3, 5] += 1
        cached.weights_changed()
        assert cached.hit_tokens(prompt) == 0


def test_a_fingerprint_of_the_users_own_names_the_model_until_it_changes(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_model)
    with attached(model, tmp_path, fingerprint=b"release 7") as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10) and cached.hit_tokens(prompt) == 96
        through_data(model)
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
