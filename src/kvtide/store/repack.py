"""Learning from uses, and repacking blocks by what was learnt: background work beside the engine.

Invariant: an object is replaced only by one that was read back, parsed and decoded to the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase, PackedCodec
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.evict import Recent
from kvtide.importance import RECORD_BYTES_MAX, Floats, UseRecord, packing_orders, record_id, shares_touched
from kvtide.store.notes import USES_CODEC, read_note, write_note
from kvtide.tier.base import Tier
from kvtide.tier.buffers import aligned_buffer
from kvtide.types import ObjectId
from kvtide.wire import object_bytes_max, pack_object, parse_object

_log = logging.getLogger(__name__)

# Blocks whose uses are remembered here; the rest is in their records.
_REMEMBERED_MAX = 4096
# A block is written again at most so often in its life, and only if its important tokens then touch so much less of it:
# what is written for a block is bounded by 1 + REPACKS_MAX times its bytes.
REPACKS_MAX = 3
_GAIN_MIN = 0.2
# Uses before the first packing; before another, twice as many as before the last.
_USES_MIN = 2
# Tokens that count as important: what an engine with the default ratio loads.
_IMPORTANT_RATIO = 0.25


class UseStore:
    """Uses of blocks as this process saw them, joined with what others stored. Not thread-safe."""

    def __init__(self, tier: Tier, writer: bytes, clock: Clock) -> None:
        """writer: 8 bytes that no other process has."""
        self._tier = tier
        self._writer = writer
        self._clock = clock
        self._records: Recent[ObjectId, UseRecord] = Recent(_REMEMBERED_MAX)

    def note(self, meta: BlockMeta, importance: Floats) -> None:
        """Note one use. importance: (layers, tokens) of the block."""
        record = self._records.get(meta.id) or self._stored(meta)
        self._records[meta.id] = record.noted(self._writer, importance, self._clock.wall_s())

    def known(self, meta: BlockMeta) -> UseRecord:
        """Return what this process and the stored record know."""
        stored, mine = self._stored(meta), self._records.get(meta.id)
        return stored.merged(mine) if mine else stored

    def scores(self, meta: BlockMeta) -> Floats | None:
        """Return average importance (layers, tokens) now, None for a block that was never used."""
        return self.known(meta).scores(self._clock.wall_s())

    def blended(self, meta: BlockMeta, importance: Floats) -> Floats:
        """Return a use's importance together with what is remembered of past ones. Any thread may call it."""
        record = self._records.get(meta.id)
        if record is None:
            return importance
        now_s = self._clock.wall_s()
        scores = record.noted(self._writer, importance, now_s).scores(now_s)
        return importance if scores is None else scores

    def important_tokens(self, object_id: ObjectId) -> float:
        """Return a block's important tokens for `ScoreRanking`: those above the even share, 1 if nothing is known."""
        record = self._records.get(object_id)
        scores = record.scores(self._clock.wall_s()) if record else None
        return float(max(1.0, (scores > 1).sum(axis=1).mean())) if scores is not None else 1.0

    def save(self, meta: BlockMeta) -> bool:
        """Merge what is known into the stored record. False if the tier did not take it; it is then tried next time."""
        record = self._records[meta.id] = self.known(meta)
        return write_note(self._tier, record_id(meta.id), USES_CODEC, record.to_bytes())

    def _stored(self, meta: BlockMeta) -> UseRecord:
        layers, tokens = meta.layout.layers, meta.layout.tokens
        empty = UseRecord(meta.id.key, layers, tokens)
        name = record_id(meta.id)
        try:
            data = read_note(self._tier, name, USES_CODEC, min(RECORD_BYTES_MAX, empty.bytes_max))
            return UseRecord.parse(data, meta.id.key, layers, tokens) if data is not None else empty
        except CorruptPayload as error:
            _log.debug("the uses of %s are forgotten: %s", meta.id, error)
            self._tier.delete(name, "corrupt")
        except TierUnavailable as error:
            _log.debug("the uses of %s are not known: %s", meta.id, error)
        return empty


class Repacked(NamedTuple):
    """Counts of some blocks: looked at, replaced, bytes read and written, damaged or changed meanwhile."""

    blocks: int
    replaced: int
    moved_bytes: int
    failed: int


class Repacker:
    """Repacks blocks by their uses. Call it in the background; any number of processes may."""

    def __init__(self, tier: Tier, registry: CodecRegistry, uses: UseStore) -> None:
        self._tier = tier
        self._registry = registry
        self._uses = uses

    def run(self, metas: Sequence[BlockMeta], bases: Sequence[PackedBase], bytes_max: float = math.inf) -> Repacked:
        """Replace the blocks that gain, while their raw bytes, read and written, are at most `bytes_max`.

        bases: how each is packed now; others than these are not read.
        """
        replaced = moved = failed = 0
        for meta, base in zip(metas, bases, strict=True):
            if moved + 2 * meta.layout.raw_bytes > bytes_max:
                break
            if not self._gains(meta, base):
                continue
            try:
                size = self._repack(meta)
            except (CorruptPayload, TierUnavailable) as error:
                _log.debug("%s stays as it is: %s", meta.id, error)
                failed, size = failed + 1, 0
            replaced, moved = replaced + bool(size), moved + (2 * size or meta.layout.raw_bytes)
        return Repacked(len(metas), replaced, moved, failed)

    def _gains(self, meta: BlockMeta, base: PackedBase) -> bool:
        record, scores = self._uses.known(meta), self._uses.scores(meta)
        if scores is None or base.repacks >= REPACKS_MAX or record.uses() < _USES_MIN << base.repacks:
            return False
        now, packed = shares_touched(scores, base.orders, _IMPORTANT_RATIO, base.chunk_tokens)
        return now - packed >= _GAIN_MIN * now

    def _repack(self, meta: BlockMeta) -> int:
        """Return the bytes written: 0 for a block that has changed or can't be replaced."""
        scores = self._uses.scores(meta)
        if scores is None or not self._tier.can_replace:
            return 0
        buffer = aligned_buffer(object_bytes_max(meta.layout) + 1)
        size = self._tier.get_into(meta.id, buffer)
        stored = parse_object(buffer[:size], meta.id) if size else None
        codec = self._registry.get(stored.codec_id, stored.profile) if stored else None
        if stored is None or not isinstance(codec, PackedCodec) or not codec.has_base or stored.meta != meta:
            return 0
        sections = stored.sections()
        if not self._gains(meta, codec.layout_of(meta, sections)):
            return 0
        bits: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        codec.decode(meta, sections, bits)
        repacked = codec.repack(meta, sections, packing_orders(scores))
        packed = pack_object(meta, codec.codec_id, repacked, stored.profile, stored.quality)
        again: BlockBits = np.empty_like(bits)
        codec.decode(meta, parse_object(packed, meta.id).sections(), again)
        if not np.array_equal(bits, again):
            raise CorruptPayload(f"{meta.id}: packed anew it is not the same block")
        return len(packed) if self._tier.replace(meta.id, packed) else 0
