"""A prefix of which only some chunks are loaded: the rough base of all tokens first, then chunks as they are asked for.

Invariant: what is handed out was verified and belongs to the block asked for. A chunk that is damaged, or of an object
that was repacked meanwhile, is left out: its tokens stay rough.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase, PackedCodec, chunk_bits, put_chunk
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.plan.base import cut
from kvtide.store.load.access import BlockSink, LoadAccess, LoadReport, MissReason, ahead
from kvtide.tier.base import RangeRead, Tier
from kvtide.tier.breaker import until
from kvtide.tier.buffers import recycled_buffer
from kvtide.tier.source import read_ranges
from kvtide.types import ObjectId, Section, SectionId, SectionKind
from kvtide.wire import HEADER_BYTES, SectionEntry, StoredObject, header_and_table_bytes, parse_header

# Two sections are one read if no more lies between them than a disk reads in the time of a seek; what lies there is
# used too. On a link another range costs its head alone: all of a block are one request, however far it is.
GAP_BYTES = 16 << 10


def stop_of(entry: SectionEntry) -> int:
    """Return where a section ends in its object."""
    return entry.offset + entry.size


class PackedPart(NamedTuple):
    """One block: its object's head, how its tokens are stored, and where each chunk lies."""

    meta: BlockMeta
    stored: StoredObject
    base: PackedBase
    position_of: dict[SectionId, int]
    ahead_chunks: int

    def runs(self, chunks: Sequence[tuple[int, int]]) -> list[Sequence[SectionEntry]]:
        """Return the sections to read for chunks (layer, number), by read. CorruptPayload if the object has not all."""
        names = [SectionId(SectionKind.DELTA, 1 + number, layer, layer + 1) for layer, number in chunks]
        entries, runs = self.stored.entries, list[tuple[int, int]]()
        if not all(name in self.position_of for name in names):
            raise CorruptPayload(f"{self.meta.id}: some of the chunks {chunks} are not in the object")
        for position in sorted(self.position_of[name] for name in names):
            if runs and entries[position].offset - stop_of(entries[runs[-1][1]]) <= GAP_BYTES:
                runs[-1] = (runs[-1][0], position)
            else:
                runs.append((position, position))
        return [entries[first : last + 1] for first, last in runs]


class PackedFront(NamedTuple):
    """A block's object up to the end of its leading chunks, as it was read."""

    part: PackedPart
    codec: PackedCodec
    base: list[Section]
    leading: list[SectionEntry]
    data: memoryview


_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")

_READ_THREADS = 2


class ChunkBits(NamedTuple):
    """Exact tokens of a layer: positions in the prefix, and bits (2, tokens, kv_heads, head_dim)."""

    tokens: NDArray[np.int64]
    bits: BlockBits


class SparseLoad:
    """The leading blocks of a prefix that are stored as `packed-1`. One caller; threads of its own until `close`.

    on_corrupt: told of objects that are not what was stored.
    """

    def __init__(
        self, tier: Tier, on_corrupt: Callable[[ObjectId, CorruptPayload], object] = lambda object_id, error: None
    ) -> None:
        self.tier, self._on_corrupt = tier, on_corrupt
        self._parts: list[PackedPart] = []
        # The blocks that are open, in order, and how each is packed.
        self.metas: list[BlockMeta] = []
        self.bases: list[PackedBase] = []
        self.layout: BlockLayout
        self.blocks = self.tokens = 0
        # Of the first block: the tokens of a chunk, and a layer's chunks.
        self.chunk_tokens = self.chunks_per_block = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        # Up to where a block was read: the next one's table and base are of nearly the same size.
        self._front_bytes = HEADER_BYTES
        self.read_bytes = self.reads = 0

    def open(
        self,
        metas: Sequence[BlockMeta],
        registry: CodecRegistry,
        sink: BlockSink = lambda position, bits: None,
        tokens_ahead: int = 0,
        deadline_s: float = math.inf,
        quality_max: float = math.inf,
    ) -> int:
        """Load the fronts of the leading blocks; return how many there are. `sink` has got their rough values.

        It ends before the first block that is absent, damaged, not as wanted or of another codec; the
        sink, which is called in several threads, may have got some after that. Of each block that was stored in an
        order the leading chunks with at most `tokens_ahead` tokens, the most important ones so far, are exact already:
        head, base and these chunks lie one after the other, and come by one read a block once the first has told how
        much that is.
        """

        def read(meta: BlockMeta) -> PackedFront | None:
            # The deadline of whoever waits is a thread's own.
            with until(deadline_s):
                return self._tried(meta.id, partial(self._front, meta, registry, tokens_ahead, quality_max))

        def decode(position: int, front: PackedFront | None) -> PackedPart | None:
            into = partial(sink, position)
            return None if front is None else self._tried(front.part.meta.id, partial(self._decode, front, into))

        # For chunks: those of one layer come before those of the next.
        self._pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="kvtide-select")
        # On a disk of 200 MB/s and two cores reading a base takes as long as decoding it: neither waits for the other.
        parts = ahead(lambda item: decode(*item), enumerate(ahead(read, metas)))
        self._parts = [*filter(None, takewhile(bool, parts))]
        self.metas, self.bases = [part.meta for part in self._parts], [part.base for part in self._parts]
        if self._parts:
            self.layout, self.chunk_tokens = self.metas[0].layout, self.bases[0].chunk_tokens
            self.chunks_per_block = -(-self.layout.tokens // self.chunk_tokens)
            self.blocks, self.tokens = len(self._parts), len(self._parts) * self.layout.tokens
        return self.blocks

    def _tried(self, object_id: ObjectId, action: Callable[[], _Found | None], tries: int = 2) -> _Found | None:
        """Run an action on a block; None if that can't be loaded in part."""
        try:
            return action()
        except CorruptPayload as error:
            # What was packed again between two reads is whole at the next try.
            if tries > 1:
                return self._tried(object_id, action, tries - 1)
            self._on_corrupt(object_id, error)
        except TierUnavailable as error:
            _log.debug("a block is not loaded in part: %s", error)
        return None

    def close(self) -> None:
        """Drop what is still being loaded ahead. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def ahead_chunks(self) -> NDArray[np.int64]:
        """Return the chunks of every layer that were exact from the beginning."""
        starts = [at * self.chunks_per_block + np.arange(part.ahead_chunks) for at, part in enumerate(self._parts)]
        return np.concatenate(starts).astype(np.int64)

    def _front(
        self, meta: BlockMeta, registry: CodecRegistry, tokens_ahead: int, quality_max: float
    ) -> PackedFront | None:
        data = self._read(meta, 0, self._front_bytes)
        head_stop = header_and_table_bytes(data)
        data = self._read_on(meta, data, head_stop)
        # A copy: who keeps it does not keep the chunks.
        stored = parse_header(bytes(data[:head_stop]), meta.id)
        stored.check_place(meta)
        codec = registry.get(stored.codec_id, stored.profile)
        if not isinstance(codec, PackedCodec) or not codec.has_base or stored.quality > quality_max:
            return None
        bases = [entry for entry in stored.entries if entry.id.refinement == 0]
        data = self._read_on(meta, data, stop_of(bases[-1]))
        sections = [entry.cut(data, 0, meta.id) for entry in bases]
        base = codec.layout_of(meta, sections)
        position_of = {entry.id: position for position, entry in enumerate(stored.entries)}
        leading_max = len(cut(meta.layout.tokens, base.chunk_tokens)) if base.is_ordered else 0
        leading_chunks = min(tokens_ahead // base.chunk_tokens, leading_max)
        leading = [entry for entry in stored.entries if 0 < entry.id.refinement <= leading_chunks]
        stop = stop_of((leading or bases)[-1])
        data = self._read_on(meta, data, stop)
        # Half of the fronts are longer, and take a second read of what they lack.
        self._front_bytes = stop
        return PackedFront(PackedPart(meta, stored, base, position_of, leading_chunks), codec, sections, leading, data)

    def _read_on(self, meta: BlockMeta, data: memoryview, stop: int) -> memoryview:
        """Return an object's first bytes up to `stop`, of which some were read."""
        if stop <= len(data):
            return data
        rest = self._read(meta, len(data), stop)
        return np.concatenate([np.frombuffer(data, np.uint8), np.frombuffer(rest, np.uint8)]).data

    def _decode(self, front: PackedFront, sink: Callable[[BlockBits], None]) -> PackedPart:
        part = front.part
        # New memory, which the system clears, would cost as much as decoding.
        layout = part.meta.layout
        bits: BlockBits = np.ndarray(layout.shape, layout.bits_dtype, recycled_buffer(layout.raw_bytes))
        front.codec.decode(part.meta, front.base, bits)
        for entry in front.leading:
            try:
                section = entry.cut(front.data, 0, part.meta.id)
                put_chunk(part.meta, part.base, section, bits[entry.id.layer_start])
            except CorruptPayload as error:
                _log.debug("chunks stay rough: %s", error)
        sink(bits)
        return part

    def orders(self, layer: int) -> NDArray[np.uint16]:
        """Return how each block's tokens are stored in a layer: (blocks, tokens)."""
        return np.stack([part.base.orders[layer] for part in self._parts])

    def chunks_with(self, layer: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunks that hold some tokens of the prefix, numbered through all blocks."""
        places = np.argsort(self.orders(layer), axis=1, kind="stable").reshape(-1)[tokens]
        return np.unique(tokens // self.layout.tokens * self.chunks_per_block + places // self.chunk_tokens)

    def start(self, wanted: Mapping[int, NDArray[np.int64]]) -> list[Future[dict[int, ChunkBits]]]:
        """Begin to load chunks of some layers in the background, a result for each block: what could be had, by layer.

        What lies together in an object, a chunk of neighbouring layers, is one read. Between `open` and `close`.
        """
        assert self._pool is not None, "start outside open and close"
        by_block = defaultdict[int, list[tuple[int, int]]](list)
        for layer, chunks in wanted.items():
            for chunk in np.sort(chunks).tolist():
                block, number = divmod(chunk, self.chunks_per_block)
                by_block[block].append((layer, number))
        return [self._pool.submit(self._fetch, block, each) for block, each in by_block.items()]

    def joined(self, found: Sequence[ChunkBits]) -> ChunkBits:
        """Return chunks of one layer as one."""
        none = np.empty((2, 0, *self.layout.shape[3:]), dtype=self.layout.bits_dtype)
        bits: BlockBits = np.concatenate([none, *(each.bits for each in found)], axis=1)
        return ChunkBits(np.concatenate([np.empty(0, np.int64), *(each.tokens for each in found)]), bits)

    def _fetch(self, block: int, wanted: Sequence[tuple[int, int]]) -> dict[int, ChunkBits]:
        """Load chunks (layer, number) of one block; return what could be had, by layer."""
        part, by_layer = self._parts[block], defaultdict[int, list[ChunkBits]](list)
        try:
            runs = part.runs(wanted)
            parts = self._read_ranges(part.meta, [(run[0].offset, stop_of(run[-1])) for run in runs])
        except CorruptPayload as error:
            self._damaged(part, error)
            return {}
        except TierUnavailable as error:
            _log.debug("chunks stay rough: %s", error)
            return {}
        for run, data in zip(runs, parts, strict=True):
            for entry in run:
                try:
                    section = entry.cut(data, run[0].offset, part.meta.id)
                    tokens, bits = chunk_bits(part.meta, part.base, section)
                    had = ChunkBits(tokens.astype(np.int64) + part.meta.start, bits)
                    by_layer[entry.id.layer_start].append(had)
                except CorruptPayload as error:
                    self._damaged(part, error)
        return {layer: self.joined(found) for layer, found in by_layer.items()}

    def _damaged(self, part: PackedPart, error: CorruptPayload) -> None:
        _log.debug("chunks stay rough: %s", error)
        try:
            # Unless it was packed again meanwhile.
            if self._read(part.meta, 0, len(part.stored.head)) == part.stored.head:
                self._on_corrupt(part.meta.id, error)
        except TierUnavailable as unknown:
            _log.debug("what is stored now can't be read: %s", unknown)

    def _read(self, meta: BlockMeta, start: int, stop: int) -> memoryview:
        return self._read_ranges(meta, [(start, stop)])[0]

    def _read_ranges(self, meta: BlockMeta, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return what is there of ranges of an object's bytes. TierUnavailable if it is gone, or a tier has a fault."""
        reads = [RangeRead(start, np.empty(stop - start, dtype=np.uint8).data) for start, stop in ranges]
        if (sizes := read_ranges(self.tier, meta.id, reads)) is None:
            raise TierUnavailable(f"{meta.id} is gone, or can't be read now")
        with self._lock:
            self.read_bytes += sum(sizes)
            self.reads += len(reads)
        return [buffer[:size] for (_, buffer), size in zip(reads, sizes, strict=True)]


class Sparse:
    """The strategy that brings the rough base of blocks stored as `packed`; exact chunks follow through `opened`.

    sink: gets the rough values. The blocks stay pinned until `opened` is closed by `close`.
    """

    def __init__(self, sink: BlockSink, tokens_ahead: int = 0) -> None:
        """tokens_ahead: as in `SparseLoad.open`."""
        self._sink, self._tokens_ahead = sink, tokens_ahead
        self._pins = ExitStack()
        self.opened: SparseLoad | None = None

    def load(self, access: LoadAccess, metas: Sequence[BlockMeta], deadline_s: float) -> LoadReport:
        """Open what is stored so of the leading blocks; nothing where any of them waits to be stored, whole."""
        if any(access.queued(meta.id) is not None for meta in metas):
            return LoadReport(0, 0, None)
        opened, until_s = SparseLoad(access.tiers, access.corrupt), access.clock.monotonic_s() + deadline_s
        with ExitStack() as unless_loaded:
            unless_loaded.callback(opened.close)
            blocks = opened.open(metas, access.registry, self._sink, self._tokens_ahead, until_s, access.quality_max)
            if not blocks:
                return LoadReport(0, 0, None)
            unless_loaded.pop_all()
        self.opened = opened
        self._pins.enter_context(access.pinned(metas[:blocks]))
        access.decide(metas, blocks, MissReason.ABSENT)
        return LoadReport(blocks, opened.read_bytes, None)

    def close(self) -> None:
        """Drop what is still being loaded, and unpin. Idempotent."""
        if self.opened is not None:
            self.opened.close()
        self._pins.close()
