"""The half of a connector beside the engine's scheduler: what is stored, what to load, what to store. Moves no bytes.

Invariant: what is ordered to be stored are full blocks of known tokens whose keys and values the step completes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.engines.paged.lookups import FoundPrefix, Lookups
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
from kvtide.outcomes import Choice, Decided, Why
from kvtide.store import Cache
from kvtide.types import BlockKey, Namespace

STEPS_IN_FLIGHT_MAX = 64
# Blocks that lie rough in the engine's pages: more than any engine has.
ROUGH_MAX = 1 << 18


class ScheduledRequest(NamedTuple):
    """One request's share of a step. `pages` is asked for only if there is something to store."""

    request: str
    tokens: Sequence[int]
    computed_tokens: int
    pages: Callable[[], Sequence[int]]


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
        tail_tokens: int = 0,
    ) -> None:
        """tail_tokens: what a prompt has behind its last full block is stored in pieces of so many; 0: it is not."""
        assert block_tokens % page_tokens == 0
        assert not tail_tokens or page_tokens % tail_tokens == 0
        self.cache = cache
        self._namespaces = namespaces
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._clock = clock
        self._state_every_tokens = state_every_tokens
        # A draft model's last row of a block goes by the token after it.
        self._volatile_blocks = int(is_drafted)
        self._tail_tokens = tail_tokens
        self._epoch = b""
        self._sequences: dict[str, TrackedSequence] = {}
        self._loads: list[LoadOrder] = []
        self._advice: list[AdviceOrder] = []
        # First pages of blocks that lie rough in the engine's pages, those of the latest requests last.
        self._rough: OrderedDict[bytes, None] = OrderedDict()
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._step = self._heard = 0
        self._lookups = Lookups(cache, clock, match_s_max)

    def close(self) -> None:
        """Stop asking the store. Idempotent."""
        self._lookups.close()
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
            tail_tokens = self._tail_tokens if options.stream is None else 0
            sequence = TrackedSequence(namespaces, self._block_tokens, has_states, extra, tail_tokens)
            self._sequences[request] = sequence
            sequence.prompt_tokens = len(tokens)
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
        reach = (len(tokens) - 1) // sequence.unit_tokens * sequence.unit_tokens
        if not sequence.may_load or reach <= computed_tokens:
            return 0
        if sequence.followed is not None and self._clock.monotonic_s() < sequence.followed.next_s:
            return None
        hit, followed = self._lookups.find(request, sequence, tokens, blocks), sequence.followed
        if hit is None or (followed is not None and self._is_coming(followed, blocks, hit.blocks)):
            return None
        if followed is not None:
            # A store that has fallen silent takes nothing back of what was brought.
            hit, sequence.followed = hit if hit.blocks >= followed.blocks else FoundPrefix(followed.blocks), None
        sequence.known = hit.known
        fresh = self._restored_tokens(sequence, tokens, blocks, hit) - computed_tokens
        # A look-up that goes on without us was given up.
        why = Why.DEADLINE if self._lookups.is_open(request) else Why.ABSENT
        self._count(sequence, Decided(Choice.RECOMPUTE, why), reach - computed_tokens - max(0, fresh))
        if fresh <= 0 or self._pays(sequence, fresh):
            return max(0, fresh)
        self._count(sequence, Decided(Choice.RECOMPUTE, Why.LINK_SLOWER), fresh)
        return 0

    def _restored_tokens(
        self, sequence: TrackedSequence, tokens: Sequence[int], blocks: Sequence[BlockRef], hit: FoundPrefix
    ) -> int:
        """Return up to which token a hit can be restored, for all that workers have missed lately."""
        whole = self._lookups.restorable(blocks[: max(0, hit.blocks - self._volatile_blocks)])
        pieces = sequence.tail(tokens, whole, len(tokens) - 1)[: hit.pieces] if whole == hit.blocks else []
        sequence.offered = tuple(pieces[: self._lookups.unmissed(pieces)])
        return whole * self._block_tokens + len(sequence.offered) * sequence.tail_tokens

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

    def _count(self, sequence: TrackedSequence, decided: Decided, tokens: int) -> None:
        """Count a decision about a request once for each shard, however often the engine asks."""
        if decided not in sequence.counted:
            sequence.counted.add(decided)
            for namespace in sequence.namespaces:
                self.cache.decisions.add(*decided, tokens, namespace)

    def allocated(self, request: str, pages: Sequence[int], loaded_tokens: int, is_in_step: bool = False) -> None:
        """Order the load that the last match offered, into the pages that the request got for it."""
        sequence = self._sequences[request]
        start = sequence.computed_tokens
        stop = start + loaded_tokens
        assert start % self._page_tokens == 0
        assert stop % sequence.unit_tokens == 0
        first = sequence.loaded_from = start // self._block_tokens
        blocks = tuple(sequence.blocks(())[first : stop // self._block_tokens])
        # What the engine has by itself may reach into them.
        tail = tuple(piece for piece in sequence.offered if piece.start >= start)
        filled = tuple(pages[start // self._page_tokens : -(-stop // self._page_tokens)])
        skip_pages = (start - first * self._block_tokens) // self._page_tokens if blocks else 0
        deadline_s = self.cache.judge.deadline_s(loaded_tokens)
        stream = self._stream(sequence, stop)
        order = LoadOrder(request, blocks, filled, skip_pages, deadline_s, is_in_step, sequence.is_latest, stream, tail)
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
            order
            for request in scheduled
            for order in (*self._stores(request), *self._state_stores(request), *self._tail_stores(request))
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
        known = len(self.cache.index.match([block.ids[0].key for block in blocks]).blocks)
        known = self._lookups.unmissed(blocks[:known])
        fresh = range(max(known, sequence.settled), full)
        pages = scheduled.pages() if fresh else ()
        pages_per_block = self._block_tokens // self._page_tokens
        for position in fresh:
            block = blocks[position]
            filled = tuple(pages[position * pages_per_block : (position + 1) * pages_per_block])
            self._lookups.ordered(block.ids)
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
        self._lookups.ordered(block.states)
        for object_id in block.states:
            self.cache.index.insert(object_id.namespace, [object_id.key], BlockKey(object_id.namespace))
        last = full * (self._block_tokens // self._page_tokens) - 1
        yield StoreOrder(scheduled.request, block, tuple(scheduled.pages()[last : last + 1]), is_state=True)

    def _tail_stores(self, scheduled: ScheduledRequest) -> Iterable[StoreOrder]:
        """Order what a prompt has behind its last full block, with the step that ends the prompt."""
        sequence = self._sequences.get(scheduled.request)
        if sequence is None or sequence.is_tail_settled or scheduled.computed_tokens < sequence.prompt_tokens:
            return
        sequence.is_tail_settled = True
        blocks = sequence.prompt_tokens // self._block_tokens
        if self._is_rough(sequence, sequence.blocks(scheduled.tokens)[:blocks]) or not sequence.may_store:
            return
        pieces = sequence.tail(scheduled.tokens, blocks, sequence.prompt_tokens)
        fresh = [piece for piece in pieces if not self._lookups.are_held([piece])]
        pages = scheduled.pages() if fresh else ()
        for piece in fresh:
            self._lookups.ordered(piece.ids)
            page = pages[piece.start // self._page_tokens]
            yield StoreOrder(scheduled.request, piece, (page,), is_tail=True)
            self._note_stored(piece)

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
                self._sequences[request].is_tail_settled = False
        for request in report.rough:
            if request in self._sequences:
                sequence = self._sequences[request]
                before = sequence.rough_from
                sequence.rough_from = sequence.loaded_from if before is None else min(before, sequence.loaded_from)
                # At once: the engine may hand the pages on before this request computes again.
                self._note_rough(sequence)
        self._lookups.lost(report.lost)

    def finished(self, request: str) -> None:
        """Forget a request, however it ended."""
        self._sequences.pop(request, None)
        self._lookups.finished(request)
        self._loads = [order for order in self._loads if order.request != request]

    def reset(self, epoch: bytes) -> None:
        """Serve nothing that was stored before: from now on names carry `epoch`, which nobody has used."""
        self._epoch = b"\0epoch " + epoch
        self._sequences.clear()
        self._rough.clear()

    def check(self) -> None:
        """AssertionError if anything of a finished request is left. Call it while no request runs."""
        assert not self._sequences, f"requests are still tracked: {sorted(self._sequences)}"
        self._lookups.check()
        assert not self._loads
