"""Blocks to the engine's tensors and back: (tokens, heads, head_dim) in a block, (1, heads, tokens, head_dim) there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.engines.transformers.groups import BITS_DTYPES, TORCH_DTYPES
from kvtide.store import BlockSource
from kvtide.tier.buffers import aligned_buffer


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
