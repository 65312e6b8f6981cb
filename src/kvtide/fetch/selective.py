"""A prefix of which only some chunks are loaded: the rough base of all tokens first, then chunks as they are asked for.

Invariant: what is handed out was verified and belongs to the block asked for. A chunk that is damaged, or of an object
that was packed anew meanwhile, is left out: its tokens stay rough.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.cache import BlockSink
from kvtide.codec import CodecRegistry, PackedBase, PackedCodec
from kvtide.codec.packed import put_chunk
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.importance.reorder import chunks_of
from kvtide.tier.base import Tier
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import HEADER_BYTES, StoredObject, header_and_table_bytes, parse_header

__all__ = ["ChunkBits", "SelectiveLoad"]

_log = logging.getLogger(__name__)


# One reads while the other decodes.
OPEN_THREADS = 2


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


class SelectiveLoad:
    """The leading blocks of a prefix that are stored as `packed-1`. One caller; threads of its own until `close`."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._parts: list[_Part] = []
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[ChunkBits]] = {}
        self._ahead_chunks = 0
        # What the table of one block took, for the next.
        self._head_bytes = HEADER_BYTES
        self.read_bytes = 0
        self.damaged_chunks = 0

    def open(
        self, metas: Sequence[BlockMeta], registry: CodecRegistry, sink: BlockSink | None = None, tokens_ahead: int = 0
    ) -> int:
        """Load heads and bases of the leading blocks; return how many there are. `sink` has got their rough values.

        It ends before the first block that is absent, damaged or of another codec; the sink, which is called in several
        threads, may have got some behind that. Of each block that was packed anew
        the leading chunks with at most `tokens_ahead` tokens, the most important ones so far, are loaded meanwhile.
        """
        self._pool = ThreadPoolExecutor(OPEN_THREADS, thread_name_prefix="kvtide-select")
        opening = [
            self._pool.submit(self._try_block, position, meta, registry, sink) for position, meta in enumerate(metas)
        ]
        for future in opening:
            found = future.result()
            if found is None:
                break
            self._parts.append(found)
        if self._parts:
            self._ahead_chunks = tokens_ahead // self.chunk_tokens
            for layer in range(self._parts[0].meta.layout.layers) if len(self.ahead_chunks()) else ():
                self._ahead[layer] = self._pool.submit(self._fetch, layer, self.ahead_chunks())
        return len(self._parts)

    def read_from(self, tier: Tier) -> None:
        """Read chunks there from now on, and count anew."""
        self._tier, self.read_bytes = tier, 0

    def close(self) -> None:
        """Drop what is still being loaded ahead. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def ahead_chunks(self) -> NDArray[np.int64]:
        """Return the chunks of every layer that are loaded ahead."""
        packed = [block for block, part in enumerate(self._parts) if part.base.repacks]
        starts = np.array(packed, dtype=np.int64)[:, None] * self.chunks_per_block
        return (starts + np.arange(min(self._ahead_chunks, self.chunks_per_block))).reshape(-1)

    def _try_block(
        self, position: int, meta: BlockMeta, registry: CodecRegistry, sink: BlockSink | None
    ) -> _Part | None:
        try:
            found = self._open_block(meta, registry)
            if found is None:
                return None
            part, bits = found
            if sink is not None:
                sink(position, bits)
            return part
        except (CorruptPayload, TierUnavailable) as error:
            _log.debug("block %s is not loaded in part: %s", meta.id, error)
            return None

    def _open_block(self, meta: BlockMeta, registry: CodecRegistry) -> tuple[_Part, BlockBits] | None:
        head = self._read(meta, 0, self._head_bytes)
        if head is None:
            return None
        if (wanted := header_and_table_bytes(head)) > len(head):
            head += self._read(meta, len(head), wanted) or b""
        stored = parse_header(head, meta.id)
        self._head_bytes = len(stored.head)
        if (stored.meta.layout, stored.meta.start, stored.meta.parent) != (meta.layout, meta.start, meta.parent):
            raise CorruptPayload(f"{meta.id}: expected {meta.layout} at {meta.start}, got {stored.meta}")
        codec = registry.get(stored.codec_id, stored.profile)
        if not isinstance(codec, PackedCodec) or codec.profile is None:
            return None
        positions = [i for i, entry in enumerate(stored.entries) if entry.id.refinement == 0]
        first, last = stored.entries[positions[0]], stored.entries[positions[-1]]
        data = self._read(meta, first.offset, last.offset + last.size)
        sections = [_cut(stored, position, first.offset, data or b"") for position in positions]
        bits: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        base = codec.decode_base(meta, sections, bits)
        position_of = {entry.id: position for position, entry in enumerate(stored.entries)}
        return _Part(meta, stored, base, position_of), bits

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
        return len(chunks_of(self._parts[0].meta.layout.tokens, self.chunk_tokens))

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

    def fetch(self, layer: int, chunks: NDArray[np.int64]) -> ChunkBits:
        """Load chunks of a layer, once, and hand out those that were loaded ahead with them.

        Tokens of chunks that could not be had are left out.
        """
        ahead = self._ahead.pop(layer, None)
        if ahead is None:
            return self._fetch(layer, chunks)
        rest = self._fetch(layer, np.setdiff1d(chunks, self.ahead_chunks()))
        first = ahead.result()
        bits = np.concatenate([first.bits, rest.bits], axis=1).view(first.bits.dtype)
        return ChunkBits(np.concatenate([first.tokens, rest.tokens]), bits)

    def _fetch(self, layer: int, chunks: NDArray[np.int64]) -> ChunkBits:
        tokens, found = [], list[BlockBits]()
        for block in np.unique(chunks // self.chunks_per_block):
            part = self._parts[block]
            numbers = chunks[chunks // self.chunks_per_block == block] % self.chunks_per_block
            whole: BlockBits = np.empty(part.meta.layout.shape[1:], part.meta.layout.bits_dtype)
            for number in numbers.tolist():
                here = part.base.chunk(layer, number).astype(np.int64)
                if self._fetch_chunk(part, layer, number, whole):
                    tokens.append(here + part.meta.start)
                    found.append(whole[:, here])
        if not tokens:
            shape, dtype = self._parts[0].meta.layout.shape, self._parts[0].meta.layout.bits_dtype
            return ChunkBits(np.empty(0, dtype=np.int64), np.empty((2, 0, *shape[3:]), dtype=dtype))
        bits = np.concatenate(found, axis=1).view(self._parts[0].meta.layout.bits_dtype)
        return ChunkBits(np.concatenate(tokens), bits)

    def _fetch_chunk(self, part: _Part, layer: int, number: int, layer_out: BlockBits) -> bool:
        position = part.position_of.get(SectionId(SectionKind.DELTA, 1 + number, layer, layer + 1))
        try:
            if position is None:
                raise CorruptPayload(f"{part.meta.id}: no chunk {number} of layer {layer}")
            entry = part.stored.entries[position]
            data = self._read(part.meta, entry.offset, entry.offset + entry.size)
            put_chunk(part.meta, part.base, _cut(part.stored, position, entry.offset, data or b""), layer_out)
        except (CorruptPayload, TierUnavailable) as error:
            with self._lock:
                self.damaged_chunks += 1
            _log.debug("a chunk stays rough: %s", error)
            return False
        return True

    def _read(self, meta: BlockMeta, start: int, stop: int) -> bytes | None:
        buffer = bytearray(stop - start)
        size = self._tier.get_into(meta.id, memoryview(buffer), start)
        if not size:
            return None
        with self._lock:
            self.read_bytes += size
        return bytes(buffer[:size])


def _cut(stored: StoredObject, position: int, start: int, data: bytes) -> Section:
    """Return a section out of bytes that begin at `start` of its object, verified."""
    entry = stored.entries[position]
    return entry.section(memoryview(data)[entry.offset - start :][: entry.size], stored.meta.id)
