"""A small engine's pages for tests, without an engine: what it wrote and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtide.block import BlockBits, BlockLayout, KVDtype
from kvtide.engines.paged.pages import CellOrder, HostPages, keys_values

PAGE_TOKENS = 4
LAYOUT = BlockLayout(layers=3, tokens=8, kv_heads=2, head_dim=6, dtype=KVDtype.BFLOAT16)


def empty_layers(pages: int = 12, layout: BlockLayout = LAYOUT) -> list[Any]:
    """Return zeroed pages of all layers in one storage, as engines allocate them."""
    shape = (layout.layers, pages, layout.kv_heads, PAGE_TOKENS, 2 * layout.head_dim)
    return list(np.zeros(shape, layout.bits_dtype))


def random_block(seed: int, layout: BlockLayout = LAYOUT) -> BlockBits:
    rng = np.random.default_rng(seed)
    bits: Any = rng.integers(1, 1 << 15, layout.shape).astype(layout.bits_dtype)
    return bits


def engine_writes(layers: Sequence[Any], order: CellOrder, bits: BlockBits, pages: Sequence[int]) -> None:
    """Write a block token by token, as an engine that knows nothing of blocks would."""
    for layer, cells in enumerate(layers):
        keys, values = keys_values(cells, order)
        for token in range(bits.shape[2]):
            page, slot = pages[token // PAGE_TOKENS], token % PAGE_TOKENS
            keys[page, :, slot], values[page, :, slot] = bits[layer, 0, token], bits[layer, 1, token]


def host_pages(
    order: CellOrder = CellOrder.TRANSPOSED_KEYS, pages: int = 12, layout: BlockLayout = LAYOUT
) -> tuple[HostPages, list[Any]]:
    layers = empty_layers(pages, layout)
    return HostPages(layers, layout, order), layers
