"""Learning from an engine's attention to its prompts: uses saved and blocks repacked, in the background.

Invariant: at most one task waits or runs; what comes meanwhile is counted in memory or not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase
from kvtide.importance import WRITER_BYTES, Floats
from kvtide.store import Cache
from kvtide.store.repack import Repacker, UseStore
from kvtide.tier.breaker import caller_deadline_s, until
from kvtide.types import ObjectId

# Records of uses are small and read side by side.
WEIGHT_THREADS = 4


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

    def weights(self, cache: Cache, metas: Sequence[BlockMeta]) -> NDArray[np.float64]:
        """Return how much each block mattered to past prompts of all engines, 1 for an even share or no use.

        Waits no longer than the caller (`tier.breaker.until`).
        """
        deadline_s = caller_deadline_s()

        def weight(meta: BlockMeta) -> float:
            with until(deadline_s):
                scores = UseStore(cache.tiers, bytes(WRITER_BYTES), self._clock).scores(meta)
            return 1.0 if scores is None else float(scores.mean())

        with ThreadPoolExecutor(WEIGHT_THREADS, thread_name_prefix="kvtide-weigh") as pool:
            return np.array(list(pool.map(weight, metas)))

    def note(
        self, cache: Cache, metas: Sequence[BlockMeta], importance: Mapping[int, Floats], bases: Sequence[PackedBase]
    ) -> bool:
        """Learn from one prompt over some blocks. False if left out: the last one is being worked on.

        importance: (tokens of all blocks) of each layer. bases: how they are packed, none for those of other codecs.
        """
        if self._task is not None and not self._task.done():
            return False
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="kvtide-learn")
        by_layer = np.stack([importance[layer] for layer in sorted(importance)])
        learn = partial(self._learn, cache, metas, bases, by_layer)
        self._task = self._pool.submit(cache.guarded, "learn", learn, None)
        return True

    def _learn(self, cache: Cache, metas: Sequence[BlockMeta], bases: Sequence[PackedBase], importance: Floats) -> None:
        uses = self._uses = self._uses or UseStore(cache.tiers, secrets.token_bytes(WRITER_BYTES), self._clock)
        for meta, part in zip(metas, np.split(importance, len(metas), axis=1), strict=True):
            uses.note(meta, part)
            uses.save(meta)
        if bases:
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
