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
from kvtide.codec import ProfileShape
from kvtide.engines.chunks import chunk_layout
from kvtide.engines.llamacpp.state import SEQUENCE_VERSION, LlamaContext, PartShape, build_state
from kvtide.engines.paged import file_digest, gguf_files, gguf_fingerprint
from kvtide.errors import CorruptPayload, UnsupportedModel
from kvtide.group import LayerGroup, row_group
from kvtide.keys import namespace_digest
from kvtide.types import Namespace

# GGML's numbers of the element types that are keys and values for kvtide; rows of others are kept as they are.
_DTYPES = {0: KVDtype.FLOAT32, 1: KVDtype.FLOAT16, 30: KVDtype.BFLOAT16}
# By architecture, where a file does not say it: each n-th layer attends to all tokens, the others have windows.
_PERIODS = {"gemma2": 2, "gemma3": 6}
# Tokens of a block, where a batch is no shorter; and how short one may be where no number divides a batch well.
_BLOCK_TOKENS, _SHORT_BLOCK_TOKENS, _BLOCK_TOKENS_MIN = 256, 128, 64
# Settings of a context that decide what the same tokens leave in its cache.
_DECISIVE = (
    *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "attention_type", "flash_attn_type", "offload_kqv"),
    *("op_offload", "type_k", "type_v"),
)


class ServedGroup(NamedTuple):
    """One of the model's caches: its rows in a state, its group, and the namespaces of its parts.

    spaces: of rows as a whole prompt's batches leave them, as a conversation left them, and of those among these that
    have or follow an answer. window_cells: of a cache that forgets what has left its window, its size; else 0.
    """

    shape: PartShape
    group: LayerGroup
    spaces: tuple[Namespace, ...]
    window_cells: int


class ServedLlama(NamedTuple):
    """Served groups of a context. step: prompts are restored in multiples of it, where batches end.

    pairs: KV heads whose channels lossy codecs take from another order than llama.cpp's, where RoPE turns neighbours;
    they know them in two halves, as transformers has them. 0 where nothing has to be changed. weights: names profiles.
    """

    groups: tuple[ServedGroup, ...]
    block_tokens: int
    unit_tokens: int
    step: int
    label: str
    weights: bytes
    pairs: int

    @property
    def profile_shapes(self) -> list[ProfileShape]:
        """Return of which blocks the model needs profiles, by group, as `kvtide calibrate` names them."""
        has_windows = len(self.groups) > 1
        return [ProfileShape(each.group.layout, each.group.text if has_windows else "") for each in self.groups]


def served_llama(context: LlamaContext, is_exact: bool, tenant_salt: bytes) -> ServedLlama:
    """Return how a context is served, which is empty afterwards. UnsupportedModel, with the reason, if it can't be."""
    llm = context.llm
    _refuse(llm)
    shapes = _probed(context)
    ubatch = int(llama_cpp.llama_n_ubatch(llm.ctx))
    # After so many tokens a batch ends, wherever a whole prompt is computed from its beginning.
    unit = ubatch if llm.n_batch % ubatch == 0 else int(llm.n_batch)
    size, path = block_tokens_for(unit), Path(llm.model_path)
    try:
        _check_mapped(gguf_files(path))
        weights, settings = gguf_fingerprint(path), _settings(llm)
    except (ValueError, OSError) as error:
        # A loaded model needs its files no more.
        raise UnsupportedModel(str(error)) from error
    # The second cache is that of windows, and may forget what has left them: its cells hold the newest tokens.
    window = int(llama_cpp.llama_model_n_swa(llm.model)) if len(shapes) > 1 else 0
    kept = min(int(llm.n_ctx()), window + ubatch)
    window_cells = -(-kept // 256) * 256 if window and not llm.context_params.swa_full else 0
    # Cells in another order are summed in another order, which all layers' rows feel.
    decisive = {"weights": weights.hex(), "unit": unit, "shapes": repr(shapes), "cells": window_cells, **settings}
    fingerprint = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).digest()
    layers, groups = _layers(llm, shapes), list[ServedGroup]()
    if not is_exact and not layers:
        arch = llm.metadata.get("general.architecture")
        raise UnsupportedModel(f"which layers of {arch} have windows is not known: the codec must be lossless or raw")
    for number, shape in enumerate(shapes):
        numbers = layers[number] if layers else range(len(shape) // 2)
        group, is_opaque = _group(llm, shape, size, numbers, window if number else 0)
        if not is_exact and is_opaque:
            raise UnsupportedModel("quantised keys and values are kept as they are: the codec must be lossless or raw")
        text = f"{group.text} {'exact' if is_exact else 'approximate'}"
        kinds = (text, f"{text} as turns left it", f"{text} as turns left it, with answers")
        spaces = tuple(namespace_digest(fingerprint, group.layout.dtype, kind, size, tenant_salt) for kind in kinds)
        groups.append(ServedGroup(shape, group, spaces, window_cells if number else 0))
    is_paired = llama_cpp.llama_model_rope_type(llm.model) == llama_cpp.LLAMA_ROPE_TYPE_NORM
    pairs = groups[0].group.layout.kv_heads if is_paired and not is_exact else 0
    label = str(llm.metadata.get("general.name") or path.stem)[:64]
    return ServedLlama(tuple(groups), size, unit, max(size, unit), label, weights, pairs)


def block_tokens_for(unit: int) -> int:
    """Return the tokens of a block: a whole number of units, or a unit a whole number of blocks."""
    if unit < _SHORT_BLOCK_TOKENS:
        return unit * (_SHORT_BLOCK_TOKENS // unit)
    best = max(size for size in range(1, min(unit, _BLOCK_TOKENS) + 1) if unit % size == 0)
    return best if best >= _BLOCK_TOKENS_MIN else unit


def _refuse(llm: Any) -> None:
    """UnsupportedModel for what is known to keep something else than rows of tokens."""
    version, sequences, model = llama_cpp.LLAMA_STATE_SEQ_VERSION, llm.context_params.n_seq_max, llm.model
    has_states = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    has_encoder = llama_cpp.llama_model_has_encoder(model) or llama_cpp.llama_get_memory(llm.ctx) is None
    sees_images = getattr(llm.chat_handler, "clip_model_path", None) is not None
    for is_so, reason in (
        (version != SEQUENCE_VERSION, f"kvtide knows version {SEQUENCE_VERSION} of llama.cpp's states, got {version}"),
        (has_states, "layers that keep a state (Mamba, LFM2, Qwen3-Next) can't be cut at a token"),
        (has_encoder, "a model with an encoder, or without a cache, has no prefixes to restore"),
        (llm._logits_all and llm.draft_model is None, "logits_all wants those of all tokens, which are never stored"),
        (sequences != 1, f"a context of {sequences} sequences is for embeddings"),
        (sees_images, "images have no token ids by which a prompt could be found again"),
    ):
        if is_so:
            raise UnsupportedModel(reason)


def _probed(context: LlamaContext) -> list[PartShape]:
    """Return the model's caches after a few tokens went out and in again, each bit the same. The context is empty."""
    context.clear()
    try:
        context.llm.eval([1, 2, 3])
        data, parts = context.read()
        if len(parts) > 2 or any(list(part.positions) != [0, 1, 2] for part in parts):
            raise CorruptPayload(f"a state of {len(parts)} parts has other cells than the three that were computed")
        shapes = [part.shape for part in parts]
        built, places = build_state(shapes, [part.positions for part in parts])
        for part, place in zip(parts, places, strict=True):
            for source, target in zip(part.rows, place.rows, strict=True):
                target[:] = source
        context.clear()
        if not context.write(built) or context.read()[0] != data:
            raise CorruptPayload("a state that was put together is not what llama.cpp wrote")
    except CorruptPayload as error:
        raise UnsupportedModel(f"kvtide does not know the form of llama.cpp's state of it: {error}") from error
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
    found: dict[str, object] = {name: getattr(llm.context_params, name) for name in _DECISIVE}
    found["library"] = [llama_cpp.__version__, llama_cpp.llama_print_system_info().decode(errors="replace")]
    found["layers on a device"] = llm.model_params.n_gpu_layers
    found["overrides"] = repr(llm.kv_overrides)
    if any(".rope.scaling." in name for name in llm.metadata):
        # Some models take other factors for a long context, whatever the prompt's length.
        found["context"] = int(llm.n_ctx())
    if llm.lora_path:
        found["adapter"] = [file_digest(Path(llm.lora_path)), float(llm.lora_scale)]
    return found


def _layers(llm: Any, shapes: Sequence[PartShape]) -> list[tuple[int, ...]]:
    """Return the numbers of each cache's layers, those of windows second; nothing where that is not known."""
    counts, arch = [len(shape) // 2 for shape in shapes], llm.metadata.get("general.architecture")
    if len(counts) == 1:
        return [tuple(range(*counts))]
    period = llm.metadata.get(f"{arch}.attention.sliding_window_pattern", str(_PERIODS.get(arch, "")))
    # Of files that say it layer by layer it is not read.
    if arch not in _PERIODS or not period.isdecimal():
        return []
    found = [
        tuple(number for number in range(sum(counts)) if ((number + 1) % max(1, int(period)) > 0) is has_window)
        for has_window in (False, True)
    ]
    return found if [*map(len, found)] == counts else []


def _group(llm: Any, shape: PartShape, tokens: int, numbers: Sequence[int], window: int) -> tuple[LayerGroup, bool]:
    """Return a cache as a group of layers, and whether its rows are bytes that are kept as they are."""
    heads = int(llama_cpp.llama_model_n_head_kv(llm.model))
    (code, row_bytes), *others = {(tensor.type_code, tensor.row_bytes) for tensor in shape}
    dtype = _DTYPES.get(code)
    if others or dtype is None or row_bytes % (heads * dtype.item_bytes):
        layout, dtype = chunk_layout(tokens * sum(tensor.row_bytes for tensor in shape), 1, tokens), None
    else:
        layout = BlockLayout(len(numbers), tokens, heads, row_bytes // (heads * dtype.item_bytes), dtype)
    return row_group(numbers, layout, window), dtype is None


def positions_of(tokens: int, cells: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the position in each filled cell of a cache once so many tokens were computed: newest over oldest."""
    every = np.arange(min(tokens, cells) if cells else tokens, dtype=np.int32)
    return every + (tokens - 1 - every) // cells * cells if cells else every
