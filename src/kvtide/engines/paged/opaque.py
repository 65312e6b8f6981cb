"""Pages whose bytes are kept as they are: of layers of several shapes, and the states of layers that have no rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec
from kvtide.engines.paged.pages import Captured, slot_page
from kvtide.types import Section

Bytes = NDArray[np.uint8]


class OpaqueLayer(NamedTuple):
    """One layer's pages (pages, bytes), and its slots in a joined page (`join_pages`)."""

    pages: Bytes
    slots: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        """Return the bytes that a joined page has of the layer."""
        return len(self.slots) * int(self.pages.shape[1])


class OpaquePages:
    """Pages in this machine's memory whose bytes mean something to the engine alone; a PagePool.

    A block holds for each layer its pages in order. page_tokens: of a joined page.
    """

    def __init__(self, layers: Sequence[OpaqueLayer], layout: BlockLayout, page_tokens: int) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self._layers = list(layers)
        page_bytes = sum(layer.page_bytes for layer in layers)
        self._pages = layout.raw_bytes // page_bytes
        assert self._pages * page_bytes == layout.raw_bytes, f"{layout} is not whole pages of {page_bytes} bytes"

    @property
    def memory(self) -> None:
        """Return None: the pages lie on no device."""

    def close(self) -> None:
        """Do nothing: the pages are the engine's."""

    def follow(self) -> None:
        """Do nothing: an engine on this processor queues nothing."""

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block into `pages`, from `skip_pages` pages into the block on; not into those that were given up."""
        data = bits.reshape(-1).view(np.uint8)
        for layer, page, part in self._rooms(pages, skip_pages):
            if page:
                layer[page] = data[part]

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

    def decode(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], pages: Sequence[int], skip_pages: int
    ) -> bool:
        """Return False: blocks are decoded, then scattered."""
        return False

    def encoder(self, codec: Codec) -> Codec:
        """Return the codec: the processor encodes."""
        return codec

    def capture(self, pages: Sequence[int]) -> Captured:
        """Copy the pages of a block as they are now. ValueError if one was given up."""
        bits: BlockBits = np.empty(self.layout.shape, self.layout.bits_dtype)
        data = bits.reshape(-1).view(np.uint8)
        for layer, page, part in self._rooms(pages, 0):
            if not page:
                raise ValueError("a page of the block was given up")
            data[part] = layer[page]
        return _OpaqueCaptured(bits, self)


class _OpaqueCaptured:
    def __init__(self, bits: BlockBits, pool: OpaquePages) -> None:
        self._bits = bits
        self._pool = pool

    def wait(self) -> None:
        pass

    def block(self) -> BlockBits:
        return self._bits

    def restore(self, pages: Sequence[int], skip_pages: int) -> None:
        self._pool.scatter(self._bits, pages, skip_pages)
