"""Blocks of the published codecs, CacheGen's and chunkwise, decoded and encoded on a device.

The bytes are those of `kvtide.codec.published`, under rANS tables; prefix codes are the processor's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.entropy import RansTables, Streams
from kvtide.codec.published.cachegen import CodedLayers, ProfiledCodec, SectionPart
from kvtide.codec.published.integers import (
    SHIFT_MAX,
    Distribution,
    IntegerRuns,
    WrittenIntegers,
    join_integers,
    plane_bits,
)
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section
from kvtide_gpu.kernels import (
    ALIGNMENT,
    CODES_BYTES,
    LANES_BYTES,
    STATES_BYTES,
    STREAM,
    THREADS,
    DeviceRans,
    Kernels,
    Staging,
    address,
    pack,
    warp_blocks,
)
from kvtide_gpu.targets import PageTarget, StoredBlock

# A table takes 0.7 KB of the device; a model with 32 layers of 1,024 channels has 131,072 at a level.
TABLES_MAX = 1 << 18
# Tables of a stream are numbered by 16 bits.
RUNS_MAX = 1 << 16
RESTORED_TOKENS = 32
NOT_FINITE = 2

# IntegerRuns, IntegerStream of kernels/integers.cuh; GroupedHalf of kernels/groups.cuh.
RUNS = np.dtype(
    [(name, "<u8") for name in ("numbers", "shifts", "ranks", "planes")]
    + [("plane_starts", "<u4", SHIFT_MAX), ("symbols", "<u4"), ("zero", "<u4")]
)
INTEGERS = np.dtype([("rans", STREAM), ("numbers", RUNS)])
HALF = np.dtype(
    [(name, "<u8") for name in ("base", "token_starts", "scales", "positions", "status", "head_stride")]
    + [(name, "<u4") for name in ("tokens", "group_tokens", "channels", "head_dim", "element")]
    + [("half", "<f4"), ("step", "<f4"), ("zero", "<u4")]
)


class _OnDevice(NamedTuple):
    """A distribution on a device: addresses of its shifts, ranks and values."""

    distribution: Distribution
    rans: DeviceRans
    sent: torch.Tensor
    shifts: int
    ranks: int
    values: int


class DeviceGroups:
    """Decodes and encodes blocks of published codecs. One thread at a time."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._distributions: OrderedDict[int, _OnDevice] = OrderedDict()
        staging = Staging(kernels)
        # Each run has a table of its own.
        staging.add(np.arange(RUNS_MAX, dtype=np.uint16))
        self._runs = staging.send()

    def write(
        self, codec: ProfiledCodec, blocks: Sequence[StoredBlock], target: PageTarget, wait: Callable[[], None]
    ) -> list[bool]:
        """Write blocks to their pages, whole or not at all; `wait` is called before the first page is written."""
        decoding = _Decoding(self, codec, target)
        are_sound = [decoding.add(block) for block in blocks]
        statuses = iter(decoding.run(self._kernels, wait))
        self._trim()
        return [is_sound and not next(statuses) for is_sound in are_sound]

    def encode(self, codec: ProfiledCodec, meta: BlockMeta, bits: BlockBits) -> list[Section] | None:
        """Return a block's sections, None if that is left to the processor. UnencodableBlock as the codec's own."""
        if codec.profile is None or codec.coder != 0 or not codec.fits(meta.layout) or not _has_room(meta.layout):
            return None
        encoding = _Encoding(self, codec, meta.layout)
        if not np.isfinite(encoding.steps).all():
            return None
        found = encoding.run(self._kernels, bits)
        self._trim()
        return found

    def runs(self) -> int:
        """Return the address of the table of each run."""
        return address(self._runs)

    def on_device(self, distribution: Distribution) -> _OnDevice:
        """Return a distribution on the device. CorruptPayload for a coder that is left to the processor."""
        if not isinstance(distribution.tables, RansTables):
            raise CorruptPayload("prefix codes are decoded by the processor")
        key = id(distribution)
        if key not in self._distributions:
            staging = Staging(self._kernels)
            has_bit = (distribution.shifts[:, None] > np.arange(SHIFT_MAX)).astype(np.uint32)
            ranks = np.cumsum(has_bit, axis=0, dtype=np.uint32) - has_bit
            arrays = (distribution.shifts, ranks, distribution.symbol_values)
            places = [staging.add(array) for array in arrays]
            sent = staging.send()
            addresses = [address(sent) + place for place in places]
            rans = DeviceRans(self._kernels, distribution.tables)
            self._distributions[key] = _OnDevice(distribution, rans, sent, *addresses)
        self._distributions.move_to_end(key)
        return self._distributions[key]

    def _trim(self) -> None:
        """Forget what was not used for longest, once nothing that uses it is under way."""
        counts = [len(each.distribution.tables.rows) for each in self._distributions.values()]
        for excess in accumulate(counts, lambda left, count: left - count, initial=sum(counts)):
            if excess <= TABLES_MAX:
                break
            self._distributions.popitem(last=False)


def _has_room(layout: BlockLayout) -> bool:
    return 2 * layout.kv_heads * layout.head_dim <= RUNS_MAX


def _plane_starts(distribution: Distribution, symbols: int) -> list[int]:
    """Return where each plane of low bits begins, and where the last one ends, in bytes."""
    return list(accumulate((-(-bits // 8) for bits in plane_bits(distribution.shifts, symbols)), initial=0))


def _fill_positions(
    positions: NDArray[np.void], part: SectionPart, layout: BlockLayout, on: _OnDevice, numbers: int, planes: int
) -> None:
    """Write where the numbers of each half of a part's layers are. positions: those of the halves."""
    channels, symbols = layout.kv_heads * layout.head_dim, part.runs.symbols
    first_runs = np.arange(len(positions), dtype=np.uint64) * np.uint64(channels)
    positions["numbers"] = numbers + 2 * symbols * first_runs
    positions["shifts"], positions["ranks"] = on.shifts + first_runs, on.ranks + 4 * SHIFT_MAX * first_runs
    positions["planes"], positions["symbols"] = planes, symbols
    starts = _plane_starts(on.distribution, symbols)[:-1]
    positions["plane_starts"][:, : len(starts)] = starts


def _fill_streams(
    streams: NDArray[np.void], runs: IntegerRuns, on: _OnDevice, kept_runs: int, tables: int, table_bytes: int
) -> None:
    """Write what streams of a part have of its distribution."""
    first_runs = np.arange(len(streams), dtype=np.uint64) * np.uint64(runs.runs)
    streams["runs"], streams["tables"] = kept_runs, tables + table_bytes * first_runs
    streams["values"] = on.values + on.distribution.symbol_values[0].nbytes * first_runs
    streams["count"], streams["run_symbols"] = runs.runs * runs.symbols, runs.symbols


class _Decoding:
    """Blocks being decoded together: records are added to while sections are cut up, addresses filled in at the end."""

    def __init__(self, groups: DeviceGroups, codec: ProfiledCodec, target: PageTarget) -> None:
        self._groups = groups
        self._codec = codec
        self._target = target
        self._staging = Staging(groups._kernels)
        self._halves: list[NDArray[np.void]] = []
        self._positions: list[NDArray[np.void]] = []
        self._streams: list[NDArray[np.void]] = []
        self._elements = 0

    def add(self, block: StoredBlock) -> bool:
        """Add a block. False if it is not whole, or the processor's."""
        if not _has_room(block.meta.layout):
            return False
        try:
            layers = list(self._codec.coded(block.meta.layout, block.sections))
            for part in (part for each in layers for part in each.parts):
                part.coded.planes(part.distribution.shifts, part.part.runs.symbols)
                self._groups.on_device(part.distribution)
        except CorruptPayload:
            return False
        self._add(block, layers)
        return True

    def _add(self, block: StoredBlock, layers: list[CodedLayers]) -> None:
        """Places in what is sent, in the room for numbers, and numbers of statuses stand in records until `run`."""
        codec, target, layout, number = self._codec, self._target, block.meta.layout, len(self._halves)
        halves = np.zeros(2 * layout.layers, dtype=HALF)
        positions = np.zeros((len(halves), codec.group_tokens), dtype=RUNS)
        halves["base"], halves["token_starts"] = target.bases.reshape(-1), self._staging.add(block.token_starts)
        halves["head_stride"], halves["status"] = target.head_stride, 4 * number
        _fill_layout(halves, layout, codec.group_tokens)
        for each in layers:
            for layer, head in zip(each.layers, each.heads, strict=True):
                two = halves[2 * layer : 2 * layer + 2]
                at = self._staging.add(head.scales)
                two["scales"] = at + head.scales[0].nbytes * np.arange(2)
                two["half"] = [codec.half(layout, layer, which, head.level) for which in range(2)]
                two["step"] = head.steps
            for part, coded, distribution in each.parts:
                on, runs = self._groups.on_device(distribution), part.runs
                planes, numbers = self._staging.add(coded.low), 2 * self._elements
                of_part = positions[2 * part.layers.start : 2 * part.layers.stop, part.position]
                _fill_positions(of_part, part, layout, on, numbers, planes)
                streams = np.zeros(runs.streams, dtype=STREAM)
                _fill_streams(streams, runs, on, self._groups.runs(), on.rans.lanes, LANES_BYTES)
                streams["stream_bytes"], streams["escape_count"] = coded.sizes, coded.escape_counts
                ends = list(accumulate(coded.sizes, initial=0))
                for stream, start, stop in zip(streams, ends, ends[1:], strict=False):
                    stream["stream"] = self._staging.add(coded.streams[start:stop])
                counts = list(accumulate(coded.escape_counts, initial=0))
                streams["escapes"] = self._staging.add(coded.escapes) + 2 * np.array(counts[:-1])
                streams["symbols"] = numbers + 2 * np.arange(runs.streams) * runs.runs * runs.symbols
                streams["status"] = 4 * number
                self._streams.append(streams)
                self._elements += runs.distributions * runs.symbols
        self._halves.append(halves)
        self._positions.append(positions)

    def run(self, kernels: Kernels, wait: Callable[[], None]) -> list[int]:
        """Decode, and return the status of each block."""
        if not self._halves:
            return []
        halves, positions = np.concatenate(self._halves), np.concatenate(self._positions)
        streams, count = np.concatenate(self._streams), len(self._halves)
        places = [self._staging.add(array) for array in (halves, positions, streams)]
        with kernels.queue():
            status = torch.zeros(count, dtype=torch.int32, device=kernels.device)
            room = torch.empty(max(2 * self._elements, 1), dtype=torch.uint8, device=kernels.device)
        base, at = np.uint64(self._staging.base), np.uint64(address(room))
        for name in ("token_starts", "scales"):
            halves[name] += base
        halves["status"] += np.uint64(address(status))
        halves["positions"] = (
            base + np.uint64(places[1]) + positions.strides[0] * np.arange(len(halves), dtype=np.uint64)
        )
        is_here = positions["symbols"] > 0
        positions["numbers"][is_here] += at
        positions["planes"][is_here] += base
        streams["stream"] += base
        streams["escapes"] += base
        streams["symbols"] += at
        streams["status"] += np.uint64(address(status))
        sent = self._staging.send()
        args = (address(sent) + places[2], len(streams), 2, 1)
        kernels.launch("rans_decode", args, warp_blocks(len(streams)), THREADS)
        wait()
        layout = self._target.layout
        jobs = -(-layout.kv_heads * layout.head_dim // 32) * -(-layout.tokens // RESTORED_TOKENS)
        restored = (address(sent) + places[0], len(halves), jobs)
        kernels.launch("groups_restore", restored, warp_blocks(len(halves) * jobs), THREADS)
        with kernels.queue():
            found: list[int] = status.tolist()
        kernels.finish()
        return found


def _fill_layout(halves: NDArray[np.void], layout: BlockLayout, group_tokens: int) -> None:
    halves["tokens"], halves["group_tokens"] = layout.tokens, group_tokens
    halves["channels"], halves["head_dim"] = layout.kv_heads * layout.head_dim, layout.head_dim
    halves["element"] = layout.dtype.code


class _Encoding:
    """One block being encoded under a profile."""

    def __init__(self, groups: DeviceGroups, codec: ProfiledCodec, layout: BlockLayout) -> None:
        self._groups = groups
        self._codec = codec
        self._layout = layout
        self.steps = [[codec.step(layout, layer, which, None) for which in range(2)] for layer in range(layout.layers)]
        self._parts: list[tuple[SectionPart, Distribution]] = []
        for part in (part for parts in codec.parts(layout) for part in parts):
            distribution = codec.shared(part, codec.level, codec.coder)
            assert distribution is not None, "a profile"
            self._parts.append((part, distribution))
        self._planes = [_plane_starts(distribution, part.runs.symbols)[-1] for part, distribution in self._parts]
        self._streams = np.zeros(sum(part.runs.streams for part, _ in self._parts), dtype=INTEGERS)
        self._scales_bytes = 2 * 2 * layout.layers * -(-layout.tokens // codec.group_tokens)
        # What comes back: the status, sizes of streams and of escapes, scales, planes of low bits.
        sizes = (4, 8 * len(self._streams), self._scales_bytes, *self._planes)
        self._places = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))

    def run(self, kernels: Kernels, bits: BlockBits) -> list[Section]:
        """Return the sections. UnencodableBlock for values that are not finite."""
        halves, positions, ends = self._records()
        staging, streams = Staging(kernels), self._streams
        starts = np.arange(self._layout.tokens, dtype=np.int64) * int(halves["channels"][0])
        places = [staging.add(array) for array in (bits, starts, halves, positions, streams, ends)]
        base, count = staging.base, len(streams)
        with kernels.queue():
            known = torch.zeros(self._places[-1], dtype=torch.uint8, device=kernels.device)
            room = torch.empty(int(ends[-1]), dtype=torch.uint8, device=kernels.device)
        at, known_at = np.uint64(address(room)), np.uint64(address(known))
        halves["base"] += np.uint64(base + places[0])
        halves["token_starts"], halves["status"] = base + places[1], known_at
        halves["positions"] += np.uint64(base + places[3])
        halves["scales"] += known_at
        for numbers in (positions, streams["numbers"]):
            numbers["numbers"] += at
            numbers["planes"] += known_at
        streams["rans"]["stream"] += at
        streams["rans"]["escapes"] += at
        streams["rans"]["status"] = known_at
        ends += at
        sent = staging.send()
        groups = -(-self._layout.tokens // self._codec.group_tokens)
        args = (address(sent) + places[2], len(halves), groups)
        kernels.launch("groups_quantise", args, warp_blocks(len(halves) * groups), THREADS)
        sizes = known[self._places[1] : self._places[1] + 8 * count]
        kernels.launch(
            "integers_encode", (address(sent) + places[4], count, address(sizes)), warp_blocks(count), THREADS
        )
        packed = pack(kernels, address(sent) + places[5], sizes, len(room))
        with kernels.queue():
            stops = packed.ends.cpu().numpy()
            found = [tensor.cpu().numpy() for tensor in (known, packed.data[: int(stops[-1])])]
        kernels.finish()
        return self._joined(found[0], found[1], stops)

    def _records(self) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.uint64]]:
        """Return halves, positions, and where streams and escapes end in the room.

        Addresses are places in the block, in what comes back or in the room: numbers, then streams, then escapes.
        """
        layout, codec = self._layout, self._codec
        halves = np.zeros(2 * layout.layers, dtype=HALF)
        positions = np.zeros((len(halves), codec.group_tokens), dtype=RUNS)
        _fill_layout(halves, layout, codec.group_tokens)
        order = np.arange(len(halves), dtype=np.uint64)
        halves["base"], halves["head_stride"] = layout.layer_bytes // 2 * order, layout.head_dim
        halves["positions"] = positions.strides[0] * order
        halves["scales"] = self._places[2] + self._scales_bytes // len(halves) * order
        halves["half"] = [
            codec.half(layout, layer, which, codec.level) for layer in range(layout.layers) for which in (0, 1)
        ]
        halves["step"] = np.array(self.steps).reshape(-1)
        numbers = first = 0
        for number, (part, distribution) in enumerate(self._parts):
            on, runs = self._groups.on_device(distribution), part.runs
            of_part = positions[2 * part.layers.start : 2 * part.layers.stop, part.position]
            _fill_positions(of_part, part, layout, on, numbers, self._places[3 + number])
            streams = self._streams[first : first + runs.streams]
            streams["numbers"] = of_part[: runs.streams]
            _fill_streams(streams["rans"], runs, on, self._groups.runs(), on.rans.codes, CODES_BYTES)
            numbers, first = numbers + 2 * runs.distributions * runs.symbols, first + runs.streams
        sizes = 2 * self._streams["rans"]["count"].astype(np.uint64)
        ends = np.uint64(numbers) + np.cumsum(np.concatenate([sizes + np.uint64(STATES_BYTES), sizes]))
        self._streams["rans"]["stream_bytes"] = sizes + np.uint64(STATES_BYTES)
        self._streams["rans"]["stream"] = ends[: len(sizes)] - sizes - np.uint64(STATES_BYTES)
        self._streams["rans"]["escapes"] = ends[len(sizes) :] - sizes
        return halves, positions, ends

    def _joined(self, known: NDArray[np.uint8], data: NDArray[np.uint8], stops: NDArray[np.int64]) -> list[Section]:
        status = int(known[:4].view(np.uint32)[0])
        if status:
            raise UnencodableBlock("a value is not finite" if status == NOT_FINITE else "a symbol has no probability")
        layout, codec, count, first = self._layout, self._codec, len(self._streams), 0
        scales = known[self._places[2] :][: self._scales_bytes].reshape(layout.layers, -1)
        anchors: list[Section] = []
        deltas: list[Section] = []
        bounds = [0, *stops.tolist()]
        for place, size, (part, distribution) in zip(self._places[3:], self._planes, self._parts, strict=False):
            last = first + part.runs.streams
            streams, escapes = bounds[first : last + 1], bounds[count + first : count + last + 1]
            written = WrittenIntegers(
                Streams(data[streams[0] : streams[-1]].tobytes(), np.diff(streams).tolist()),
                (np.diff(escapes) // 2).tolist(),
                np.frombuffer(data[escapes[0] : escapes[-1]].tobytes(), dtype="<i2").astype(np.int16),
                known[place : place + size].tobytes(),
            )
            coded, first = join_integers(written, distribution, is_shared=True), last
            if part.position:
                deltas.append(Section(part.id, coded))
            else:
                layer = part.layers.start
                head = codec.pack_head(self.steps[layer], scales[layer].tobytes(), None)
                anchors.append(Section(part.id, head + coded))
        return anchors + deltas
