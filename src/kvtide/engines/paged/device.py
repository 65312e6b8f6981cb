"""Pages on an accelerator: copied through pinned memory on a stream of their own, beside the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec
from kvtide.engines.paged.pages import Captured, CellOrder, block_of_cells, keys_values
from kvtide.types import Section

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
        self._after: Any = None

    @property
    def memory(self) -> None:
        """Return None: objects get to a device's memory with the kernels' streams alone."""

    def close(self) -> None:
        """Do nothing: the pages are the engine's."""

    def follow(self) -> None:
        """Put what is written from now on behind what torch's current stream has queued."""
        if self._stream is not None:
            self._after = torch.cuda.current_stream(self._device).record_event()

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block into `pages`, from `skip_pages` pages into the block on. Done on return."""
        tokens = self.page_tokens
        _, kv_heads, _, content = self._layers[0].shape
        part = bits[:, :, skip_pages * tokens : (skip_pages + len(pages)) * tokens]
        shape = (len(self._layers), 2, len(pages), tokens, kv_heads, content // 2)
        shaped = part.reshape(shape).view(f"<i{bits.itemsize}")
        with self._on_stream():
            host = torch.from_numpy(shaped)
            if self._stream is not None:
                host = host.pin_memory()
            chosen = torch.tensor(list(pages), device=self._device)
            for rooms, both in zip(self._views, host, strict=True):
                for room, values in zip(rooms, both.to(self._device, non_blocking=True), strict=True):
                    room[chosen] = values.transpose(1, 2)
        if self._stream is not None:
            # `bits` is the caller's again, and the engine may read the pages.
            self._stream.synchronize()

    def decode(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], pages: Sequence[int], skip_pages: int
    ) -> bool:
        """Leave it to the codec."""
        return False

    def capture(self, pages: Sequence[int]) -> Captured:
        """Copy the pages of a block as they are when the engine's stream comes here.

        They are gathered on the device and may be overwritten by what the engine queues next; the way to the host is
        beside it.
        """
        chosen = torch.tensor(list(pages), device=self._device)
        gathered = torch.stack([layer[chosen] for layer in self._layers])
        if self._stream is None:
            return _DeviceCaptured(self, gathered, lambda: None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
            return _DeviceCaptured(self, host, self._stream.record_event().synchronize)

    def write(self, cells: torch.Tensor, pages: Sequence[int]) -> None:
        """Write cells (layers, pages, kv_heads, page_tokens, 2 * head_dim) of the host into pages. Done on return."""
        with self._on_stream():
            chosen = torch.tensor(list(pages), device=self._device)
            for layer, copy in zip(self._layers, cells, strict=True):
                layer[chosen] = copy.to(self._device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if self._after is not None:
                self._stream.wait_event(self._after)
            yield


class _DeviceCaptured:
    """Cells on their way to the host; `wait` returns when they are there."""

    def __init__(self, pool: DevicePages, cells: torch.Tensor, wait: Callable[[], None]) -> None:
        self._pool = pool
        self._cells = cells
        self.wait = wait

    def block(self) -> BlockBits:
        self.wait()
        unsigned: Any = self._cells.numpy().view(self._pool.layout.bits_dtype)
        return block_of_cells(np.ascontiguousarray(unsigned), self._pool.layout, CellOrder.SPLIT)

    def restore(self, pages: Sequence[int], skip_pages: int) -> None:
        self.wait()
        self._pool.write(self._cells[:, skip_pages : skip_pages + len(pages)], pages)
