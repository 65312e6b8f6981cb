"""Pages on an accelerator: copied through pinned memory on a stream of their own, beside the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.paged.pages import CellOrder, block_of_cells, keys_values

__all__ = ["DevicePages"]

_INT_BITS = {2: torch.int16, 4: torch.int32}


class DevicePages:
    """Pages that a device holds, each token's key before its value.

    layers: one tensor (pages, kv_heads, page_tokens, 2 * head_dim) for each layer, strided as the kernels like it. All
    on one device; in this machine's memory it works too, without streams.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        self.layout = layout
        self.page_tokens = layers[0].shape[2]
        self._device = layers[0].device
        self._layers = [layer.view(_INT_BITS[layout.dtype.item_bytes]) for layer in layers]
        self._views = [keys_values(layer, CellOrder.SPLIT) for layer in self._layers]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def scatter(self, layer: int, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write one layer of a block into `pages`, from `skip_pages` pages into the block on. Done on return."""
        tokens = self.page_tokens
        _, kv_heads, _, content = self._layers[layer].shape
        part = bits[layer, :, skip_pages * tokens : (skip_pages + len(pages)) * tokens]
        shaped = part.reshape(2, len(pages), tokens, kv_heads, content // 2).view(f"<i{bits.itemsize}")
        with self._on_stream():
            host = torch.from_numpy(shaped)
            if self._stream is not None:
                host = host.pin_memory()
            chosen = torch.tensor(list(pages), device=self._device)
            for room, values in zip(self._views[layer], host.to(self._device, non_blocking=True), strict=True):
                room[chosen] = values.transpose(1, 2)
        if self._stream is not None:
            # `bits` is the caller's again, and the engine may read the pages.
            self._stream.synchronize()

    def capture(self, pages: Sequence[int]) -> Callable[[], BlockBits]:
        """Copy the pages of a block as they are when the engine's stream comes here.

        They are gathered on the device and may be overwritten by what the engine queues next; the way to the host is
        beside it.
        """
        chosen = torch.tensor(list(pages), device=self._device)
        gathered = torch.stack([layer[chosen] for layer in self._layers])
        if self._stream is None:
            return lambda: self._block(gathered)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
            copied = self._stream.record_event()

        def source() -> BlockBits:
            copied.synchronize()
            return self._block(host)

        return source

    def _block(self, cells: torch.Tensor) -> BlockBits:
        unsigned: Any = cells.numpy().view(self.layout.bits_dtype)
        return block_of_cells(np.ascontiguousarray(unsigned), self.layout, CellOrder.SPLIT)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
