"""Pages out to pinned memory and in again: gathered by a kernel, copied in large pieces, ordered by events.

Each direction has a stream for copies; kernels run on their own. While one piece is copied the next is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtide_gpu.kernels import THREADS, Kernels, Opened, Staging, address, warp_blocks
from kvtide_lab.swap import Swap, runs

PIECE_BYTES = 16 << 20
# One is gathered, one is copied, one is about to be.
PIECES = 3
VECTOR_BYTES = 16
COPIED_BY_WARP = 4 * 32 * VECTOR_BYTES


class _Piece(NamedTuple):
    """A part of a swap: pages and slots [start, stop) of its lists."""

    start: int
    stop: int
    room: int


class _Direction:
    """One way: its stream, its rooms on the device, and when each is free again."""

    def __init__(self, kernels: Kernels, rooms: list[torch.Tensor]) -> None:
        self.copies = kernels.copies()
        self.rooms = rooms
        self.is_free: list[Any] = [None] * len(rooms)
        self.next = 0


class KernelSwapper(Opened):
    """Moves pages of all layers between `layers` and slots in this machine's memory. One thread at a time.

    layers: one tensor (pages, bytes of a page) of int8 for each layer, on the kernels' device, pages of whole 16 bytes.
    Use it with `with`.
    """

    def __init__(
        self, kernels: Kernels, layers: Sequence[torch.Tensor], slots: int, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """ValueError for layers of another kind, and for no slots."""
        shapes = {(layer.ndim, layer.dtype, layer.shape[-1], layer.stride()) for layer in layers}
        if len(shapes) != 1 or layers[0].ndim != 2 or layers[0].dtype != torch.int8 or layers[0].stride(1) != 1:
            raise ValueError(f"layers must be (pages, bytes) of int8 and alike, got {sorted(map(str, shapes))}")
        self._page_bytes, self._stride = layers[0].shape[1], layers[0].stride(0)
        if self._page_bytes % VECTOR_BYTES or self._stride % VECTOR_BYTES:
            raise ValueError(f"pages must be whole {VECTOR_BYTES} bytes, got {self._page_bytes} every {self._stride}")
        if slots < 1 or piece_bytes < 1:
            raise ValueError(f"slots and piece_bytes must be positive, got {slots} and {piece_bytes}")
        self._kernels = kernels
        self._layers = list(layers)
        self._slots = slots
        self._pages_per_piece = max(1, piece_bytes // (self._page_bytes * len(layers)))
        self._directions: dict[bool, _Direction] = {}
        self._host = torch.empty(0)
        self._bases = torch.empty(0)

    def open(self) -> None:
        """Reserve the memory."""
        device = self._kernels.device
        slot_bytes = self._page_bytes * len(self._layers)
        self._host = torch.empty((self._slots, slot_bytes), dtype=torch.int8, pin_memory=device.type == "cuda")
        for is_out in (False, True):
            shape = (PIECES, self._pages_per_piece, slot_bytes)
            with self._kernels.queue():
                rooms = list(torch.empty(shape, dtype=torch.int8, device=device))
            self._directions[is_out] = _Direction(self._kernels, rooms)
        staging = Staging(self._kernels)
        staging.add(np.array([address(layer) for layer in self._layers], dtype=np.uint64))
        self._bases = staging.send()
        # The rooms may lie where the kernels' stream has something under way, which streams for copies know nothing of.
        self._kernels.finish()

    def close(self) -> None:
        """Wait for what is under way and give the memory back. Idempotent."""
        for direction in self._directions.values():
            direction.copies.finish()
        if self._directions:
            self._kernels.finish()
        self._directions, self._host, self._bases = {}, torch.empty(0), torch.empty(0)

    def swap_out(self, pages: Sequence[int], slots: Sequence[int]) -> Swap:
        """Copy pages, as they are when torch's current stream comes here, into slots. ValueError for unequal counts."""
        direction, at = self._begin(pages, slots, is_out=True)
        end = None
        for piece in self._pieces(direction, len(pages)):
            room = direction.rooms[piece.room]
            self._kernels.wait_for(direction.is_free[piece.room])
            self._copy_pages(at, piece, room, to_pages=False)
            direction.copies.wait_for(self._kernels.mark())
            with direction.copies.queue():
                for start, slot, count in runs(range(piece.start, piece.stop), slots[piece.start : piece.stop]):
                    inside = room[start - piece.start :][:count]
                    self._host[slot : slot + count].copy_(inside, non_blocking=True)
            end = direction.is_free[piece.room] = direction.copies.mark()
        return Swap(lambda: end.synchronize() if end is not None else None)

    def swap_in(self, slots: Sequence[int], pages: Sequence[int]) -> Swap:
        """Copy slots into pages; the engine's stream may use them once it is done. ValueError for unequal counts."""
        direction, at = self._begin(pages, slots, is_out=False)
        end = None
        for piece in self._pieces(direction, len(pages)):
            room = direction.rooms[piece.room]
            direction.copies.wait_for(direction.is_free[piece.room])
            with direction.copies.queue():
                for start, slot, count in runs(range(piece.start, piece.stop), slots[piece.start : piece.stop]):
                    room[start - piece.start :][:count].copy_(self._host[slot : slot + count], non_blocking=True)
            self._kernels.wait_for(direction.copies.mark())
            self._copy_pages(at, piece, room, to_pages=True)
            end = direction.is_free[piece.room] = self._kernels.mark()
        return Swap(lambda: end.synchronize() if end is not None else None)

    def _begin(self, pages: Sequence[int], slots: Sequence[int], is_out: bool) -> tuple[_Direction, torch.Tensor]:
        """Check, order behind the engine's stream, and send the pages' numbers."""
        if len(pages) != len(slots):
            raise ValueError(f"every page needs a slot, got {len(pages)} pages and {len(slots)} slots")
        count = self._layers[0].shape[0]
        if not all(0 <= page < count for page in pages) or not all(0 <= slot < self._slots for slot in slots):
            raise ValueError(f"expected pages below {count} and slots below {self._slots}")
        assert self._directions, "swap before open"
        self._kernels.follow()
        staging = Staging(self._kernels)
        staging.add(np.array(pages, dtype=np.int64))
        return self._directions[is_out], staging.send()

    def _pieces(self, direction: _Direction, count: int) -> Iterator[_Piece]:
        for start in range(0, count, self._pages_per_piece):
            room, direction.next = direction.next, (direction.next + 1) % PIECES
            yield _Piece(start, min(count, start + self._pages_per_piece), room)

    def _copy_pages(self, at: torch.Tensor, piece: _Piece, room: torch.Tensor, to_pages: bool) -> None:
        count, layers = piece.stop - piece.start, len(self._layers)
        pages = address(at) + 8 * piece.start
        sizes = (count, layers, self._page_bytes, self._stride)
        jobs = count * layers * -(-self._page_bytes // COPIED_BY_WARP)
        args = (address(self._bases), pages, address(room), *sizes, int(to_pages))
        self._kernels.launch("pages_copy", args, warp_blocks(jobs), THREADS)
