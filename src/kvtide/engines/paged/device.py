"""Pages on an accelerator: copied through pinned memory on a stream beside the engine's; on a processor at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.paged.pages import Captured, PagePool, slot_page

_INT_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

# Some 5 ms of a device: longer than it takes to queue a few copies.
_DELAY_CYCLES = 10_000_000


def device_name(device: torch.device) -> str:
    """Return the name that a device's maker gave it."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


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
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

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

    def delay(self) -> None:
        """Keep what is queued from now on waiting for some milliseconds."""
        if self._stream is not None:
            with self.queue():
                torch.cuda._sleep(_DELAY_CYCLES)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from others until what is queued here is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class DeviceLayer(NamedTuple):
    """One layer's pages on a device, in the engine's strides, and its slots in a joined page (`join_pages`).

    pages: (pages, [parts of a page,] kv_heads, tokens, content), of which a block has `halves` of the content apart,
    token by token; or (pages, content).
    """

    pages: torch.Tensor
    halves: int = 2
    slots: tuple[int, ...] | None = None

    def rooms(self) -> list[torch.Tensor]:
        """Return views (pages, ...) in the order of a block."""
        bits = self.pages.view(_INT_BITS[self.pages.element_size()])
        return [bits] if bits.ndim == 2 else [part.transpose(-3, -2) for part in bits.chunk(self.halves, -1)]

    def own(self, pages: Sequence[int], skip_pages: int = 0) -> tuple[list[int], list[int]]:
        """Return the pages that it still has of `pages`, and where they come in a block that is skipped into."""
        if self.slots is None:
            return list(pages), list(range(skip_pages, skip_pages + len(pages)))
        slots = [slot_page(page, slot) for page in pages for slot in self.slots]
        here = [(page, at) for at, page in enumerate(slots, skip_pages * len(self.slots)) if page]
        return [page for page, _ in here], [at for _, at in here]


class DevicePages(PagePool):
    """Pages that a device holds; in this machine's memory they need no streams."""

    def __init__(self, layers: Sequence[DeviceLayer], layout: BlockLayout, page_tokens: int) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self.layers = layers
        self._rooms = [layer.rooms() for layer in layers]
        self._device = layers[0].pages.device
        self._is_cuda = self._device.type == "cuda"
        self._copies = DeviceStream.new(self._device)
        self._after: Any = None
        pages = layout.tokens // page_tokens
        # How many pages a block has of each layer.
        self._counts = [pages * len(layer.slots or (0,)) for layer in layers]
        taken = sum(count * layer.pages[0].nbytes for count, layer in zip(self._counts, layers, strict=True))
        assert taken == layout.raw_bytes, f"{layout} takes {layout.raw_bytes} bytes, its pages {taken}"

    @classmethod
    def of_rows(cls, layers: Sequence[torch.Tensor], layout: BlockLayout) -> DevicePages:
        """Return plain layers (pages, kv_heads, page_tokens, 2 * head_dim), each token's key before its value."""
        return cls([DeviceLayer(layer) for layer in layers], layout, layers[0].shape[-2])

    @property
    def room_bytes(self) -> int:
        """The pinned memory that a captured block takes: torch rounds up to a power of two."""
        size = self.layout.raw_bytes
        return 1 << (size - 1).bit_length() if self._is_cuda else size

    def reserve(self, blocks: int, is_wanted: Callable[[], bool]) -> None:
        """Pin memory for captured blocks; see PagePool. A block of 16 MiB waits 7 ms for that, in the engine's step."""
        rooms: list[torch.Tensor] = []
        while len(rooms) < blocks and is_wanted():
            rooms.append(self._room())
        # Given back, torch keeps them pinned.

    def follow(self) -> None:
        self._after = DeviceStream.current(self._device).mark()

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block into `pages`; see PagePool. The engine's work that was followed comes before, and may go on."""
        self._copies.wait_for(self._after)
        with self._copies.queue():
            data, start = self._pinned(torch.from_numpy(bits.reshape(-1).view(np.uint8))), 0
            own = self._own(pages, skip_pages)
            for (chosen, here), rooms, count in zip(own, self._rooms, self._counts, strict=True):
                for room in rooms:
                    stop = start + count * room[0].nbytes
                    values = data[start:stop].view(room.dtype).view(count, *room.shape[1:])
                    if here:
                        room[chosen] = values[_span(here)].to(self._device, non_blocking=True)
                    start = stop
        # What was sent is the caller's again.
        self._copies.finish()

    def capture(self, pages: Sequence[int]) -> Captured:
        """Gather the pages on the device when the engine's stream comes here; they go to the host beside it."""
        own = self._own(pages, 0)
        if any(len(here) < count for (_, here), count in zip(own, self._counts, strict=True)):
            raise ValueError("a page of the block was given up")
        found = [room[chosen] for (chosen, _), rooms in zip(own, self._rooms, strict=True) for room in rooms]
        gathered = torch.cat([each.reshape(-1).view(torch.uint8) for each in found])
        self._copies.wait_for(DeviceStream.current(self._device).mark())
        with self._copies.queue():
            host = self._room()
            host.copy_(gathered, non_blocking=True)
        self._copies.uses(gathered)
        event = self._copies.mark()
        return coming(self, host, (lambda: None) if event is None else event.synchronize)

    def _own(self, pages: Sequence[int], skip_pages: int) -> list[tuple[torch.Tensor, list[int]]]:
        """Return of each layer the numbers of its pages, on the device, and where they come in a block."""
        found: dict[Any, tuple[torch.Tensor, list[int]]] = {}
        for layer in self.layers:
            if layer.slots not in found:
                chosen, here = layer.own(pages, skip_pages)
                # From pageable memory the engine's thread would wait for its step here.
                numbers = self._pinned(torch.tensor(chosen, dtype=torch.int64))
                found[layer.slots] = numbers.to(self._device, non_blocking=True), here
        return [found[layer.slots] for layer in self.layers]

    def _room(self) -> torch.Tensor:
        return torch.empty(self.layout.raw_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._is_cuda else tensor


def _span(numbers: list[int]) -> slice | list[int]:
    """Return ascending numbers as a slice, which copies nothing, if none between them is missing."""
    is_dense = numbers[-1] - numbers[0] == len(numbers) - 1
    return slice(numbers[0], numbers[-1] + 1) if is_dense else numbers


def coming(pool: PagePool, host: torch.Tensor, wait: Callable[[], None]) -> Captured:
    """Return the block whose values are on their way to this machine's memory; `wait` returns when they are there."""

    def block() -> BlockBits:
        wait()
        bits: BlockBits = host.numpy().view(pool.layout.bits_dtype).reshape(pool.layout.shape)
        return bits

    return Captured(block, lambda pages, skip_pages: pool.scatter(block(), pages, skip_pages), wait)
