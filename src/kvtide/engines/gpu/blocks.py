"""Whole blocks between an engine's pages and one piece of memory, one kernel for all layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockBits
from kvtide.engines.gpu.kernels import Kernels, Staging, address
from kvtide.engines.gpu.rans import THREADS, warp_blocks
from kvtide.engines.gpu.targets import PageTarget
from kvtide.engines.streams import DeviceStream

_VECTOR_BYTES, _UNIT_BYTES = 16, 2


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

    def scatter(self, kernels: Kernels, bits: BlockBits, token_starts: NDArray[np.int64]) -> None:
        """Write a block of this machine's memory to its tokens' places; see `PageTarget.token_starts`."""
        staging = Staging(kernels)
        places = [staging.add(array) for array in (self._target.bases, token_starts, bits)]
        base = staging.base
        sent = staging.send()
        bases, starts, block = (base + place for place in places)
        self._launch(kernels, bases, starts, block, to_pages=True)
        # Queued memory is reused behind what uses it on the same stream.
        del sent

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
