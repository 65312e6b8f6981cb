"""The pages of an engine that vLLM runs, as pools that blocks are copied to and from."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from kvtide.engines import device_part
from kvtide.engines.paged import CellOrder, HostPages, OpaqueLayer, OpaquePages, PagePool, cell_order
from kvtide.engines.settings import ConnectorSettings
from kvtide.engines.vllm.model import BYTE_DTYPES, DTYPES, ServedModel
from kvtide.errors import UnsupportedModel

_log = logging.getLogger(__name__)

# Their kernels take a token's key, then its value, from the last axis of a page.
_SPLIT_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"}
_INT_BITS = {2: torch.int16, 4: torch.int32}


def page_pools(
    model: ServedModel, kv_caches: dict[str, torch.Tensor], vllm_config: Any, settings: ConnectorSettings
) -> tuple[PagePool, PagePool | None]:
    """Return the engine's pages and those of its states. UnsupportedModel if they are not as kvtide knows them."""
    states = model.states
    names = {*model.layer_names, *(states.layer_names if states is not None else ())}
    if set(kv_caches) != names:
        raise UnsupportedModel(f"pages and layers do not match: {sorted(set(kv_caches) ^ names)[:4]}")
    layers = [kv_caches[name] for name in model.layer_names]
    if model.dtype is None:
        assert model.slots is not None
        bytes_of = [OpaqueLayer(_bytes_of(layer), slots) for layer, slots in zip(layers, model.slots, strict=True)]
        pool: PagePool = OpaquePages(bytes_of, model.layout, model.page_tokens)
    else:
        pool = _row_pool(model, layers, vllm_config, settings)
    if states is None:
        return pool, None
    parts = zip(states.layer_names, states.layer_bytes, states.slots, strict=True)
    state_layers = [OpaqueLayer(_bytes_of(kv_caches[name])[:, :size], (slot,)) for name, size, slot in parts]
    return pool, OpaquePages(state_layers, states.layout, 1)


def _bytes_of(layer: torch.Tensor) -> NDArray[np.uint8]:
    """Return a layer's pages as (pages, bytes), without copying. UnsupportedModel if a page is not one run of bytes."""
    page = layer[0]
    if not page.is_contiguous():
        raise UnsupportedModel(f"pages of {tuple(layer.shape)} are strided inside: {layer.stride()}")
    flat = layer.as_strided((layer.shape[0], page.numel()), (layer.stride(0), 1), layer.storage_offset())
    pages: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return pages


def _row_pool(
    model: ServedModel, layers: list[torch.Tensor], vllm_config: Any, settings: ConnectorSettings
) -> PagePool:
    layout = model.layout
    if model.dtype in BYTE_DTYPES:
        layers = [layer.view(torch.bfloat16) if layer.dtype == model.dtype else layer for layer in layers]
    wanted = (layout.kv_heads, model.page_tokens, 2 * layout.head_dim)
    for name, layer in zip(model.layer_names, layers, strict=True):
        if layer.ndim != 4 or tuple(layer.shape[1:]) != wanted or DTYPES.get(layer.dtype) is not layout.dtype:
            found = f"{tuple(layer.shape)} of {layer.dtype}"
            raise UnsupportedModel(f"pages of {name} must be (pages, {wanted}) of {layout.dtype.value}, got {found}")
    if layers[0].device.type == "cpu":
        order = CellOrder.SPLIT if model.opaque else _probed_order(layers[0], vllm_config)
        bits = [layer.view(_INT_BITS[layout.dtype.item_bytes]).numpy().view(layout.bits_dtype) for layer in layers]
        return HostPages(bits, layout, order, None if model.slots is None else [first for (first,) in model.slots])
    attention = get_layers_from_vllm_config(vllm_config, Attention, list(model.layer_names))
    backends = {layer.attn_backend.get_name() for layer in attention.values()}
    if not backends <= _SPLIT_BACKENDS:
        raise UnsupportedModel(f"pages of attention backend {sorted(backends - _SPLIT_BACKENDS)} are not known")
    if settings.device_kernels:
        try:
            pool: PagePool = device_part("pages")(layers, layout, settings.device_multiprocessors)
            return pool
        except ImportError as error:
            _log.warning("no kernels for the engine's pages, torch copies them: %s", error)
    else:
        _log.info("torch copies the engine's pages on %s; device_kernels would have kernels do it", layers[0].device)
    from kvtide.engines.paged.device import DevicePages

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
