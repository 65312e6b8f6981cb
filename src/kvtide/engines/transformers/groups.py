"""The groups of a Hugging Face model, found by a probe, and their parts: the engine's tensors as blocks and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
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

from kvtide.block import HEAD_DIM_MAX, KV_HEADS_MAX, BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import ProfileShape
from kvtide.errors import UnsupportedModel
from kvtide.group import GroupKind, LayerGroup, row_group
from kvtide.tier.buffers import aligned_buffer

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in KVDtype}
_KVTIDE_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
BITS_DTYPES = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
_LAYER_TYPES = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
# Models with states that go on exactly where a pass has left them: two passes were held against one in float32, by the
# tests too. Others are known not to (Bamba, Jamba, MiniMax), or nobody has looked.
_STATES_GO_ON = {
    *("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
# Their rotary frequencies depend on the length of the sequence: keys from a short prompt are wrong in a long one.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# A state's bytes are rounded up to whole rows of so many elements, or of a multiple where these would be too many.
_STATE_ROW = 64


class TokenRows(NamedTuple):
    """Shape of what a layer keeps of each token: heads and dims of keys and of values. window: in tokens, 0: none."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype
    window: int

    @property
    def is_latent(self) -> bool:
        """Tell whether keys and values are one row of which attention makes both."""
        return self.key != self.value


class StateTensor(NamedTuple):
    """One tensor of a layer's state: `conv_states` or `recurrent_states`, its number, its shape."""

    name: str
    number: int
    shape: tuple[int, ...]


class ModelGroup(NamedTuple):
    """A group, all of the model's layers if `is_whole`, and what these hold: rows of tokens, or tensors of states."""

    group: LayerGroup
    rows: TokenRows | None
    states: tuple[tuple[StateTensor, ...], ...] = ()
    is_whole: bool = True


def groups_of(model: Any, block_tokens: int) -> tuple[ModelGroup, ...]:
    """Return the groups of the model's cache, found by running two tokens through it.

    UnsupportedModel, with the reason, where it can't be restored exactly, or depends on later tokens or a length.
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
    except (AttributeError, ValueError, IndexError, NotImplementedError) as error:
        raise UnsupportedModel(f"the model takes no usual cache: {error}") from error
    return cache


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes its cache: models of states alone have their own."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


def model_groups(model: Any, cache: DynamicCache, block_tokens: int) -> tuple[ModelGroup, ...]:
    """Return the groups of a model, those of tokens first, from a cache of two. UnsupportedModel, with the reason."""
    config = model.config.get_text_config(decoder=True)
    kind, across = config.model_type, getattr(config, "cross_attention_layers", None) or ()
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if has_states and kind not in _STATES_GO_ON:
        raise UnsupportedModel(f"the states of {kind} models are not known to go on exactly from one pass to the next")
    plain = (layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized)
    if len(devices := {str(layer.keys.device) for layer in plain}) > 1:
        raise UnsupportedModel(f"its layers are on {', '.join(sorted(devices))}: load it onto one device")
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
    found = (_row_group(each, layers, block_tokens, len(cache.layers)) for each, layers in rows.items())
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


def _row_group(rows: TokenRows, layers: list[int], block_tokens: int, all_layers: int) -> ModelGroup:
    elements = math.prod(rows.key) + math.prod(rows.value)
    heads, dims = (1, elements // 2) if rows.is_latent else rows.key
    if elements % 2 or dims > HEAD_DIM_MAX:
        raise UnsupportedModel(f"keys of {rows.key} and values of {rows.value} can't be kept as rows of equal halves")
    layout = BlockLayout(len(layers), block_tokens, heads, dims, _KVTIDE_DTYPES[rows.dtype])
    # What is rotated comes first in a latent row, which the name tells from an order that once was.
    latent = f"{rows.value[1]}+{rows.key[1]}" if rows.is_latent else ""
    return ModelGroup(row_group(layers, layout, rows.window, latent), rows, is_whole=len(layers) == all_layers)


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
    row = _STATE_ROW * -(-elements // (2 * _STATE_ROW * KV_HEADS_MAX))
    layout = BlockLayout(len(layers), 1, -(-elements // (2 * row)), row, _KVTIDE_DTYPES[dtype])
    group = LayerGroup(f"state {layout.dtype.value}", GroupKind.STATE, tuple(layers), layout)
    return ModelGroup(group, None, tuple(layers.values()))


@dataclass(eq=False, repr=False)
class RestoredRoom:
    """Room for the restored rows of layers, in the shape that the engine wants.

    pads: columns of padding before each sequence. group: whose layers they are; None for all, of plain rows. before:
    tokens that a window has left. spare_tokens: room behind, so that nothing is copied for what comes.
    """

    layout: BlockLayout
    tokens: InitVar[int]
    pads: Sequence[int] = (0,)
    group: ModelGroup | None = None
    before: int = 0
    spare_tokens: int = 0

    def __post_init__(self, tokens: int) -> None:
        layout, columns = self.layout, tokens + self.spare_tokens
        shape = (layout.layers, 2, len(self.pads), layout.kv_heads, columns, layout.head_dim)
        # numpy asks for huge pages, torch does not: touching 90 MiB of fresh memory takes 16 ms instead of 65.
        self._room = np.empty(shape, dtype=layout.bits_dtype)
        # It is attended to with a weight of 0, which makes no number of what may be in fresh memory.
        self._room[..., : max(self.pads), :] = 0

    def write(self, position: int, bits: BlockBits, sequences: Sequence[int] = (0,)) -> None:
        """Copy a block into sequences that have it, as far as there is room; a BlockSink."""
        # By numpy: torch would start a team of threads for each loading thread.
        size = self.layout.tokens
        for sequence in sequences:
            part = self._room[:, :, sequence, :, self.pads[sequence] + position * size :][:, :, :, :size]
            part[:] = bits[:, :, : part.shape[3]].transpose(0, 1, 3, 2, 4)

    def fill(self, past: DynamicCache, stop: int, device: torch.device) -> None:
        """Make what is before `stop` tokens the contents of an empty cache's layers.

        Without `update`, which would copy all once more (90 MiB and 40 ms of 2,048 tokens of SmolLM2).
        """
        tokens = stop - self.before
        if tokens == 0:
            return
        room = self._room[..., : tokens + self.spare_tokens, :]
        pages = torch.from_numpy(room.view(f"<i{room.itemsize}")).view(TORCH_DTYPES[self.layout.dtype]).to(device)
        if self.spare_tokens:
            past.layers = [_Roomy(keys, values) for keys, values in pages]
        group = self.group
        rows, numbers = (None, range(len(pages))) if group is None else (group.rows, group.group.layers)
        window = 0 if rows is None else rows.window
        first = max(0, tokens - window + 1) if window else 0
        for number, pair in zip(numbers, pages[..., :tokens, :], strict=True):
            keys, values = pair if rows is None or not rows.is_latent else _both_of(rows, pair)
            layer = past.layers[number]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[..., first:, :], values[..., first:, :]
            if window:
                layer.cumulative_length = stop


def _both_of(rows: TokenRows, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of latent rows, whose halves `halves_of` made."""
    row, split = torch.cat([pair[0], pair[1]], dim=-1)[:, 0], math.prod(rows.value)
    keys, values = row[..., split:].unflatten(-1, rows.key), row[..., :split].unflatten(-1, rows.value)
    return keys.transpose(1, 2), values.transpose(1, 2)


def filled_cache(model: Any, layout: BlockLayout, blocks: Sequence[BlockBits]) -> DynamicCache:
    """Return an engine's cache of a plain model's leading blocks."""
    past, room = DynamicCache(config=model.config), RestoredRoom(layout, len(blocks) * layout.tokens)
    for position, bits in enumerate(blocks):
        room.write(position, bits)
    room.fill(past, len(blocks) * layout.tokens, model.device)
    return past


def cut_to(past: DynamicCache, tokens: int) -> None:
    """Forget what a plain model's layers, each maybe of another length, have behind so many tokens."""
    # Not `crop`: it asks the first layer for the length.
    for layer in past.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


class _Roomy(DynamicLayer):  # type: ignore[misc]
    """A layer that grows in place while there is room after its tokens; the usual one copies all of them each time."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._room = (keys, values)
        self.keys: torch.Tensor = keys[..., :0, :]
        self.values: torch.Tensor = values[..., :0, :]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        start, stop = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        keys, values = self._room
        is_ours = self.keys.data_ptr() == keys.data_ptr() and key_states.dtype == keys.dtype
        if not is_ours or stop > keys.shape[-2]:
            return super().update(key_states, value_states, *arguments, **named)
        keys[..., start:stop, :], values[..., start:stop, :] = key_states, value_states
        self.keys, self.values = keys[..., :stop, :], values[..., :stop, :]
        return self.keys, self.values


def block_bits(
    past: DynamicCache, meta: BlockMeta, group: ModelGroup | None = None, row: int = 0, pad: int = 0
) -> BlockBits:
    """Return a copy of a block of a row behind `pad` columns: RestoredRoom's inverse. ValueError if it is not there."""
    layout, rows = meta.layout, None if group is None else group.rows
    torch_bits, numpy_bits = BITS_DTYPES[layout.dtype.item_bytes]
    # Mapped, and not from the heap, in which blocks would leave holes.
    bits: BlockBits = np.ndarray(layout.shape, layout.bits_dtype, aligned_buffer(layout.raw_bytes))
    plain = (layout.kv_heads, layout.head_dim)
    shapes = (plain, plain) if rows is None else (rows.key, rows.value)
    for place, number in enumerate(range(layout.layers) if group is None else group.group.layers):
        layer, halves = past.layers[number], []
        # What is before has left the window.
        left = layer.get_seq_length() - layer.keys.shape[-2] if rows is not None and rows.window else 0
        start = pad + meta.start - left
        for tensor, (heads, dims) in zip((layer.keys, layer.values), shapes, strict=True):
            part = tensor.detach()[row, :, max(0, start) : start + layout.tokens]
            is_right = tuple(part.shape) == (heads, layout.tokens, dims) and part.dtype is TORCH_DTYPES[layout.dtype]
            if start < 0 or not is_right:
                raise ValueError(f"layer {number} has {part.dtype} of {tuple(part.shape)} from token {meta.start} on")
            # By numpy: beside busy neighbours torch's threads take twenty times as long for so little.
            halves.append(part.cpu().view(torch_bits).numpy().view(numpy_bits).transpose(1, 0, 2))
        bits[place, 0], bits[place, 1] = halves if rows is None else halves_of(rows, *halves)
    return bits


def halves_of(rows: TokenRows, keys: NDArray[Any], values: NDArray[Any]) -> Sequence[NDArray[Any]]:
    """Return both halves of a layer's rows as a block has them, each (tokens, kv_heads, head_dim).

    keys, values: (tokens, heads, dims). Of latents, values, then keys make one row, of which each half is half.
    """
    if not rows.is_latent:
        return keys, values
    row = np.concatenate([part.reshape(len(part), -1) for part in (values, keys)], axis=1)
    return [half[:, None] for half in np.split(row, 2, axis=1)]


def read_states(past: DynamicCache, group: ModelGroup) -> BlockBits:
    """Return a copy of a group's states as they are now. ValueError if one has another shape than the probe's."""
    layout, dtype = group.group.layout, TORCH_DTYPES[group.group.layout.dtype]
    torch_bits, numpy_bits = BITS_DTYPES[layout.dtype.item_bytes]
    bits: BlockBits = np.zeros(layout.shape, layout.bits_dtype)
    for position, (number, tensors) in enumerate(zip(group.group.layers, group.states, strict=True)):
        flat, start = bits[position].reshape(-1), 0
        for each in tensors:
            tensor = getattr(past.layers[number], each.name)[each.number]
            if tensor is None or tuple(tensor.shape) != each.shape or tensor.dtype != dtype:
                raise ValueError(f"layer {number} has no {each.name} of {each.shape} in {dtype}")
            stop = start + tensor.numel()
            flat[start:stop] = tensor.detach().cpu().contiguous().view(torch_bits).numpy().view(numpy_bits).reshape(-1)
            start = stop
    return bits


class StateRoom:
    """Room for the restored states of a group's layers."""

    def __init__(self, group: ModelGroup) -> None:
        self._group = group
        self._bits: BlockBits = np.empty(group.group.layout.shape, group.group.layout.bits_dtype)

    def write(self, position: int, bits: BlockBits, sequences: object = None) -> None:
        """Copy states in; a BlockSink."""
        self._bits[:] = bits

    def fill(self, past: DynamicCache, stop: int, device: torch.device) -> None:
        """Make an empty cache's layers hold the states, as `read_states` has read them."""
        group, dtype = self._group, TORCH_DTYPES[self._group.group.layout.dtype]
        layers = self._bits.view(f"<i{self._bits.itemsize}").reshape(len(group.states), -1)
        for flat, number, tensors in zip(layers, group.group.layers, group.states, strict=True):
            start, layer = 0, past.layers[number]
            for each in tensors:
                part = flat[start : start + math.prod(each.shape)]
                start += len(part)
                tensor = torch.from_numpy(part.copy()).view(dtype).view(each.shape).to(device)
                named: dict[str, Any] = {each.name: tensor, "state_idx": each.number}
                layer.lazy_initialization(**named)
                getattr(layer, each.name)[each.number].copy_(tensor)
                layer.has_previous_state[each.number] = True
