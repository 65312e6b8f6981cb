"""The pages of an engine that vLLM runs, as pools that blocks are copied to and from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvtide.clock import Clock
from kvtide.codec import Codec
from kvtide.engines import device_part
from kvtide.engines.paged import CellOrder, HostPages, OpaquePages, PagePool, cell_order
from kvtide.engines.settings import ConnectorSettings
from kvtide.engines.vllm.model import BYTE_DTYPES, DTYPES, ServedModel
from kvtide.engines.vllm.stats import counted
from kvtide.errors import UnsupportedModel

# vLLM's log has what is below its own logger.
_log = logging.getLogger(f"vllm.{__name__}")

# Their kernels take a token's key, then its value, from the last axis of a page; or a latent, then its key by RoPE.
KNOWN_BACKENDS = {
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
    *("FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"),
}
_INT_BITS = {2: torch.int16, 4: torch.int32}


class EnginePages(NamedTuple):
    """The engine's pages and those of its states. refused: why a device's are not to be used, "" if they are."""

    pool: PagePool
    states: PagePool | None
    counts: Mapping[str, float]
    refused: str = ""


def page_pools(
    model: ServedModel,
    kv_caches: dict[str, torch.Tensor],
    vllm_config: Any,
    settings: ConnectorSettings,
    codecs: Sequence[Codec],
    clock: Clock,
) -> EnginePages:
    """Return the engine's pages, a device's once they are proved with the codecs. UnsupportedModel for unknown ones."""
    states = model.layers.states
    names = {*model.layers.names, *(states.layer_names if states is not None else ())}
    known = {kv_caches[name].data_ptr() for name in names.intersection(kv_caches)}
    # Layers that attend to what others keep come with the pages of these.
    found = {name for name, pages in kv_caches.items() if name in names or pages.data_ptr() not in known}
    if found != names:
        raise UnsupportedModel(f"pages and layers do not match: {sorted(found ^ names)[:4]}")
    layers = [kv_caches[name] for name in model.layers.names]
    parts = [] if states is None else zip(states.layer_names, states.layer_bytes, states.slots, strict=True)
    bytes_of = [(_bytes_of(kv_caches[name])[:, :size], (slot,)) for name, size, slot in parts]
    if vllm_config.device_config.device_type == "cpu":
        pool = _host_pool(model, layers, vllm_config)
        return EnginePages(pool, None if states is None else OpaquePages(bytes_of, states.layout, 1), {})
    attention = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(model.layers.names))
    unknown = {layer.get_attn_backend().get_name() for layer in attention.values()} - KNOWN_BACKENDS
    if unknown:
        raise UnsupportedModel(f"pages of attention backend {sorted(unknown)} are not known")
    return _proved(model, layers, bytes_of, settings, codecs, clock)


def _bytes_of(layer: torch.Tensor) -> torch.Tensor:
    """Return a layer's pages as (pages, bytes), without copying. UnsupportedModel if a page is not one run of bytes."""
    page = layer[0]
    if not page.is_contiguous():
        raise UnsupportedModel(f"pages of {tuple(layer.shape)} are strided inside: {layer.stride()}")
    flat = layer.as_strided((layer.shape[0], page.numel()), (layer.stride(0), 1), layer.storage_offset())
    return flat.view(torch.uint8)


def _host_pool(model: ServedModel, layers: list[torch.Tensor], vllm_config: Any) -> PagePool:
    layout, slots = model.layout, model.layers.slots
    if model.dtype is None:
        assert slots is not None
        parts = list(zip(map(_bytes_of, layers), slots, strict=True))
        return OpaquePages(parts, layout, model.layers.page_tokens)
    layers = _checked_rows(model, layers)
    order = CellOrder.SPLIT if model.opaque else _probed_order(layers[0], vllm_config)
    bits = [layer.view(_INT_BITS[layout.dtype.item_bytes]).numpy().view(layout.bits_dtype) for layer in layers]
    return HostPages(bits, layout, order, None if slots is None else [first for (first,) in slots])


def _checked_rows(model: ServedModel, layers: Sequence[torch.Tensor], parts: int = 1) -> list[torch.Tensor]:
    """Return layers as rows of the layout's elements. UnsupportedModel for other shapes; pages may lie in `parts`."""
    layout = model.layout
    wanted = (layout.kv_heads, model.layers.page_tokens // parts, 2 * layout.head_dim)
    found = [layer.view(torch.bfloat16) if model.dtype in BYTE_DTYPES else layer for layer in layers]
    for name, layer in zip(model.layers.names, found, strict=True):
        if layer.ndim != 4 or tuple(layer.shape[1:]) != wanted or DTYPES.get(layer.dtype) is not layout.dtype:
            shape = f"{tuple(layer.shape)} of {layer.dtype}"
            raise UnsupportedModel(f"pages of {name} must be (pages, {wanted}) of {layout.dtype.value}, got {shape}")
    return found


def _proved(
    model: ServedModel,
    layers: Sequence[torch.Tensor],
    bytes_of: Sequence[tuple[torch.Tensor, tuple[int, ...]]],
    settings: ConnectorSettings,
    codecs: Sequence[Codec],
    clock: Clock,
) -> EnginePages:
    # Who has no device needs none of it.
    from kvtide.engines.paged.device import DeviceLayer, DevicePages, device_name
    from kvtide.engines.paged.proof import prove

    slots = model.layers.slots or [None] * len(layers)
    # A page of the engine's may be several of its kernels', one behind the other.
    tokens = [model.layers.page_tokens // len(own or (0,)) for own in slots]
    parts = [max(1, each // layer.shape[2]) for each, layer in zip(tokens, layers, strict=True)]
    found, halves = (_checked_rows(model, layers, parts[0]), 2) if model.dtype is not None else (layers, 1)
    split = [layer.unflatten(0, (-1, each)) if each > 1 else layer for layer, each in zip(found, parts, strict=True)]
    rows = list(map(DeviceLayer, split, [halves] * len(split), slots))
    kept = [DeviceLayer(pages, 1, own) for pages, own in bytes_of]
    plain = DevicePages(rows, model.layout, model.layers.page_tokens)
    states = None if model.layers.states is None else DevicePages(kept, model.layers.states.layout, 1)
    proofs = [prove(each, each.layers, clock, codecs) for each in (plain, states) if each is not None]
    # What is proved of a part is of no use alone.
    reason, seconds = next((each.reason for each in proofs if each.reason), ""), sum(each.seconds for each in proofs)
    name, result = device_name(layers[0].device), "failed" if reason else "proved"
    counts = Counter({counted("proofs", result): 1.0, "proof_seconds": seconds})
    if reason:
        _log.warning("kvtide serves nothing here: %s failed its proof: %s", name, reason)
        return EnginePages(plain, states, counts, reason)
    # Kernels know plain pages alone.
    has_kernels = settings.device_kernels != "off" and model.layers.slots is None and parts[0] == 1
    pool = _with_kernels(plain, settings, codecs, clock) if has_kernels else plain
    who = "torch" if pool is plain else "kernels"
    counts.update([] if pool is plain else [counted("proofs", who)])
    said = (len({row.slots for row in (*rows, *kept)}), len(codecs), seconds)
    _log.info("proved on %s: %d groups, %d codecs, %.2f s, copied by %s", name, *said, who)
    return EnginePages(pool, states, counts)


def _with_kernels(pool: PagePool, settings: ConnectorSettings, codecs: Sequence[Codec], clock: Clock) -> PagePool:
    is_asked_for = settings.device_kernels == "on"
    try:
        pool = device_part("pages")(pool, settings.device_multiprocessors, codecs, clock, is_asked_for)
    except ImportError as error:
        _log.log(logging.WARNING if is_asked_for else logging.INFO, "torch copies the engine's pages: %s", error)
    return pool


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
