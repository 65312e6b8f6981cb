"""rANS streams coded by kernels alone, as often as one likes: for tests, and for what tools/gpu.py times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.codec.entropy import Elements, Escapes, RansTables, Runs, Streams
from kvtide.errors import CorruptPayload
from kvtide_gpu.kernels import (
    STATES_BYTES,
    STREAM,
    THREADS,
    DeviceRans,
    Kernels,
    Packed,
    Staging,
    address,
    pack,
    warp_blocks,
)


def prepare_decode(
    kernels: Kernels,
    tables: RansTables,
    streams: Streams,
    runs: Runs,
    values: Elements,
    count: int,
    escapes: Escapes | None = None,
) -> DecodeCall:
    """Send streams of `count` symbols each. Arguments are those of `EntropyTables.decode`, and not checked."""
    out = np.empty((len(streams.sizes), count), dtype=values.dtype)
    rans = DeviceRans(kernels, tables)
    staging, jobs = Staging(kernels), _jobs(runs, len(streams.sizes), count)
    data, start = memoryview(streams.data), 0
    for job, size in zip(jobs, streams.sizes, strict=True):
        job["stream"], job["stream_bytes"] = staging.add(data[start : start + size]), size
        start += size
    taken = escapes.elements if escapes is not None else np.empty(0, values.dtype)
    if escapes is not None:
        jobs["escape_count"] = escapes.counts
        jobs["escapes"] = (np.cumsum(escapes.counts) - escapes.counts) * values.itemsize
    places = [staging.add(array) for array in (jobs, runs.tables, values, taken)]
    room = _room(kernels, 4 + out.nbytes)
    base, at = staging.base, address(room)
    jobs["stream"] += base
    jobs["runs"] += base + places[1]
    jobs["values"], jobs["escapes"] = base + places[2], jobs["escapes"] + base + places[3]
    jobs["tables"], jobs["status"] = rans.lanes, at
    jobs["symbols"] = at + 4 + np.arange(len(jobs)) * count * values.itemsize
    args = (base + places[0], len(jobs), values.itemsize, int(escapes is not None))
    return DecodeCall(_Sent(kernels, rans, staging.send(), room), args, out)


def prepare_encode(kernels: Kernels, tables: RansTables, symbols: NDArray[np.uint8], runs: Runs) -> EncodeCall:
    """Send symbols. Arguments are those of `EntropyTables.encode`, and not checked."""
    count, streams = symbols.shape[1], len(symbols)
    rans = DeviceRans(kernels, tables)
    staging, jobs = Staging(kernels), _jobs(runs, streams, count)
    size = 2 * count + STATES_BYTES
    ends = np.arange(1, streams + 1, dtype=np.uint64) * np.uint64(size)
    places = [staging.add(array) for array in (jobs, runs.tables, symbols, ends)]
    # The status, sizes, rooms.
    room = _room(kernels, 4 + 4 * streams + streams * size)
    base, at = staging.base, address(room)
    ends += np.uint64(at + 4 + 4 * streams)
    jobs["stream"], jobs["stream_bytes"] = ends - np.uint64(size), size
    jobs["runs"] += base + places[1]
    jobs["symbols"] = base + places[2] + np.arange(streams) * count
    jobs["tables"], jobs["status"] = rans.codes, at
    args = (base + places[0], streams, at + 4)
    return EncodeCall(_Sent(kernels, rans, staging.send(), room), args, base + places[3])


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
