"""Look-ups of prompts in a store: asked in the background, remembered while a request waits, less what workers missed.

Invariant: nothing is changed by asking.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.engines.paged.sequence import BlockRef, TrackedSequence
from kvtide.group import Parts
from kvtide.store import Cache
from kvtide.types import BlockKey, ObjectId

# Answers of local tiers come within this; the engine's loop waits for no longer at a time.
ANSWER_S = 0.005
# Blocks that a worker did not find are taken as missing for so long, whatever tiers say that have not noticed yet.
LOST_S = 60.0
LOST_MAX = 1 << 16


class FoundPrefix(NamedTuple):
    """Leading blocks that seem stored, those that another prompt began with, and pieces of the block behind them."""

    blocks: int
    known: int = 0
    pieces: int = 0


class _Lookup(NamedTuple):
    asked_s: float
    future: Future[FoundPrefix]


class Lookups:
    """The look-ups of one engine's requests. Not thread-safe. Owns a thread until `close`."""

    def __init__(self, cache: Cache, clock: Clock, match_s_max: float) -> None:
        self._cache = cache
        self._clock = clock
        self._match_s_max = match_s_max
        self._asked: dict[str, _Lookup] = {}
        self._lost: OrderedDict[BlockKey, float] = OrderedDict()
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="kvtide-match")

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._asker.shutdown(wait=False, cancel_futures=True)

    def is_open(self, request: str) -> bool:
        """Tell whether a request's look-up has no answer yet."""
        return request in self._asked

    def finished(self, request: str) -> None:
        """Forget a request."""
        lookup = self._asked.pop(request, None)
        if lookup is not None:
            lookup.future.cancel()

    def ordered(self, ids: Iterable[ObjectId]) -> None:
        """Take these as stored: they are ordered to be."""
        for object_id in ids:
            self._lost.pop(object_id.key, None)

    def lost(self, keys: Iterable[BlockKey]) -> None:
        """Take these as missing for a while: workers did not find them."""
        now_s = self._clock.monotonic_s()
        for key in keys:
            self._cache.index.remove(key)
            self._lost[key] = now_s
            self._lost.move_to_end(key)
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)

    def check(self) -> None:
        """AssertionError if a look-up is left over."""
        assert not self._asked

    def find(
        self, request: str, sequence: TrackedSequence, tokens: Sequence[int], blocks: Sequence[BlockRef]
    ) -> FoundPrefix | None:
        """Return what seems stored of a prompt; None to be asked again soon.

        blocks: those of `tokens` that may be restored. An answer that is late serves the next request.
        """
        now_s = self._clock.monotonic_s()
        lookup = self._asked.get(request)
        if lookup is None:
            pieces = sequence.tail(tokens, len(blocks), len(tokens) - 1)
            if not sequence.is_latest and self._known(blocks) == len(blocks) and self.are_held(pieces):
                return FoundPrefix(len(blocks), len(blocks), len(pieces))
            lookup = _Lookup(now_s, self._asker.submit(self._match, sequence, tokens, blocks))
            self._asked[request] = lookup
        try:
            hit = lookup.future.result(ANSWER_S)
        except FutureTimeoutError:
            # Nobody waits for a slow store for long; its answer, when it comes, serves the next request.
            return None if now_s - lookup.asked_s < self._match_s_max else FoundPrefix(0)
        del self._asked[request]
        return hit

    def _known(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks the index has of every shard, without asking any tier; 0 if without states."""
        if not blocks:
            return 0
        if not all(self._cache.index.is_held(each.key) for each in blocks[-1].states):
            return 0
        shards = range(len(blocks[0].ids))
        return min(len(self._cache.index.match([block.ids[shard].key for block in blocks]).blocks) for shard in shards)

    def are_held(self, pieces: Sequence[BlockRef]) -> bool:
        """Tell whether the index has all of these, without asking any tier."""
        return all(self._cache.index.is_held(each.key) for piece in pieces for each in piece.ids)

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

    def _match(self, sequence: TrackedSequence, tokens: Sequence[int], blocks: Sequence[BlockRef]) -> FoundPrefix:
        named, shards = self._cache.tiers.named, range(len(sequence.namespaces))
        hits, is_latest = len(blocks), sequence.is_latest
        if blocks and blocks[0].states:
            rows = [Parts([named(block.ids[shard], is_latest) for block in blocks]) for shard in shards]
            states = [[named(block.states[shard], is_latest) for block in blocks] for shard in shards]
            hit = self._cache.match_parts([*rows, *(Parts(ids, 1, is_sparse=True) for ids in states)])
            return FoundPrefix(hit.blocks, hit.known)
        for shard in shards:
            hits = min(hits, self._cache.match([named(block.ids[shard], is_latest) for block in blocks[:hits]]))
        pieces = sequence.tail(tokens, hits, len(tokens) - 1)
        # Each by itself: they are no run of a prompt that a ranking should learn from.
        for shard in shards if pieces else ():
            parts = Parts([named(piece.ids[shard], is_latest) for piece in pieces], is_sparse=True)
            pieces = pieces[: self._cache.match_parts([parts]).blocks]
        return FoundPrefix(hits, pieces=len(pieces))
