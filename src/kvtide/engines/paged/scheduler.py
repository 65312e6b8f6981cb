"""The half of a connector beside the engine's scheduler: what is stored, what to load, what to store. Moves no bytes.

Invariant: what is ordered to be stored are full blocks of known tokens whose keys and values the step completes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.engines.paged.sequence import (
    AdviceOrder,
    BlockRef,
    FollowedPrefix,
    LoadOrder,
    Namespaces,
    StepCommands,
    StoreOrder,
    TrackedSequence,
    WorkerReport,
)
from kvtide.engines.settings import NO_OPTIONS, RequestOptions, StreamOrder
from kvtide.group import Hit, Parts
from kvtide.outcomes import Choice, Decided, Why
from kvtide.store import Cache
from kvtide.types import BlockKey, Namespace

# Answers of local tiers come within this; the engine's loop waits for no longer at a time.
ANSWER_S = 0.005
STEPS_IN_FLIGHT_MAX = 64
# Blocks that a worker did not find are taken as missing for so long, whatever tiers say that have not noticed yet.
LOST_S = 60.0
LOST_MAX = 1 << 16
# Blocks that lie rough in the engine's pages: more than any engine has.
ROUGH_MAX = 1 << 18


class ScheduledRequest(NamedTuple):
    """One request's share of a step. `pages` is asked for only if there is something to store."""

    request: str
    tokens: Sequence[int]
    computed_tokens: int
    pages: Callable[[], Sequence[int]]


class _Lookup(NamedTuple):
    asked_s: float
    future: Future[Hit]


class _Step(NamedTuple):
    started_s: float
    tokens: int


class SchedulerHalf:
    """Decides for all requests of one engine. Not thread-safe: the engine's scheduler calls it.

    What was ordered to be stored counts as stored: the workers load it from their queues. They tell what they dropped.
    """

    def __init__(
        self,
        cache: Cache,
        namespaces: Namespaces,
        block_tokens: int,
        page_tokens: int,
        clock: Clock,
        match_s_max: float,
        state_every_tokens: int = 0,
        is_drafted: bool = False,
    ) -> None:
        assert block_tokens % page_tokens == 0
        self.cache = cache
        self._namespaces = namespaces
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._clock = clock
        self._match_s_max = match_s_max
        self._state_every_tokens = state_every_tokens
        # A draft model's last row of a block goes by the token after it.
        self._volatile_blocks = int(is_drafted)
        self._epoch = b""
        self._sequences: dict[str, TrackedSequence] = {}
        self._lookups: dict[str, _Lookup] = {}
        self._loads: list[LoadOrder] = []
        self._advice: list[AdviceOrder] = []
        self._lost: OrderedDict[BlockKey, float] = OrderedDict()
        # First pages of blocks that lie rough in the engine's pages, those of the latest requests last.
        self._rough: OrderedDict[bytes, None] = OrderedDict()
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._step = self._heard = 0
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="kvtide-match")

    def close(self) -> None:
        """Stop asking the store. Idempotent."""
        self._asker.shutdown(wait=False, cancel_futures=True)
        self.cache.close()

    def match(
        self,
        request: str,
        salt: bytes,
        tokens: Sequence[int],
        computed_tokens: int,
        options: RequestOptions = NO_OPTIONS,
        extra: Callable[[int, int], bytes] | None = None,
    ) -> int | None:
        """Return how many tokens after `computed_tokens` are worth loading; None to be asked again soon.

        The last token always runs: its logits are the answer's next token. Nothing is changed by asking. For the latest
        servers are asked, and copies of this machine do not count. Options and `extra` (of `TrackedSequence`) hold
        from the request's first call on.
        """
        sequence = self._sequences.get(request)
        if sequence is None:
            namespaces, has_states = self._namespaces.of(salt + self._epoch), self._namespaces.has_states
            sequence = TrackedSequence(namespaces, self._block_tokens, has_states, extra)
            self._sequences[request] = sequence
            sequence.last_block = (len(tokens) - 1) // self._block_tokens
            if options.stream is not None:
                sequence.stream = (self._clock.monotonic_s() + options.stream.within_s, options.stream.quality)
            sequence.may_load, sequence.may_store = options.may_load, options.may_store
            sequence.is_latest = options.is_latest
            if options.follow_s:
                sequence.followed = FollowedPrefix(options.follow_s, self._clock.monotonic_s())
            self._advise(sequence.blocks(tokens), namespaces, options)
        sequence.computed_tokens = computed_tokens
        blocks = sequence.blocks(tokens)[: (len(tokens) - 1) // self._block_tokens]
        if not sequence.may_load or len(blocks) * self._block_tokens <= computed_tokens:
            return 0
        if sequence.followed is not None and self._clock.monotonic_s() < sequence.followed.next_s:
            return None
        hit, followed = self._stored(request, blocks, sequence.is_latest), sequence.followed
        if hit is None or (followed is not None and self._is_coming(followed, blocks, hit.blocks)):
            return None
        if followed is not None:
            # A store that has fallen silent takes nothing back of what was brought.
            hit, sequence.followed = hit._replace(blocks=max(hit.blocks, followed.blocks)), None
        sequence.known = hit.known
        stop = max(0, hit.blocks - self._volatile_blocks)
        fresh = self._restorable(blocks[:stop]) * self._block_tokens - computed_tokens
        absent = len(blocks) * self._block_tokens - computed_tokens - max(0, fresh)
        # A look-up that goes on without us was given up.
        why = Why.DEADLINE if request in self._lookups else Why.ABSENT
        self._count(sequence, blocks[0], Decided(Choice.RECOMPUTE, why), absent)
        if fresh <= 0 or self._pays(sequence, fresh):
            return max(0, fresh)
        self._count(sequence, blocks[0], Decided(Choice.RECOMPUTE, Why.LINK_SLOWER), fresh)
        return 0

    def _advise(self, blocks: Sequence[BlockRef], namespaces: tuple[Namespace, ...], options: RequestOptions) -> None:
        """Pass on, with the next step, what a request's agent says."""
        if options.hint is not None or options.prefetch:
            expected = TrackedSequence(namespaces, self._block_tokens).blocks(options.prefetch)
            self._advice.append(AdviceOrder(tuple(blocks), options.hint, tuple(expected)))

    def _is_coming(self, followed: FollowedPrefix, blocks: Sequence[BlockRef], here: int) -> bool:
        """Tell whether to wait for what another engine computes; what is here is brought to the workers meanwhile."""
        now_s, prefill, size = self._clock.monotonic_s(), self.cache.judge.prefill(), self._block_tokens
        if here > followed.blocks:
            self._advice.append(AdviceOrder((), None, tuple(blocks[followed.blocks : here])))
        followed.note(here, now_s)
        compute_s = math.inf if prefill is None else prefill.seconds(here * size, len(blocks) * size)
        return followed.is_worth(len(blocks) - here, compute_s, now_s)

    def _pays(self, sequence: TrackedSequence, tokens: int) -> bool:
        """Tell whether loading tokens pays; where computing ends in time for a request that streams, that is exact."""
        now_s, prefill = self._clock.monotonic_s(), self.cache.judge.prefill()
        if (
            sequence.stream is not None
            and prefill is not None
            and now_s + prefill.seconds(0, tokens) <= sequence.stream[0]
        ):
            return False
        return self.cache.judge.is_load_faster(tokens, now_s)

    def _count(self, sequence: TrackedSequence, block: BlockRef, decided: Decided, tokens: int) -> None:
        """Count a decision about a request once for each shard, however often the engine asks."""
        if decided not in sequence.counted:
            sequence.counted.add(decided)
            for object_id in block.ids:
                self.cache.decisions.add(*decided, tokens, object_id.namespace)

    def _stored(self, request: str, blocks: Sequence[BlockRef], is_latest: bool) -> Hit | None:
        now_s = self._clock.monotonic_s()
        lookup = self._lookups.get(request)
        if lookup is None:
            if not is_latest and self._known(blocks) == len(blocks):
                return Hit(len(blocks), known=len(blocks))
            lookup = _Lookup(now_s, self._asker.submit(self._match_shards, blocks, is_latest))
            self._lookups[request] = lookup
        try:
            hit = lookup.future.result(ANSWER_S)
        except FutureTimeoutError:
            # Nobody waits for a slow store for long; its answer, when it comes, serves the next request.
            return None if now_s - lookup.asked_s < self._match_s_max else Hit(0)
        del self._lookups[request]
        return hit

    def _known(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks the index has of every shard, without asking any tier; 0 if without states."""
        if not all(self.cache.index.is_held(each.key) for each in blocks[-1].states):
            return 0
        shards = range(len(blocks[0].ids))
        return min(len(self.cache.index.match([block.ids[shard].key for block in blocks]).blocks) for shard in shards)

    def _found(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks no worker has missed lately."""
        oldest_s = self._clock.monotonic_s() - LOST_S
        while self._lost and next(iter(self._lost.values())) < oldest_s:
            self._lost.popitem(last=False)
        missing = (i for i, block in enumerate(blocks) if any(each.key in self._lost for each in block.ids))
        return next(missing, len(blocks)) if self._lost else len(blocks)

    def _restorable(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks of a hit can be restored, for all that workers have missed lately."""
        found = self._found(blocks)
        if not found or not blocks[0].states:
            return found
        # A shorter run would need states of its own.
        is_whole = found == len(blocks) and not any(each.key in self._lost for each in blocks[-1].states)
        return found if is_whole else 0

    def _match_shards(self, blocks: Sequence[BlockRef], is_latest: bool) -> Hit:
        hits, named, shards = len(blocks), self.cache.tiers.named, range(len(blocks[0].ids))
        if blocks[0].states:
            rows = [Parts([named(block.ids[shard], is_latest) for block in blocks]) for shard in shards]
            states = [[named(block.states[shard], is_latest) for block in blocks] for shard in shards]
            return self.cache.match_parts([*rows, *(Parts(ids, 1, is_sparse=True) for ids in states)])
        for shard in shards:
            hits = min(hits, self.cache.match([named(block.ids[shard], is_latest) for block in blocks[:hits]]))
        return Hit(hits)

    def allocated(self, request: str, pages: Sequence[int], loaded_tokens: int, is_in_step: bool = False) -> None:
        """Order the load that the last match offered, into the pages that the request got for it."""
        sequence = self._sequences[request]
        start = sequence.computed_tokens
        stop = start + loaded_tokens
        assert start % self._page_tokens == 0
        assert stop % self._block_tokens == 0
        first = sequence.loaded_from = start // self._block_tokens
        blocks = tuple(sequence.blocks(())[first : stop // self._block_tokens])
        filled = tuple(pages[start // self._page_tokens : stop // self._page_tokens])
        skip_pages = (start - first * self._block_tokens) // self._page_tokens
        deadline_s = self.cache.judge.deadline_s(loaded_tokens)
        stream = self._stream(sequence, stop)
        order = LoadOrder(request, blocks, filled, skip_pages, deadline_s, is_in_step, sequence.is_latest, stream)
        self._loads.append(order)

    def _stream(self, sequence: TrackedSequence, stop: int) -> StreamOrder | None:
        """Return what is left for a streamed load, less what computing after it takes."""
        if sequence.stream is None:
            return None
        (until_s, quality), prefill = sequence.stream, self.cache.judge.prefill()
        rest_s = prefill.seconds(stop, max(stop, sequence.tokens)) if prefill is not None else 0.0
        return StreamOrder(max(0.0, until_s - rest_s - self._clock.monotonic_s()), quality)

    def plan(self, scheduled: Iterable[ScheduledRequest], step_tokens: int) -> StepCommands:
        """Return the orders of this step and forget them."""
        stores = tuple(
            order for request in scheduled for order in (*self._stores(request), *self._state_stores(request))
        )
        loads, self._loads = tuple(self._loads), []
        advice, self._advice = tuple(self._advice), []
        self._step += 1
        # A step that waits for its loads says nothing of how fast the engine computes.
        paced_tokens = 0 if any(load.is_in_step for load in loads) else step_tokens
        self._steps[self._step] = _Step(self._clock.monotonic_s(), paced_tokens)
        if len(self._steps) > STEPS_IN_FLIGHT_MAX:
            self._steps.popitem(last=False)
        return StepCommands(self._step, loads, stores, step_tokens == 0, self._heard, advice)

    def _stores(self, scheduled: ScheduledRequest) -> Iterable[StoreOrder]:
        sequence = self._sequences.get(scheduled.request)
        full = min(scheduled.computed_tokens, len(scheduled.tokens)) // self._block_tokens
        if sequence is None or full <= sequence.settled:
            return
        blocks = sequence.blocks(scheduled.tokens)[:full]
        if self._is_rough(sequence, blocks) or not sequence.may_store:
            sequence.settled = full
            return
        # With several shards all are stored at once, so that the first one speaks for all.
        known = self._found(blocks[: len(self.cache.index.match([block.ids[0].key for block in blocks]).blocks)])
        fresh = range(max(known, sequence.settled), full)
        pages = scheduled.pages() if fresh else ()
        pages_per_block = self._block_tokens // self._page_tokens
        for position in fresh:
            block = blocks[position]
            filled = tuple(pages[position * pages_per_block : (position + 1) * pages_per_block])
            for object_id in block.ids:
                self._lost.pop(object_id.key, None)
            yield StoreOrder(scheduled.request, block, filled)
            self._note_stored(block)
        sequence.settled = full

    def _state_stores(self, scheduled: ScheduledRequest) -> Iterable[StoreOrder]:
        """Order the states that the step ends with, where they are to be kept: the engine has no others."""
        sequence, tokens = self._sequences.get(scheduled.request), scheduled.computed_tokens
        full, rest = divmod(tokens, self._block_tokens)
        if sequence is None or not (self._namespaces.has_states and sequence.may_store):
            return
        if rest or tokens > len(scheduled.tokens):
            return
        is_often = 0 < self._state_every_tokens <= tokens - sequence.state_tokens
        if not (is_often or full >= sequence.last_block or full == sequence.known):
            return
        sequence.state_tokens = tokens
        block = sequence.blocks(scheduled.tokens)[full - 1]
        if all(self.cache.index.is_held(each.key) for each in block.states):
            return
        for object_id in block.states:
            self._lost.pop(object_id.key, None)
            self.cache.index.insert(object_id.namespace, [object_id.key], BlockKey(object_id.namespace))
        last = full * (self._block_tokens // self._page_tokens) - 1
        yield StoreOrder(scheduled.request, block, tuple(scheduled.pages()[last : last + 1]), is_state=True)

    def _is_rough(self, sequence: TrackedSequence, blocks: Sequence[BlockRef]) -> bool:
        """Tell whether any of the blocks is rough in the engine's pages; those after it are then.

        The engine hands pages from one request to the next by itself, also some of a block's.
        """
        if self._rough:
            leads = sequence.leads(self._page_tokens)[: sequence.rough_from]
            rough = (i for i, lead in enumerate(leads[: len(blocks)]) if lead in self._rough)
            sequence.rough_from = next(rough, sequence.rough_from)
        if sequence.rough_from is None:
            return False
        self._note_rough(sequence)
        return True

    def _note_rough(self, sequence: TrackedSequence) -> None:
        for lead in sequence.leads(self._page_tokens)[sequence.rough_from :]:
            self._rough[lead] = None
            self._rough.move_to_end(lead)
        while len(self._rough) > ROUGH_MAX:
            self._rough.popitem(last=False)

    def _note_stored(self, block: BlockRef) -> None:
        for object_id, parent in zip(block.ids, block.parents, strict=True):
            self.cache.index.insert(object_id.namespace, [object_id.key], parent)

    def heard(self, report: WorkerReport) -> None:
        """Learn from a worker: the step's duration, those of loads, and blocks that are not there after all."""
        now_s, step = self._clock.monotonic_s(), self._steps.pop(report.step, None)
        self._heard = max(self._heard, report.step)
        if step is not None:
            self.cache.judge.note_prefill(0, step.tokens, now_s - step.started_s)
        for timing in report.loads:
            self.cache.judge.note_load(timing.tokens, timing.seconds, now_s)
        for request in report.failed:
            if request in self._sequences:
                self._sequences[request].may_load = False
                # What the step itself was to store, had its load not failed, is there once it is computed again.
                self._sequences[request].settled = 0
        for request in report.rough:
            if request in self._sequences:
                sequence = self._sequences[request]
                before = sequence.rough_from
                sequence.rough_from = sequence.loaded_from if before is None else min(before, sequence.loaded_from)
                # At once: the engine may hand the pages on before this request computes again.
                self._note_rough(sequence)
        for key in report.lost:
            self.cache.index.remove(key)
            self._lost[key] = now_s
            self._lost.move_to_end(key)
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)

    def finished(self, request: str) -> None:
        """Forget a request, however it ended."""
        self._sequences.pop(request, None)
        lookup = self._lookups.pop(request, None)
        if lookup is not None:
            lookup.future.cancel()
        self._loads = [order for order in self._loads if order.request != request]

    def reset(self, epoch: bytes) -> None:
        """Serve nothing that was stored before: from now on names carry `epoch`, which nobody has used."""
        self._epoch = b"\0epoch " + epoch
        self._sequences.clear()
        self._rough.clear()

    def check(self) -> None:
        """AssertionError if anything of a finished request is left. Call it while no request runs."""
        assert not self._sequences, f"requests are still tracked: {sorted(self._sequences)}"
        assert not self._lookups
        assert not self._loads
