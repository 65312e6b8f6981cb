"""Loads of one model by importance: when a prefix is loaded in part, the answer on it, and what is learnt from both."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase
from kvtide.engines.transformers.groups import RestoredRoom
from kvtide.engines.transformers.selective import (
    ObservedPrefix,
    SelectedLayers,
    SparsePrefix,
    SparseSettings,
    attending,
)
from kvtide.evict import Recent
from kvtide.importance import WRITER_BYTES, Floats, Orders, packing_orders
from kvtide.plan import Speed
from kvtide.store import Cache
from kvtide.store.load.sparse import Sparse
from kvtide.store.repack import Repacker, UseStore
from kvtide.types import ObjectId

# Tokens of an answer after a selected prefix before it is copied for each.
ANSWER_ROOM = 256
# The slower way gets another chance after this long.
MEMORY_S = 600.0
# A part is rough, and times vary: it has to be faster by so much.
GAIN_MIN = 1.05
# Blocks of prefixes that a guard refused.
REFUSALS_MAX = 4096
# What packing blocks again may read and write, of what was used; it adds up over so many uses at most.
REPACK_SHARE = 0.05
REPACK_USES = 10


class Ways:
    """Tokens a second until the first new token, of loads in part and whole, apart for prefixes in the fastest tier."""

    def __init__(self) -> None:
        self._speeds = {(is_part, is_near): Speed() for is_part in (True, False) for is_near in (True, False)}

    def is_part_faster(self, is_near: bool, now_s: float) -> bool:
        """False where a part gains next to nothing; first either way is tried once."""
        part, whole = (self._speeds[is_part, is_near].known(now_s, MEMORY_S) for is_part in (True, False))
        return part is None or (whole is not None and whole * GAIN_MIN <= part)

    def note(self, is_part: bool, is_near: bool, tokens: int, seconds: float, now_s: float) -> None:
        """Take what a load of so many tokens took; short ones are ignored."""
        self._speeds[is_part, is_near].note(tokens, seconds, now_s)


class ImportanceLoads:
    """Loads exactly only what matters of blocks that are stored as `packed`, and learns what that is."""

    def __init__(
        self, cache: Cache, clock: Clock, settings: SparseSettings, learner: Learner, is_reordered: bool
    ) -> None:
        """is_reordered: tokens are stored in the order in which they matter, else as they come, for good."""
        self._cache = cache
        self._clock = clock
        self._settings = settings
        self.learner = learner
        self._is_reordered = is_reordered
        self.ways = Ways()
        # Last blocks of prefixes that a guard refused, and when: loaded whole for as long as the slower way is.
        self.refused_s: Recent[ObjectId, float] = Recent(REFUSALS_MAX)

    def open(
        self, model: Any, metas: Sequence[BlockMeta], is_near: bool, spare_tokens: int
    ) -> tuple[Sparse, DynamicCache] | None:
        """Load the rough blocks of a hit; None if they are not packed, or are to be loaded whole.

        Of those in the engine's cache exact chunks can still be had, until the load is closed.
        """
        now_s = self._clock.monotonic_s()
        if not metas or self._settings.ratio == 1.0:
            return None
        is_refused = now_s - self.refused_s.get(metas[-1].id, -math.inf) <= MEMORY_S
        if is_refused or not self.ways.is_part_faster(is_near, now_s):
            return None
        layout = metas[0].layout
        pages = RestoredRoom(layout, len(metas) * layout.tokens, spare_tokens=spare_tokens + ANSWER_ROOM)
        sparse = Sparse(pages.write, self._settings.tokens_ahead(layout.tokens))
        self._cache.load(metas, sparse, self._cache.judge.deadline_s(len(metas) * layout.tokens))
        if sparse.opened is None:
            return None
        past = DynamicCache(config=model.config)
        pages.fill(past, sparse.opened.tokens, model.device)
        return sparse, past

    def answer(
        self, model: Any, input_ids: torch.Tensor, sparse: Sparse, past: DynamicCache, arguments: dict[str, Any]
    ) -> tuple[Any, SelectedLayers]:
        """Answer on rough blocks of which each layer loads what matters."""
        load = sparse.opened
        assert load is not None
        metas, selection = load.metas, SparsePrefix(load, self._settings)
        with closing(sparse):
            selection.probe(model, input_ids[:, load.tokens :], past)
            if selection.report().is_fallback:
                self._refuse(metas)
            with selection.active(model):
                output = model.generate(input_ids, **arguments)
        # A pass that ended early tells nothing of the layers behind.
        if len(selection.importance) == load.layout.layers:
            self._learn(metas, selection.importance, load.bases if self._is_reordered else ())
        return output, selection.report()

    @contextmanager
    def observed(self, model: Any, metas: Sequence[BlockMeta]) -> Iterator[ObservedPrefix | None]:
        """Learn what a prompt's first pass attends to in its blocks, stored or about to be. None if nobody can tell."""
        if not metas or model.config._attn_implementation != "sdpa":
            yield None
            return
        observed = ObservedPrefix(len(metas) * metas[0].layout.tokens, self._settings)
        with attending(model, observed.attend):
            yield observed
        self._learn(metas, observed.importance, ())
        if observed.is_refused:
            self._refuse(metas)

    def _learn(self, metas: Sequence[BlockMeta], importance: Mapping[int, Floats], bases: Sequence[PackedBase]) -> None:
        self._cache.guarded("learn", partial(self.learner.note, self._cache, metas, importance, bases), False)

    def _refuse(self, metas: Sequence[BlockMeta]) -> None:
        # A prefix that shares only its first half is another.
        for meta in metas[len(metas) // 2 :]:
            self.refused_s[meta.id] = self._clock.monotonic_s()

    def orders(self, metas: Sequence[BlockMeta], observed: ObservedPrefix | None) -> dict[ObjectId, Orders]:
        """Return in which orders to store the observed blocks' tokens."""
        if not self._is_reordered or observed is None or not observed.importance:
            return {}
        return self.learner.orders(metas[: observed.tokens // metas[0].layout.tokens], observed.importance)


class Learner:
    """Notes uses and acts on them. Owns a thread between the first use and `close`."""

    def __init__(self, registry: CodecRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._uses: UseStore | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._task: Future[None] | None = None
        self._repack_bytes = 0.0
        self.replaced = 0

    def important_tokens(self, object_id: ObjectId) -> float:
        """Return what `ScoreRanking` wants to know of a block."""
        return self._uses.important_tokens(object_id) if self._uses else 1.0

    def orders(self, metas: Sequence[BlockMeta], importance: Mapping[int, Floats]) -> dict[ObjectId, Orders]:
        """Return in which orders to store blocks: by a prompt over them, and by past uses that this process knows."""
        by_block, uses = np.split(_by_layer(importance), len(metas), axis=1), self._uses
        return {
            meta.id: packing_orders(part if uses is None else uses.blended(meta, part))
            for meta, part in zip(metas, by_block, strict=True)
        }

    def note(
        self, cache: Cache, metas: Sequence[BlockMeta], importance: Mapping[int, Floats], bases: Sequence[PackedBase]
    ) -> bool:
        """Learn from a prompt's importance by layer over blocks packed as `bases`. False while it works on another."""
        if self._task is not None and not self._task.done():
            return False
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="kvtide-learn")
        learn = partial(self._learn, cache, metas, bases, _by_layer(importance))
        self._task = self._pool.submit(cache.guarded, "learn", learn, None)
        return True

    def _learn(self, cache: Cache, metas: Sequence[BlockMeta], bases: Sequence[PackedBase], importance: Floats) -> None:
        uses = self._uses = self._uses or UseStore(cache.tiers, secrets.token_bytes(WRITER_BYTES), self._clock)
        for meta, part in zip(metas, np.split(importance, len(metas), axis=1), strict=True):
            uses.note(meta, part)
            uses.save(meta)
        gained = REPACK_SHARE * sum(meta.layout.raw_bytes for meta in metas)
        self._repack_bytes = min(self._repack_bytes + gained, REPACK_USES * gained)
        if bases:
            done = Repacker(cache.tiers, self._registry, uses).run(metas, bases, self._repack_bytes)
            self._repack_bytes -= done.moved_bytes
            self.replaced += done.replaced

    def flush(self, timeout_s: float) -> None:
        """Wait until what was noted is done, at most so long. TimeoutError."""
        if self._task is not None:
            self._task.result(timeout_s)

    def close(self) -> None:
        """End after what is under way. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _by_layer(importance: Mapping[int, Floats]) -> Floats:
    return np.stack([importance[layer] for layer in sorted(importance)])
