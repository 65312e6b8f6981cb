"""Brings a context into an engine: heads, load or recompute, a plan run for real, blocks decoded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.fetch.bring import LoadedBlock, bring
from kvtide.fetch.job import Job, Wish, layered_job
from kvtide.fetch.keep import Left
from kvtide.fetch.run import Engine, FetchLimits, FetchReport, LinkState
from kvtide.stream.plan import (
    CHUNK_TOKENS,
    PASS_TOKENS,
    Decision,
    Policy,
    Reason,
    TwoEnded,
    Way,
    cut,
    cut_for_meeting,
    decide,
)
from kvtide.tier.source import Source, read_heads
from kvtide.wire import StoredObject

__all__ = ["ContextLoader", "ContextReport", "LoaderStats"]


class ContextReport(NamedTuple):
    """What became of a context.

    tokens: usable ones from the start on, computed or loaded; what is behind them is the engine's. decision: None if
    there was nothing to load. fetch: None if nothing was loaded. ready_s: until the engine had all of it.
    stored_tokens: those that could have been loaded, computed or not. left: what came of the loaded blocks, for a
    Keeper to complete.
    """

    tokens: int
    computed_tokens: int
    kl: float
    ready_s: float
    decision: Decision | None
    fetch: FetchReport | None
    stored_tokens: int = 0
    left: Left | None = None


class LoaderStats(NamedTuple):
    """Counters since the loader was made: decisions, and what was asked for or computed by reason."""

    ways: Mapping[Way, int]
    reasons: Mapping[Reason, int]
    received_bytes: int
    faults: int


class ContextLoader:
    """Loads contexts from sources over one link, and keeps what it learns of link and decoder. One load at a time."""

    def __init__(
        self,
        sources: Sequence[Source],
        registry: CodecRegistry,
        link: LinkState,
        clock: Clock,
        limits: FetchLimits,
        policy: Policy | None = None,
    ) -> None:
        self._sources = sources
        self._registry = registry
        self._link = link
        self._clock = clock
        self._limits = limits
        self._policy = policy or TwoEnded()
        self._decode_block_s = 0.0
        self._ways: Counter[Way] = Counter()
        self._reasons: Counter[Reason] = Counter()
        self._received_bytes = self._faults = 0

    def load(
        self, metas: Sequence[BlockMeta], kl: Sequence[float], wish: Wish, engine: Engine, append: LoadedBlock
    ) -> ContextReport:
        """Have the engine hold the leading blocks by `wish.deadline_s`, computed by itself or appended as they came.

        metas: the blocks from token 0 on. kl: loss with each refinement. The engine computes from the first call on:
        where nothing can be loaded no time is lost. `append` is called in this thread, before the engine computes
        what is behind a loaded block, and at the end. CorruptPayload never leaves it: such blocks are not loaded.
        """
        started_s = self._clock.monotonic_s()
        pool = ThreadPoolExecutor(1, thread_name_prefix="kvtide-heads")
        ids = [meta.id for meta in metas]
        requests_max, wait_s = self._limits.requests_max, self._limits.read_s_max
        heads = pool.submit(read_heads, self._sources, ids, self._clock, wait_s, requests_max)
        # Heads that come too late are read to no purpose, for `read_s_max` at most.
        pool.shutdown(wait=False)
        computed = self._compute_until_known(metas, heads, engine)
        stored = self._matching(heads.result() if heads.done() else [], metas)
        tokens = metas[0].layout.tokens
        if len(stored) <= computed:
            return ContextReport(computed * tokens, computed * tokens, 0.0, self._since(started_s), None, None)
        job = self._job(stored, computed, kl, wish, started_s)
        decision = decide(
            job.request, self._link.estimator.bytes_per_s(), min(self._link.latency_s, self._limits.read_s_max)
        )
        self._ways[decision.way] += 1
        if decision.way is Way.RECOMPUTE:
            done, stored_tokens = computed * tokens, len(stored) * tokens
            return ContextReport(done, done, 0.0, self._since(started_s), decision, None, stored_tokens)
        return self._run(job, computed, engine, append, decision, started_s)

    def _since(self, started_s: float) -> float:
        return self._clock.monotonic_s() - started_s

    def _compute_until_known(
        self, metas: Sequence[BlockMeta], heads: Future[list[StoredObject]], engine: Engine
    ) -> int:
        """Compute until the heads are here; what is under way then is stopped, at most half of the time so far."""
        computed, blocks, tokens = 0, 1, metas[0].layout.tokens
        while computed < len(metas):
            after = min(len(metas), computed + blocks)
            if heads.done() or not engine.compute(computed * tokens, after * tokens, lambda: not heads.done()):
                break
            computed, blocks = after, max(1, min(after, PASS_TOKENS // tokens))
        return computed

    def _matching(self, heads: Sequence[StoredObject], metas: Sequence[BlockMeta]) -> list[StoredObject]:
        """Return the leading objects that are the blocks asked for, and whose codec is here."""
        found = []
        for head, meta in zip(heads, metas, strict=False):
            is_same = (head.meta.layout, head.meta.start, head.meta.parent) == (meta.layout, meta.start, meta.parent)
            if not is_same or self._registry.get(head.codec_id, head.profile) is None:
                break
            found.append(head)
        return found

    def _job(
        self, stored: Sequence[StoredObject], computed: int, kl: Sequence[float], wish: Wish, started_s: float
    ) -> Job:
        tokens, blocks = stored[0].meta.layout.tokens, len(stored)
        decode_s = self._decode_block_s * blocks
        left_s = max(0.0, wish.deadline_s - self._since(started_s) - decode_s)
        if 0 < left_s < math.inf and not wish.kl_goal:
            chunk_tokens = max(tokens, CHUNK_TOKENS // tokens * tokens)
            spans = cut_for_meeting(blocks * tokens, tokens, wish.prefill, left_s, chunk_tokens)
        else:
            # They meet as early as they can, wherever that is.
            spans = cut(blocks * tokens, tokens)
        if computed:
            done = computed * tokens
            spans = [(0, done), *((max(start, done), stop) for start, stop in spans if stop > done)]
        return layered_job(stored, spans, kl, wish._replace(deadline_s=left_s))

    def _run(
        self, job: Job, computed: int, engine: Engine, append: LoadedBlock, decision: Decision, started_s: float
    ) -> ContextReport:
        brought = bring(
            job,
            self._policy,
            self._sources,
            self._link,
            self._clock,
            self._limits,
            self._registry,
            engine,
            append,
            computed_chunks=1 if computed else 0,
        )
        report = brought.report
        if brought.appended:
            self._decode_block_s = brought.append_s / len(brought.appended)
        self._reasons.update(report.reasons)
        self._received_bytes += report.received_bytes
        self._faults += report.faults
        own = sum(job.request.chunks[chunk].tokens for chunk in report.progress.computed)
        ready_s = self._since(started_s)
        left = Left(job.objects, brought.receiver, brought.appended)
        return ContextReport(brought.tokens, own, report.kl, ready_s, decision, report, job.request.tokens, left)

    def stats(self) -> LoaderStats:
        """Return the counters."""
        return LoaderStats(dict(self._ways), dict(self._reasons), self._received_bytes, self._faults)
