"""rANS streams on a device: many at a time, a warp for each.

Takes and gives the bytes of `kvtide.codec.entropy`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.codec.entropy import SYMBOLS, Escapes, RansTables, Runs, Streams
from kvtide.codec.entropy.base import Elements, check_decode, check_encode
from kvtide.engines.gpu.kernels import Kernels, Staging, address
from kvtide.errors import CorruptPayload

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
            # Queued memory is reused behind what uses it on the same stream.
            sent = staging.send()
            args = (address(sent), address(room), address(room) + count * LANES_BYTES, count)
            self._kernels.launch("rans_tables", args, warp_blocks(count), THREADS)
            self._room = room
        return address(self._room)

    @property
    def codes(self) -> int:
        """Return the address of the tables for encoding."""
        return self.lanes + self._tables.count * LANES_BYTES

    def prepare_decode(
        self, streams: Streams, runs: Runs, values: Elements, count: int, escapes: Escapes | None = None
    ) -> DecodeCall:
        """Send streams of `count` symbols each. Arguments and errors are those of `EntropyTables.decode`."""
        out = np.empty((len(streams.sizes), count), dtype=values.dtype)
        check_decode(streams, runs, values, out, escapes, self._tables.count)
        staging, jobs = Staging(self._kernels), _jobs(runs, len(streams.sizes), count)
        data, start = memoryview(streams.data), 0
        for job, size in zip(jobs, streams.sizes, strict=True):
            job["stream"], job["stream_bytes"] = staging.add(data[start : start + size]), size
            start += size
        taken = escapes.elements if escapes is not None else np.empty(0, values.dtype)
        if escapes is not None:
            jobs["escape_count"] = escapes.counts
            jobs["escapes"] = (np.cumsum(escapes.counts) - escapes.counts) * values.itemsize
        places = [staging.add(array) for array in (jobs, runs.tables, values, taken)]
        room = _room(self._kernels, 4 + out.nbytes)
        base, at = staging.base, address(room)
        jobs["stream"] += base
        jobs["runs"] += base + places[1]
        jobs["values"], jobs["escapes"] = base + places[2], jobs["escapes"] + base + places[3]
        jobs["tables"], jobs["status"] = self.lanes, at
        jobs["symbols"] = at + 4 + np.arange(len(jobs)) * count * values.itemsize
        args = (base + places[0], len(jobs), values.itemsize, int(escapes is not None))
        return DecodeCall(_Sent(self._kernels, self, staging.send(), room), args, out)

    def prepare_encode(self, symbols: NDArray[np.uint8], runs: Runs) -> EncodeCall:
        """Send symbols. Arguments and errors are those of `EntropyTables.encode`."""
        check_encode(symbols, runs, self._tables.count)
        count, streams = symbols.shape[1], len(symbols)
        staging, jobs = Staging(self._kernels), _jobs(runs, streams, count)
        size = 2 * count + STATES_BYTES
        ends = np.arange(1, streams + 1, dtype=np.uint64) * np.uint64(size)
        places = [staging.add(array) for array in (jobs, runs.tables, symbols, ends)]
        # The status, sizes, rooms.
        room = _room(self._kernels, 4 + 4 * streams + streams * size)
        base, at = staging.base, address(room)
        ends += np.uint64(at + 4 + 4 * streams)
        jobs["stream"], jobs["stream_bytes"] = ends - np.uint64(size), size
        jobs["runs"] += base + places[1]
        jobs["symbols"] = base + places[2] + np.arange(streams) * count
        jobs["tables"], jobs["status"] = self.codes, at
        args = (base + places[0], streams, at + 4)
        return EncodeCall(_Sent(self._kernels, self, staging.send(), room), args, base + places[3])


def _jobs(runs: Runs, streams: int, count: int) -> NDArray[np.void]:
    jobs = np.zeros(streams, dtype=STREAM)
    jobs["count"], jobs["run_symbols"] = count, min(runs.symbols, 1 << 31)
    jobs["runs"] = 2 * np.arange(streams) * runs.tables.shape[1]
    return jobs


def _room(kernels: Kernels, size: int) -> torch.Tensor:
    with kernels.queue():
        return torch.zeros(size, dtype=torch.uint8, device=kernels.device)


class _Sent(NamedTuple):
    """What kernels get addresses of: this lives as long as they may run. `room` begins with the status."""

    kernels: Kernels
    tables: DeviceRans
    inputs: torch.Tensor
    room: torch.Tensor

    def has_failed(self) -> bool:
        """Wait, and tell whether a stream was no stream."""
        self.kernels.finish()
        return bool(self.room[:4].any())


class DecodeCall:
    """Streams on the device, to be decoded as often as one likes."""

    def __init__(self, sent: _Sent, args: tuple[int, ...], out: Elements) -> None:
        self._sent = sent
        self._args = args
        self._host = out

    def launch(self) -> None:
        """Queue the decoding."""
        self._sent.kernels.launch("rans_decode", self._args, warp_blocks(len(self._host)), THREADS)

    def result(self) -> Elements:
        """Wait, and return the elements. CorruptPayload unless every stream holds exactly its symbols."""
        if self._sent.has_failed():
            raise CorruptPayload(f"rans: {len(self._host)} streams do not hold {self._host.shape[1]} symbols each")
        flat = self._sent.room[4:].cpu().numpy()
        found: Elements = flat.view(self._host.dtype).reshape(self._host.shape)
        return found


class EncodeCall:
    """Symbols on the device, to be encoded as often as one likes."""

    def __init__(self, sent: _Sent, args: tuple[int, ...], ends: int) -> None:
        """ends: address of where the rooms end."""
        self._sent = sent
        self._args = args
        self._ends = ends

    def launch(self) -> None:
        """Queue the encoding; streams end up at the ends of their rooms."""
        self._sent.kernels.launch("rans_encode", self._args, warp_blocks(self._args[1]), THREADS)

    def pack(self) -> Packed:
        """Queue moving the streams side by side."""
        count = self._args[1]
        return pack(self._sent.kernels, self._ends, self._sent.room[4 : 4 + 4 * count], len(self._sent.room))

    def result(self) -> Streams:
        """Wait, and return the streams. ValueError for a symbol that its table can't code."""
        packed = self.pack()
        if self._sent.has_failed():
            raise ValueError("a symbol has no probability in its table")
        ends = packed.ends.tolist()
        total = ends[-1] if ends else 0
        return Streams(packed.data[:total].cpu().numpy().tobytes(), np.diff(ends, prepend=0).tolist())


class Packed(NamedTuple):
    """What lay at the ends of rooms, side by side, and where each ends; queued."""

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
