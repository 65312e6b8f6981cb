"""Brings a context into an engine: heads, load or recompute, a plan run for real, blocks decoded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.plan import CHUNK_TOKENS, Decision, Reason, StreamPolicy, TwoEnded, Way, cut, cut_for_meeting, decide
from kvtide.store.load.backfill import PartialLoad
from kvtide.store.load.bring import LoadedBlock, LoadedPrefix, StreamedLoad
from kvtide.store.load.job import FetchJob, LoadRequest, layered_job
from kvtide.store.load.lead import SpeculativePrefill, StreamStart
from kvtide.store.load.run import Engine, FetchLimits, FetchReport, LinkState
from kvtide.tier.source import Source, read_heads
from kvtide.wire import StoredObject


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
    left: PartialLoad | None = None


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
        policy: StreamPolicy | None = None,
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
        self, metas: Sequence[BlockMeta], kl: Sequence[float], wish: LoadRequest, engine: Engine, append: LoadedBlock
    ) -> ContextReport:
        """Have the engine hold the leading blocks by `wish.deadline_s`, computed by itself or appended as they came.

        metas: the blocks from token 0 on. kl: loss with each refinement. The engine computes from the first call on:
        where nothing can be loaded no time is lost. `append` is called in this thread, before the engine computes
        what is behind a loaded block, and at the end. CorruptPayload never leaves it: such blocks are not loaded.
        """
        started_s, tokens = self._clock.monotonic_s(), metas[0].layout.tokens
        lead = SpeculativePrefill(len(metas) * tokens, tokens, wish, self._clock)
        pool = ThreadPoolExecutor(1, thread_name_prefix="kvtide-heads")
        opened = pool.submit(self._open, metas, kl, wish, lead, started_s)
        # Heads that come too late are read to no purpose, for `read_s_max` at most.
        pool.shutdown(wait=False)
        lead.compute(engine, lambda: not opened.done())
        if opened.done():
            opened.result()
        opening, done = lead.opening, lead.tokens
        if opening is None or opening.decision is None:
            return ContextReport(done, done, 0.0, self._since(started_s), None, None)
        self._ways[opening.decision.way] += 1
        if opening.bringing is None:
            ready_s = self._since(started_s)
            return ContextReport(done, done, 0.0, ready_s, opening.decision, None, opening.stored_tokens)
        brought = opening.bringing.finish(engine, append, lead.is_begun_computed)
        return self._report(brought, opening, started_s)

    def _since(self, started_s: float) -> float:
        return self._clock.monotonic_s() - started_s

    def _open(
        self,
        metas: Sequence[BlockMeta],
        kl: Sequence[float],
        wish: LoadRequest,
        lead: SpeculativePrefill,
        started_s: float,
    ) -> None:
        """Read the heads, decide, and begin to fetch beside whatever the engine is computing then."""
        ids = [meta.id for meta in metas]
        heads = read_heads(self._sources, ids, self._clock, self._limits.read_s_max, self._limits.requests_max)
        # At least two round trips, one after the other.
        self._link.latency_s = min(self._link.latency_s, self._since(started_s) / 2)
        stored, tokens = self._matching(heads, metas), metas[0].layout.tokens

        def found(done: int, under_way: int) -> StreamStart:
            if len(stored) * tokens <= done or len(stored) * tokens < under_way:
                return StreamStart(None, 0, None)
            job, computed, begun = self._job(stored, (done, under_way), kl, wish, started_s)
            decision = decide(job.request, self._link.estimator.bytes_per_s(), self._link.latency_s)
            if decision.way is Way.RECOMPUTE:
                return StreamStart(decision, job.request.tokens, None)
            link, limits = self._link, self._limits
            bringing = StreamedLoad(
                job, self._policy, self._sources, link, self._clock, limits, self._registry, computed, begun
            )
            return StreamStart(decision, job.request.tokens, bringing)

        lead.open(found)

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
        self,
        stored: Sequence[StoredObject],
        under_way: tuple[int, int],
        kl: Sequence[float],
        wish: LoadRequest,
        started_s: float,
    ) -> tuple[FetchJob, Sequence[int], Sequence[int]]:
        """Return the job, and which of its chunks are computed and being computed: none lies across an end of those."""
        tokens, blocks = stored[0].meta.layout.tokens, len(stored)
        decode_s = self._decode_block_s * blocks
        left_s = max(0.0, wish.deadline_s - self._since(started_s) - decode_s)
        if 0 < left_s < math.inf and not wish.kl_goal:
            chunk_tokens = max(tokens, CHUNK_TOKENS // tokens * tokens)
            spans = cut_for_meeting(blocks * tokens, tokens, wish.prefill, left_s, chunk_tokens)
        else:
            # They meet as early as they can, wherever that is.
            spans = cut(blocks * tokens, tokens)
        done, busy = (min(each, blocks * tokens) for each in under_way)
        marks = sorted({done, busy, *(start for start, _ in spans if start > done)} - {0, blocks * tokens})
        spans = list(pairwise([0, *marks, blocks * tokens]))
        computed = [chunk for chunk, (_, stop) in enumerate(spans) if stop <= done]
        begun = [chunk for chunk, (start, stop) in enumerate(spans) if done <= start and stop <= busy]
        return layered_job(stored, spans, kl, wish._replace(deadline_s=left_s)), computed, begun

    def _report(self, brought: LoadedPrefix, opening: StreamStart, started_s: float) -> ContextReport:
        report, chunks = brought.report, brought.report.progress.computed
        if brought.appended:
            self._decode_block_s = brought.append_s / len(brought.appended)
        self._reasons.update(report.reasons)
        self._received_bytes += report.received_bytes
        self._faults += report.faults
        request = brought.job.request
        own = sum(request.chunks[chunk].tokens for chunk in chunks)
        left = PartialLoad(brought.job.objects, brought.receiver, brought.appended)
        return ContextReport(
            brought.tokens,
            own,
            report.kl,
            self._since(started_s),
            opening.decision,
            report,
            opening.stored_tokens,
            left,
        )

    def stats(self) -> LoaderStats:
        """Return the counters."""
        return LoaderStats(dict(self._ways), dict(self._reasons), self._received_bytes, self._faults)
