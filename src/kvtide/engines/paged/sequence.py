"""One request's tokens as blocks: refs of a growing sequence, and which of them have been taken care of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtide.engines.settings import NO_OPTIONS, StreamOrder
from kvtide.evict import Hint
from kvtide.group import part_keys
from kvtide.keys import KeyChain
from kvtide.outcomes import Why
from kvtide.store.load import MissReason
from kvtide.types import BlockKey, Namespace, ObjectId

# Of a block: what it depends on besides tokens, given its first and the token after its last; b"" for nothing.
Extra = Callable[[int, int], bytes]


class BlockRef(NamedTuple):
    """One block of a sequence, by shard: its object, the one before, and of models with states those at its end."""

    ids: tuple[ObjectId, ...]
    parents: tuple[BlockKey, ...]
    start: int
    states: tuple[ObjectId, ...] = ()


class LoadOrder(NamedTuple):
    """Fill `pages` with blocks, from `skip_pages` pages into the first one on, then with the pieces of `tail`.

    is_in_step: this step computes with them, each layer as soon as it is there; else nobody waits. is_latest: copies of
    this machine won't do. stream: how much time there is for refinements of streamed blocks; None for whole ones.
    """

    request: str
    blocks: tuple[BlockRef, ...]
    pages: tuple[int, ...]
    skip_pages: int
    deadline_s: float
    is_in_step: bool = False
    is_latest: bool = False
    stream: StreamOrder | None = None
    tail: tuple[BlockRef, ...] = ()


class StoreOrder(NamedTuple):
    """Store a block that the step completes, or the states at its end, or a piece (`is_tail`), from these pages."""

    request: str
    block: BlockRef
    pages: tuple[int, ...]
    is_state: bool = False
    is_tail: bool = False


class AdviceOrder(NamedTuple):
    """The blocks of a request's prompt, a hint about them, and blocks to bring to the fastest tier ahead of another."""

    blocks: tuple[BlockRef, ...]
    hint: Hint | None
    prefetch: tuple[BlockRef, ...] = ()


class StepCommands(NamedTuple):
    """All orders of one engine step; `is_idle` if it computes nothing, so that waiting costs nobody.

    heard: the newest step whose reports were known; engines may plan a step before they hear of the one before. held:
    what was found for requests that wait for room or for their loads; it is not to leave before the next step.
    """

    step: int
    loads: tuple[LoadOrder, ...]
    stores: tuple[StoreOrder, ...]
    is_idle: bool
    heard: int = 0
    advice: tuple[AdviceOrder, ...] = ()
    held: tuple[BlockRef, ...] = ()


class EndedLoad(NamedTuple):
    """A request's load: the tokens that came of those wanted, its seconds, and why no more came; None for all.

    is_rough: without some refinements. is_timed: its seconds say how fast loading is.
    """

    request: str
    tokens: int
    wanted_tokens: int
    seconds: float
    reason: MissReason | None
    is_rough: bool = False
    is_timed: bool = True


class WorkerReport(NamedTuple):
    """A worker's findings of a step: loads that ended, and promised blocks that are `lost`.

    is_refused: its pages are not to be used at all.
    """

    step: int
    ended: tuple[EndedLoad, ...] = ()
    lost: tuple[BlockKey, ...] = ()
    is_refused: bool = False

    def joined(self, other: WorkerReport) -> WorkerReport:
        """Return this step's findings and another worker's, or later ones."""
        is_refused = self.is_refused or other.is_refused
        return WorkerReport(self.step, self.ended + other.ended, self.lost + other.lost, is_refused)


@dataclass(slots=True)
class RequestSummary:
    """One request's tokens by what was done for them. own: in the engine's cache. ended: the least of all shards."""

    own_tokens: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    ended: EndedLoad | None = None
    saved_s: float | None = None
    computed: dict[Why, int] = field(default_factory=dict)
    stored_blocks: int = 0

    def text(self, store: str) -> str:
        """Return it as a line for a person."""
        found = [f"{self.asked_tokens} tokens asked, {self.own_tokens} more in the engine's cache"]
        found.append(f"{self.found_tokens} found in {store}" if self.found_tokens else "none found")
        if self.ended is not None:
            saved = "" if self.saved_s is None else f", {self.saved_s:.3f} s saved"
            failed = f" ({self.ended.reason.value})" if self.ended.reason else ""
            found.append(f"{self.ended.tokens} loaded{failed} in {self.ended.seconds:.3f} s{saved}")
        found += [f"{tokens} computed: {why.meaning}" for why, tokens in self.computed.items() if tokens]
        return "; ".join([*found, f"{self.stored_blocks} blocks to store"])


# The store is asked so often for blocks that another engine is about to store.
FOLLOW_EVERY_S = 0.02


def tail_namespace(namespace: Namespace, tail_tokens: int) -> Namespace:
    """Return the namespace of pieces of so many tokens, which stand behind a shard's blocks."""
    return Namespace(hashlib.sha256(b"tail" + tail_tokens.to_bytes(4, "little") + namespace).digest())


class FollowedPrefix:
    """The blocks that came of a prefix which another engine computes. next_s: when to look again (monotonic)."""

    def __init__(self, within_s: float, now_s: float) -> None:
        self.blocks = 0
        self.next_s = now_s
        self._within_s = within_s
        self._started_s = self._grown_s = now_s

    def note(self, blocks: int, now_s: float) -> None:
        """Note how many blocks are there now."""
        self.next_s = now_s + FOLLOW_EVERY_S
        if blocks > self.blocks:
            self.blocks, self._grown_s = blocks, now_s

    def is_worth(self, missing: int, compute_s: float, now_s: float) -> bool:
        """True if it pays to wait on for `missing` blocks, which would be computed in so many seconds."""
        if not missing or now_s > self._grown_s + self._within_s:
            return False
        block_s = (self._grown_s - self._started_s) / self.blocks if self.blocks else 0.0
        return missing * block_s <= compute_s + self._within_s


class TrackedSequence:
    """The blocks of a request, whose tokens may only grow, and how far they have been taken care of.

    tail_tokens: tokens of a piece of a block, 0 for whole blocks alone; those that depend on more have no pieces.
    """

    def __init__(
        self,
        namespaces: tuple[Namespace, ...],
        block_tokens: int,
        has_states: bool = False,
        extra: Extra | None = None,
        tail_tokens: int = 0,
    ) -> None:
        self.namespaces = namespaces
        self.tail_tokens = 0 if extra is not None else tail_tokens
        # Tokens are restored in multiples of this.
        self.unit_tokens = self.tail_tokens or block_tokens
        # How many tokens are known of it.
        self.tokens = 0
        # Of the states beside each shard's blocks.
        beside = namespaces if has_states else ()
        self._states = [Namespace(hashlib.sha256(b"states" + each).digest()) for each in beside]
        self._extra = extra
        self._block_tokens = block_tokens
        self._chains = [KeyChain(namespace, block_tokens) for namespace in namespaces]
        self._blocks: list[BlockRef] = []
        self._parents = tuple(BlockKey(namespace) for namespace in namespaces)
        self._all: Sequence[int] = ()
        self._leads: list[bytes] = []
        # What its request says; after a load that failed it waits for no second one.
        self.options = NO_OPTIONS
        # Of a prefix that another engine is computing.
        self.followed: FollowedPrefix | None = None
        self.prompt_tokens = 0
        # What the engine had computed itself when it last asked for a match, and the pieces that were offered then.
        self.computed_tokens = 0
        self.offered: tuple[BlockRef, ...] = ()
        # When it was first asked for a match, and whether that has an answer.
        self.asked_s = 0.0
        self.is_answered = False
        self.summary = RequestSummary()
        # Where its last load began; the first of its blocks that came rougher than the store has it, on top of which
        # nothing is stored.
        self.loaded_from = 0
        self.rough_from: int | None = None
        # Blocks that were stored, ordered to be, or found stored; the same of what is behind them.
        self.settled = 0
        self.is_tail_settled = False
        # Leading blocks that other prompts began with, and the tokens after which states were kept last.
        self.known = self.state_tokens = 0

    def blocks(self, tokens: Sequence[int]) -> list[BlockRef]:
        """Return the full blocks of `tokens`, which start with all tokens given before. Don't change the list."""
        if len(tokens) // self._block_tokens > len(self._blocks):
            fresh = list(tokens[self.tokens :])
            self.tokens, self._all = len(tokens), tokens
            extra, size = self._extra, self._block_tokens
            more = None if extra is None else lambda block: extra(block * size, (block + 1) * size)
            for keys in zip(*(chain.extend(fresh, more) for chain in self._chains), strict=True):
                ids = tuple(map(ObjectId, self.namespaces, keys))
                parts = zip(self._states, keys, strict=False)
                states = tuple(ObjectId(namespace, part_keys(namespace, [key])[0]) for namespace, key in parts)
                self._blocks.append(BlockRef(ids, self._parents, len(self._blocks) * size, states))
                self._parents = keys
        return self._blocks

    def tail(self, tokens: Sequence[int], blocks: int, stop: int) -> list[BlockRef]:
        """Return the pieces of the block behind so many full ones, before token `stop`; never all of that block.

        A piece's key goes on from that of the block before, so that it stands for all tokens up to its end.
        """
        start, size = blocks * self._block_tokens, self.tail_tokens
        count = min((stop - start) // size, self._block_tokens // size - 1) if size else 0
        if count <= 0:
            return []
        spaces = [tail_namespace(each, size) for each in self.namespaces]
        before = [each.key for each in self._blocks[blocks - 1].ids] if blocks else self.namespaces
        mine = list(tokens[start : start + count * size])
        chains = [KeyChain(Namespace(each), size).extend(mine) for each in before]
        parents, found = tuple(BlockKey(each) for each in spaces), list[BlockRef]()
        for position, keys in enumerate(zip(*chains, strict=True)):
            found.append(BlockRef(tuple(map(ObjectId, spaces, keys)), parents, start + position * size))
            parents = keys
        return found

    def leads(self, page_tokens: int) -> Sequence[bytes]:
        """Return a name of each block's first page and all before: who shares any page of a block shares that one."""
        for block in self._blocks[len(self._leads) :]:
            page = np.array(self._all[block.start : block.start + page_tokens], np.uint32)
            self._leads.append(hashlib.sha256(block.parents[0] + page.tobytes()).digest())
        return self._leads
