"""Streams a run of blocks into an engine: heads, load or recompute, a plan run for real, blocks decoded in order."""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec, EmbeddedCodec
from kvtide.errors import CorruptPayload
from kvtide.outcomes import Choice, Why
from kvtide.plan import Decision
from kvtide.plan.base import CHUNK_TOKENS, PASS_TOKENS, StreamPolicy, cut, cut_for_meeting, pass_reach
from kvtide.plan.policies import is_by_level
from kvtide.store.load.access import QUALITY_SLACK, LoadAccess, LoadReport, MissReason, ahead, level_meta
from kvtide.store.load.backfill import PartialLoad
from kvtide.store.load.run import (
    Engine,
    FetchJob,
    FetchLimits,
    FetchReport,
    FetchRun,
    LoadRequest,
    layered_job,
    level_job,
    losses_of,
)
from kvtide.store.load.whole import Whole
from kvtide.tier.source import read_heads
from kvtide.wire import StoredObject
from kvtide.wire.receiver import Receiver

# Passes that nobody races are no longer: to SmolLM2 each one more is about 1.5 % of recomputing 1,040 tokens, and in
# much longer ones attention over what was there before them costs more than that.
_OWN_PASS_TOKENS = 2 * PASS_TOKENS
# Bound on the bytes of all objects that one load brings.
_RECEIVE_BYTES_MAX = 4 << 30


class SpeculativePrefill:
    """The first tokens of a context, computed until it is known what there is; the pass that is under way then goes on.

    One thread is in `compute`, another one calls `open`.
    """

    def __init__(self, tokens: int, block_tokens: int, request: LoadRequest, clock: Clock) -> None:
        self._tokens, self._block_tokens, self._request, self._clock = tokens, block_tokens, request, clock
        self._started_s = clock.monotonic_s()
        self._lock = threading.Lock()
        # Tokens that are computed, and that will be once the pass under way has ended.
        self.done = self._under_way = 0
        self._is_opened = self._is_over = False
        # Under way, or None if the rest is the engine's.
        self.load: StreamedLoad | None = None
        # Whether the pass that was under way when the opening came has been computed.
        self.is_begun_computed = False

    def open(self, found: Callable[[int, int], StreamedLoad | None]) -> None:
        """Take the load that `found` begins, given the tokens that are computed and will be once a pass has ended.

        It is not called once `compute` has ended.
        """
        with self._lock:
            if not self._is_over:
                self.load = found(self.done, self._under_way)
                self._is_opened = True

    def compute(self, engine: Engine, is_awaited: Callable[[], bool]) -> None:
        """Compute until there is something to load, or all is computed.

        Once no opening is awaited, or it has nothing to load, the rest is the engine's: the last pass is left to it,
        which computes that with what follows the context.
        """
        try:
            while self._begin_pass(is_awaited()):
                is_computed = engine.compute(self.done, self._under_way, self._is_wanted)
                with self._lock:
                    if self.load is not None:
                        self.is_begun_computed = is_computed
                    elif is_computed:
                        self.done = self._under_way
        except BaseException:
            with self._lock:
                self._is_over = True
                if self.load is not None:
                    self.load.run.stop()
            raise

    def _is_wanted(self) -> bool:
        return self.load is None or not self.load.run.is_ready()

    def _begin_pass(self, is_awaited: bool) -> bool:
        with self._lock:
            rest = self._tokens - self.done
            is_engines = self._is_opened or not is_awaited
            own_passes = math.ceil(rest / _OWN_PASS_TOKENS)
            if self.load is not None or not rest or (is_engines and own_passes == 1):
                self._is_over = True
                return False
            longest = rest // own_passes if is_engines else min(PASS_TOKENS, self._pass_tokens(rest))
            blocks = max(1, longest // self._block_tokens)
            self._under_way = min(self._tokens, self.done + blocks * self._block_tokens)
            return True

    def _pass_tokens(self, rest: int) -> int:
        """Return as `TwoEnded` does how long a pass should be: the link may begin at the other end at any moment."""
        left_s = self._request.deadline_s - (self._clock.monotonic_s() - self._started_s)
        longest = max(rest // 2, self.done)
        if not 0 < left_s < math.inf:
            return longest
        in_time = pass_reach(self._request.prefill, self.done, left_s) - self.done
        return min(longest, in_time) if self._request.kl_goal else max(longest, in_time)


_log = logging.getLogger(__name__)


class StreamEngine(Engine, Protocol):
    """An engine that takes loaded blocks too; called from the thread that loads."""

    def append(self, block: int, bits: BlockBits) -> None:
        """Put a loaded block after what is there; the bits are valid during the call only."""


class StreamedReport(NamedTuple):
    """The outcome of streaming a run of blocks.

    tokens: usable ones from the start on, computed or loaded; what is after them is the engine's. kl: what the loaded
    ones cost, in nats. ready_s: until the engine had all of it. decision: None if there was nothing to load.
    stored_tokens: those that could have been loaded, computed or not. loaded: blocks that were appended. fetch: None if
    nothing was loaded. is_whole: whether what was loaded has all its refinements.
    """

    tokens: int
    computed_tokens: int
    kl: float
    ready_s: float
    decision: Decision | None
    stored_tokens: int = 0
    loaded: Sequence[int] = ()
    fetch: FetchReport | None = None
    is_whole: bool = True

    def is_rougher_than(self, quality: float) -> bool:
        """Tell whether what was loaded is rougher than it is stored, and than a quality."""
        return not self.is_whole and self.kl > quality * (1 + QUALITY_SLACK)

    @property
    def received_bytes(self) -> int:
        """Return what was read."""
        return self.fetch.received_bytes if self.fetch is not None else 0


@dataclass(eq=False, repr=False)
class Streamed:
    """The strategy that brings the base of all blocks first and refinements until the engine should start.

    With `computes` the engine computes from the first token on meanwhile. `report` says afterwards what came.
    chunk_tokens: what a policy for levels picks one for.
    """

    engine: StreamEngine
    request: LoadRequest
    policy: StreamPolicy
    computes: bool = True
    limits: FetchLimits = field(default_factory=FetchLimits)
    chunk_tokens: int = CHUNK_TOKENS
    report: StreamedReport | None = field(default=None, init=False)

    def load(self, access: LoadAccess, metas: Sequence[BlockMeta], deadline_s: float) -> LoadReport:
        """Have the engine hold the leading blocks by its deadline, computed by itself or appended as they came.

        The engine computes from the first moment on: where nothing can be loaded no time is lost. CorruptPayload never
        leaves it: such blocks are removed.
        """
        waiting = {meta.id for meta in metas if access.queued(meta.id) is not None}
        far = (meta for meta in metas if meta.id not in waiting and not access.tiers.is_near(meta.id))
        if waiting and not (self.computes and any(far)):
            # What waits to be stored lies in memory whole. An engine computes it behind what comes over a link.
            return self._load_whole(access, metas, deadline_s)
        with access.backfill.paused():
            self.report = report = _Stream(access, self, metas, deadline_s).run()
        _count(access, metas, report)
        is_all = self.computes or len(report.loaded) == len(metas)
        reason = MissReason.DEADLINE if report.ready_s >= deadline_s else MissReason.ABSENT
        return LoadReport(len(report.loaded), report.received_bytes, None if is_all else reason)

    def _load_whole(self, access: LoadAccess, metas: Sequence[BlockMeta], deadline_s: float) -> LoadReport:
        started_s, found = access.clock.monotonic_s(), dict[int, BlockBits]()

        def keep(position: int, bits: BlockBits) -> None:
            found[position] = bits.copy()

        report = Whole(keep).load(access, metas, deadline_s)
        for position in range(report.blocks):
            self.engine.append(position, found.pop(position))
        tokens, now_s = report.blocks * metas[0].layout.tokens, access.clock.monotonic_s()
        self.report = StreamedReport(tokens, 0, 0.0, now_s - started_s, None, tokens, range(report.blocks))
        return report


def _count(access: LoadAccess, metas: Sequence[BlockMeta], report: StreamedReport) -> None:
    """Count the blocks' tokens by their fate: loaded, computed although stored, or stored nowhere."""
    namespace, full_tokens = metas[0].id.namespace, len(metas) * metas[0].layout.tokens
    if report.decision is not None:
        loaded = report.tokens - report.computed_tokens if report.fetch is not None else 0
        why = report.decision.why
        access.decisions.add(Choice.LOAD, why, loaded, namespace)
        access.decisions.add(Choice.RECOMPUTE, why, report.stored_tokens - loaded, namespace)
    access.decisions.add_absent(full_tokens - report.stored_tokens, namespace)


class _Stream:
    """One load: its heads are read in a thread while the engine begins to compute."""

    def __init__(self, access: LoadAccess, how: Streamed, metas: Sequence[BlockMeta], deadline_s: float) -> None:
        self._access, self._how, self._metas = access, how, metas
        self._started_s = access.clock.monotonic_s()
        # Who waits longer for refinements waits as long for bases.
        asked_s = 0.0 if math.isinf(how.request.deadline_s) else how.request.deadline_s
        self._give_up_s = self._started_s + max(deadline_s, asked_s)
        self._heads_until_s = self._started_s + min(deadline_s, how.limits.read_s_max)
        self._tokens = metas[0].layout.tokens
        self._is_by_level = is_by_level(how.policy)
        # As in the report.
        self._decision: Decision | None = None
        self._stored_tokens = 0

    def run(self) -> StreamedReport:
        total, how = len(self._metas) * self._tokens, self._how
        lead = SpeculativePrefill(total, self._tokens, how.request, self._access.clock)
        begin = partial(self._access.guarded, "begin a load", partial(self._open, lead), None)
        if how.computes and not self._is_by_level:
            pool = ThreadPoolExecutor(1, thread_name_prefix="kvtide-heads")
            opened = pool.submit(begin)
            # Heads that come too late are read to no purpose, for their own bound at most.
            pool.shutdown(wait=False)
            lead.compute(how.engine, lambda: not opened.done())
        else:
            begin()
        if lead.load is None:
            return StreamedReport(lead.done, lead.done, 0.0, self._since(), self._decision, self._stored_tokens)
        return self._finish(lead.load, lead.is_begun_computed)

    def _since(self) -> float:
        return self._access.clock.monotonic_s() - self._started_s

    def _heads(self, metas: Sequence[BlockMeta]) -> list[StoredObject]:
        ids = [meta.id for meta in metas]
        return read_heads(self._access.tiers, ids, self._heads_until_s, self._how.limits.requests_max)

    def _open(self, lead: SpeculativePrefill) -> None:
        """Read the heads, decide, and begin to fetch beside whatever the engine is computing then."""
        access, how, link = self._access, self._how, self._access.judge.link
        heads = self._heads(self._metas)
        if heads:
            # At least two round trips, one after the other.
            link.latency_s = min(link.latency_s, self._since() / 2)
        stored, codec = self._usable(heads)
        levels = [*self._coarser(len(stored)), stored]
        sizes = accumulate(sum(each.object_bytes for each in block) for block in zip(*levels, strict=True))
        blocks = bisect_right([*sizes], _RECEIVE_BYTES_MAX)

        def found(done: int, under_way: int) -> StreamedLoad | None:
            if codec is None or blocks * self._tokens <= done or blocks * self._tokens < under_way:
                return None
            job = self._job([level[:blocks] for level in levels], codec, done, under_way)
            decision = access.judge.decide(job.request, codec.codec_id, access.clock.monotonic_s())
            # The rule for levels says itself when computing fits.
            is_declined = decision.why is Why.LINK_SLOWER and how.computes and not self._is_by_level
            load = None if is_declined else StreamedLoad(access, job, how, self._give_up_s)
            self._decision, self._stored_tokens = decision, job.request.tokens
            return load

        lead.open(found)

    def _coarser(self, blocks: int) -> list[list[StoredObject]]:
        """Return the blocks as they are stored in coarser levels, the coarsest first; those that all have."""
        found = []
        for number in range(self._access.coarser_levels if self._is_by_level and blocks else 0, 0, -1):
            metas = [level_meta(meta, number) for meta in self._metas[:blocks]]
            heads = self._heads(metas)
            if sum(self._is_here(head, meta) for head, meta in zip(heads, metas, strict=False)) == blocks:
                found.append(heads)
        return found

    def _is_here(self, head: StoredObject, meta: BlockMeta) -> bool:
        """Tell whether an object is the coarser level of a block; one that is at another place is removed."""
        try:
            head.check_place(meta)
        except CorruptPayload as error:
            self._access.corrupt(meta.id, error)
            return False
        return self._access.registry.get(head.codec_id, head.profile) is not None

    def _usable(self, heads: Sequence[StoredObject]) -> tuple[list[StoredObject], Codec | None]:
        """Return the leading objects that are the blocks asked for, of one kind that is here and good enough."""
        found, kinds, first = list[StoredObject](), set[tuple[str, int]](), None
        for head, meta in zip(heads, self._metas, strict=False):
            try:
                codec = self._access.codec_of(head, meta)
            except CorruptPayload as error:
                codec = self._access.corrupt(meta.id, error)
            # The refinements of all are asked for alike, where an object can be used without some.
            parts = {each.refinement for each in head.section_ids} if isinstance(codec, EmbeddedCodec) else ()
            kinds.add((head.codec_id, len(parts)))
            if isinstance(codec, MissReason) or len(kinds) > 1:
                break
            first = first or codec
            found.append(head)
        return found, first

    def _job(self, levels: Sequence[Sequence[StoredObject]], codec: Codec, done: int, under_way: int) -> FetchJob:
        """Return the job; none of its chunks lies across an end of what is computed or being computed."""
        request, stored = self._how.request, levels[-1]
        total = len(stored) * self._tokens
        decode_s = self._access.judge.decode_token_s(codec.codec_id) * total
        left_s = max(0.0, request.deadline_s - self._since() - decode_s)
        if 0 < left_s < math.inf and not request.kl_goal and self._how.computes:
            chunk_tokens = max(self._tokens, CHUNK_TOKENS // self._tokens * self._tokens)
            spans = cut_for_meeting(total, self._tokens, request.prefill, left_s, chunk_tokens)
        elif self._is_by_level:
            spans = cut(total, self._how.chunk_tokens // self._tokens * self._tokens or self._tokens)
        else:
            # They meet as early as they can, wherever that is.
            spans = cut(total, self._tokens)
        done, busy = min(done, total), min(under_way, total)
        marks = sorted({done, busy, *(start for start, _ in spans if start > done)} - {0, total})
        spans = list(pairwise([0, *marks, total]))
        computed = [chunk for chunk, (_, stop) in enumerate(spans) if stop <= done]
        begun = [chunk for chunk, (start, stop) in enumerate(spans) if done <= start and stop <= busy]
        request = request._replace(deadline_s=left_s)
        if self._is_by_level:
            job = level_job(levels, spans, [level[0].quality for level in levels], request)
        else:
            losses, count = losses_of(stored[0], codec), len(stored)
            laws = codec.losses_by_block(losses, count, self._tokens) if isinstance(codec, EmbeddedCodec) else None
            job = layered_job(stored, spans, losses, request, laws)
        return replace(job, computed=computed, begun=begun)

    def _finish(self, load: StreamedLoad, is_begun_computed: bool) -> StreamedReport:
        fetch = load.finish(is_begun_computed)
        request, progress = load.job.request, fetch.progress
        self._access.judge.note_decode(load.job.objects[0].codec_id, len(load.appended) * self._tokens, load.append_s)
        if load.appended and not self._is_by_level:
            self._access.backfill.offer(PartialLoad(load.receivers, load.appended))
        return StreamedReport(
            load.tokens,
            sum(request.chunks[chunk].tokens for chunk in progress.computed),
            fetch.kl,
            self._since(),
            self._decision,
            self._stored_tokens,
            tuple(load.appended),
            fetch,
            all(steps == request.steps for chunk, steps in enumerate(progress.here) if chunk not in progress.computed),
        )


class StreamedLoad:
    """A job that runs from the first moment on, into an engine in `finish`.

    What is loaded is decoded and appended before what the engine computes after it.
    """

    def __init__(self, access: LoadAccess, job: FetchJob, how: Streamed, give_up_s: float) -> None:
        """give_up_s: see `FetchRun`."""
        self.job = job
        self.receivers = [Receiver(stored) for stored in job.objects]
        # What the engine has, from the start on; the blocks of it that were appended, and what that took.
        self.tokens = self._stop_of(job.computed)
        self.appended: list[int] = []
        self.append_s = 0.0
        self._access, self._engine = access, how.engine
        means = (how.policy, access.tiers, access.judge.link, access.clock, how.limits)
        self.run = FetchRun(job, self.receivers, *means, give_up_s)
        self.run.start()

    def _stop_of(self, chunks: Sequence[int]) -> int:
        return max((self.job.request.chunks[chunk].stop for chunk in chunks), default=0)

    def finish(self, is_begun_computed: bool) -> FetchReport:
        """Have the engine compute its part, then append all that is usable.

        Damaged blocks end it early, they raise nothing. is_begun_computed: whether the engine has what it had begun.
        """
        if is_begun_computed:
            self.run.add_computed(self.job.begun)
            self.tokens = self._stop_of(self.job.begun) or self.tokens
        report = self.run.until_ready(self)
        self._append_until(self.job.request.tokens)
        for block in sorted(report.damaged):
            self._access.corrupt(self.job.objects[block].meta.id, CorruptPayload("a section came damaged"))
        return report

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Append what is loaded up to a chunk, and have the engine compute that."""
        self._append_until(start)
        if self.tokens != start or not self._engine.compute(start, stop, is_wanted):
            return False
        self.tokens = stop
        return True

    def _append_until(self, stop: int) -> None:
        """Append the loaded blocks up to token `stop`, or to the first that is not usable."""
        tokens, started_s = self.job.objects[0].meta.layout.tokens, self._access.clock.monotonic_s()
        blocks = range(self.tokens // tokens, stop // tokens)
        for block, bits in zip(blocks, ahead(self._decode, blocks), strict=True):
            if bits is None:
                break
            self._engine.append(block, bits)
            self.appended.append(block)
            self.tokens += tokens
        self.append_s += self._access.clock.monotonic_s() - started_s

    def _decode(self, block: int) -> BlockBits | None:
        """Decode what is here of a block: of levels, the one that was loaded."""
        layout = self.job.objects[0].meta.layout
        bits: BlockBits = np.empty(layout.shape, layout.bits_dtype)
        blocks = self.job.request.tokens // layout.tokens
        for number in range(block, len(self.job.objects), blocks):
            stored, sections = self.job.objects[number], self.receivers[number].sections()
            codec = self._access.registry.get(stored.codec_id, stored.profile)
            # Other codecs may decode a part too, at a quality that nobody knows.
            is_enough = bool(sections) if isinstance(codec, EmbeddedCodec) else len(sections) == len(stored.entries)
            if codec is None or not is_enough:
                continue
            try:
                codec.decode(stored.meta, sections, bits)
                return bits
            except CorruptPayload as error:
                _log.debug("object %d can't be decoded, what is behind it is not used: %s", number, error)
                if len(sections) == len(stored.entries):
                    self._access.corrupt(stored.meta.id, error)
        return None
