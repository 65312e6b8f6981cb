"""rANS on a device: its tables, records of streams, and streams put side by side. A warp takes a stream."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvtide.codec.entropy import SYMBOLS, RansTables
from kvtide.engines.gpu.kernels import Kernels, Staging, address

STATES_BYTES = 128
THREADS = 256
WARPS = THREADS // 32
# Of a table: RansLane and RansCode of each lane.
LANES_BYTES, CODES_BYTES = 8 * SYMBOLS, 12 * SYMBOLS

# RansStream of kernels/rans.cuh.
STREAM = np.dtype(
    [(name, "<u8") for name in ("stream", "runs", "symbols", "escapes", "tables", "values", "status")]
    + [(name, "<u4") for name in ("stream_bytes", "count", "run_symbols", "escape_count")]
)


def warp_blocks(jobs: int) -> int:
    """Return the blocks that have a warp for each job."""
    return -(-jobs // WARPS)


class DeviceRans:
    """A set of tables on a device, made there when first asked for."""

    def __init__(self, kernels: Kernels, tables: RansTables) -> None:
        self._kernels = kernels
        self._tables = tables
        self._room: torch.Tensor | None = None

    @property
    def lanes(self) -> int:
        """Return the address of the tables for decoding."""
        if self._room is None:
            staging, count = Staging(self._kernels), self._tables.count
            staging.add(self._tables.frequencies.astype(np.uint16))
            with self._kernels.queue():
                room = torch.empty(count * (LANES_BYTES + CODES_BYTES), dtype=torch.uint8, device=self._kernels.device)
            # Queued memory is reused after what uses it on the same stream.
            sent = staging.send()
            args = (address(sent), address(room), address(room) + count * LANES_BYTES, count)
            self._kernels.launch("rans_tables", args, warp_blocks(count), THREADS)
            self._room = room
        return address(self._room)

    @property
    def codes(self) -> int:
        """Return the address of the tables for encoding."""
        return self.lanes + self._tables.count * LANES_BYTES


class Packed(NamedTuple):
    """The ends of rooms put side by side, and where each ends; queued."""

    data: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


def pack(kernels: Kernels, rooms: int, sizes: torch.Tensor, bytes_max: int) -> Packed:
    """Queue moving what lies at the ends of rooms side by side. rooms: address of these ends; sizes: of uint32."""
    with kernels.queue():
        each = sizes.view(torch.int32).to(torch.int64)
        ends = torch.cumsum(each, 0)
        packed = Packed(torch.empty(max(bytes_max, 1), dtype=torch.uint8, device=kernels.device), ends - each, ends)
    args = (rooms, address(sizes), address(packed.starts), len(each), address(packed.data))
    kernels.launch("pack", args, warp_blocks(len(each)), THREADS)
    return packed
