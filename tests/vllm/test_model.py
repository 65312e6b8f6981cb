"""What the connector refuses, with the reason: every case is a cache that it could not restore exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engines.settings import ConnectorSettings
from kvtide.errors import UnsupportedModel

SETTINGS = ConnectorSettings.parse({"store": "memory://", "fingerprint": "f"})


def _spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, **changes}
    )


def _config(**changes: Any) -> Any:
    parallel = SimpleNamespace(
        pipeline_parallel_size=changes.pop("stages", 1),
        decode_context_parallel_size=changes.pop("context", 1),
        tensor_parallel_size=changes.pop("shards", 1),
    )
    model = SimpleNamespace(runner_type=changes.pop("runner", "generate"), model="models/toy")
    return SimpleNamespace(parallel_config=parallel, model_config=model, speculative_config=changes.pop("draft", None))


def _caches(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    )


def _served(config: Any, caches: Any) -> Any:
    from kvtide.engines.vllm.model import served_model

    return served_model(config, caches, SETTINGS, is_exact=True)


def test_plain_model_is_served_in_blocks_of_whole_pages() -> None:
    model = _served(_config(), _caches(_spec()))
    assert model.layout.shape == (2, 2, 128, 2, 64)
    assert (model.page_tokens, model.label) == (16, "toy bfloat16")


def test_shards_and_salts_have_namespaces_of_their_own() -> None:
    one, two = (_served(_config(shards=n), _caches(_spec())).namespaces for n in (1, 2))
    names = [*one.of(b""), *two.of(b""), *one.of(b"tenant")]
    assert len(set(names)) == 4


def test_hybrid_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="hybrid"):
        _served(_config(), _caches(_spec(), _spec()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 128}, "windowed"),
        ({"attention_chunk_size": 128}, "windowed"),
        ({"non_causal": True}, "windowed"),
        ({"head_size_v": 32}, "one shape"),
    ],
)
def test_cache_that_is_not_all_tokens_keys_and_values_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        _served(_config(), _caches(_spec(**changes)))


def test_quantised_cache_is_refused() -> None:
    import torch

    with pytest.raises(UnsupportedModel, match="float32, float16 or bfloat16"):
        _served(_config(), _caches(_spec(dtype=torch.uint8)))


def test_cache_of_another_kind_is_refused() -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
    with pytest.raises(UnsupportedModel, match="SlidingWindowSpec"):
        _served(_config(), _caches(spec))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 2}, "pipeline"),
        ({"context": 2}, "context parallel"),
        ({"runner": "pooling"}, "text generation"),
        ({"draft": SimpleNamespace(method="eagle")}, "eagle"),
    ],
)
def test_deployment_that_spreads_or_adds_caches_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        _served(_config(**changes), _caches(_spec()))


def test_pages_of_another_shape_are_refused() -> None:
    import torch

    from kvtide.engines.vllm.model import page_pool

    model = _served(_config(), _caches(_spec()))
    pages = torch.zeros((4, 2, 8, 128), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="must be"):
        page_pool(model, {"a": pages, "b": pages}, None, SETTINGS)
    with pytest.raises(UnsupportedModel, match="do not match"):
        page_pool(model, {"a": pages}, None, SETTINGS)


@pytest.mark.parametrize(("options", "expected"), [({}, "torch"), ({"device_kernels": True}, "kernels")])
def test_pages_of_a_device_are_torch_s_unless_kernels_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str
) -> None:
    import torch

    from kvtide.engines import gpu
    from kvtide.engines.paged.device import DevicePages
    from kvtide.engines.vllm import model as vllm_model

    attention = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    monkeypatch.setattr(vllm_model, "get_layers_from_vllm_config", lambda *args: {"a": attention, "b": attention})
    monkeypatch.setattr(gpu, "cuda_pages", lambda layers, layout, multiprocessors: ("kernels", multiprocessors))
    served = _served(_config(), _caches(_spec()))
    # On no processor, and no device needed.
    pages = torch.zeros((4, 2, 16, 128), dtype=torch.bfloat16, device="meta")
    settings = ConnectorSettings.parse({"store": "memory://", **options})
    pool = vllm_model.page_pool(served, {"a": pages, "b": pages}, None, settings)
    found = "torch" if isinstance(pool, DevicePages) else pool
    assert found == ("torch" if expected == "torch" else ("kernels", 32))


def test_connector_has_what_holds_the_pages_encode_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtide.engines.vllm import connector as module

    seen: list[Any] = []
    options = {"store": "memory://", "codec": "cachegen:2", "device_kernels": True}
    connector: Any = object.__new__(module.KVTideConnector)
    connector._settings, connector._codec = ConnectorSettings.parse(options), "cachegen"
    connector._model, connector._vllm_config, connector._clock = SimpleNamespace(label=""), None, None
    pool = SimpleNamespace(memory=None, encoder=lambda codec: f"{codec} on the device")
    monkeypatch.setattr(module, "page_pool", lambda *args: pool)
    monkeypatch.setattr(
        module, "cache_for", lambda store, codec, *args, **rest: seen.append(codec) or SimpleNamespace(open=list)
    )
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(module, "WorkerHalf", lambda cache, pages, *args: seen.append(pages))
    connector.register_kv_caches({})
    assert seen == ["cachegen on the device", pool]


@pytest.mark.parametrize(
    ("params", "is_latest"), [(None, False), ({}, False), ({"kvtide_force_latest": True, "other": 1}, True)]
)
def test_request_says_in_its_transfer_params_that_it_wants_the_latest(params: Any, is_latest: bool) -> None:
    from kvtide.engines.vllm.connector import KVTideConnector

    asked: list[tuple[Any, ...]] = []
    connector: Any = object.__new__(KVTideConnector)
    connector._settings = ConnectorSettings.parse({"store": "memory://"})
    connector._scheduler = SimpleNamespace(match=lambda *words: asked.append(words) or 0)
    kind = dict.fromkeys(("lora_request", "pooling_params", "prompt_embeds", "mm_features", "cache_salt"))
    request = SimpleNamespace(**kind, resumable=False, request_id="r", all_token_ids=[1, 2], kv_transfer_params=params)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert asked == [("r", b"", [1, 2], 0, is_latest, None)]
