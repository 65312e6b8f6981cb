"""A prefix of which only some chunks are loaded: the rough base of all tokens first, then chunks as they are asked for.

Invariant: what is handed out was verified and belongs to the block asked for. A chunk that is damaged, or of an object
that was packed anew meanwhile, is left out: its tokens stay rough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import CodecRegistry, PackedBase, PackedCodec
from kvtide.codec.packed import put_chunk
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.importance.reorder import chunks_of
from kvtide.tier.base import Tier
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import HEADER_BYTES, StoredObject, header_and_table_bytes, parse_header

__all__ = ["ChunkBits", "SelectiveLoad"]

_log = logging.getLogger(__name__)


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
    """The leading blocks of a prefix that are stored as `packed-1`. Not thread-safe."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._parts: list[_Part] = []
        self.rough: list[BlockBits] = []
        self.read_bytes = 0
        self.damaged_chunks = 0

    def open(self, metas: Sequence[BlockMeta], registry: CodecRegistry) -> int:
        """Load heads and bases of the leading blocks; return how many there are. `rough` then has their values.

        It ends before the first block that is absent, damaged or of another codec.
        """
        for meta in metas:
            try:
                found = self._open_block(meta, registry)
            except (CorruptPayload, TierUnavailable) as error:
                _log.debug("block %s is not loaded in part: %s", meta.id, error)
                found = False
            if not found:
                break
        return len(self._parts)

    def _open_block(self, meta: BlockMeta, registry: CodecRegistry) -> bool:
        # The table of blocks of one layout has one size: guessed from the block before.
        guess = len(self._parts[0].stored.head) if self._parts else HEADER_BYTES
        head = self._read(meta, 0, guess)
        if head is None:
            return False
        if (wanted := header_and_table_bytes(head)) > len(head):
            head += self._read(meta, len(head), wanted) or b""
        stored = parse_header(head, meta.id)
        if (stored.meta.layout, stored.meta.start, stored.meta.parent) != (meta.layout, meta.start, meta.parent):
            raise CorruptPayload(f"{meta.id}: expected {meta.layout} at {meta.start}, got {stored.meta}")
        codec = registry.get(stored.codec_id, stored.profile)
        if not isinstance(codec, PackedCodec) or codec.profile is None:
            return False
        positions = [i for i, entry in enumerate(stored.entries) if entry.id.refinement == 0]
        first, last = stored.entries[positions[0]], stored.entries[positions[-1]]
        data = self._read(meta, first.offset, last.offset + last.size)
        sections = [_cut(stored, position, first.offset, data or b"") for position in positions]
        bits: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        base = codec.decode_base(meta, sections, bits)
        position_of = {entry.id: position for position, entry in enumerate(stored.entries)}
        self._parts.append(_Part(meta, stored, base, position_of))
        self.rough.append(bits)
        return True

    @property
    def blocks(self) -> int:
        """Return the blocks that are open."""
        return len(self._parts)

    @property
    def chunk_tokens(self) -> int:
        """Return the tokens of a chunk, those of the first block."""
        return self._parts[0].base.chunk_tokens

    @property
    def chunks_per_block(self) -> int:
        """Return the chunks of a block in a layer."""
        return len(chunks_of(self._parts[0].meta.layout.tokens, self.chunk_tokens))

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
        """Load chunks of a layer. Tokens of chunks that could not be had are left out."""
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
            self.damaged_chunks += 1
            _log.debug("a chunk stays rough: %s", error)
            return False
        return True

    def _read(self, meta: BlockMeta, start: int, stop: int) -> bytes | None:
        buffer = bytearray(stop - start)
        size = self._tier.get_into(meta.id, memoryview(buffer), start)
        if not size:
            return None
        self.read_bytes += size
        return bytes(buffer[:size])


def _cut(stored: StoredObject, position: int, start: int, data: bytes) -> Section:
    """Return a section out of bytes that begin at `start` of its object, verified."""
    entry = stored.entries[position]
    return entry.section(memoryview(data)[entry.offset - start :][: entry.size], stored.meta.id)
