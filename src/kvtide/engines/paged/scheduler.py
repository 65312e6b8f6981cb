"""The half of a connector beside the engine's scheduler: what is stored, what to load, what to store. Moves no bytes.

Invariant: what is ordered to be stored are full blocks of known tokens whose keys and values the step completes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from functools import partial
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.engines.paged.sequence import (
    AdviceOrder,
    BlockRef,
    Extra,
    FollowedPrefix,
    LoadOrder,
    RequestSummary,
    StepCommands,
    StoreOrder,
    TrackedSequence,
    WorkerReport,
)
from kvtide.engines.settings import NO_OPTIONS, RequestOptions
from kvtide.evict import Recent
from kvtide.group import Parts
from kvtide.outcomes import Choice, Why
from kvtide.store import Cache
from kvtide.store.load import MissReason
from kvtide.types import BlockKey, Namespace, ObjectId

STEPS_IN_FLIGHT_MAX = 64
# Blocks that lie rough in the engine's pages: more than any engine has.
ROUGH_MAX = 1 << 18
# Answers of local tiers come within the first; the engine's loop waits for no longer at a time, and no longer than the
# second in a step.
ANSWER_S, ANSWERS_S = 0.005, 0.05
# Blocks that a worker did not find are taken as missing for so long, whatever tiers say that have not noticed yet.
LOST_S = 60.0
LOST_MAX = 1 << 16


class ScheduledRequest(NamedTuple):
    """One request's share of a step. `pages` is asked for only if there is something to store."""

    request: str
    tokens: Sequence[int]
    computed_tokens: int
    pages: Callable[[], Sequence[int]]


@dataclass(eq=False, repr=False)
class SchedulerHalf:
    """Decides for all requests of one engine, whose scheduler calls it. Not thread-safe.

    What was ordered to be stored counts as stored: the workers load it from their queues, and tell what they dropped.
    namespaces: by a request's salt, one for each shard. state_every_tokens: states (decision 0021) are kept after so
    many tokens at the most; 0: blocks have none. tail_tokens: what a prompt has behind its last full block is stored
    in pieces of so many; 0: it is not.
    """

    cache: Cache
    _namespaces: Callable[[bytes], tuple[Namespace, ...]]
    _block_tokens: int
    _page_tokens: int
    _clock: Clock
    match_s_max: InitVar[float]
    _state_every_tokens: int = 0
    is_drafted: InitVar[bool] = False
    _tail_tokens: int = 0

    def __post_init__(self, match_s_max: float, is_drafted: bool) -> None:
        assert self._block_tokens % self._page_tokens == 0
        assert not self._tail_tokens or self._page_tokens % self._tail_tokens == 0
        self._pages_per_block = self._block_tokens // self._page_tokens
        # A draft model's last row of a block goes by the token after it.
        self._volatile_blocks = int(is_drafted)
        # A worker's pages can't be used: nothing is loaded or stored any more.
        self._is_refused = False
        self._epoch = b""
        self._sequences: dict[str, TrackedSequence] = {}
        self._loads: list[LoadOrder] = []
        self._advice: list[AdviceOrder] = []
        # What was found since the last step.
        self._held: list[BlockRef] = []
        # First pages of blocks that lie rough in the engine's pages, those of the latest requests last.
        self._rough: Recent[bytes, None] = Recent(ROUGH_MAX)
        # When a step began, and its tokens.
        self._steps: Recent[int, tuple[float, int]] = Recent(STEPS_IN_FLIGHT_MAX)
        self._step = self._heard = 0
        self._heard_s = -math.inf  # until then a step that was planned ahead has waited
        # Of several shards: the pages of loads within steps of which nobody has heard whether all shards have them.
        self._doubtful: dict[int, frozenset[int]] = {}
        self._is_warm = False
        self._counts: Counter[str] = Counter()
        self._lookups = _Lookups(self.cache, self._clock, match_s_max)

    def close(self) -> None:
        """Stop asking the store. Idempotent."""
        self._lookups.close()
        self.cache.close()

    # What to load

    def match(
        self,
        request: str,
        salt: bytes,
        tokens: Sequence[int],
        computed_tokens: int,
        options: RequestOptions = NO_OPTIONS,
        extra: Extra | None = None,
    ) -> int | None:
        """Return how many tokens after `computed_tokens` are worth loading; None to be asked again soon.

        The last token always runs: its logits are the answer's next token. Nothing is changed by asking. Options and
        `extra` hold from the request's first call on.
        """
        if self._is_refused:
            return 0
        sequence = self._sequences.get(request) or self._tracked(request, salt, tokens, options, extra)
        found = self._matched(request, sequence, tokens, computed_tokens)
        if found is not None and not sequence.is_answered:
            waited_s, sequence.is_answered = self._clock.monotonic_s() - sequence.asked_s, True
            counts = {"lookups": 1, "asked_tokens": len(tokens) - computed_tokens, "hit_tokens": found}
            self._counts.update({**counts, "lookup_seconds": waited_s})
        return found

    def _matched(
        self, request: str, sequence: TrackedSequence, tokens: Sequence[int], computed_tokens: int
    ) -> int | None:
        sequence.computed_tokens = computed_tokens
        if sequence.summary.ended is None:
            sequence.summary.own_tokens, sequence.summary.asked_tokens = computed_tokens, len(tokens) - computed_tokens
        blocks = sequence.blocks(tokens)[: (len(tokens) - 1) // self._block_tokens]
        reach = (len(tokens) - 1) // sequence.unit_tokens * sequence.unit_tokens
        if not sequence.options.may_load or reach <= computed_tokens:
            return 0
        followed = sequence.followed
        if followed is not None and self._clock.monotonic_s() < followed.next_s:
            return None
        hit = self._lookups.find(request, sequence, tokens, blocks)
        if hit is None or (followed is not None and self._is_coming(followed, blocks, hit.blocks)):
            return None
        if followed is not None:
            # A store that has fallen silent takes nothing back of what was brought.
            hit, sequence.followed = hit if hit.blocks >= followed.blocks else _Found(followed.blocks), None
        sequence.known = hit.known
        # What workers have missed lately is not restored.
        whole = self._lookups.restorable(blocks[: max(0, hit.blocks - self._volatile_blocks)])
        pieces = sequence.tail(tokens, whole, len(tokens) - 1)[: hit.pieces] if whole == hit.blocks else []
        sequence.offered = tuple(pieces[: self._lookups.unmissed(pieces)])
        fresh = whole * self._block_tokens + len(sequence.offered) * sequence.tail_tokens - computed_tokens
        # A look-up that goes on without us was given up.
        why = Why.DEADLINE if request in self._lookups.asked else Why.ABSENT
        self._count(sequence, why, reach - computed_tokens - max(0, fresh))
        sequence.summary.found_tokens = max(sequence.summary.found_tokens, fresh)
        if fresh <= 0:
            return 0
        if self._pays(sequence, fresh):
            self._held += [*blocks[: hit.blocks], *sequence.offered]
            return fresh
        self._count(sequence, Why.LINK_SLOWER, fresh)
        return 0

    def _tracked(
        self, request: str, salt: bytes, tokens: Sequence[int], options: RequestOptions, extra: Extra | None
    ) -> TrackedSequence:
        namespaces = self._namespaces(salt + self._epoch)
        tail_tokens = self._tail_tokens if options.stream is None else 0
        sequence = TrackedSequence(namespaces, self._block_tokens, bool(self._state_every_tokens), extra, tail_tokens)
        self._sequences[request] = sequence
        sequence.prompt_tokens, sequence.options = len(tokens), options
        sequence.asked_s = self._clock.monotonic_s()
        if options.follow_s:
            sequence.followed = FollowedPrefix(options.follow_s, sequence.asked_s)
        self._advice.append(AdviceOrder(tuple(sequence.blocks(tokens)), options.hint))
        return sequence

    def _is_coming(self, followed: FollowedPrefix, blocks: Sequence[BlockRef], here: int) -> bool:
        """True to wait for what another engine computes; what is here is brought to the workers meanwhile."""
        now_s, prefill, size = self._clock.monotonic_s(), self.cache.judge.prefill(), self._block_tokens
        if here > followed.blocks:
            self._advice.append(AdviceOrder((), None, tuple(blocks[followed.blocks : here])))
        followed.note(here, now_s)
        compute_s = math.inf if prefill is None else prefill.seconds(here * size, len(blocks) * size)
        return followed.is_worth(len(blocks) - here, compute_s, now_s)

    def _pays(self, sequence: TrackedSequence, tokens: int) -> bool:
        """True if loading tokens pays; where computing ends in time for a request that streams, that is exact."""
        now_s, prefill, stream = self._clock.monotonic_s(), self.cache.judge.prefill(), sequence.options.stream
        compute_s = math.inf if prefill is None else prefill.seconds(0, tokens)
        if stream is not None and now_s + compute_s <= sequence.asked_s + stream.within_s:
            return False
        return self.cache.judge.is_load_faster(tokens, now_s)

    def _count(self, sequence: TrackedSequence, why: Why, tokens: int) -> None:
        """Count once for each shard why a request's tokens are computed, however often the engine asks."""
        if why not in sequence.summary.computed:
            sequence.summary.computed[why] = tokens
            for namespace in sequence.namespaces:
                self.cache.decisions.add(Choice.RECOMPUTE, why, tokens, namespace)

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
        deadline_s, is_latest = self.cache.judge.deadline_s(loaded_tokens), sequence.options.is_latest
        stream = sequence.options.stream
        if stream is not None:
            # What is left of its time, less what computing after it takes.
            until_s, prefill = sequence.asked_s + stream.within_s, self.cache.judge.prefill()
            rest_s = prefill.seconds(stop, max(stop, sequence.tokens)) if prefill is not None else 0.0
            stream = stream._replace(within_s=max(0.0, until_s - rest_s - self._clock.monotonic_s()))
        order = LoadOrder(request, blocks, filled, skip_pages, deadline_s, is_in_step, is_latest, stream, tail)
        self._loads.append(order)

    # What a step does

    def plan(self, scheduled: Iterable[ScheduledRequest], step_tokens: int) -> StepCommands:
        """Return the orders of this step and forget them."""
        self._step += 1
        scheduled, own = list(scheduled), self._sequences
        # A step of answers alone, or one that waits for its loads, says nothing of how fast prompts are computed.
        known = [(each, own[each.request].prompt_tokens) for each in scheduled if each.request in own]
        is_answering = bool(known) and all(each.computed_tokens > prompt for each, prompt in known)
        is_waiting = any(load.is_in_step for load in self._loads)
        if is_waiting and len(self._namespaces(self._epoch)) > 1:
            pages = (page for load in self._loads if load.is_in_step for page in load.pages)
            self._doubtful[self._step] = frozenset(pages)
            if len(self._doubtful) > STEPS_IN_FLIGHT_MAX:
                # Nobody is heard: the oldest pages stay in doubt, as those of the step after theirs.
                oldest, after, *_ = self._doubtful
                self._doubtful[after] |= self._doubtful.pop(oldest)
        doubtful = frozenset[int]().union(*self._doubtful.values())
        stores = tuple(order for request in scheduled for order in self._stores(request, doubtful))
        self._lookups.waited_s = 0.0
        loads, advice, held = tuple(self._loads), tuple(self._advice), tuple(self._held)
        self._loads, self._advice, self._held = [], [], []
        self._steps[self._step] = (self._clock.monotonic_s(), 0 if is_waiting or is_answering else step_tokens)
        return StepCommands(self._step, loads, stores, step_tokens == 0, self._heard, advice, held)

    def _stores(self, scheduled: ScheduledRequest, doubtful: frozenset[int]) -> Iterable[StoreOrder]:
        sequence = self._sequences.get(scheduled.request)
        # What one shard misses is missing in what all compute on these pages, and the others don't know.
        is_sure = not doubtful or doubtful.isdisjoint(scheduled.pages())
        if sequence is not None and is_sure and not self._is_refused:
            yield from self._block_stores(sequence, scheduled)
            if self._state_every_tokens and sequence.options.may_store:
                yield from self._state_stores(sequence, scheduled)
            yield from self._tail_stores(sequence, scheduled)

    def _block_stores(self, sequence: TrackedSequence, scheduled: ScheduledRequest) -> Iterable[StoreOrder]:
        full = min(scheduled.computed_tokens, len(scheduled.tokens)) // self._block_tokens
        if full <= sequence.settled:
            return
        first, sequence.settled = sequence.settled, full
        blocks = sequence.blocks(scheduled.tokens)[:full]
        if self._is_rough(sequence, blocks) or not sequence.options.may_store:
            return
        # One shard may have lost what the others still have.
        shards = zip(*(block.ids for block in blocks), strict=True)
        known = min(self.cache.index.match([each.key for each in ids]) for ids in shards)
        fresh = blocks[max(self._lookups.unmissed(blocks[:known]), first) :]
        sequence.summary.stored_blocks += len(fresh)
        pages = scheduled.pages() if fresh else ()
        for block in fresh:
            page = block.start // self._page_tokens
            self._lookups.ordered(block.ids, block.parents)
            yield StoreOrder(scheduled.request, block, tuple(pages[page : page + self._pages_per_block]))

    def _tail_stores(self, sequence: TrackedSequence, scheduled: ScheduledRequest) -> Iterable[StoreOrder]:
        """Order what a prompt has behind its last full block, with the step that ends the prompt."""
        if sequence.is_tail_settled or scheduled.computed_tokens < sequence.prompt_tokens:
            return
        sequence.is_tail_settled = True
        blocks = sequence.prompt_tokens // self._block_tokens
        if self._is_rough(sequence, sequence.blocks(scheduled.tokens)[:blocks]) or not sequence.options.may_store:
            return
        pieces = sequence.tail(scheduled.tokens, blocks, sequence.prompt_tokens)
        fresh = [each for each in pieces if each not in sequence.offered and not self._lookups.are_held(each.ids)]
        pages = scheduled.pages() if fresh else ()
        for piece in fresh:
            page = piece.start // self._page_tokens
            self._lookups.ordered(piece.ids, piece.parents)
            yield StoreOrder(scheduled.request, piece, tuple(pages[page : page + 1]), is_tail=True)

    def _state_stores(self, sequence: TrackedSequence, scheduled: ScheduledRequest) -> Iterable[StoreOrder]:
        """Order the states that the step ends with, where they are to be kept: the engine has no others."""
        tokens = scheduled.computed_tokens
        full, rest = divmod(tokens, self._block_tokens)
        if rest or tokens > len(scheduled.tokens):
            return
        is_often = self._state_every_tokens <= tokens - sequence.state_tokens
        # The last block that another prompt of this length can restore.
        is_last = full >= (sequence.prompt_tokens - 1) // self._block_tokens
        if not (is_often or is_last or full == sequence.known):
            return
        sequence.state_tokens = tokens
        block = sequence.blocks(scheduled.tokens)[full - 1]
        if self._lookups.are_held(block.states):
            return
        self._lookups.ordered(block.states, [BlockKey(each.namespace) for each in block.states])
        last = full * self._pages_per_block - 1
        yield StoreOrder(scheduled.request, block, tuple(scheduled.pages()[last : last + 1]), is_state=True)

    def _is_rough(self, sequence: TrackedSequence, blocks: Sequence[BlockRef]) -> bool:
        """True if a block is rough in the pages, and those after it: the engine hands parts of them to others too."""
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

    def heard(self, report: WorkerReport) -> None:
        """Learn from a worker: the step's duration, those of loads, and blocks that are not there after all."""
        now_s = self._clock.monotonic_s()
        self._heard = max(self._heard, report.step)
        self._doubtful = {step: pages for step, pages in self._doubtful.items() if step > self._heard}
        self._is_refused |= report.is_refused
        if report.step in self._steps:
            started_s, tokens = self._steps.pop(report.step)
            # The first one of a block or more is slower than all others: memory and kernels are new to it.
            if self._is_warm:
                self.cache.judge.note_prefill(0, tokens, now_s - max(started_s, self._heard_s))
            self._is_warm |= tokens >= self._block_tokens
        self._heard_s = now_s
        for ended in report.ended:
            if ended.is_timed:
                tokens = ended.wanted_tokens if ended.reason is MissReason.DEADLINE else ended.tokens
                self.cache.judge.note_load(tokens, ended.seconds, now_s, ended.tokens)
            if (sequence := self._sequences.get(ended.request)) is None:
                continue
            sequence.summary.ended = min(sequence.summary.ended or ended, ended, key=lambda each: each.tokens)
            if ended.tokens < ended.wanted_tokens:
                sequence.options = sequence.options._replace(may_load=False)
                # What the step itself was to store, had its load not failed, is there once it is computed again.
                sequence.settled, sequence.is_tail_settled, sequence.offered = 0, False, ()
            if ended.is_rough:
                before = sequence.rough_from
                sequence.rough_from = sequence.loaded_from if before is None else min(before, sequence.loaded_from)
                # At once: the engine may hand the pages on before this request computes again.
                self._note_rough(sequence)
        self._lookups.lost(report.lost)

    def finished(self, request: str) -> RequestSummary | None:
        """Forget a request, however it ended; return what was done for it, None if it was never looked up."""
        sequence = self._sequences.pop(request, None)
        self._lookups.finished(request)
        self._loads = [order for order in self._loads if order.request != request]
        if sequence is None:
            return None
        summary, prefill = sequence.summary, self.cache.judge.prefill()
        if summary.ended is not None and prefill is not None:
            start = sequence.computed_tokens
            summary.saved_s = prefill.seconds(start, start + summary.ended.tokens) - summary.ended.seconds
        return summary

    def reset(self, epoch: bytes) -> None:
        """Serve nothing that was stored before: from now on names carry `epoch`, which nobody has used."""
        self._epoch = b"\0epoch " + epoch
        for request in self._sequences:
            # Its answer is about other names.
            self._lookups.finished(request)
        self._sequences.clear()
        self._rough.clear()

    def take_counts(self) -> Mapping[str, float]:
        """Return what was counted of look-ups since the last call, by name."""
        found, self._counts = self._counts, Counter()
        return found

    def check(self) -> None:
        """AssertionError if anything of a finished request is left. Call it while no request runs."""
        assert not self._sequences, f"requests are still tracked: {sorted(self._sequences)}"
        assert not self._loads
        assert not self._lookups.asked


class _Found(NamedTuple):
    """Leading blocks that seem stored, those that another prompt began with, and pieces of the block behind them."""

    blocks: int
    known: int = 0
    pieces: int = 0


class _Lookups:
    """Look-ups of prompts, asked in a thread until `close` and remembered while a request waits. Not thread-safe."""

    def __init__(self, cache: Cache, clock: Clock, match_s_max: float) -> None:
        self._cache = cache
        self._clock = clock
        self._match_s_max = match_s_max
        # In this step, for answers.
        self.waited_s = 0.0
        # By request, when it was asked, and the answer to come.
        self.asked: dict[str, tuple[float, Future[_Found]]] = {}
        self._lost: Recent[BlockKey, float] = Recent(LOST_MAX)
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="kvtide-match")

    def close(self) -> None:
        self._asker.shutdown(wait=False, cancel_futures=True)

    def finished(self, request: str) -> None:
        if request in self.asked:
            self.asked.pop(request)[1].cancel()

    def ordered(self, ids: Iterable[ObjectId], parents: Iterable[BlockKey]) -> None:
        """Take these as stored: they are ordered to be."""
        for object_id, parent in zip(ids, parents, strict=True):
            self._lost.pop(object_id.key, None)
            self._cache.index.insert(object_id.namespace, [object_id.key], parent)

    def lost(self, keys: Iterable[BlockKey]) -> None:
        """Take these as missing for a while: workers did not find them."""
        now_s = self._clock.monotonic_s()
        for key in keys:
            self._cache.index.remove(key)
            self._lost[key] = now_s

    def find(
        self, request: str, sequence: TrackedSequence, tokens: Sequence[int], blocks: Sequence[BlockRef]
    ) -> _Found | None:
        """Return what seems stored of the `blocks` of a prompt that may be restored; None to be asked again soon."""
        now_s = self._clock.monotonic_s()
        if request not in self.asked:
            pieces = sequence.tail(tokens, len(blocks), len(tokens) - 1)
            # The index has a block only with all before it; pieces stand alone.
            wanted = [each for block in (*blocks[-1:], *pieces) for each in (*block.ids, *block.states)]
            if not sequence.options.is_latest and self.are_held(wanted):
                return _Found(len(blocks), len(blocks), len(pieces))
            ask = partial(self._asker.submit, self._match, sequence, tokens, blocks)
            if (asked := self._cache.guarded("start a thread", ask, None)) is None:
                return _Found(0)
            self.asked[request] = (now_s, asked)
        asked_s, answer = self.asked[request]
        try:
            # Of many requests in front of a slow store each is asked again: those that run wait for all of them.
            hit = answer.result(min(ANSWER_S, max(0.0, ANSWERS_S - self.waited_s)))
        except TimeoutError:
            # Nobody waits for a slow store for long; its answer, when it comes, serves the next request.
            return None if now_s - asked_s < self._match_s_max else _Found(0)
        finally:
            self.waited_s += self._clock.monotonic_s() - now_s
        del self.asked[request]
        return hit

    def are_held(self, ids: Iterable[ObjectId]) -> bool:
        """True if the index has all of these, without asking any tier."""
        return all(self._cache.index.is_held(each.key) for each in ids)

    def unmissed(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks no worker has missed lately."""
        oldest_s = self._clock.monotonic_s() - LOST_S
        while self._lost and next(iter(self._lost.values())) < oldest_s:
            self._lost.popitem(last=False)
        missing = (i for i, block in enumerate(blocks) if any(each.key in self._lost for each in block.ids))
        return next(missing, len(blocks)) if self._lost else len(blocks)

    def restorable(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks of a hit can be restored, for all that workers have missed lately."""
        found = self.unmissed(blocks)
        if not found or not blocks[0].states:
            return found
        # A shorter run would need states of its own.
        is_whole = found == len(blocks) and not any(each.key in self._lost for each in blocks[-1].states)
        return found if is_whole else 0

    def _match(self, sequence: TrackedSequence, tokens: Sequence[int], blocks: Sequence[BlockRef]) -> _Found:
        named, shards = self._cache.tiers.named, range(len(sequence.namespaces))
        hits, is_latest = len(blocks), sequence.options.is_latest
        if blocks and blocks[0].states:
            rows = [Parts([named(block.ids[shard], is_latest) for block in blocks]) for shard in shards]
            states = [[named(block.states[shard], is_latest) for block in blocks] for shard in shards]
            hit = self._cache.match_parts([*rows, *(Parts(ids, 1, is_sparse=True) for ids in states)])
            return _Found(hit.blocks, hit.known)
        for shard in shards:
            hits = min(hits, self._cache.match([named(block.ids[shard], is_latest) for block in blocks[:hits]]))
        pieces = sequence.tail(tokens, hits, len(tokens) - 1)
        # Each by itself: they are no run of a prompt that a ranking should learn from.
        for shard in shards if pieces else ():
            parts = Parts([named(piece.ids[shard], is_latest) for piece in pieces], is_sparse=True)
            pieces = pieces[: self._cache.match_parts([parts]).blocks]
        return _Found(hits, pieces=len(pieces))
