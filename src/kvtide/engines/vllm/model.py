"""Shape and identity of the cache of a model that vLLM serves, or why kvtide can't serve it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

import vllm
from kvtide.block import BlockLayout, KVDtype
from kvtide.engines import VLLM_VERSIONS
from kvtide.engines.paged import CellOrder, HostPages, Namespaces, PagePool, cell_order, files_fingerprint
from kvtide.engines.settings import ConnectorSettings
from kvtide.errors import UnsupportedModel
from kvtide.keys import NamespaceSpec

_log = logging.getLogger(__name__)

_DTYPES = {torch.float32: KVDtype.FLOAT32, torch.float16: KVDtype.FLOAT16, torch.bfloat16: KVDtype.BFLOAT16}
# Their kernels take a token's key, then its value, from the last axis of a page.
_SPLIT_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"}
# Entries of a config that say where a model came from or how it is written down, not what it computes.
_VOLATILE_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
_INT_BITS = {2: torch.int16, 4: torch.int32}


class ServedModel(NamedTuple):
    """One shard's cache: `layout` of its blocks, tokens of an engine page, and what names its blocks."""

    layout: BlockLayout
    page_tokens: int
    layer_names: tuple[str, ...]
    namespaces: Namespaces
    label: str


def served_model(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, is_exact: bool) -> ServedModel:
    """Return what is served. UnsupportedModel, with the reason, for what can't be restored exactly."""
    if not vllm.__version__.startswith(VLLM_VERSIONS):
        raise UnsupportedModel(
            f"tested with vLLM {', '.join(f'{v}x' for v in VLLM_VERSIONS)}, this is {vllm.__version__}"
        )
    _refuse_by_config(vllm_config)
    spec, layer_names = _only_group(kv_cache_config)
    layout = BlockLayout(
        len(layer_names),
        settings.block_tokens_for(spec.block_size),
        spec.num_kv_heads,
        spec.head_size,
        _DTYPES[spec.dtype],
    )
    name = str(vllm_config.model_config.model)
    label = f"{name.rstrip('/').rpartition('/')[2]} {layout.dtype.value}"
    namespaces = _namespaces(vllm_config, layout, settings, is_exact)
    return ServedModel(layout, spec.block_size, layer_names, namespaces, label)


def _refuse_by_config(vllm_config: Any) -> None:
    parallel, model, speculative = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    if parallel.pipeline_parallel_size != 1:
        raise UnsupportedModel(f"pipeline parallelism is not supported, got {parallel.pipeline_parallel_size} stages")
    if parallel.decode_context_parallel_size != 1 or getattr(parallel, "prefill_context_parallel_size", 1) != 1:
        raise UnsupportedModel("context parallelism spreads a page's tokens over ranks, which is not supported")
    if speculative is not None and speculative.method != "ngram":
        raise UnsupportedModel(f"speculative method {speculative.method!r} keeps a cache of its own")
    if model.runner_type != "generate":
        raise UnsupportedModel(f"only text generation is supported, got runner {model.runner_type!r}")


def _only_group(kv_cache_config: Any) -> tuple[Any, tuple[str, ...]]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise UnsupportedModel(f"hybrid models are not supported: their cache has {len(groups)} groups ({kinds})")
    spec = groups[0].kv_cache_spec
    # Subclasses keep something else than keys and values of all tokens.
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedModel(f"only plain full attention is supported, this model's cache is {type(spec).__name__}")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        raise UnsupportedModel("windowed, chunked or non-causal attention is not supported")
    if spec.kv_quant_mode is not KVQuantMode.NONE or spec.dtype not in _DTYPES:
        raise UnsupportedModel(f"the KV cache must be float32, float16 or bfloat16, got {spec.dtype}")
    if spec.head_size_v != spec.head_size or spec.num_head_slots is not None or spec.tokens_per_state != 1:
        raise UnsupportedModel("keys and values must have one shape and one slot for each token and head")
    return spec, tuple(groups[0].layer_names)


def _namespaces(vllm_config: Any, layout: BlockLayout, settings: ConnectorSettings, is_exact: bool) -> Namespaces:
    fingerprint = settings.fingerprint.encode() or _fingerprint(vllm_config)
    shards = vllm_config.parallel_config.tensor_parallel_size
    shape = f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}"
    quality = "exact" if is_exact else "approximate"
    texts = [f"{shape} {quality} shard={shard}/{shards}" for shard in range(shards)]
    own_salt = settings.tenant_salt.encode()

    def specs(salt: bytes) -> Sequence[NamespaceSpec]:
        # The lengths keep "a" + "bc" and "ab" + "c" apart.
        both = len(own_salt).to_bytes(4, "little") + own_salt + salt if own_salt or salt else b""
        return [NamespaceSpec(fingerprint, layout.dtype, text, layout.tokens, both) for text in texts]

    return Namespaces(specs)


def _fingerprint(vllm_config: Any) -> bytes:
    model = vllm_config.model_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _VOLATILE_CONFIG}
    what = {"config": config, "dtype": str(model.dtype), "quantization": str(model.quantization)}
    return files_fingerprint(model_folder(model.model, model.revision), what)


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model that vLLM has loaded: the name itself, or where the hub's client put it."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def page_pool(
    model: ServedModel, kv_caches: dict[str, torch.Tensor], vllm_config: Any, settings: ConnectorSettings
) -> PagePool:
    """Return the engine's pages: on a device torch copies them, or kernels if the user asks for them.

    UnsupportedModel if they are not as kvtide knows them.
    """
    if set(kv_caches) != set(model.layer_names):
        foreign = sorted(set(kv_caches) ^ set(model.layer_names))
        raise UnsupportedModel(f"pages and layers do not match: {foreign[:4]}")
    layers = [kv_caches[name] for name in model.layer_names]
    layout = model.layout
    wanted = (layout.kv_heads, model.page_tokens, 2 * layout.head_dim)
    for name, layer in zip(model.layer_names, layers, strict=True):
        if layer.ndim != 4 or tuple(layer.shape[1:]) != wanted or _DTYPES.get(layer.dtype) is not layout.dtype:
            found = f"{tuple(layer.shape)} of {layer.dtype}"
            raise UnsupportedModel(f"pages of {name} must be (pages, {wanted}) of {layout.dtype.value}, got {found}")
    if layers[0].device.type == "cpu":
        order = _probed_order(layers[0], vllm_config)
        bits = [layer.view(_INT_BITS[layout.dtype.item_bytes]).numpy().view(layout.bits_dtype) for layer in layers]
        return HostPages(bits, layout, order)
    attention = get_layers_from_vllm_config(vllm_config, Attention, list(model.layer_names))
    backends = {layer.attn_backend.get_name() for layer in attention.values()}
    if not backends <= _SPLIT_BACKENDS:
        raise UnsupportedModel(f"pages of attention backend {sorted(backends - _SPLIT_BACKENDS)} are not known")
    if settings.device_kernels:
        from kvtide.engines.gpu import cuda_pages

        return cuda_pages(layers, layout, settings.device_multiprocessors)
    from kvtide.engines.paged import DevicePages

    _log.info("torch copies the engine's pages on %s; device_kernels would have kernels do it", layers[0].device)
    return DevicePages(layers, layout)


def _probed_order(layer: torch.Tensor, vllm_config: Any) -> CellOrder:
    """Let the engine write a page of its own and look: the order inside depends on the processor."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from vllm import _custom_ops as ops

    _, heads, tokens, content = layer.shape
    head_dim = content // 2
    # Whole numbers up to 256 are exact in every dtype; each row and column is told apart by the sum of two passes.
    scratch = torch.zeros((1, heads, tokens, content), dtype=layer.dtype)
    values = torch.arange(2 * tokens * heads * head_dim).remainder(251).to(layer.dtype)
    keys, rest = values.view(2, tokens, heads, head_dim)
    halves = scratch.view(1, heads, 2 * tokens, head_dim).chunk(2, dim=2)
    isa = _get_attn_isa(layer.dtype, tokens, head_dim, vllm_config.cache_config.cache_dtype)
    ops.cpu_attn_reshape_and_cache(keys, rest, *halves, torch.arange(tokens), isa)
    try:
        return cell_order(scratch[0, 0].float().numpy(), keys[:, 0].float().numpy(), rest[:, 0].float().numpy())
    except ValueError as error:
        raise UnsupportedModel(f"{error} (processor path {isa!r})") from error
