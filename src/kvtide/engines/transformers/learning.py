"""What an engine learns from its own selections: uses saved and blocks packed anew, in the background.

Invariant: at most one task waits or runs; what comes meanwhile is counted in memory or not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase
from kvtide.importance import WRITER_BYTES, Floats
from kvtide.store import Cache
from kvtide.store.load.sparse import SparseLoad
from kvtide.store.repack import Repacker, UseStore
from kvtide.types import ObjectId


class Learner:
    """Notes uses and acts on them. Owns a thread between the first use and `close`."""

    def __init__(self, registry: CodecRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._uses: UseStore | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._task: Future[None] | None = None
        self.replaced = 0

    def important_tokens(self, object_id: ObjectId) -> float:
        """Return what `ScoreRanking` wants to know of a block."""
        return self._uses.important_tokens(object_id) if self._uses else 1.0

    def note(self, cache: Cache, load: SparseLoad, importance: Mapping[int, Floats]) -> bool:
        """Learn from one selection over the blocks of a load. False if left out: the last one is being worked on.

        importance: (tokens of all blocks) of each layer.
        """
        if self._task is not None and not self._task.done():
            return False
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="kvtide-learn")
        by_layer = np.stack([importance[layer] for layer in sorted(importance)])
        learn = partial(self._learn, cache, load.metas, load.bases, by_layer)
        self._task = self._pool.submit(cache.guarded, "learn", learn, None)
        return True

    def _learn(self, cache: Cache, metas: Sequence[BlockMeta], bases: Sequence[PackedBase], importance: Floats) -> None:
        uses = self._uses = self._uses or UseStore(cache.tiers, secrets.token_bytes(WRITER_BYTES), self._clock)
        for meta, part in zip(metas, np.split(importance, len(metas), axis=1), strict=True):
            uses.note(meta, part)
            uses.save(meta)
        self.replaced += Repacker(cache.tiers, self._registry, uses).run(metas, bases).replaced

    def flush(self, timeout_s: float) -> None:
        """Wait until what was noted is done, at most so long. TimeoutError."""
        if self._task is not None:
            self._task.result(timeout_s)

    def close(self) -> None:
        """End after what is under way. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
