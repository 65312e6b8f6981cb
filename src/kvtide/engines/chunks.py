"""Chunks of an engine's bytes, in any order, under its own names: for hosts that hand over bytes, not tokens."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from kvtide.block import HEAD_DIM_MAX, BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry
from kvtide.engines.gate import WriteGate
from kvtide.engines.settings import ConnectorSettings
from kvtide.errors import UnsupportedModel
from kvtide.group import Parts
from kvtide.keys import namespace_digest
from kvtide.store import BlockSource, Cache, PendingBlock, cache_for
from kvtide.store.load import MissReason, Whole
from kvtide.types import BlockKey, Namespace, ObjectId

# Bytes are stored in units of two: most caches are of half precision, and any even number of bytes is whole units.
_UNIT = KVDtype.BFLOAT16


def chunk_layout(chunk_bytes: int, layers: int, tokens: int, dtype: KVDtype = _UNIT) -> BlockLayout:
    """Return a block layout of exactly so many bytes. UnsupportedModel if the size can't be split so."""
    elements, rest = divmod(chunk_bytes, 2 * layers * tokens * dtype.item_bytes)
    heads = next((n for n in range(1, elements + 1) if elements % n == 0 and elements // n <= HEAD_DIM_MAX), 0)
    if rest or not heads:
        raise UnsupportedModel(f"a chunk of {chunk_bytes} bytes is not {layers} layers of {tokens} tokens")
    return BlockLayout(layers, tokens, heads, elements // heads, dtype)


class ChunkStore:
    """Chunks of one size by name; faults are misses. `fingerprint` and `text` differ where a name may mean other bytes.

    ValueError for a lossy codec, and for options of engines whose pages kvtide fills.
    """

    def __init__(self, settings: ConnectorSettings, layout: BlockLayout, fingerprint: bytes, text: str) -> None:
        settings.check_chunks()
        codec = CodecRegistry().make(settings.codec)
        if not codec.is_lossless:
            raise ValueError(f"chunks hold bytes of any order: the codec must be lossless or raw, got {settings.codec}")
        self.layout = layout
        salt = settings.tenant_salt.encode()
        self._namespace = namespace_digest(fingerprint, layout.dtype, text, layout.tokens, salt)
        self._settings = settings
        self._clock = SystemClock()
        self.cache: Cache = cache_for(settings.store, codec, limits=settings.limits(), clock=self._clock)

    def open(self) -> None:
        """Open the cache; its judge knows what the engine computes, from the settings or another engine's record."""
        self.cache.open()
        self.cache.recall()
        if tokens_per_s := self._settings.prefill_tokens_per_s:
            self.cache.judge.note_prefill(0, 1024, 1024 / tokens_per_s)

    def forget(self) -> None:
        """Serve nothing that was stored before, as after an update of the weights: names change from now on."""
        self._namespace = Namespace(hashlib.sha256(self._namespace + uuid.uuid4().bytes).digest())

    def _meta(self, name: bytes) -> BlockMeta:
        key = BlockKey(hashlib.sha256(self._namespace + name).digest())
        # Chunks stand alone: the engine knows what comes before which.
        object_id = self.cache.tiers.named(ObjectId(self._namespace, key))
        return BlockMeta(object_id, BlockKey(self._namespace), 0, self.layout)

    def contains(self, name: bytes) -> bool:
        """Tell whether the store seems to have the chunk."""
        # An engine's loop waits for it, chunk by chunk.
        return bool(self.cache.match([self._meta(name).id], wait_s=self._settings.match_s_max))

    def leading(self, names: Sequence[bytes]) -> int:
        """Return how many leading chunks the store seems to have, 0 where the judge says that computing is faster."""
        ids = [self._meta(name).id for name in names]
        parts, wait_s = [Parts(ids, is_sparse=True)], self._settings.match_s_max
        count = self.cache.match_parts(parts, wait_s=wait_s).blocks if ids else 0
        is_near = self.cache.is_near(ids[:count])
        return count if count and self.cache.is_worth(count * self.layout.tokens, is_near, self._namespace) else 0

    def store(self, name: bytes, chunk: memoryview) -> bool:
        """Copy a chunk and queue it to be stored. False if the queue is full. ValueError for another size."""
        if chunk.nbytes != self.layout.raw_bytes:
            raise ValueError(f"a chunk has {self.layout.raw_bytes} bytes, got {chunk.nbytes}")

        def capture() -> BlockSource:
            bits: BlockBits = np.ndarray(self.layout.shape, self.layout.bits_dtype, chunk).copy()
            return lambda: bits

        return self.cache.store([PendingBlock(self._meta(name), capture)]) == 1

    def load(self, names: Sequence[bytes], write: Callable[[int, memoryview], None]) -> int:
        """Load chunks and return how many leading ones came whole; `write`, from several threads, takes what came."""
        gate = WriteGate()

        def sink(position: int, bits: BlockBits) -> None:
            with gate.enter() as is_in:
                if is_in:
                    write(position, bits.data.cast("B"))

        metas, started_s = [self._meta(name) for name in names], self._clock.monotonic_s()
        is_near = self.cache.is_near([meta.id for meta in metas])
        judge, tokens = self.cache.judge, self.layout.tokens
        report = self.cache.load(metas, Whole(sink), judge.deadline_s(len(metas) * tokens))
        gate.close()
        now_s = self._clock.monotonic_s()
        if not is_near:
            wanted = len(metas) if report.reason is MissReason.DEADLINE else report.blocks
            judge.note_load(wanted * tokens, now_s - started_s, now_s, report.blocks * tokens)
        return report.blocks
