"""Pages on an accelerator: copied through pinned memory on a stream beside the engine's; on a processor at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.paged.pages import Captured, CellOrder, PagePool, block_of_cells, keys_values

_INT_BITS = {2: torch.int16, 4: torch.int32}


class DeviceStream:
    """A stream of a device. Without one, in this machine's memory, all is done at once and events are None."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @staticmethod
    def new(device: torch.device) -> DeviceStream:
        """Return a new stream of a device."""
        return DeviceStream(torch.cuda.Stream(device) if device.type == "cuda" else None)

    @staticmethod
    def current(device: torch.device) -> DeviceStream:
        """Return torch's current stream of a device: the engine's, if its thread asks."""
        return DeviceStream(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def queue(self) -> AbstractContextManager[Any]:
        """Return a context in which torch queues here."""
        context: AbstractContextManager[Any] = (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        return context

    def mark(self) -> Any:
        """Return an event after all that is queued here."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Put what is queued from now on after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def finish(self) -> None:
        """Wait for all that is queued."""
        if self._stream is not None:
            self._stream.synchronize()

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from others until what is queued here is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class DevicePages(PagePool):
    """Pages that a device holds, each token's key before its value; in this machine's memory they need no streams.

    layers: one tensor (pages, kv_heads, page_tokens, 2 * head_dim) each, strided as the kernels like it.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        self.layout = layout
        self.page_tokens = layers[0].shape[2]
        self._device = layers[0].device
        self._layers = [layer.view(_INT_BITS[layout.dtype.item_bytes]) for layer in layers]
        self._views = [keys_values(layer, CellOrder.SPLIT) for layer in self._layers]
        self._is_cuda = self._device.type == "cuda"
        self._copies = DeviceStream.new(self._device)
        self._after: Any = None

    def follow(self) -> None:
        """Put what is written from now on after what torch's current stream has queued."""
        self._after = DeviceStream.current(self._device).mark()

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block into `pages`; see PagePool."""
        tokens = self.page_tokens
        _, kv_heads, _, content = self._layers[0].shape
        part = bits[:, :, skip_pages * tokens : (skip_pages + len(pages)) * tokens]
        shape = (len(self._layers), 2, len(pages), tokens, kv_heads, content // 2)
        shaped = part.reshape(shape).view(f"<i{bits.itemsize}")
        with self._behind_engine():
            host, chosen = self._pinned(torch.from_numpy(shaped)), self._numbers(pages)
            for rooms, both in zip(self._views, host, strict=True):
                for room, values in zip(rooms, both.to(self._device, non_blocking=True), strict=True):
                    room[chosen] = values.transpose(1, 2)

    def capture(self, pages: Sequence[int]) -> Captured:
        """Gather the pages on the device when the engine's stream comes here; they go to the host beside it."""
        chosen = self._numbers(pages)
        gathered = torch.stack([layer[chosen] for layer in self._layers])
        self._copies.wait_for(DeviceStream.current(self._device).mark())
        with self._copies.queue():
            host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=self._is_cuda)
            host.copy_(gathered, non_blocking=True)
        self._copies.uses(gathered)
        return _DeviceCaptured(self, host, self._copies.mark())

    def write(self, cells: torch.Tensor, pages: Sequence[int]) -> None:
        """Write cells (layers, pages, kv_heads, page_tokens, 2 * head_dim) of the host into pages. Done on return."""
        with self._behind_engine():
            chosen = self._numbers(pages)
            for layer, copy in zip(self._layers, cells, strict=True):
                layer[chosen] = copy.to(self._device, non_blocking=True)

    @contextmanager
    def _behind_engine(self) -> Iterator[None]:
        """Queue copies behind what was followed, and wait: their source is the caller's again, the engine may read."""
        self._copies.wait_for(self._after)
        with self._copies.queue():
            yield
        self._copies.finish()

    def _numbers(self, pages: Sequence[int]) -> torch.Tensor:
        """Return page numbers on the device. From pageable memory the engine's thread would wait for its step here."""
        return self._pinned(torch.tensor(list(pages))).to(self._device, non_blocking=True)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._is_cuda else tensor


class _DeviceCaptured(Captured):
    """Cells on their way to the host; `wait` returns when they are there."""

    def __init__(self, pool: DevicePages, cells: torch.Tensor, event: Any) -> None:
        self._pool = pool
        self._cells = cells
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def block(self) -> BlockBits:
        self.wait()
        unsigned: Any = self._cells.numpy().view(self._pool.layout.bits_dtype)
        return block_of_cells(np.ascontiguousarray(unsigned), self._pool.layout, CellOrder.SPLIT)

    def restore(self, pages: Sequence[int], skip_pages: int) -> None:
        self.wait()
        self._pool.write(self._cells[:, skip_pages : skip_pages + len(pages)], pages)
