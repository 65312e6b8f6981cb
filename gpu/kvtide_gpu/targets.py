"""The layout of a device's pages as kernels take it: any strides, as long as a head's values stand together.

`BlockCopier` moves whole blocks between them and one piece of memory, one kernel for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockLayout, BlockMeta
from kvtide.engines.paged import CellOrder, keys_values
from kvtide.engines.paged.device import DeviceStream
from kvtide.types import Section
from kvtide_gpu.kernels import THREADS, Kernels, Staging, address, warp_blocks

SKIPPED = -1


_VECTOR_BYTES, _UNIT_BYTES = 16, 2


class PageTarget(NamedTuple):
    """Pages of all layers. Strides are in elements.

    bases: (layers, 2), the addresses of K and V of the first token of page 0. The tensors must outlive this.
    """

    layout: BlockLayout
    bases: NDArray[np.uint64]
    page_tokens: int
    page_stride: int
    token_stride: int
    head_stride: int

    def token_starts(self, pages: Sequence[int], skip_pages: int = 0) -> NDArray[np.int64]:
        """Return where each token of a block lies behind a base, -1 for those that no page is given for.

        The first page is `skip_pages` pages into the block. ValueError for more pages than a block has.
        """
        count = self.layout.tokens // self.page_tokens
        if skip_pages < 0 or skip_pages + len(pages) > count or (len(pages) and min(pages) < 0):
            raise ValueError(f"a block has {count} pages, got {len(pages)} from {skip_pages} on")
        starts = np.full((count, self.page_tokens), SKIPPED, dtype=np.int64)
        given = np.asarray(pages, dtype=np.int64).reshape(-1, 1) * self.page_stride
        starts[skip_pages : skip_pages + len(pages)] = given + np.arange(self.page_tokens) * self.token_stride
        return starts.reshape(-1)


class StoredBlock(NamedTuple):
    """A block's sections and where its tokens go (`PageTarget.token_starts`)."""

    meta: BlockMeta
    sections: Sequence[Section]
    token_starts: NDArray[np.int64]


def page_target(layers: Sequence[torch.Tensor], layout: BlockLayout) -> PageTarget:
    """Return the target of layers (pages, kv_heads, page_tokens, 2 * head_dim), each token's key before its value.

    That is vLLM's view, however its memory is strided. ValueError for layers that differ in their strides, or whose
    values don't stand together.
    """
    return _target([keys_values(layer, CellOrder.SPLIT) for layer in layers], layout)


def block_target(block: torch.Tensor, layout: BlockLayout) -> PageTarget:
    """Return the target of one contiguous block (layers, 2, tokens, kv_heads, head_dim): a pool of one page."""
    if tuple(block.shape) != layout.shape or not block.is_contiguous():
        raise ValueError(f"expected a contiguous block of {layout.shape}, got {tuple(block.shape)}")
    views = block.permute(0, 1, 3, 2, 4)
    return _target([(layer[0][None], layer[1][None]) for layer in views], layout)


def _target(halves: Sequence[tuple[torch.Tensor, torch.Tensor]], layout: BlockLayout) -> PageTarget:
    shapes = {tuple(part.shape[1:]) for pair in halves for part in pair}
    strides = {part.stride() for pair in halves for part in pair}
    sizes = {part.element_size() for pair in halves for part in pair}
    page_tokens = halves[0][0].shape[2] if halves else 0
    if shapes != {(layout.kv_heads, page_tokens, layout.head_dim)} or len(halves) != layout.layers:
        raise ValueError(f"pages of {sorted(shapes)} in {len(halves)} layers are not of {layout}")
    if len(strides) != 1 or sizes != {layout.dtype.item_bytes} or layout.tokens % page_tokens:
        raise ValueError(f"pages must be alike and divide a block, got strides {sorted(strides)}, bytes {sizes}")
    page_stride, head_stride, token_stride, unit = strides.pop()
    if unit != 1:
        raise ValueError(f"a head's values must stand together, they are {unit} apart")
    bases = np.array([[address(part) for part in pair] for pair in halves], dtype=np.uint64)
    return PageTarget(layout, bases, page_tokens, page_stride, token_stride, head_stride)


class BlockCopier:
    """Gathers and scatters blocks of one engine's pages. Everything is queued, nothing waited for."""

    def __init__(self, target: PageTarget) -> None:
        self._target = target
        layout = target.layout
        item = layout.dtype.item_bytes
        strides = (target.page_stride, target.token_stride, target.head_stride, layout.head_dim)
        is_aligned = not (target.bases % _VECTOR_BYTES).any() and not any(
            item * each % _VECTOR_BYTES for each in strides
        )
        self._unit_bytes = _VECTOR_BYTES if is_aligned else _UNIT_BYTES

    def scatter(self, kernels: Kernels, block: torch.Tensor, token_starts: NDArray[np.int64]) -> None:
        """Write a block's bytes, of this machine's memory, to its tokens' places; see `PageTarget.token_starts`."""
        staging = Staging(kernels)
        bases, starts = (staging.add(array) for array in (self._target.bases, token_starts))
        base, sent = staging.base, staging.send()
        if kernels.device.type == "cuda":
            with kernels.queue():
                # What was captured is pinned already.
                block = block.pin_memory().to(kernels.device, non_blocking=True)
        self._launch(kernels, base + bases, base + starts, address(block), to_pages=True)
        # Queued memory is reused after what uses it on the same stream.
        del sent, block

    def gather(self, kernels: Kernels, token_starts: NDArray[np.int64], out: DeviceStream) -> torch.Tensor:
        """Return a block of pinned memory that the pages' values are on their way to, on the stream `out`.

        They are those when the kernels' stream comes here. Values of tokens without a place are any.
        """
        staging, layout = Staging(kernels), self._target.layout
        places = [staging.add(array) for array in (self._target.bases, token_starts)]
        with kernels.queue():
            room = torch.empty(layout.raw_bytes, dtype=torch.uint8, device=kernels.device)
        base = staging.base
        sent = staging.send()
        self._launch(kernels, base + places[0], base + places[1], address(room), to_pages=False)
        del sent
        out.wait_for(kernels.mark())
        with out.queue():
            host = torch.empty(layout.raw_bytes, dtype=torch.uint8, pin_memory=kernels.device.type == "cuda")
            host.copy_(room, non_blocking=True)
        out.uses(room)
        return host

    def _launch(self, kernels: Kernels, bases: int, starts: int, block: int, to_pages: bool) -> None:
        layout, target = self._target.layout, self._target
        item = layout.dtype.item_bytes
        sizes = (layout.layers, layout.tokens, layout.kv_heads, item * layout.head_dim, item * target.head_stride)
        args = (bases, starts, block, *sizes, item, self._unit_bytes, int(to_pages))
        kernels.launch("block_copy", args, warp_blocks(2 * layout.layers * layout.tokens), THREADS)
