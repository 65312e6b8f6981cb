"""The engine's pages and kvtide's blocks: where keys and values lie inside a page, and copying between the two.

A layer's pages are an array (pages, kv_heads, page_tokens, 2 * head_dim), however it is strided, or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec
from kvtide.tier.base import DeviceMemory
from kvtide.tier.buffers import RECYCLED_BYTES_MAX, recycled_buffer, touch
from kvtide.types import Section

Cells = NDArray[Any]
Bytes = NDArray[np.uint8]
# Where an engine's layers are in several groups, each group has pages of its own for the same tokens; what is called a
# page is then the numbers of all of them in one, in slots of so many bits. 0: the engine has given it up already.
_PAGE_BITS = 32


def join_pages(pages: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
    """Return the joined pages of tokens, of which each group has as many as `counts` says; see `slot_page`."""
    slots = [group[each::count] for group, count in zip(pages, counts, strict=True) for each in range(count)]
    return [sum(page << _PAGE_BITS * slot for slot, page in enumerate(each)) for each in zip(*slots, strict=False)]


def slot_page(page: int, slot: int) -> int:
    """Return the engine's page in a slot of a joined one, 0 if the engine has given it up."""
    return page >> _PAGE_BITS * slot & ((1 << _PAGE_BITS) - 1)


class CellOrder(Enum):
    """The order of the values in the cell of one page and head.

    SPLIT: for each token its key, then its value. TRANSPOSED_KEYS: keys as (head_dim, tokens), then values as
    (tokens, head_dim), whatever the array's shape says.
    """

    SPLIT = "split"
    TRANSPOSED_KEYS = "transposed keys"


class Captured(NamedTuple):
    """The pages of a block as they were. Safe to use from several threads. DeviceFault if the device fails.

    block: returns them as a block. restore: writes them into pages, from so many pages into the block on. wait: returns
    when the pages may be overwritten by whomever: at once, unless a device copies.
    """

    block: Callable[[], BlockBits]
    restore: Callable[[Sequence[int], int], None]
    wait: Callable[[], None] = lambda: None


class PagePool(Protocol):
    """All layers' pages of an engine, in this machine's memory unless said otherwise. Threads may use different pages.

    DeviceFault if they lie on a device that fails; what it was asked to write to is then to be taken as unwritten.
    """

    layout: BlockLayout
    page_tokens: int

    @property
    def room_bytes(self) -> int:
        """The memory that a captured block takes."""
        return self.layout.raw_bytes

    @property
    def memory(self) -> DeviceMemory | None:
        """The memory of the device that the pages lie on, if objects can be kept in it."""
        return None

    def close(self) -> None:
        """Give back what the pages took besides. Idempotent."""
        return

    def reserve(self, blocks: int, is_wanted: Callable[[], bool]) -> None:
        """Take memory from the system for so many captured blocks before they come, while it is wanted."""
        count = min(blocks, RECYCLED_BYTES_MAX // self.layout.raw_bytes)
        for room in [recycled_buffer(self.layout.raw_bytes) for _ in range(count)]:
            touch(room, is_wanted)

    def follow(self) -> None:
        """Put what is written from now on after what the calling thread, the engine's, has queued on a device."""
        return

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block, from `skip_pages` pages into it on, into `pages` without those given up. Done on return."""

    def decode(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], pages: Sequence[int], skip_pages: int
    ) -> bool:
        """Write a block straight from its sections, as `scatter` does. False: decode it, and do that."""
        return False

    def encoder(self, codec: Codec) -> Codec:
        """Return what encodes blocks as `codec` does: on the device where that can, else `codec` itself."""
        return codec

    def capture(self, pages: Sequence[int]) -> Captured:
        """Copy a block's pages as they are now, or once the calling thread's stream is there.

        ValueError if the engine has given one up.
        """


def keys_values(cells: Any, order: CellOrder) -> tuple[Any, Any]:
    """Return views (..., tokens, head_dim) of keys and values in cells (..., tokens, 2 * head_dim), arrays or tensors.

    TRANSPOSED_KEYS needs cells that are contiguous in their last two axes.
    """
    *outer, tokens, content = cells.shape
    head_dim = content // 2
    if order is CellOrder.SPLIT:
        return cells[..., :head_dim], cells[..., head_dim:]
    flat = cells.reshape(*outer, tokens * content)
    keys = flat[..., : tokens * head_dim].reshape(*outer, head_dim, tokens)
    return keys.swapaxes(-1, -2), flat[..., tokens * head_dim :].reshape(*outer, tokens, head_dim)


def cell_order(cell: Cells, keys: Cells, values: Cells) -> CellOrder:
    """Return the order of a cell in which an engine wrote keys and values (tokens, head_dim). ValueError if unknown."""
    for order in CellOrder:
        if all(map(np.array_equal, keys_values(cell, order), (keys, values))):
            return order
    raise ValueError("the engine keeps keys and values inside a page in an order that kvtide does not know")


class HostPages(PagePool):
    """Pages in this machine's memory: of each layer bit patterns (pages, kv_heads, page_tokens, 2 * head_dim).

    slots: each layer's, where there are several; pages are then joined (`join_pages`).
    """

    def __init__(
        self, layers: Sequence[Cells], layout: BlockLayout, order: CellOrder, slots: Sequence[int] | None = None
    ) -> None:
        self.layout = layout
        self.order = order
        self.page_tokens = layers[0].shape[2]
        self._slots = slots
        self._layers = list(layers)
        self._views = [keys_values(layer, order) for layer in layers]
        # Writes to a copy would be lost without a word.
        assert all(np.shares_memory(layer, keys) for layer, (keys, _) in zip(layers, self._views, strict=True))

    def scatter(self, bits: Iterable[BlockBits], pages: Sequence[int], skip_pages: int, first: int = 0) -> None:
        """Write a block's layers from `first` on, each (2, tokens, kv_heads, head_dim); see PagePool."""
        tokens = self.page_tokens
        for number, layer in enumerate(bits, first):
            own = list(self._own_pages(number, pages, skip_pages))
            for room, values in zip(self._views[number], layer, strict=True):
                for position, page in own:
                    room[page] = values[position * tokens : (position + 1) * tokens].transpose(1, 0, 2)

    def scatter_tokens(self, layers: Iterable[BlockBits], page: int, start: int, first: int = 0) -> None:
        """Write layers from `first` on, each (2, tokens, kv_heads, head_dim), as a page's tokens from `start` on."""
        for room, values in self._token_rooms(layers, page, start, first):
            room[...] = values.transpose(1, 0, 2)

    def capture_tokens(self, page: int, start: int, stop: int) -> BlockBits:
        """Return a copy of the tokens [start, stop) of a page."""
        bits: BlockBits = np.empty(replace(self.layout, tokens=stop - start).shape, self.layout.bits_dtype)
        for room, values in self._token_rooms(bits, page, start):
            values[...] = room.transpose(1, 0, 2)
        return bits

    def _token_rooms(
        self, layers: Iterable[BlockBits], page: int, start: int, first: int = 0
    ) -> Iterator[tuple[Cells, BlockBits]]:
        """Return for keys and values of each layer where they lie in a page, and those given."""
        assert self._slots is None, "pages of several groups are taken whole"
        for rooms, layer in zip(self._views[first:], layers, strict=False):
            for room, values in zip(rooms, layer, strict=True):
                yield room[page, :, start : start + len(values)], values

    def capture(self, pages: Sequence[int]) -> Captured:
        cells = _mapped((len(self._layers), len(pages), *self._layers[0].shape[1:]), self.layout.bits_dtype)
        for number, (layer, copy) in enumerate(zip(self._layers, cells, strict=True)):
            own = list(self._own_pages(number, pages))
            if len(own) < len(pages):
                raise ValueError(f"layer {number} has given up a page of the block")
            for position, page in own:
                copy[position] = layer[page]
        return Captured(partial(_block_of_cells, cells, self.layout, self.order), partial(self._write, cells))

    def _write(self, cells: Cells, pages: Sequence[int], skip_pages: int) -> None:
        for number, (layer, copy) in enumerate(zip(self._layers, cells, strict=True)):
            for position, page in self._own_pages(number, pages, skip_pages):
                layer[page] = copy[position]

    def _own_pages(self, layer: int, pages: Sequence[int], start: int = 0) -> Iterator[tuple[int, int]]:
        """Return a layer's pages by position, from `start` on, without those that were given up."""
        if self._slots is None:
            return enumerate(pages, start)
        slot = self._slots[layer]
        own = ((position, slot_page(page, slot)) for position, page in enumerate(pages, start))
        return ((position, page) for position, page in own if page)


def _mapped(shape: Sequence[int], dtype: Any) -> Cells:
    """Return room for a block, with whatever was left in it, outside of the heap, which large blocks would fragment."""
    return np.frombuffer(recycled_buffer(math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)


def _block_of_cells(cells: Cells, layout: BlockLayout, order: CellOrder) -> BlockBits:
    """Return the block in cells (layers, pages, kv_heads, page_tokens, 2 * head_dim)."""
    bits: BlockBits = _mapped(layout.shape, layout.bits_dtype)
    layers, pages, kv_heads, tokens, content = cells.shape
    rooms = bits.reshape(layers, 2, pages, tokens, kv_heads, content // 2)
    for which, part in enumerate(keys_values(cells, order)):
        rooms[:, which] = part.swapaxes(2, 3)
    return bits


class OpaquePages(PagePool):
    """Pages whose bytes mean something to the engine alone: a block holds for each layer its pages in order.

    layers: the pages (pages, bytes) of each, an array or a tensor, and its slots in a joined page (`join_pages`).
    """

    def __init__(self, layers: Sequence[tuple[Any, tuple[int, ...]]], layout: BlockLayout, page_tokens: int) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self._layers = [(np.asarray(pages), slots) for pages, slots in layers]
        page_bytes = sum(len(slots) * int(pages.shape[1]) for pages, slots in layers)
        self._pages = layout.raw_bytes // page_bytes
        assert self._pages * page_bytes == layout.raw_bytes, f"{layout} is not whole pages of {page_bytes} bytes"

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        data = bits.reshape(-1).view(np.uint8)
        for layer, page, part in self._rooms(pages, skip_pages):
            if page:
                layer[page] = data[part]

    def capture(self, pages: Sequence[int]) -> Captured:
        bits: BlockBits = np.empty(self.layout.shape, self.layout.bits_dtype)
        data = bits.reshape(-1).view(np.uint8)
        for layer, page, part in self._rooms(pages, 0):
            if not page:
                raise ValueError("a page of the block was given up")
            data[part] = layer[page]
        return Captured(lambda: bits, partial(self.scatter, bits))

    def _rooms(self, pages: Sequence[int], skip_pages: int) -> Iterator[tuple[Bytes, int, slice]]:
        """Return for each of the engine's pages its layer, its number and where it lies in a block."""
        start = 0
        for layer, slots in self._layers:
            size = layer.shape[1]
            for position, page in enumerate(pages, skip_pages):
                for number, slot in enumerate(slots):
                    at = start + (position * len(slots) + number) * size
                    yield layer, slot_page(page, slot), slice(at, at + size)
            start += self._pages * len(slots) * size
