"""The groups of a Hugging Face model, found by a probe, and their parts: the engine's tensors as blocks and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvtide.block import HEAD_DIM_MAX, BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import ProfileShape
from kvtide.errors import UnsupportedModel
from kvtide.group import GroupKind, LayerGroup
from kvtide.store import BlockSource
from kvtide.tier.buffers import aligned_buffer

TORCH_DTYPES = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.BFLOAT16: torch.bfloat16,
}
_KVTIDE_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
BITS_DTYPES = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
_LAYER_TYPES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)
# Models with states that go on exactly where a pass has left them: two passes were held against one in float32, by the
# tests too. Others are known not to (Bamba, Jamba, MiniMax), or nobody has looked.
_STATES_GO_ON = {
    *("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
# A state's bytes are rounded up to whole rows of so many elements.
_STATE_ROW = 64


class TokenRows(NamedTuple):
    """Shape of what a layer keeps of each token: heads and dims of keys and of values. window: in tokens, 0: none."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype
    window: int


class StateTensor(NamedTuple):
    """One tensor of a layer's state: `conv_states` or `recurrent_states`, its number, its shape."""

    name: str
    number: int
    shape: tuple[int, ...]


class ModelGroup(NamedTuple):
    """A group, and how its layers hold it: rows of tokens, or for each layer the tensors of its state.

    is_whole: every layer of the model is in it.
    """

    group: LayerGroup
    rows: TokenRows | None
    states: tuple[tuple[StateTensor, ...], ...] = ()
    is_whole: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the tensors."""
        return TORCH_DTYPES[self.group.layout.dtype]


def model_groups(model: Any, cache: DynamicCache, block_tokens: int) -> tuple[ModelGroup, ...]:
    """Return the groups of a model from a cache in which it has left two tokens, those of tokens first.

    UnsupportedModel, with the reason, for layers that can't be restored exactly.
    """
    config = model.config.get_text_config(decoder=True)
    kind, across = config.model_type, getattr(config, "cross_attention_layers", None) or ()
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if has_states and kind not in _STATES_GO_ON:
        raise UnsupportedModel(f"the states of {kind} models are not known to go on exactly from one pass to the next")
    rows: dict[TokenRows, list[int]] = {}
    states: dict[torch.dtype, dict[int, tuple[StateTensor, ...]]] = {}
    for number, layer in enumerate(cache.layers):
        # Of layers without a cache there is a stand-in.
        if not isinstance(layer, DynamicLayer | LinearAttentionCacheLayerMixin):
            continue
        # What attends to an image keeps nothing of a text; calls with images run without kvtide's cache.
        if number in across and isinstance(layer, DynamicLayer) and not layer.is_initialized:
            continue
        if type(layer) not in _LAYER_TYPES:
            raise UnsupportedModel(f"layer {number} keeps a {type(layer).__name__}, which can't be restored")
        if isinstance(layer, DynamicLayer):
            rows.setdefault(_rows_of(layer, number), []).append(number)
        if isinstance(layer, LinearAttentionLayer):
            for dtype, tensors in _states_of(layer).items():
                states.setdefault(dtype, {})[number] = tensors
    if not rows and not states:
        raise UnsupportedModel("the model's config does not say how many layers its cache has")
    found = [
        _row_group(each, layers, block_tokens)._replace(is_whole=len(layers) == len(cache.layers))
        for each, layers in rows.items()
    ]
    return (*found, *(_state_group(dtype, layers) for dtype, layers in states.items()))


def is_plain(groups: Sequence[ModelGroup]) -> bool:
    """Tell whether all of a model is keys and values of one shape, of all tokens."""
    first = groups[0]
    return len(groups) == 1 and first.is_whole and first.group.kind is GroupKind.KV and not first.group.reach_tokens


def profile_shapes(groups: Sequence[ModelGroup]) -> list[ProfileShape]:
    """Return of which blocks a model needs profiles: of a plain model's, else of each group of rows'."""
    if is_plain(groups):
        return [ProfileShape(groups[0].group.layout)]
    return [ProfileShape(each.group.layout, each.group.text) for each in groups if each.rows]


def _rows_of(layer: DynamicLayer, number: int) -> TokenRows:
    if layer.get_seq_length() == 0:
        raise UnsupportedModel(f"layer {number} keeps no keys: it shares another's cache, or has no usual one")
    shapes = [tuple(tensor.shape) for tensor in (layer.keys, layer.values)]
    if any(len(shape) != 4 or (shape[0], shape[2]) != (1, 2) for shape in shapes):
        raise UnsupportedModel(f"expected (1, heads, 2, dims) after two tokens, got {shapes}")
    if layer.keys.dtype != layer.values.dtype or layer.keys.dtype not in _KVTIDE_DTYPES:
        types = f"{layer.keys.dtype} and {layer.values.dtype}"
        raise UnsupportedModel(f"KV dtype must be float32, float16 or bfloat16, got {types}")
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
    (_, key_heads, _, key_dims), (_, value_heads, _, value_dims) = shapes
    return TokenRows((key_heads, key_dims), (value_heads, value_dims), layer.keys.dtype, window)


def _row_group(rows: TokenRows, layers: list[int], block_tokens: int) -> ModelGroup:
    is_latent = rows.key != rows.value
    elements = math.prod(rows.key) + math.prod(rows.value)
    heads, dims = (1, elements // 2) if is_latent else rows.key
    if elements % 2 or dims > HEAD_DIM_MAX:
        raise UnsupportedModel(f"keys of {rows.key} and values of {rows.value} can't be kept as rows of equal halves")
    # What is rotated comes first in a latent row, which the name tells from an order that once was.
    kept = f"latent {rows.value[1]}+{rows.key[1]}" if is_latent else f"attention {heads}x{dims}"
    name = f"{kept}{f' window {rows.window}' if rows.window else ''}"
    layout = BlockLayout(len(layers), block_tokens, heads, dims, _KVTIDE_DTYPES[rows.dtype])
    kind = GroupKind.LATENT if is_latent else GroupKind.KV
    return ModelGroup(LayerGroup(name, kind, tuple(layers), layout, max(0, rows.window - 1)), rows)


def _states_of(layer: LinearAttentionLayer) -> dict[torch.dtype, tuple[StateTensor, ...]]:
    found: dict[torch.dtype, tuple[StateTensor, ...]] = {}
    for name in ("conv_states", "recurrent_states"):
        for number, tensor in getattr(layer, name).items():
            if tensor is None:
                continue
            if tensor.shape[0] != 1 or tensor.dtype not in _KVTIDE_DTYPES:
                raise UnsupportedModel(f"{name} of {tuple(tensor.shape)} and {tensor.dtype} can't be kept")
            state = StateTensor(name, number, tuple(tensor.shape))
            found[tensor.dtype] = (*found.get(tensor.dtype, ()), state)
    return found


def _state_group(dtype: torch.dtype, layers: dict[int, tuple[StateTensor, ...]]) -> ModelGroup:
    elements = max(sum(math.prod(tensor.shape) for tensor in tensors) for tensors in layers.values())
    half = -(-elements // (2 * _STATE_ROW)) * _STATE_ROW
    layout = BlockLayout(len(layers), 1, half // _STATE_ROW, _STATE_ROW, _KVTIDE_DTYPES[dtype])
    group = LayerGroup(f"state {layout.dtype.value}", GroupKind.STATE, tuple(layers), layout)
    return ModelGroup(group, None, tuple(layers.values()))


def read_rows(past: DynamicCache, group: ModelGroup, meta: BlockMeta) -> BlockBits:
    """Return a copy of one part of a group of tokens. ValueError if the cache holds another shape or not all of it."""
    layout, rows = meta.layout, group.rows
    assert rows is not None
    torch_bits, numpy_bits = BITS_DTYPES[layout.dtype.item_bytes]
    bits: BlockBits = np.empty(layout.shape, layout.bits_dtype)
    for position, number in enumerate(group.group.layers):
        layer = past.layers[number]
        # What is before has left the window.
        start = meta.start - (layer.get_seq_length() - layer.keys.shape[-2])
        parts = []
        for tensor, (heads, dims) in ((layer.keys, rows.key), (layer.values, rows.value)):
            part = tensor.detach()[0, :, max(0, start) : start + layout.tokens]
            if start < 0 or tuple(part.shape) != (heads, layout.tokens, dims) or part.dtype != rows.dtype:
                raise ValueError(f"layer {number} has {part.dtype} of {tuple(part.shape)} from token {meta.start} on")
            parts.append(part.cpu().contiguous().view(torch_bits).numpy().view(numpy_bits).transpose(1, 0, 2))
        bits[position] = halves_of(group, parts[0], parts[1])
    return bits


def halves_of(group: ModelGroup, keys: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Return both halves of a layer's rows as a block has them: (2, tokens, kv_heads, head_dim).

    keys, values: (tokens, heads, dims). Of latents, values, then keys make one row, of which each half is half.
    """
    if group.group.kind is GroupKind.KV:
        return np.stack([keys, values])
    row = np.concatenate([part.reshape(len(part), -1) for part in (values, keys)], axis=1)
    return np.stack(np.split(row, 2, axis=1))[:, :, None]


class RowsRoom:
    """Room for the parts of a group of tokens that are being loaded."""

    def __init__(self, group: ModelGroup, parts: int) -> None:
        self._group, layout = group, group.group.layout
        self._room = np.empty(
            (layout.layers, 2, parts * layout.tokens, layout.kv_heads, layout.head_dim), layout.bits_dtype
        )

    def write(self, position: int, bits: BlockBits) -> None:
        """Copy a part in; a BlockSink."""
        tokens = self._group.group.layout.tokens
        self._room[:, :, position * tokens : (position + 1) * tokens] = bits

    def fill(self, past: DynamicCache, stop: int, device: torch.device) -> None:
        """Make the layers hold what was loaded, whose last token is the one before `stop`."""
        rows = self._group.rows
        assert rows is not None
        signed = self._room.view(f"<i{self._room.itemsize}")
        for position, number in enumerate(self._group.group.layers):
            pair = torch.from_numpy(signed[position]).view(self._group.dtype)
            if self._group.group.kind is GroupKind.KV:
                tensors = list(pair)
            else:
                row, values = torch.cat([pair[0, :, 0], pair[1, :, 0]], dim=1), math.prod(rows.value)
                tensors = [row[:, values:].unflatten(1, rows.key), row[:, :values].unflatten(1, rows.value)]
            layer = past.layers[number]
            keep = min(rows.window - 1, tensors[0].shape[0]) if rows.window else tensors[0].shape[0]
            keys, values = (
                each[each.shape[0] - keep :].transpose(0, 1)[None].contiguous().to(device) for each in tensors
            )
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if rows.window:
                layer.cumulative_length = stop


def read_states(past: DynamicCache, group: ModelGroup) -> BlockBits:
    """Return a copy of a group's states as they are now. ValueError if one has another shape than the probe's."""
    layout = group.group.layout
    torch_bits, numpy_bits = BITS_DTYPES[layout.dtype.item_bytes]
    bits: BlockBits = np.zeros(layout.shape, layout.bits_dtype)
    for position, (number, tensors) in enumerate(zip(group.group.layers, group.states, strict=True)):
        flat, start = bits[position].reshape(-1), 0
        for each in tensors:
            tensor = getattr(past.layers[number], each.name)[each.number]
            if tensor is None or tuple(tensor.shape) != each.shape or tensor.dtype != group.dtype:
                raise ValueError(f"layer {number} has no {each.name} of {each.shape} in {group.dtype}")
            stop = start + tensor.numel()
            flat[start:stop] = tensor.detach().cpu().contiguous().view(torch_bits).numpy().view(numpy_bits).reshape(-1)
            start = stop
    return bits


def fill_states(past: DynamicCache, group: ModelGroup, bits: BlockBits, device: torch.device) -> None:
    """Make the layers of an empty cache hold the states that `read_states` has read."""
    layers = bits.view(f"<i{bits.itemsize}").reshape(len(group.states), -1)
    for flat, number, tensors in zip(layers, group.group.layers, group.states, strict=True):
        start, layer = 0, past.layers[number]
        for each in tensors:
            stop = start + math.prod(each.shape)
            tensor = torch.from_numpy(flat[start:stop].copy()).view(group.dtype).view(each.shape).to(device)
            start = stop
            named: dict[str, Any] = {each.name: tensor, "state_idx": each.number}
            layer.lazy_initialization(**named)
            getattr(layer, each.name)[each.number].copy_(tensor)
            layer.has_previous_state[each.number] = True


# Their rotary frequencies depend on the length of the sequence: keys from a short prompt are wrong in a long one.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def groups_of(model: Any, block_tokens: int) -> tuple[ModelGroup, ...]:
    """Return the groups of the model's cache, found by running two tokens through it.

    UnsupportedModel, with the reason, for a model whose cache can't be restored exactly, or depends on later tokens or
    on the length of the prompt.
    """
    _refuse_by_config(model)
    first, second = _probe(model, [0, 1]), _probe(model, [0, 2])
    groups = model_groups(model, first, block_tokens)
    for number in (number for each in groups if each.rows for number in each.group.layers):
        one, other = first.layers[number].keys[:, :, :1], second.layers[number].keys[:, :, :1]
        if not torch.allclose(one, other, rtol=1e-2, atol=1e-2):
            raise UnsupportedModel("keys of a token change with later tokens: the model is not causal")
    return groups


def model_layout(model: Any, block_tokens: int) -> BlockLayout:
    """Return the layout of a model's blocks. UnsupportedModel as in `groups_of`, and for a model of several groups."""
    return plain_layout(groups_of(model, block_tokens))


def plain_layout(groups: Sequence[ModelGroup]) -> BlockLayout:
    """Return the layout of blocks. UnsupportedModel for several groups."""
    if not is_plain(groups):
        names = ", ".join(each.group.name for each in groups)
        raise UnsupportedModel(f"importance and streams take models of one group, not {names}")
    return groups[0].group.layout


def _refuse_by_config(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models keep a cache that depends on the encoder's input")
    if model.training:
        raise UnsupportedModel("the model is in training mode, where dropout changes the cache; call model.eval()")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel("the model has adapters that can be switched at any time; merge them into the weights")
    rope_type = _rope_types(getattr(config, "rope_parameters", None)) & _LENGTH_DEPENDENT_ROPE
    if rope_type:
        raise UnsupportedModel(f"rotary scaling {sorted(rope_type)} depends on the length of the prompt")


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def _probe(model: Any, tokens: list[int]) -> Any:
    cache = DynamicCache(config=model.config)
    given: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    try:
        with torch.inference_mode():
            model(torch.tensor([tokens], device=model.device), **given)
    except (ValueError, IndexError) as error:
        raise UnsupportedModel(f"the model takes no usual cache: {error}") from error
    return cache


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes its cache: models of states alone have their own."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


class RestoredRoom:
    """Room for the restored blocks of all layers, in the shape that the engine wants."""

    def __init__(self, layout: BlockLayout, blocks: int, spare_tokens: int = 0) -> None:
        """spare_tokens: room for what comes after the blocks, which then need not be copied for it."""
        self._layout = layout
        self._spare_tokens = spare_tokens
        tokens = blocks * layout.tokens + spare_tokens
        shape = (layout.layers, 2, 1, layout.kv_heads, tokens, layout.head_dim)
        # numpy asks for huge pages, torch does not: touching 90 MiB of fresh memory takes 16 ms instead of 65.
        self._room = np.empty(shape, dtype=layout.bits_dtype)

    def write(self, position: int, bits: BlockBits) -> None:
        """Copy a block in; a BlockSink."""
        # By numpy: torch would start a team of threads for each loading thread.
        tokens = self._layout.tokens
        self._room[:, :, 0, :, position * tokens : (position + 1) * tokens] = bits.transpose(0, 1, 3, 2, 4)

    def fill(self, past: DynamicCache, blocks: int, device: torch.device) -> None:
        """Make the leading blocks the contents of the engine's empty cache.

        Without `update`, which would copy them all once more (90 MiB and 40 ms of 2,048 tokens of SmolLM2).
        """
        if blocks == 0:
            return
        tokens = blocks * self._layout.tokens
        fill_layers(past, self._room[..., : tokens + self._spare_tokens, :], self._layout, device, self._spare_tokens)


def fill_layers(
    past: DynamicCache, room: BlockBits, layout: BlockLayout, device: torch.device, spare_tokens: int = 0
) -> None:
    """Make (layers, 2, rows, heads, tokens, dims) but for the last `spare_tokens` the contents of an empty cache."""
    signed = room.view(f"<i{room.itemsize}")
    pages = torch.from_numpy(signed).view(TORCH_DTYPES[layout.dtype]).to(device)
    if spare_tokens:
        past.layers = [_Roomy(keys, values) for keys, values in pages]
    tokens = room.shape[-2] - spare_tokens
    for layer, (keys, values) in zip(past.layers, pages[..., :tokens, :], strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values


class _Roomy(DynamicLayer):  # type: ignore[misc]
    """A layer that grows in place while there is room after its tokens; the usual one copies all of them each time."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._room = (keys, values)
        self.keys: torch.Tensor = keys[..., :0, :]
        self.values: torch.Tensor = values[..., :0, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append."""
        start, stop = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        keys, values = self._room
        is_ours = self.keys.data_ptr() == keys.data_ptr() and key_states.dtype == keys.dtype
        if not is_ours or stop > keys.shape[-2]:
            copied: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *arguments, **named)
            return copied
        keys[..., start:stop, :], values[..., start:stop, :] = key_states, value_states
        self.keys, self.values = keys[..., :stop, :], values[..., :stop, :]
        return self.keys, self.values


def block_bits(past: DynamicCache, meta: BlockMeta, row: int = 0, pad: int = 0) -> BlockBits:
    """Return a copy of one block of a row of a cache, which begins after `pad` columns: the inverse of RestoredRoom.

    The row holds at least `meta.start` + a block of tokens. ValueError if its layers are of another dtype or shape.
    """
    layout = meta.layout
    torch_bits, numpy_bits = BITS_DTYPES[layout.dtype.item_bytes]
    # Mapped, and not from the heap, in which blocks would leave holes.
    bits: BlockBits = np.ndarray(layout.shape, layout.bits_dtype, aligned_buffer(layout.raw_bytes))
    start = pad + meta.start
    for layer, pages in enumerate(past.layers):
        for which, tensor in enumerate((pages.keys, pages.values)):
            if tensor.dtype is not TORCH_DTYPES[layout.dtype]:
                raise ValueError(f"layer {layer} is of {tensor.dtype}, expected {layout.dtype.value}")
            part = tensor.detach()[row, :, start : start + layout.tokens].cpu().view(torch_bits)
            # By numpy: beside busy neighbours torch's threads take twenty times as long for so little.
            bits[layer, which] = part.numpy().view(numpy_bits).transpose(1, 0, 2)
    return bits


def captured(past: DynamicCache, meta: BlockMeta, row: int = 0, pad: int = 0) -> BlockSource:
    """Copy a block out of a cache, which is the caller's to change once `generate` has returned."""
    bits = block_bits(past, meta, row, pad)
    return lambda: bits
