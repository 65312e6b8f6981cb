"""Shape and identity of a llama.cpp context's cache, found by a probe; or why kvtide can't serve it.

Invariant: two contexts have one name only if both compute the same bits for the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines.chunks import chunk_layout
from kvtide.engines.llamacpp.context import LlamaContext
from kvtide.engines.llamacpp.state import SEQUENCE_VERSION, PartShape, StateBuilder
from kvtide.engines.paged import file_digest, gguf_files, gguf_fingerprint
from kvtide.errors import CorruptPayload, UnsupportedModel
from kvtide.group import GroupKind, LayerGroup
from kvtide.keys import NamespaceSpec
from kvtide.types import Namespace

# GGML's numbers of the element types that are keys and values for kvtide; rows of others are kept as they are.
_DTYPES = {0: KVDtype.FLOAT32, 1: KVDtype.FLOAT16, 30: KVDtype.BFLOAT16}
# Tokens of a block, where a batch is no shorter; and how short one may be where no number divides a batch well.
_BLOCK_TOKENS, _SHORT_BLOCK_TOKENS, _BLOCK_TOKENS_MIN = 256, 128, 64
_PROBE_TOKENS = (1, 2, 3)
# Settings of a context that decide what the same tokens leave in its cache.
_DECISIVE = (
    *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "attention_type", "flash_attn_type", "offload_kqv"),
    *("op_offload", "type_k", "type_v"),
)


class ServedGroup(NamedTuple):
    """One of the model's caches: its rows in a state, its group, and the namespaces of its parts.

    namespace: rows as a whole prompt's batches leave them. turns: rows as a conversation left them; told: those with
    or after tokens of an answer. window_cells: of a cache that forgets what has left its window, its size; else 0.
    """

    shape: PartShape
    group: LayerGroup
    namespace: Namespace
    turns: Namespace
    told: Namespace
    window_cells: int


class ServedLlama(NamedTuple):
    """Served groups of a context. step: prompts are restored in multiples of it, where batches end.

    pairs: KV heads whose channels lossy codecs take from another order than llama.cpp's, where RoPE turns neighbours;
    they know them in two halves, as transformers has them, and so do profiles. 0 where nothing has to be changed.
    """

    groups: tuple[ServedGroup, ...]
    block_tokens: int
    unit_tokens: int
    step: int
    label: str
    # By which the model's profiles are kept: they don't depend on how it is run.
    weights: bytes
    pairs: int


def served_llama(context: LlamaContext, is_exact: bool, tenant_salt: bytes) -> ServedLlama:
    """Return how a context is served, which is empty afterwards. UnsupportedModel, with the reason, if it can't be."""
    llm = context.llm
    _refuse(llm)
    shapes = _probed(context)
    unit = unit_tokens(int(llm.n_batch), int(llama_cpp.llama_n_ubatch(llm.ctx)))
    size = block_tokens_for(unit)
    path = Path(llm.model_path)
    _check_mapped(gguf_files(path))
    weights = gguf_fingerprint(path)
    fingerprint = _digest({"weights": weights.hex(), "unit": unit, "shapes": repr(shapes), **_settings(llm)})
    windows = _window_cells(llm, len(shapes))
    groups = []
    for number, shape in enumerate(shapes):
        window = int(llama_cpp.llama_model_n_swa(llm.model)) if windows[number] else 0
        group, is_opaque = _group(llm, shape, size, number, window)
        if not is_exact and (is_opaque or len(shapes) > 1):
            what = "quantised keys and values" if is_opaque else "keys and values of windows"
            raise UnsupportedModel(f"{what} are kept as they are: the codec must be lossless or raw")
        text = f"{group.text} {'exact' if is_exact else 'approximate'}"
        plain, turns, told = (
            NamespaceSpec(fingerprint, group.layout.dtype, f"{text}{kind}", size, tenant_salt).digest()
            for kind in ("", " as turns left it", " as turns left it, with answers")
        )
        groups.append(ServedGroup(shape, group, plain, turns, told, windows[number]))
    is_paired = llama_cpp.llama_model_rope_type(llm.model) == llama_cpp.LLAMA_ROPE_TYPE_NORM
    pairs = groups[0].group.layout.kv_heads if is_paired and not is_exact else 0
    label = str(llm.metadata.get("general.name") or Path(llm.model_path).stem)[:64]
    return ServedLlama(tuple(groups), size, unit, max(size, unit), label, weights, pairs)


def unit_tokens(batch: int, ubatch: int) -> int:
    """Return after how many tokens a batch ends, wherever a whole prompt is computed from its beginning."""
    return ubatch if batch % ubatch == 0 else batch


def block_tokens_for(unit: int) -> int:
    """Return the tokens of a block: a whole number of units, or a unit a whole number of blocks."""
    if unit < _SHORT_BLOCK_TOKENS:
        return unit * (_SHORT_BLOCK_TOKENS // unit)
    best = max(size for size in range(1, min(unit, _BLOCK_TOKENS) + 1) if unit % size == 0)
    return best if best >= _BLOCK_TOKENS_MIN else unit


def _refuse(llm: Any) -> None:
    """UnsupportedModel for what is known to keep something else than rows of tokens."""
    if SEQUENCE_VERSION != llama_cpp.LLAMA_STATE_SEQ_VERSION:
        found = f"{llama_cpp.LLAMA_STATE_SEQ_VERSION} in llama-cpp-python {llama_cpp.__version__}"
        raise UnsupportedModel(f"kvtide knows version {SEQUENCE_VERSION} of llama.cpp's states, this is {found}")
    if llama_cpp.llama_model_is_recurrent(llm.model) or llama_cpp.llama_model_is_hybrid(llm.model):
        raise UnsupportedModel("layers that keep a state (Mamba, LFM2, Qwen3-Next) can't be cut at a token")
    if llama_cpp.llama_model_has_encoder(llm.model) or llama_cpp.llama_get_memory(llm.ctx) is None:
        raise UnsupportedModel("a model with an encoder, or without a cache, has no prefixes to restore")
    if llm.context_params.n_seq_max != 1:
        raise UnsupportedModel(f"a context of {llm.context_params.n_seq_max} sequences is for embeddings")
    if getattr(llm.chat_handler, "clip_model_path", None) is not None:
        raise UnsupportedModel("images have no token ids by which a prompt could be found again")


def _probed(context: LlamaContext) -> list[PartShape]:
    """Return the model's caches after a few tokens went out and in again, each bit the same. The context is empty."""
    context.clear()
    try:
        context.evaluate(_PROBE_TOKENS)
        data, parts = context.read()
        if len(parts) > 2 or any(part is None or (part.positions != range(3)).any() for part in parts):
            raise CorruptPayload(f"a state of {len(parts)} parts has other cells than the three that were computed")
        shapes = [part.shape for part in parts if part is not None]
        builder = StateBuilder(shapes, [part.positions for part in parts if part is not None])
        for part, place in zip(parts, builder.parts, strict=True):
            for source, target in zip(part.rows if part else (), place.rows, strict=True):
                target[:] = source
        context.clear()
        if not context.write(builder.data) or context.read()[0] != data:
            raise CorruptPayload("a state that was put together is not what llama.cpp wrote")
    except CorruptPayload as error:
        raise UnsupportedModel(
            f"llama.cpp's state of this model is not of a form that kvtide knows: {error}"
        ) from error
    finally:
        context.clear()
    return shapes


def _check_mapped(files: Sequence[Path]) -> None:
    """UnsupportedModel if another file lies at a model's path by now than the one that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    mapped = [line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8", errors="replace").splitlines()]
    for file in files:
        path = str(file.resolve())
        inodes = {int(each[4]) for each in mapped if len(each) == 6 and each[5].removesuffix(" (deleted)") == path}
        if inodes and file.stat().st_ino not in inodes:
            raise UnsupportedModel(f"{file} was replaced after the model was loaded: load it again")


def _settings(llm: Any) -> dict[str, object]:
    """Return what changes the bits that a context computes, besides its weights and its batches."""
    parameters = llm.context_params
    found: dict[str, object] = {name: getattr(parameters, name) for name in _DECISIVE}
    found["library"] = [llama_cpp.__version__, llama_cpp.llama_print_system_info().decode(errors="replace")]
    found["layers on a device"] = llm.model_params.n_gpu_layers
    found["overrides"] = repr(llm.kv_overrides)
    if any(".rope.scaling." in name for name in llm.metadata):
        # Some models take other factors for a long context, whatever the prompt's length.
        found["context"] = int(llm.n_ctx())
    if llm.lora_path:
        found["adapter"] = [file_digest(Path(llm.lora_path)), float(llm.lora_scale)]
    return found


def _digest(what: object) -> bytes:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()


def _window_cells(llm: Any, parts: int) -> list[int]:
    """Return the size of each cache that forgets what has left its window; 0 of those that don't."""
    if parts == 1 or llm.context_params.swa_full:
        return [0] * parts
    wanted = min(int(llm.n_ctx()), llama_cpp.llama_model_n_swa(llm.model) + llama_cpp.llama_n_ubatch(llm.ctx))
    return [0, -(-wanted // 256) * 256]


def _group(llm: Any, shape: PartShape, tokens: int, number: int, window: int) -> tuple[LayerGroup, bool]:
    """Return a cache as a group of layers, and whether its rows are bytes that are kept as they are."""
    heads, tensors = int(llama_cpp.llama_model_n_head_kv(llm.model)), set(shape.tensors)
    kinds = {(tensor.type_code, tensor.row_bytes) for tensor in tensors}
    code, row_bytes = next(iter(kinds))
    dtype = _DTYPES.get(code)
    is_opaque = len(kinds) > 1 or dtype is None or row_bytes % (heads * dtype.item_bytes) != 0
    if dtype is None or is_opaque:
        layout = chunk_layout(shape.token_bytes * tokens, 1, tokens)
    else:
        dims = row_bytes // (heads * dtype.item_bytes)
        layout = BlockLayout(len(shape.layers), tokens, heads, dims, dtype)
    name = f"window {window}" if window else f"cache {number}"
    group = LayerGroup(name, GroupKind.KV, tuple(range(len(shape.layers))), layout, max(0, window - 1))
    return group, is_opaque


def positions_of(tokens: int, cells: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the position in each filled cell of a cache once so many tokens were computed: newest over oldest."""
    every = np.arange(min(tokens, cells) if cells else tokens, dtype=np.int32)
    return every + (tokens - 1 - every) // cells * cells if cells else every
