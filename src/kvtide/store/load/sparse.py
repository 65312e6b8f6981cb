"""A prefix of which only some chunks are loaded: the rough base of all tokens first, then chunks as they are asked for.

Invariant: what is handed out was verified and belongs to the block asked for. A chunk that is damaged, or of an object
that was repacked meanwhile, is left out: its tokens stay rough.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase, PackedCodec, chunk_bits, put_chunk
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.importance import chunks_of
from kvtide.store.load.access import BlockSink, LoadAccess, LoadReport, MissReason
from kvtide.tier.base import Tier
from kvtide.tier.breaker import until
from kvtide.types import ObjectId, Section, SectionId, SectionKind
from kvtide.wire import HEADER_BYTES, SectionEntry, StoredObject, header_and_table_bytes, parse_header

_log = logging.getLogger(__name__)


# Reading and decoding a base take about as long on a disk of 200 MB/s and two cores: neither is to wait for the other.
_DECODE_THREADS = 2
_READ_THREADS = 2
# Bases that are read before the first leading chunks, so that decoding never waits for one after these longer reads.
_BASES_AHEAD = 4
# Blocks that are read before the first of them is decoded.
_OPENING_MAX = 12


class ChunkBits(NamedTuple):
    """Exact tokens of a layer: positions in the prefix, and bits (2, tokens, kv_heads, head_dim)."""

    tokens: NDArray[np.int64]
    bits: BlockBits


class _Part(NamedTuple):
    """One block: its object's head, how its tokens are stored, and where each chunk lies."""

    meta: BlockMeta
    stored: StoredObject
    base: PackedBase
    position_of: dict[SectionId, int]
    ahead_chunks: int

    def ahead_positions(self) -> list[int]:
        """Return where the leading chunks of all layers are in the object's table."""
        wanted = range(1, 1 + self.ahead_chunks)
        return [position for position, entry in enumerate(self.stored.entries) if entry.id.refinement in wanted]


class _Base(NamedTuple):
    """A block whose base has been read."""

    part: _Part
    codec: PackedCodec
    sections: list[Section]


class SparseLoad:
    """The leading blocks of a prefix that are stored as `packed-1`. One caller; threads of its own until `close`.

    on_corrupt: told of objects that are not what was stored.
    """

    def __init__(self, tier: Tier, on_corrupt: Callable[[ObjectId, CorruptPayload], object] | None = None) -> None:
        self._tier = tier
        self._on_corrupt = on_corrupt or (lambda object_id, error: None)
        self._parts: list[_Part] = []
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        # What the table of one block took, for the next.
        self._head_bytes = HEADER_BYTES
        self.read_bytes = 0
        self.damaged_chunks = 0

    def open(
        self,
        metas: Sequence[BlockMeta],
        registry: CodecRegistry,
        sink: BlockSink | None = None,
        tokens_ahead: int = 0,
        quality_max: float = math.inf,
    ) -> int:
        """Load heads and bases of the leading blocks; return how many there are. `sink` has got their rough values.

        It ends before the first block that is absent, damaged, coarser than `quality_max` or of another codec; the
        sink, which is called in several threads, may have got some after that. Of each block that was repacked the
        leading chunks with at most `tokens_ahead` tokens, the most important ones so far, are exact already.
        """
        # They read chunks later on: those of one layer come before those of the next.
        readers = self._pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="kvtide-select")
        bases: list[Future[_Base | None]] = []
        opening: list[Future[_Part | None]] = []
        with ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="kvtide-decode") as pool:
            for count in range(1, 1 + len(metas) + _BASES_AHEAD):
                if count <= len(metas):
                    read = partial(self._read_base, metas[count - 1], registry, tokens_ahead, quality_max)
                    bases.append(readers.submit(read))
                if (position := count - 1 - _BASES_AHEAD) >= 0:
                    ahead = readers.submit(self._read_ahead, bases[position])
                    into = partial(sink or _nowhere, position)
                    opening.append(pool.submit(self._try_block, metas[position], bases[position], ahead, into))
                if count >= _OPENING_MAX and opening[count - _OPENING_MAX].result() is None:
                    break
            for future in opening:
                found = future.result()
                if found is None:
                    for base in bases:
                        base.cancel()
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
                self._parts.append(found)
        return len(self._parts)

    def read_from(self, tier: Tier) -> None:
        """Read chunks there from now on, and count again."""
        self._tier, self.read_bytes = tier, 0

    def close(self) -> None:
        """Drop what is still being loaded ahead. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def ahead_chunks(self) -> NDArray[np.int64]:
        """Return the chunks of every layer that were exact from the beginning."""
        starts = [
            block * self.chunks_per_block + np.arange(part.ahead_chunks) for block, part in enumerate(self._parts)
        ]
        return np.concatenate(starts).astype(np.int64)

    def _try_block(
        self, meta: BlockMeta, base: Future[_Base | None], ahead: Future[memoryview], sink: Callable[[BlockBits], None]
    ) -> _Part | None:
        try:
            found = base.result()
            return self._decode(found, ahead, sink) if found is not None else None
        except CorruptPayload as error:
            self._on_corrupt(meta.id, error)
        except TierUnavailable as error:
            _log.debug("a block is not loaded in part: %s", error)
        return None

    def _read_base(
        self, meta: BlockMeta, registry: CodecRegistry, tokens_ahead: int, quality_max: float
    ) -> _Base | None:
        head = bytes(self._read(meta, 0, self._head_bytes))
        if not head:
            return None
        if (wanted := header_and_table_bytes(head)) > len(head):
            head += self._read(meta, len(head), wanted)
        stored = parse_header(head, meta.id)
        self._head_bytes = len(stored.head)
        stored.check_place(meta)
        codec = registry.get(stored.codec_id, stored.profile)
        if not isinstance(codec, PackedCodec) or codec.profile is None or stored.quality > quality_max:
            return None
        positions = [i for i, entry in enumerate(stored.entries) if entry.id.refinement == 0]
        first, last = stored.entries[positions[0]], stored.entries[positions[-1]]
        data = self._read(meta, first.offset, _stop(last))
        sections = [stored.entries[position].cut(data, first.offset, meta.id) for position in positions]
        base = codec.layout_of(meta, sections)
        position_of = {entry.id: position for position, entry in enumerate(stored.entries)}
        ahead = tokens_ahead // base.chunk_tokens if base.repacks else 0
        part = _Part(meta, stored, base, position_of, min(ahead, len(chunks_of(meta.layout.tokens, base.chunk_tokens))))
        return _Base(part, codec, sections)

    def _read_ahead(self, base: Future[_Base | None]) -> memoryview:
        """Return the leading chunks of all layers, by one read: they lie one after the other."""
        found = base.result()
        if found is None or not (positions := found.part.ahead_positions()):
            return memoryview(b"")
        entries = found.part.stored.entries
        return self._read(found.part.meta, entries[positions[0]].offset, _stop(entries[positions[-1]]))

    def _decode(self, base: _Base, ahead: Future[memoryview], sink: Callable[[BlockBits], None]) -> _Part:
        part, codec, sections = base
        bits: BlockBits = np.empty(part.meta.layout.shape, part.meta.layout.bits_dtype)
        codec.decode_base(part.meta, sections, bits)
        positions, data = part.ahead_positions(), ahead.result()
        for position in positions:
            start, entry = part.stored.entries[positions[0]].offset, part.stored.entries[position]
            try:
                section = entry.cut(data, start, part.meta.id)
                put_chunk(part.meta, part.base, section, bits[entry.id.layer_start])
            except CorruptPayload as error:
                self._leave_rough(error)
        sink(bits)
        return part

    @property
    def metas(self) -> list[BlockMeta]:
        """Return the blocks that are open, in order."""
        return [part.meta for part in self._parts]

    @property
    def bases(self) -> list[PackedBase]:
        """Return how each open block is packed."""
        return [part.base for part in self._parts]

    @property
    def blocks(self) -> int:
        """Return the blocks that are open."""
        return len(self._parts)

    @property
    def tokens(self) -> int:
        """Return the tokens of the blocks that are open."""
        return sum(part.meta.layout.tokens for part in self._parts)

    @property
    def chunk_tokens(self) -> int:
        """Return the tokens of a chunk, those of the first block."""
        return self._parts[0].base.chunk_tokens

    @property
    def chunks_per_block(self) -> int:
        """Return the chunks of a block in a layer."""
        return -(-self._parts[0].meta.layout.tokens // self.chunk_tokens)

    @property
    def layout(self) -> BlockLayout:
        """Return the blocks' layout."""
        return self._parts[0].meta.layout

    @property
    def whole_bytes(self) -> int:
        """Return the raw bytes of all blocks."""
        return sum(part.meta.layout.raw_bytes for part in self._parts)

    def orders(self, layer: int) -> NDArray[np.uint16]:
        """Return how each block's tokens are stored in a layer: (blocks, tokens)."""
        return np.stack([part.base.orders[layer] for part in self._parts])

    def chunks_with(self, layer: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunks that hold some tokens of the prefix, numbered through all blocks."""
        block_tokens = self._parts[0].meta.layout.tokens
        places = np.argsort(self.orders(layer), axis=1, kind="stable").reshape(-1)[tokens]
        return np.unique(tokens // block_tokens * self.chunks_per_block + places // self.chunk_tokens)

    def start(self, layer: int, chunks: NDArray[np.int64]) -> Future[ChunkBits]:
        """Begin to `fetch` in the background. Between `open` and `close`."""
        assert self._pool is not None, "start outside open and close"
        return self._pool.submit(self.fetch, layer, chunks)

    def fetch(self, layer: int, chunks: NDArray[np.int64]) -> ChunkBits:
        """Load chunks of a layer. Tokens of chunks that could not be had are left out."""
        tokens, found = [], list[BlockBits]()
        for block in np.unique(chunks // self.chunks_per_block):
            part = self._parts[block]
            numbers = chunks[chunks // self.chunks_per_block == block] % self.chunks_per_block
            for number in numbers.tolist():
                if (had := self._fetch_chunk(part, layer, number)) is not None:
                    tokens.append(had.tokens)
                    found.append(had.bits)
        if not tokens:
            shape, dtype = self._parts[0].meta.layout.shape, self._parts[0].meta.layout.bits_dtype
            return ChunkBits(np.empty(0, dtype=np.int64), np.empty((2, 0, *shape[3:]), dtype=dtype))
        bits = np.concatenate(found, axis=1).view(self._parts[0].meta.layout.bits_dtype)
        return ChunkBits(np.concatenate(tokens), bits)

    def _fetch_chunk(self, part: _Part, layer: int, number: int) -> ChunkBits | None:
        position = part.position_of.get(SectionId(SectionKind.DELTA, 1 + number, layer, layer + 1))
        try:
            if position is None:
                raise CorruptPayload(f"{part.meta.id}: no chunk {number} of layer {layer}")
            entry = part.stored.entries[position]
            data = self._read(part.meta, entry.offset, _stop(entry))
            section = entry.cut(data, entry.offset, part.meta.id)
            tokens, bits = chunk_bits(part.meta, part.base, section)
        except (CorruptPayload, TierUnavailable) as error:
            self._leave_rough(error)
            if (
                isinstance(error, CorruptPayload)
                and self._read(part.meta, 0, len(part.stored.head)) == part.stored.head
            ):
                # It was not repacked meanwhile.
                self._on_corrupt(part.meta.id, error)
            return None
        return ChunkBits(tokens.astype(np.int64) + part.meta.start, bits)

    def _leave_rough(self, error: Exception) -> None:
        with self._lock:
            self.damaged_chunks += 1
        _log.debug("a chunk stays rough: %s", error)

    def _read(self, meta: BlockMeta, start: int, stop: int) -> memoryview:
        """Return what is there of a range of an object's bytes: nothing if the object is gone."""
        buffer = np.empty(stop - start, dtype=np.uint8).data
        size = self._tier.get_into(meta.id, buffer, start) or 0
        with self._lock:
            self.read_bytes += size
        return buffer[:size]


class Sparse:
    """The strategy that brings the rough base of blocks stored as `packed`; exact chunks follow through `opened`.

    sink: gets the rough values. The blocks stay pinned until `opened` is closed by `close`.
    """

    def __init__(self, sink: BlockSink, tokens_ahead: int = 0) -> None:
        """tokens_ahead: as in `SparseLoad.open`."""
        self._sink = sink
        self._tokens_ahead = tokens_ahead
        self._pins = ExitStack()
        self.opened: SparseLoad | None = None

    def load(self, access: LoadAccess, metas: Sequence[BlockMeta], deadline_s: float) -> LoadReport:
        """Open what is stored so of the leading blocks; nothing where any of them waits to be stored, whole."""
        if any(access.queued(meta.id) is not None for meta in metas):
            return LoadReport(0, 0, None)
        opened = SparseLoad(access.tiers, access.corrupt)
        with until(access.clock.monotonic_s() + deadline_s):
            blocks = opened.open(metas, access.registry, self._sink, self._tokens_ahead, access.quality_max)
        if not blocks:
            opened.close()
            return LoadReport(0, 0, None)
        self.opened = opened
        self._pins.enter_context(access.pinned(metas[:blocks]))
        access.decide(metas, blocks, MissReason.ABSENT)
        return LoadReport(blocks, opened.read_bytes, None)

    def close(self) -> None:
        """Drop what is still being loaded, and unpin. Idempotent."""
        if self.opened is not None:
            self.opened.close()
        self._pins.close()


def _stop(entry: SectionEntry) -> int:
    return entry.offset + entry.size


def _nowhere(position: int, bits: BlockBits) -> None:
    """Forget rough values: chunks alone are wanted."""
