"""The shape of the index: runs (blocks of one prefix that were always used together) and how they hang together.

Invariant: each known key is in exactly one run, `where` names it, and a run's parent ends right before it starts. The
leading `held` blocks of a run are held, the others are remembered only; a block is held only if those before it are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtide.types import BlockKey, Namespace

# A block's tiers are the bits of one byte.
TIERS_MAX = 8
# For each tier's bit, what every mask becomes with it.
_WITH_BIT = {1 << tier: bytes(mask | 1 << tier for mask in range(256)) for tier in range(TIERS_MAX)}
# A block's attention costs as much as its matrices once this many blocks come before it (16k tokens of 256 a block,
# the order of magnitude of today's 8B models).
BLOCKS_OF_EQUAL_COST = 64
# The size of a block as large as those that an index counts its room in.
USUAL_SIZE = 1024


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks `[start, start + len(keys))` of a prefix, in the tree of their namespace.

    Index and policy share it: the last three fields belong to the policy. `uses` and `last_use` (a sequence number)
    tell of the latest use, set before the policy hears of it. `value` is the mean number of important tokens of its
    blocks, `given_cost` what recomputing one of them costs if somebody said so, `size` what room each takes.
    """

    keys: list[BlockKey]
    parent: Run | None
    start: int
    children: set[Run] = field(default_factory=lambda: _NO_RUNS)
    held: int = 0
    held_children: int = 0
    is_candidate: bool = False
    tiers: bytearray = field(init=False)
    uses: int = 0
    last_use: int = 0
    value: float = 1.0
    given_cost: float | None = None
    size: int = USUAL_SIZE
    order: int = 0
    tag: int = 0
    state: Any = None

    def __post_init__(self) -> None:
        self.tiers = bytearray(len(self.keys))

    @property
    def cost(self) -> float:
        """Return what recomputing one of its held blocks costs; if not given, by its position, a prompt's first 1."""
        if self.given_cost is not None:
            return self.given_cost
        return 1 + (self.start + self.held / 2) / BLOCKS_OF_EQUAL_COST

    def may_grow(self, depth: int) -> bool:
        """Tell whether blocks after `depth` share this run's history: stored one by one, used by nobody since."""
        return self.uses == 1 and self.stop == depth and self.held == len(self.keys) and not self.children

    def note_cost(self, cost: float | None, blocks: int) -> None:
        """Take the cost of blocks that are about to be added; the given one is the mean over all, if all gave one."""
        if cost is not None and self.given_cost is not None:
            self.given_cost += blocks / (len(self.keys) + blocks) * (cost - self.given_cost)

    @property
    def stop(self) -> int:
        """Return the position after the last block."""
        return self.start + len(self.keys)


# What most runs have below them; a set of their own would be 216 bytes. Never changed.
_NO_RUNS: set[Run] = set()


class Anchor(NamedTuple):
    """The place where a chain of keys hangs: after `key`, last of `depth` blocks; None and 0 right under the root."""

    root: Run
    key: BlockKey | None
    depth: int


class Tree:
    """Runs of blocks under one root for each namespace. The callers hold the index's lock."""

    def __init__(self) -> None:
        self._where: dict[BlockKey, Run] = {}
        self._roots: dict[Namespace, Run] = {}

    def __len__(self) -> int:
        return len(self._where)

    def run_of(self, key: BlockKey) -> Run | None:
        """Return the run that has a key."""
        return self._where.get(key)

    def known_count(self, keys: Sequence[BlockKey]) -> int:
        """Return the length of the longest leading run of known keys; right for chained keys only."""
        where = self._where
        if not keys or keys[0] not in where:
            return 0
        return bisect_left(range(len(keys)), True, lo=1, key=lambda position: keys[position] not in where)

    def anchor(self, namespace: Namespace, parent: BlockKey | None) -> Anchor | None:
        """Return where the children of `parent` hang; None if that block is not held."""
        if parent is None or bytes(parent) == namespace:
            return Anchor(self._roots.get(namespace) or Run([], None, 0), None, 0)
        run = self._where.get(parent)
        root = self._roots.get(namespace)
        if run is None or root is None:
            return None
        position = run.keys.index(parent)
        return Anchor(root, parent, run.start + position + 1) if position < run.held else None

    def keep_root(self, namespace: Namespace, root: Run) -> None:
        """Make an anchor's root the namespace's; it goes with its last block."""
        self._roots[namespace] = root
        root.state = namespace

    def checked_known_count(self, anchor: Anchor, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys are known. ValueError if known and new keys do not form one chain there."""
        known = self.known_count(keys)
        depth = anchor.depth + known
        if known and not self.is_at(keys[known - 1], depth, anchor.root):
            raise ValueError(f"block {keys[known - 1].hex()[:16]} is known, but not as block {depth} of this chain")
        fresh = keys[known:]
        if len(set(fresh)) != len(fresh) or not self._where.keys().isdisjoint(fresh):
            raise ValueError(f"the keys are no chain: some occur twice, or out of order, from block {depth} on")
        return known

    def is_at(self, key: BlockKey, depth: int, root: Run | None = None) -> bool:
        """Tell whether a known key is the last of `depth` blocks, and of that root if one is given."""
        run = self._where[key]
        if not run.start < depth <= run.start + len(run.keys) or run.keys[depth - 1 - run.start] != key:
            return False
        top = run
        while top.parent is not None:
            top = top.parent
        return root is None or top is root

    def path_of(self, key: BlockKey) -> list[Run]:
        """Return the runs from the root's child to the one that has the key."""
        run: Run | None = self._where[key]
        path = []
        while run is not None and run.parent is not None:
            path.append(run)
            run = run.parent
        path.reverse()
        return path

    def cut_behind(self, key: BlockKey, depth: int) -> Run | None:
        """Make the key, the last of `depth` blocks, end its run. Return the lower part if there was something to cut.

        The lower part keeps its identity, children included; the upper one is a new run with the same history.
        """
        lower = self._where[key]
        count = depth - lower.start
        if count == len(lower.keys):
            return None
        parent = lower.parent
        assert parent is not None
        upper = Run(lower.keys[:count], parent, lower.start)
        upper.held = min(lower.held, count)
        upper.tiers = lower.tiers[:count]
        upper.value, upper.given_cost, upper.size = lower.value, lower.given_cost, lower.size
        upper.uses, upper.last_use = lower.uses, lower.last_use
        lower.keys = lower.keys[count:]
        lower.tiers = lower.tiers[count:]
        lower.held -= upper.held
        lower.start += count
        lower.parent = upper
        upper.children = {lower}
        upper.held_children = 1 if lower.held else 0
        parent.children.discard(lower)
        parent.children.add(upper)
        self._where.update(dict.fromkeys(upper.keys, upper))
        return lower

    def grow(self, parent: Run, keys: list[BlockKey]) -> Run:
        """Hang a new run below another one; none of its blocks is held yet."""
        run = Run(keys, parent, parent.start + len(parent.keys))
        if parent.children is _NO_RUNS:
            parent.children = set()
        parent.children.add(run)
        self._where.update(dict.fromkeys(keys, run))
        return run

    def extend(self, run: Run, keys: Sequence[BlockKey], tier_bit: int) -> None:
        """Append blocks to a run that has no children."""
        assert not run.children
        run.keys.extend(keys)
        run.tiers.extend(bytes((tier_bit,)) * len(keys))
        self._where.update(dict.fromkeys(keys, run))

    def below(self, run: Run) -> list[Run]:
        """Return the run and all below it, children before their parents."""
        order = [run]
        for parent in order:
            order.extend(parent.children)
        order.reverse()
        return order

    def forget_tail(self, run: Run) -> int:
        """Forget the blocks of a childless run that are not held; return how many. An empty run leaves the tree."""
        assert not run.children
        gone = run.keys[run.held :]
        for key in gone:
            del self._where[key]
        del run.keys[run.held :], run.tiers[run.held :]
        if not run.keys:
            parent = run.parent
            assert parent is not None
            parent.children.discard(run)
            if parent.parent is None and not parent.children:
                del self._roots[parent.state]
        return len(gone)

    def runs(self) -> Iterator[Run]:
        """Yield every run, parents before their children."""
        order = [child for root in self._roots.values() for child in root.children]
        for run in order:
            order.extend(run.children)
        yield from order

    def check(self) -> None:
        """AssertionError if the tree contradicts itself."""
        count = 0
        for run in self.runs():
            count += len(run.keys)
            parent = run.parent
            assert run.keys
            assert parent is not None
            assert run in parent.children
            assert run.start == parent.stop
            assert len(run.tiers) == len(run.keys)
            assert 0 <= run.held <= len(run.keys)
            assert run.held_children == sum(1 for child in run.children if child.held)
            if run.held_children:
                assert run.held == len(run.keys)
            assert all(self._where[key] is run for key in run.keys)
        assert count == len(self._where)


def tier_bit_of(tier: int) -> int:
    """Return the bit that stands for a tier. ValueError for one that has none."""
    if not 0 <= tier < TIERS_MAX:
        raise ValueError(f"tier must be from 0 to {TIERS_MAX - 1}, got {tier}")
    return 1 << tier


def mark_tier(run: Run, first: int, bit: int) -> None:
    """Note that the blocks of a run from `first` on are in the tier of that bit too."""
    if run.tiers.count(bit, first) < len(run.tiers) - first:
        run.tiers[first:] = run.tiers[first:].translate(_WITH_BIT[bit])


# Entries of candidates that left stay in the heap until they are a majority.
_HEAP_SLACK = 64


class Use(NamedTuple):
    """One request's pass over its runs: when, how many blocks it has, how many of them were known and were held."""

    now_s: float
    blocks: int
    known_blocks: int
    held_blocks: int


class EvictionPolicy:
    """Chooses what to evict; what a subclass does not say it need not hear. Called under the index's lock alone."""

    # Evicted blocks that the index shall remember for this policy; 0 for none.
    ghost_blocks_max = 0
    # Whether the last block of a request shall be a run of its own.
    splits_tail = False

    def plan(self, blocks_max: int) -> None:
        """Note that the index holds so many blocks at most from now on, as large as they are."""

    def adopt(self, run: Run, count: int) -> None:
        """Note that `count` blocks of a run are new, none of them held; it may be a run that has others."""

    def touch(self, path: Sequence[Run], use: Use) -> None:
        """Note a use of a request's runs, first blocks first; new ones have `uses` 1. None is a candidate now."""

    def measure(self, run: Run, key: BlockKey) -> None:
        """Note that one of its blocks told the run's `size`."""

    def resize(self, run: Run, delta: int) -> None:
        """Note that `run.held` has changed by `delta`: blocks came (positive) or were evicted."""

    def split(self, upper: Run, lower: Run) -> None:
        """Note that the new run `upper` took the leading blocks of `lower`, which keeps its identity."""

    def enter(self, run: Run) -> None:
        """Note that a run may be evicted from now on."""
        raise NotImplementedError

    def leave(self, run: Run) -> None:
        """Note that a run may not be evicted any more."""
        raise NotImplementedError

    def victim(self) -> Run | None:
        """Return the candidate to shrink next; None if there is none. Changes nothing that a caller can see."""
        raise NotImplementedError

    def spared(self, run: Run) -> int:
        """Return how many leading blocks of the latest victim have to stay for now, less than it holds."""
        return 0

    def advise(self, path: Sequence[Run]) -> None:
        """Note that there is advice about the latest request that ended with the path; not a use."""

    def forget(self, run: Run, count: int) -> None:
        """Note that `count` blocks of a run, none of them held, are unknown now; with no `keys` left, so is the run."""


class HeapPolicy(EvictionPolicy):
    """Evicts the candidate of lowest priority; equal ones in the order in which they became candidates.

    A priority holds from `enter` to `leave`: every use takes the run out and puts it back.
    """

    def __init__(self) -> None:
        # (priority, number of the entry, run, the run's `order` then): another `order` now means that it left since.
        self._heap: list[tuple[float, int, Run, int]] = []
        self._entries = 0
        self._candidates = 0

    def priority(self, run: Run) -> float:
        """Return what the run is worth; lower goes first."""
        raise NotImplementedError

    def enter(self, run: Run) -> None:
        self._entries += 1
        self._candidates += 1
        run.order += 1
        heapq.heappush(self._heap, (self.priority(run), self._entries, run, run.order))

    def leave(self, run: Run) -> None:
        run.order += 1
        self._candidates -= 1
        if len(self._heap) > 2 * self._candidates + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[2].order == entry[3]]
            heapq.heapify(self._heap)

    def victim(self) -> Run | None:
        while self._heap:
            _, _, run, order = self._heap[0]
            if run.order == order:
                return run
            heapq.heappop(self._heap)
        return None


class LruPolicy(HeapPolicy):
    """Least recently used first, deepest first among those of one use: the report's two criteria.

    Deepest first follows: a run is a candidate only after those below it are gone.
    """

    def priority(self, run: Run) -> float:
        return run.last_use
