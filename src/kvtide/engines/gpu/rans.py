"""rANS streams on a device: many at a time, a warp for each.

Takes and gives the bytes of `kvtide.codec.entropy`.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.codec.entropy import SYMBOLS, Escapes, RansTables, Runs, Streams
from kvtide.codec.entropy.base import Elements, check_decode, check_encode
from kvtide.codec.entropy.rans import slot_map
from kvtide.engines.gpu.kernels import Kernels, Staging, address
from kvtide.errors import CorruptPayload

TOTAL = 4096
BUCKET = TOTAL // SYMBOLS
STATES_BYTES = 128
THREADS = 256
WARPS = THREADS // 32

# RansStream of kernels/rans.cuh.
STREAM = np.dtype(
    [
        ("stream_start", "<u8"),
        ("runs_start", "<u8"),
        ("symbols_start", "<u8"),
        ("escapes_start", "<u8"),
        ("stream_bytes", "<u4"),
        ("count", "<u4"),
        ("run_symbols", "<u4"),
        ("escape_count", "<u4"),
    ]
)


def warp_blocks(jobs: int) -> int:
    """Return the blocks that have a warp for each job."""
    return -(-jobs // WARPS)


def decode_lanes(tables: RansTables) -> NDArray[np.uint32]:
    """Return what each lane keeps of each table to decode with: (tables, 32, 2), as RansLane."""
    rows = np.zeros((tables.count, SYMBOLS, 2), dtype=np.uint32)
    for row, frequencies in zip(rows, tables.frequencies.tolist(), strict=True):
        found = slot_map(frequencies)
        for bucket in range(SYMBOLS):
            first = bucket * BUCKET
            symbols = found.symbols[first : first + BUCKET]
            split = next((i for i, symbol in enumerate(symbols) if symbol != bucket), BUCKET)
            row[bucket, 0] = frequencies[bucket] << 20 | (-first % TOTAL) << 8 | split
            if split < BUCKET:
                bias = (found.ranks[first + split] - first - split) % TOTAL
                row[bucket, 1] = frequencies[symbols[split]] << 20 | bias << 8 | symbols[split]
    return rows


class _Shares(NamedTuple):
    """What each lane keeps of each table to encode with, (tables, 32, 2), and slots by symbol and rank."""

    lanes: NDArray[np.uint32]
    slots: NDArray[np.uint16]


def _encode_shares(tables: RansTables) -> _Shares:
    frequencies = tables.frequencies.astype(np.uint64)
    lanes = np.zeros((tables.count, SYMBOLS, 2), dtype=np.uint32)
    lanes[:, :, 0] = frequencies << 16 | (np.cumsum(frequencies, axis=1) - frequencies)
    reciprocals = np.minimum((1 << 32) // np.maximum(frequencies, 1), (1 << 32) - 1)
    lanes[:, :, 1] = np.where(frequencies > 0, reciprocals, 0)
    slots = [list(chain.from_iterable(slot_map(row).slots)) for row in tables.frequencies.tolist()]
    return _Shares(lanes, np.array(slots, dtype=np.uint16))


class DeviceRans:
    """A set of tables on a device."""

    def __init__(self, kernels: Kernels, tables: RansTables) -> None:
        self._kernels = kernels
        self._count = tables.count
        self._tables = tables
        # Each takes 0.1 s of Python for a profile's 128 tables, and most processes do one of the two.
        self._lanes: torch.Tensor | None = None
        self._shares: tuple[torch.Tensor, int] | None = None

    @property
    def lanes(self) -> int:
        """Return the address of the tables for decoding, sent when first asked for."""
        if self._lanes is None:
            staging = Staging(self._kernels)
            staging.add(decode_lanes(self._tables))
            self._lanes = staging.send()
        return address(self._lanes)

    @property
    def shares(self) -> tuple[int, int]:
        """Return the addresses of the tables and of the slots for encoding, sent when first asked for."""
        if self._shares is None:
            staging, found = Staging(self._kernels), _encode_shares(self._tables)
            staging.add(found.lanes)
            slots_at = staging.add(found.slots)
            self._shares = staging.send(), slots_at
        sent, slots_at = self._shares
        return address(sent), address(sent) + slots_at

    def prepare_decode(
        self, streams: Streams, runs: Runs, values: Elements, count: int, escapes: Escapes | None = None
    ) -> DecodeCall:
        """Send streams of `count` symbols each. Arguments and errors are those of `EntropyTables.decode`."""
        out = np.empty((len(streams.sizes), count), dtype=values.dtype)
        check_decode(streams, runs, values, out, escapes, self._count)
        staging, jobs = Staging(self._kernels), np.zeros(len(streams.sizes), dtype=STREAM)
        data, start = memoryview(streams.data), 0
        for job, size in zip(jobs, streams.sizes, strict=True):
            job["stream_start"], job["stream_bytes"] = staging.add(data[start : start + size]), size
            start += size
        jobs["count"], jobs["run_symbols"] = count, min(runs.symbols, 1 << 31)
        jobs["runs_start"] = np.arange(len(jobs)) * runs.tables.shape[1]
        jobs["symbols_start"] = np.arange(len(jobs)) * count
        if escapes is not None:
            jobs["escape_count"] = escapes.counts
            jobs["escapes_start"] = np.cumsum(escapes.counts) - escapes.counts
        taken = escapes.elements if escapes is not None else np.empty(0, values.dtype)
        places = [staging.add(array) for array in (jobs, runs.tables, values, taken)]
        return DecodeCall(_Sent(self._kernels, self, staging.send(), places), out, escapes is not None)

    def prepare_encode(self, symbols: NDArray[np.uint8], runs: Runs) -> EncodeCall:
        """Send symbols. Arguments and errors are those of `EntropyTables.encode`."""
        check_encode(symbols, runs, self._count)
        staging, jobs = Staging(self._kernels), np.zeros(len(symbols), dtype=STREAM)
        count = symbols.shape[1]
        room = 2 * count + STATES_BYTES
        jobs["count"], jobs["run_symbols"] = count, min(runs.symbols, 1 << 31)
        jobs["runs_start"] = np.arange(len(jobs)) * runs.tables.shape[1]
        jobs["symbols_start"] = np.arange(len(jobs)) * count
        jobs["stream_start"], jobs["stream_bytes"] = np.arange(len(jobs)) * room, room
        places = [staging.add(array) for array in (jobs, runs.tables, symbols)]
        return EncodeCall(_Sent(self._kernels, self, staging.send(), places), len(jobs), room)


class _Sent(NamedTuple):
    """Records and what they refer to, on a device. Kernels get addresses: this lives as long as they may run."""

    kernels: Kernels
    tables: DeviceRans
    copy: torch.Tensor
    places: list[int]

    @property
    def addresses(self) -> list[int]:
        return [address(self.copy) + place for place in self.places]


class DecodeCall:
    """Streams on the device, to be decoded as often as one likes."""

    def __init__(self, sent: _Sent, out: Elements, has_escapes: bool) -> None:
        """sent: jobs, run tables, values and escapes."""
        self._sent = sent
        self._kernels = kernels = sent.kernels
        self._host = out
        with kernels.queue():
            self.out = torch.empty(max(out.nbytes, 1), dtype=torch.uint8, device=kernels.device)
            self._status = torch.ones(max(len(out), 1), dtype=torch.int32, device=kernels.device)
        jobs, *inputs = sent.addresses
        outputs = (address(self.out), address(self._status))
        sizes = (out.itemsize, int(has_escapes))
        self._args = (address(sent.copy), jobs, len(out), sent.tables.lanes, *inputs, *outputs, *sizes)

    def launch(self) -> None:
        """Queue the decoding."""
        self._kernels.launch("rans_decode", self._args, warp_blocks(len(self._host)), THREADS)

    def result(self) -> Elements:
        """Wait, and return the elements. CorruptPayload unless every stream holds exactly its symbols."""
        self._kernels.finish()
        if self._status[: len(self._host)].any():
            raise CorruptPayload(f"rans: {len(self._host)} streams do not hold {self._host.shape[1]} symbols each")
        flat = self.out[: self._host.nbytes].cpu().numpy()
        found: Elements = flat.view(self._host.dtype).reshape(self._host.shape)
        return found


class EncodeCall:
    """Symbols on the device, to be encoded as often as one likes."""

    def __init__(self, sent: _Sent, streams: int, room: int) -> None:
        """sent: jobs, run tables and symbols. room: bytes for each stream."""
        self._sent = sent
        self._kernels = kernels = sent.kernels
        self._count = streams
        with kernels.queue():
            self._rooms = torch.empty(max(streams * room, 1), dtype=torch.uint8, device=kernels.device)
            self._counters = torch.ones((2, max(streams, 1)), dtype=torch.int32, device=kernels.device)
        sizes, status = (address(row) for row in self._counters)
        self._jobs, runs, symbols = sent.addresses
        outputs = (address(self._rooms), sizes, status)
        self._args = (symbols, self._jobs, streams, *sent.tables.shares, runs, *outputs)

    def launch(self) -> None:
        """Queue the encoding; streams end up at the ends of their rooms."""
        self._kernels.launch("rans_encode", self._args, warp_blocks(self._count), THREADS)

    def pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue moving the streams side by side. Returns room that begins with them, and the end of each."""
        with self._kernels.queue():
            ends = torch.cumsum(self._counters[0, : self._count].to(torch.int64), 0)
            starts = ends - self._counters[0, : self._count]
            packed = torch.empty_like(self._rooms)
        args = (address(self._rooms), self._jobs, self._count, address(self._counters[0]), address(starts))
        self._kernels.launch("rans_pack", (*args, address(packed)), warp_blocks(self._count), THREADS)
        self._starts = starts
        return packed, ends

    def result(self) -> Streams:
        """Wait, and return the streams. ValueError for a symbol that its table can't code."""
        packed, ends = self.pack()
        self._kernels.finish()
        if self._counters[1, : self._count].any():
            raise ValueError("a symbol has no probability in its table")
        sizes = self._counters[0, : self._count].cpu().tolist()
        total = int(ends[-1]) if sizes else 0
        return Streams(packed[:total].cpu().numpy().tobytes(), sizes)
