"""Shape and identity of the cache of a model that vLLM serves, and of its requests; or why kvtide can't serve it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

import vllm
from kvtide.block import BlockLayout, KVDtype
from kvtide.engines import untested_vllm
from kvtide.engines.paged import files_fingerprint
from kvtide.engines.settings import ConnectorSettings, RequestOptions
from kvtide.errors import UnsupportedModel
from kvtide.keys import namespace_digest
from kvtide.types import Namespace

_log = logging.getLogger(__name__)

DTYPES = {torch.float32: KVDtype.FLOAT32, torch.float16: KVDtype.FLOAT16, torch.bfloat16: KVDtype.BFLOAT16}
# Elements of one byte, which are taken in pairs.
BYTE_DTYPES = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
# Speculative methods whose draft reads the model's own states, with layers of its own among the model's.
_DRAFTED = ("eagle", "eagle3", "mtp")
# Attention to a part of the past, whose pages the engine gives up once it has left them.
_WINDOWS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
# One scale for a layer, which is the model's: pages do not say more than their bytes.
_QUANTISED = {KVQuantMode.FP8_PER_TENSOR}
# Entries of a config that say where a model came from or how it is written down, not what it computes.
_VOLATILE_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
# Extra keys of vLLM's blocks that the salt has already.
_SALTED = {"lora", "cache_salt"}
SALTS_MAX = 1024
_IN_VERSION = f"in vLLM {'.'.join(vllm.__version__.split('.')[:2])}"
# Where a config has these, vLLM goes by the longest prompt that is served: how fast keys turn, how queries are scaled.
_BY_LENGTH = "longrope", "llama4"


class ServedStates(NamedTuple):
    """Layers whose past is one state, with which a page at a block's end begins. order: says what its bytes mean."""

    layout: BlockLayout
    layer_names: tuple[str, ...]
    slots: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    order: str


class ServedLayers(NamedTuple):
    """Layers with rows of tokens, each one's name, spec and slots.

    slots: in a joined page (`join_pages`), of several groups or windows, whose pages the engine gives up; else None.
    counts: of all groups, the pages in a joined one, of `page_tokens`. states: layers of states beside them.
    """

    names: tuple[str, ...]
    specs: tuple[Any, ...]
    slots: tuple[tuple[int, ...], ...] | None
    page_tokens: int
    counts: tuple[int, ...]
    states: ServedStates | None


class ServedModel(NamedTuple):
    """One shard's cache: `layout` of its blocks, its layers, and what names its blocks by a request's salt.

    opaque: what decides the order inside a page that kvtide keeps as it is; "" for keys and values as it knows them.
    dtype: of the pages; None if layers differ in it or in their shape.
    """

    layout: BlockLayout
    layers: ServedLayers
    namespaces: Callable[[bytes], tuple[Namespace, ...]]
    label: str
    opaque: str
    dtype: torch.dtype | None
    is_drafted: bool
    tail_tokens: int


def served_model(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, is_exact: bool) -> ServedModel:
    """Return what is served. UnsupportedModel, with the reason, for what can't be restored exactly."""
    check_version()
    _refuse_by_config(vllm_config)
    layers, is_drafted = _layers_of(vllm_config, kv_cache_config), _is_drafted(vllm_config)
    spec = layers.specs[0]
    if layers.slots is not None and settings.load == "layers":
        raise UnsupportedModel("with several groups of layers vLLM takes failures between steps alone: load async")
    tokens = settings.block_tokens_for(layers.page_tokens)
    shapes = {(each.block_size, each.num_kv_heads, each.head_size, each.dtype) for each in layers.specs}
    is_uniform = len(shapes) == 1 and max(map(len, layers.slots or [()])) <= 1
    # One order for all of a kind; where several lie in one block, all are kept as they are.
    opaque = " and ".join(sorted({_opaque_order(vllm_config, each, not is_uniform) for each in layers.specs}))
    if opaque and not is_exact:
        raise UnsupportedModel(f"pages of {opaque} are kept as they are: the codec must be lossless or raw")
    has_parts = not opaque and is_exact and layers.slots is None and not is_drafted
    if settings.tail_tokens and not has_parts:
        raise UnsupportedModel(
            "tail_tokens stores parts of pages: it takes keys and values of full attention, an exact codec, no drafts"
        )
    layout = _row_layout(spec, len(layers.names), tokens) if is_uniform else _mixed_layout(layers, tokens)
    # Of states each bit is kept, whatever the rows' codec.
    text = " beside ".join(filter(None, [opaque, "" if layers.states is None else layers.states.order]))
    if layers.slots is not None:
        # Grouping is vLLM's own, and decides the order of layers in a block.
        text = f"{text} groups {list(zip(layers.names, layers.slots, strict=True))}"
    quality = f"{'exact' if is_exact else 'approximate'}{f' {text}' if text else ''}"
    return ServedModel(
        layout,
        layers,
        _namespaces(vllm_config, layout, settings, quality, type(spec) is MLAAttentionSpec),
        f"{str(vllm_config.model_config.model).rstrip('/').rpartition('/')[2]} {opaque or layout.dtype.value}",
        opaque,
        spec.dtype if is_uniform else None,
        is_drafted,
        settings.tail_tokens_for(layers.page_tokens, has_parts and vllm_config.device_config.device_type == "cpu"),
    )


# What is refused


@cache
def check_version() -> None:
    """Warn, once, of a vLLM that is not tested. UnsupportedModel if it lacks something that is used."""
    if untested_vllm(vllm.__version__) is not None:
        # Who runs a tested one needs none of it.
        from kvtide.engines.surface import vllm_warning

        _log.warning("%s", vllm_warning(vllm.__version__, Path(vllm.__file__).parent))


def check_policy(engine_config: Any) -> None:
    """ValueError if requests would fail whose blocks can't be loaded: a MultiConnector keeps its own policy."""
    transfer = None if engine_config is None else engine_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f'beside {transfer.kv_connector} give "kv_load_failure_policy": "recompute" beside its name, '
            "or a block that can't be loaded fails its request"
        )


def _refuse_by_config(vllm_config: Any) -> None:
    parallel, model, speculative = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    if parallel.pipeline_parallel_size != 1:
        raise UnsupportedModel(f"pipeline parallelism is not supported, got {parallel.pipeline_parallel_size} stages")
    if parallel.decode_context_parallel_size != 1 or getattr(parallel, "prefill_context_parallel_size", 1) != 1:
        raise UnsupportedModel("context parallelism spreads a page's tokens over ranks, which is not supported")
    if speculative is not None and speculative.method not in (known := ("ngram", *_DRAFTED)):
        raise UnsupportedModel(f"speculative method {speculative.method!r} is not known; {', '.join(known)} are")
    if model.runner_type != "generate":
        raise UnsupportedModel(f"only text generation is supported, got runner {model.runner_type!r}")


def _checked_rows(spec: Any) -> Any:
    # Other subclasses keep something else than rows of all tokens.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, *_WINDOWS):
        raise UnsupportedModel(f"caches of {type(spec).__name__} are not supported")
    is_full = type(spec) not in _WINDOWS
    if is_full and (spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal):
        raise UnsupportedModel("windowed, chunked or non-causal attention is not supported")
    is_plain = spec.dtype in DTYPES and spec.kv_quant_mode is KVQuantMode.NONE
    if not is_plain and (spec.dtype not in BYTE_DTYPES or spec.kv_quant_mode not in _QUANTISED):
        kind = f"{spec.dtype} quantised by {spec.kv_quant_mode.name}"
        raise UnsupportedModel(f"the KV cache must be float32, float16, bfloat16 or fp8 of one scale, got {kind}")
    is_mla = type(spec) is MLAAttentionSpec
    if spec.head_size_v != (0 if is_mla else spec.head_size):
        raise UnsupportedModel("keys and values must have one shape")
    if spec.num_head_slots is not None or spec.tokens_per_state != 1 or spec.page_size_padded is not None:
        raise UnsupportedModel("a page must have one slot for each token and head, and no more")
    if is_mla and (spec.model_version is not None or spec.alignment is not None):
        raise UnsupportedModel(f"latents of {spec.model_version or 'padded pages'} are not supported")
    return spec


def _is_drafted(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in _DRAFTED


# Layers, and how their pages are laid out


def _layers_of(vllm_config: Any, kv_cache_config: Any) -> ServedLayers:
    """Return what layers keep. UnsupportedModel for what are neither rows of tokens nor states beside them."""
    found = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in found]
    foreign = {type(spec).__name__ for spec in specs if type(spec) not in (FullAttentionSpec, MambaSpec, *_WINDOWS)}
    if len(specs) > 1 and foreign:
        raise UnsupportedModel(
            f"groups of {', '.join(sorted(foreign))} are not supported beside others: use KVTideTier"
        )
    if all(type(spec) is MambaSpec for spec in specs):
        raise UnsupportedModel("caches of states alone are not supported: use KVTideTier")
    page_tokens = math.lcm(*(spec.block_size for spec in specs))
    counts = tuple(page_tokens // spec.block_size for spec in specs)
    rows, states, first = list[tuple[str, Any, tuple[int, ...]]](), list[tuple[str, Any, int]](), 0
    for group, spec, count in zip(found, specs, counts, strict=True):
        if type(spec) is MambaSpec:
            if spec.mamba_cache_mode != "align":
                raise UnsupportedModel("vLLM keeps no states at the ends of blocks: give enable_prefix_caching=True")
            if spec.num_speculative_blocks:
                raise UnsupportedModel("states of drafted tokens are not supported: use KVTideTier")
            # In a joined page it is the one at the end of what that covers.
            states += [(name, spec, first + count - 1) for name in group.layer_names]
        else:
            rows += [(name, _checked_rows(spec), tuple(range(first, first + count))) for name in group.layer_names]
        first += count
    # As the model has them: a profile knows nothing of vLLM's grouping.
    rows.sort(key=lambda row: [int(part) for part in row[0].split(".") if part.isdecimal()])
    names, checked, slots = zip(*rows, strict=True)
    is_plain = len(specs) == 1 and type(specs[0]) not in _WINDOWS
    beside = _states_of(vllm_config, states) if states else None
    return ServedLayers(names, checked, None if is_plain else slots, page_tokens, counts, beside)


def _states_of(vllm_config: Any, layers: Iterable[tuple[str, Any, int]]) -> ServedStates:
    names, specs, slots = zip(*layers, strict=True)
    sizes = tuple(spec.state_content_size_bytes for spec in specs)
    is_float32 = {dtype for spec in specs for dtype in spec.dtypes} == {torch.float32}
    unit = KVDtype.FLOAT32 if is_float32 else KVDtype.BFLOAT16
    kinds = sorted({f"{spec.mamba_type.name} {spec.shapes} {list(map(str, spec.dtypes))}" for spec in specs})
    # Their kernels go by the device.
    device = vllm_config.device_config.device_type
    if device == "cpu":
        device = f"bf16 {torch.cpu._is_avx512_bf16_supported()} amx {torch.cpu._is_amx_tile_supported()}"
    order = f"states of {', '.join(kinds)} by {device} {_IN_VERSION}"
    return ServedStates(_bytes_layout(sum(sizes), 1, unit), names, slots, sizes, order)


def _row_layout(spec: Any, layers: int, tokens: int) -> BlockLayout:
    # Halves of a row: keys and values, or no more than halves.
    half = spec.head_size // 2 if type(spec) is MLAAttentionSpec else spec.head_size
    if (type(spec) is MLAAttentionSpec and spec.head_size % 2) or (spec.dtype in BYTE_DTYPES and half % 2):
        raise UnsupportedModel(f"rows of {spec.head_size} elements of {spec.dtype} have no halves")
    dims = half // 2 if spec.dtype in BYTE_DTYPES else half
    return BlockLayout(layers, tokens, spec.num_kv_heads, dims, DTYPES.get(spec.dtype, KVDtype.BFLOAT16))


def _mixed_layout(layers: ServedLayers, tokens: int) -> BlockLayout:
    dtypes = {spec.dtype for spec in layers.specs}
    unit = DTYPES.get(dtypes.pop(), KVDtype.BFLOAT16) if len(dtypes) == 1 else KVDtype.BFLOAT16
    token_bytes = sum(2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize for spec in layers.specs)
    return _bytes_layout(token_bytes * tokens, tokens, unit)


def _bytes_layout(size: int, tokens: int, unit: KVDtype) -> BlockLayout:
    # Who has one shape needs none of it.
    from kvtide.engines.chunks import chunk_layout

    return chunk_layout(size, 1, tokens, unit)


def _opaque_order(vllm_config: Any, spec: Any, is_mixed: bool) -> str:
    """Return what decides the order inside a page, where kvtide does not know it or not take it apart; else ""."""
    cache_type, precision = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    device = vllm_config.device_config.device_type
    if type(spec) is MLAAttentionSpec:
        return f"latents of {cache_type} on {device} {_IN_VERSION}"
    if device != "cpu":
        # Rows go into a block in an order of its own, whatever the strides.
        is_plain = not is_mixed and spec.dtype in DTYPES
        return "" if is_plain else f"{cache_type} of {precision} on {device} {_IN_VERSION}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # Bytes lie as the model's own precision would.
    try:
        isa = _get_attn_isa(precision, spec.block_size, spec.head_size, cache_type)
    except NotImplementedError as error:
        raise UnsupportedModel(str(error)) from error
    # AMX packs pairs; the other kernels' order is looked at where the pages are.
    is_opaque = is_mixed or spec.dtype in BYTE_DTYPES or (isa == "amx" and spec.dtype is torch.bfloat16)
    # Keys may lie by dims, so that their order goes by the tokens of a page.
    return f"{cache_type} of {precision} by {isa} in pages of {spec.block_size} {_IN_VERSION}" if is_opaque else ""


# Names


def _namespaces(
    vllm_config: Any, layout: BlockLayout, settings: ConnectorSettings, quality: str, is_replicated: bool
) -> Callable[[bytes], tuple[Namespace, ...]]:
    fingerprint = settings.fingerprint.encode() or _fingerprint(vllm_config)
    shards = vllm_config.parallel_config.tensor_parallel_size
    shape = f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}"
    # Where all ranks have the same, one copy serves them.
    parts = ["all"] * shards if is_replicated else [f"{shard}/{shards}" for shard in range(shards)]
    texts = [f"{shape} {quality} shard={part}" for part in parts]
    own_salt = settings.tenant_salt.encode()

    @lru_cache(SALTS_MAX)
    def of(salt: bytes) -> tuple[Namespace, ...]:
        # The lengths keep "a" + "bc" and "ab" + "c" apart.
        both = len(own_salt).to_bytes(4, "little") + own_salt + salt if own_salt or salt else b""
        return tuple(namespace_digest(fingerprint, layout.dtype, text, layout.tokens, both) for text in texts)

    return of


def _fingerprint(vllm_config: Any) -> bytes:
    model, downloads = vllm_config.model_config, vllm_config.load_config.download_dir
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _VOLATILE_CONFIG}
    what = {"config": config, "dtype": str(model.dtype), "quantization": str(model.quantization)}
    if any(name in repr(config) for name in _BY_LENGTH):
        what["tokens"] = model.max_model_len
    if model.multimodal_config is not None and model.multimodal_config.mm_processor_kwargs:
        what["images"] = model.multimodal_config.mm_processor_kwargs  # which vLLM's names of images leave out
    if vllm_config.load_config.load_format == "dummy":
        what["weights"] = "random, whatever the files say"
    if _is_drafted(vllm_config):
        draft = vllm_config.speculative_config.draft_model_config
        what["draft"] = files_fingerprint(model_folder(draft.model, draft.revision, downloads), {}).hex()
    return files_fingerprint(model_folder(model.model, model.revision, downloads), what)


def profile_fingerprint(vllm_config: Any, settings: ConnectorSettings) -> bytes:
    """Return the fingerprint by which the model's profiles are kept: they don't depend on how the weights are run."""
    if settings.fingerprint:
        return settings.fingerprint.encode()
    model, downloads = vllm_config.model_config, vllm_config.load_config.download_dir
    return files_fingerprint(model_folder(model.model, model.revision, downloads), {})


def model_folder(name: str, revision: str | None = None, downloads: str | None = None) -> Path:
    """Return the folder of a model that vLLM has loaded: the name itself, or where the hub's client put it."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))


class ServedRequest(NamedTuple):
    """A request whose blocks have names. extra: what a block depends on besides its tokens; None for nothing."""

    request: Any
    salt: bytes
    extra: Callable[[int, int], bytes] | None
    options: RequestOptions

    @classmethod
    def of(cls, request: Any, settings: ConnectorSettings, vllm_config: Any, adapters: dict[int, bytes]) -> Self | None:
        """Return a request as it is served; None if its blocks have no names. ValueError for a bad adapter."""
        is_numbered = bool(request.mm_features) and not _names_images(vllm_config)
        if request.pooling_params is not None or request.resumable or is_numbered:
            return None
        salt, lora = (request.cache_salt or "").encode(), request.lora_request
        if lora is not None:
            # A name may come to mean other weights: these name the blocks.
            folder = Path(lora.lora_path)
            config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            weights = files_fingerprint(folder, {"adapter": config})
            if adapters.setdefault(lora.lora_int_id, weights) != weights:
                return None  # vLLM may compute with what was there before
            salt += b"\0lora " + weights
        depends_on_more = bool(request.mm_features) or request.prompt_embeds is not None
        options = settings.request_options(request.kv_transfer_params)
        return cls(request, salt, partial(_extra, request) if depends_on_more else None, options)


def _names_images(vllm_config: Any) -> bool:
    """False where vLLM counts images from 1 on, in each process again, and does not look at what they are."""
    images, is_caching = vllm_config.model_config.multimodal_config, vllm_config.cache_config.enable_prefix_caching
    return is_caching or images is None or images.mm_processor_cache_gb > 0


def _extra(request: Any, start: int, stop: int) -> bytes:
    """Return what the images and embeddings in a block are, as vLLM's own block hashes have it."""
    keys, _ = generate_block_hash_extra_keys(request, start, stop, 0)
    own = [key for key in keys or () if key[0] not in _SALTED]
    return repr(own).encode() if own else b""
