"""The radix tree of block keys: what is held, what is in use, what goes next.

A key names its whole prefix, so that one table from key to run finds any prefix, and, since what is known is closed
under prefixes, bisection finds the longest one in O(log n) look-ups.
Invariant: each known key is in exactly one run, and a run's parent ends right before it starts. The leading `held`
blocks of a run are held, the others are remembered only; a block is held only if those before it are. What is held has
room unless more than that is pinned.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.index.policy import USUAL_SIZE, EvictionPolicy, Run, Use
from kvtide.types import BlockKey, Namespace, ObjectId

# A block's tiers are the bits of one byte.
TIERS_MAX = 8
# For each tier's bit, what every mask becomes with it.
_WITH_BIT = {1 << tier: bytes(mask | 1 << tier for mask in range(256)) for tier in range(TIERS_MAX)}
# What most runs have below them; a set of their own would be 216 bytes. Never changed.
_NO_RUNS: set[Run] = set()


def _new_run(keys: list[BlockKey], parent: Run | None, start: int) -> Run:
    return Run(keys, parent, start, bytearray(len(keys)), _NO_RUNS)


class Anchor(NamedTuple):
    """The place where a chain of keys hangs: after `key`, last of `depth` blocks; None and 0 right under the root."""

    root: Run
    key: BlockKey | None
    depth: int


class Tree:
    """Runs of blocks under one root for each namespace. The callers hold the index's lock."""

    def __init__(self) -> None:
        self._where: dict[BlockKey, Run] = {}
        # A root goes with its last block.
        self.roots: dict[Namespace, Run] = {}

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
            return Anchor(self.roots.get(namespace) or _new_run([], None, 0), None, 0)
        run, root = self._where.get(parent), self.roots.get(namespace)
        if run is None or root is None:
            return None
        position = run.keys.index(parent)
        return Anchor(root, parent, run.start + position + 1) if position < run.held else None

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
        is_there = run.start < depth <= run.start + len(run.keys) and run.keys[depth - 1 - run.start] == key
        return is_there and (root is None or run.root is root)

    def path_of(self, key: BlockKey) -> list[Run]:
        """Return the runs from the root's child to the one that has the key."""
        run, path = self._where[key], list[Run]()
        while run.parent is not None:
            path.append(run)
            run = run.parent
        return path[::-1]

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
        upper = _new_run(lower.keys[:count], parent, lower.start)
        upper.held = min(lower.held, count)
        upper.tiers = lower.tiers[:count]
        upper.uses, upper.last_use, upper.size = lower.uses, lower.last_use, lower.size
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
        run = _new_run(keys, parent, parent.start + len(parent.keys))
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
        return order[::-1]

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
                del self.roots[parent.state]
        return len(gone)

    def runs(self) -> Iterator[Run]:
        """Yield every run, parents before their children."""
        order = [child for root in self.roots.values() for child in root.children]
        for run in order:
            order.extend(run.children)
            yield run

    def check(self) -> None:
        """AssertionError if the tree contradicts itself."""
        for run in self.runs():
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
        assert sum(len(run.keys) for run in self.runs()) == len(self._where)


def _bit_of(tier: int) -> int:
    if not 0 <= tier < TIERS_MAX:
        raise ValueError(f"tier must be from 0 to {TIERS_MAX - 1}, got {tier}")
    return 1 << tier


class IndexStats(NamedTuple):
    """Counts of blocks that an index holds, remembers and protects now."""

    held_blocks: int
    known_blocks: int
    pinned_blocks: int


class RadixIndex:
    """The blocks that exist, of many namespaces, and those in use, under one bound and one policy. Thread-safe.

    `keys` are always chained: each names the prefix that ends with the one before.
    Memory: about `bytes_per_block` of `kvtide-lab bench index` for each block held or remembered; a policy remembers at
    most its `ghost_blocks_max` evicted blocks.
    """

    def __init__(self, clock: Clock, policy_of: Callable[[int], EvictionPolicy], blocks_max: int) -> None:
        """blocks_max: the room, in blocks of `USUAL_SIZE`. ValueError if it is negative."""
        if blocks_max < 0:
            raise ValueError(f"blocks_max must not be negative, got {blocks_max}")
        self._clock = clock
        self._room = blocks_max * USUAL_SIZE
        self._policy = policy_of(blocks_max)
        self._lock = threading.Lock()
        self._tree = Tree()
        self._held = self._held_size = 0
        # Runs with remembered blocks, those that lost one longest ago first.
        self._ghosts: OrderedDict[Run, None] = OrderedDict()
        self._ghost_blocks = 0
        # Not a Counter, which takes two to four times as long: each load pins its blocks.
        self._pins: dict[BlockKey, int] = {}
        # Candidates whose last held block turned out to be pinned, by that block.
        self._parked: dict[BlockKey, Run] = {}
        self._uses = 0

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Length of the longest leading run of held blocks. They may be evicted at any time unless pinned."""
        with self._lock:
            known = self._tree.known_count(keys)
            if not known or not self._tree.is_at(keys[known - 1], known):
                return 0
            run = self._tree.run_of(keys[known - 1])
            while run is not None and not run.held:
                run = run.parent
            return min(known, run.start + run.held) if run is not None else 0

    def insert(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None = None,
        tier: int = 0,
        size: int = USUAL_SIZE,
    ) -> list[BlockKey]:
        """Note a use of a prefix and make its blocks known in a tier; return the blocks that had to go for them.

        `parent` is the key before the first one; None or the namespace itself for a prefix from its beginning. A chain
        whose parent is not held is not inserted: nothing could match it. Blocks of the prefix itself may be among what
        had to go: those that have no place or are worth less than all others. `size` is the room that each of the new
        blocks takes. ValueError if the keys are no chain.
        """
        assert size > 0
        tier_bit = _bit_of(tier)
        evicted: list[BlockKey] = []
        with self._lock:
            anchor = self._tree.anchor(namespace, parent) if keys else None
            if anchor is None:
                return evicted
            known = self._tree.checked_known_count(anchor, keys)
            if anchor.key is None:
                self._tree.roots[namespace] = anchor.root
                anchor.root.state = namespace
            last = self._tree.run_of(anchor.key) if not known and anchor.key is not None else None
            if last is not None and last.may_grow(anchor.depth):
                self._tree.extend(last, keys, tier_bit)
                self._policy.adopt(last, len(keys))
                self._hold(last)
                self._offer(last)
            else:
                path = self._path(anchor, keys, known, size)
                self._use(path, anchor.depth, known, tier_bit)
            while (surplus := self._held_size - self._room) > 0 and (victim := self._policy.victim()) is not None:
                evicted += self._shrink(victim, -(-surplus // victim.size))
        return evicted

    def _path(self, anchor: Anchor, keys: Sequence[BlockKey], known: int, size: int) -> list[Run]:
        """Return the runs from the namespace's first block to the last key, the new ones made."""
        end = keys[known - 1] if known else anchor.key
        path: list[Run] = []
        if end is not None:
            lower = self._tree.cut_behind(end, anchor.depth + known)
            if lower is not None:
                upper = lower.parent
                assert upper is not None
                if lower.is_candidate and not lower.held:
                    self._withdraw(lower)
                if upper.held < len(upper.keys):
                    self._ghosts[upper] = None
                self._policy.split(upper, lower)
            path = self._tree.path_of(end)
        fresh = list(keys[known:])
        for part in [fresh[:-1], fresh[-1:]] if self._policy.splits_tail else [fresh]:
            if part:
                run = self._tree.grow(path[-1] if path else anchor.root, part)
                run.size = size
                self._policy.adopt(run, len(part))
                path.append(run)
        return path

    def _use(self, path: list[Run], depth: int, known: int, tier_bit: int) -> None:
        """Note a use of the path; the blocks after the first `depth` ones, `known` of them known, are in that tier."""
        now_s = self._clock.monotonic_s()
        self._uses += 1
        for run in path:
            if run.is_candidate:
                self._withdraw(run)
            run.uses += 1
            run.last_use = self._uses
        self._policy.touch(path, Use(now_s, path[-1].start + len(path[-1].keys), depth + known))
        for run in path:
            if run.held < len(run.keys):
                # What was evicted is in no tier any more.
                run.tiers[run.held :] = bytes((tier_bit,)) * (len(run.keys) - run.held)
                self._hold(run)
            first = max(0, depth - run.start)
            if run.tiers.count(tier_bit, first) < len(run.tiers) - first:
                run.tiers[first:] = run.tiers[first:].translate(_WITH_BIT[tier_bit])
        self._offer(path[-1])

    def _hold(self, run: Run) -> None:
        """Hold all blocks of a run whose parent is held."""
        delta = len(run.keys) - run.held
        if run in self._ghosts:
            del self._ghosts[run]
            self._ghost_blocks -= delta
        if not run.held and run.parent is not None:
            run.parent.held_children += 1
        self._add_held(run, delta)

    def _add_held(self, run: Run, delta: int) -> None:
        run.held += delta
        self._held += delta
        self._held_size += delta * run.size
        self._policy.resize(run, delta)

    def _offer(self, run: Run) -> None:
        """Make the run a candidate if it is a held leaf. Whether it is pinned is found out when its turn comes."""
        if run.held and not run.held_children and not run.is_candidate and run.parent is not None:
            run.is_candidate = True
            self._policy.enter(run)

    def _withdraw(self, run: Run) -> None:
        run.is_candidate = False
        self._policy.leave(run)

    def _shrink(self, run: Run, count: int) -> list[BlockKey]:
        """Evict up to `count` blocks from the end of a candidate, deepest first; none if the last one is pinned."""
        stop = run.held
        start = max(self._policy.spared(run), stop - count)
        if self._pins:
            start = next((i + 1 for i in range(stop - 1, start - 1, -1) if run.keys[i] in self._pins), start)
        if start == stop:
            self._withdraw(run)
            self._parked[run.keys[stop - 1]] = run
            return []
        evicted = self._drop(run, start)
        self._forget_surplus()
        return evicted

    def _forget_surplus(self) -> None:
        while self._ghost_blocks > self._policy.ghost_blocks_max:
            self._forget(next(iter(self._ghosts)))

    def _drop(self, run: Run, start: int) -> list[BlockKey]:
        """Stop holding blocks `[start, held)` of a run without held children; they are remembered. Deepest first."""
        dropped = run.keys[start : run.held]
        if dropped:
            self._add_held(run, -len(dropped))
            self._ghosts.setdefault(run)
            self._ghost_blocks += len(dropped)
            if not start:
                assert run.parent is not None
                if run.is_candidate:
                    self._withdraw(run)
                run.parent.held_children -= 1
                self._offer(run.parent)
        dropped.reverse()
        return dropped

    def _forget(self, run: Run) -> None:
        """Forget the blocks of a run that are not held, and whatever hangs below them."""
        for gone in self._tree.below(run) if run.children else [run]:
            del self._ghosts[gone]
            count = self._tree.forget_tail(gone)
            self._ghost_blocks -= count
            self._policy.forget(gone, count)

    def victims(self, count: int) -> list[BlockKey]:
        """Evict up to `count` blocks in the policy's order and return them; fewer if the others are in use."""
        evicted: list[BlockKey] = []
        with self._lock:
            while len(evicted) < count and (run := self._policy.victim()) is not None:
                evicted += self._shrink(run, count - len(evicted))
        return evicted

    def measure(self, key: BlockKey, size: int) -> None:
        """Note what room a block takes, and with it those that came by one request. One that is unknown is ignored."""
        with self._lock:
            run = self._tree.run_of(key)
            if run is not None and run.size != size:
                self._held_size += run.held * (size - run.size)
                run.size = size
                self._policy.measure(run, key)

    def plan(self, blocks_max: int) -> None:
        """Tell the policy that so many blocks fit by now, of the sizes that they have."""
        with self._lock:
            self._policy.plan(blocks_max)
            self._forget_surplus()

    def place(self, key: BlockKey, tier: int) -> None:
        """Note that a held block is in a tier too; not a use. Blocks that are not held are ignored."""
        tier_bit = _bit_of(tier)
        with self._lock:
            run = self._tree.run_of(key)
            position = run.keys.index(key) if run is not None else 0
            if run is not None and position < run.held:
                run.tiers[position] |= tier_bit

    def advise(self, key: BlockKey) -> None:
        """Have the policy note advice about the request that ended with a known block; not a use."""
        with self._lock:
            if self._tree.run_of(key) is not None:
                self._policy.advise(self._tree.path_of(key))

    def remove(self, key: BlockKey, tier: int | None = None) -> list[BlockKey]:
        """Drop a block from one tier or from all; if none has it then, all blocks below go too. Deepest first.

        Unknown blocks are ignored. A pin outlives it.
        """
        with self._lock:
            run = self._tree.run_of(key)
            if run is None:
                return []
            position = run.keys.index(key)
            if tier is not None:
                run.tiers[position] &= 0xFF & ~(1 << tier)
                if run.tiers[position]:
                    return []
            removed: list[BlockKey] = []
            for below in self._tree.below(run):
                removed += self._drop(below, min(below.held, position) if below is run else 0)
            if run.held < len(run.keys):
                self._forget(run)
            self._offer(run)
        return removed

    def restore(self, blocks: Iterable[tuple[ObjectId, BlockKey]], tier: int = 0) -> int:
        """Make known what a tier holds, with the parent of each, and parents first; return how many blocks that are.

        Blocks whose parent is not there are passed over.
        """
        chains, ends = list[tuple[Namespace, BlockKey, list[BlockKey]]](), dict[BlockKey, list[BlockKey]]()
        for (namespace, key), parent in blocks:
            chain = ends.pop(parent, None)
            if chain is None:
                chain = list[BlockKey]()
                chains.append((namespace, parent, chain))
            chain.append(key)
            ends[key] = chain
        for namespace, parent, chain in chains:
            self.insert(namespace, chain, parent, tier)
        return sum(self.is_held(key) for *_, chain in chains for key in chain)

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Protect blocks from eviction, once more for each call; they need not be known yet."""
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Take one pin of each block back. AssertionError if one has none."""
        with self._lock:
            for key in keys:
                count = self._pins.get(key, 0)
                assert count > 0, f"unpin of a block that is not pinned: {key.hex()}"
                if count > 1:
                    self._pins[key] = count - 1
                    continue
                del self._pins[key]
                if (parked := self._parked.pop(key, None)) is not None:
                    self._offer(parked)

    def is_held(self, key: BlockKey) -> bool:
        """Tell whether a block is held."""
        with self._lock:
            run = self._tree.run_of(key)
            return run is not None and (run.held == len(run.keys) or key in run.keys[: run.held])

    def is_pinned(self, key: BlockKey) -> bool:
        """Tell whether a block is protected from eviction."""
        with self._lock:
            return key in self._pins

    def stats(self) -> IndexStats:
        """Return the counts."""
        with self._lock:
            return IndexStats(self._held, len(self._tree), len(self._pins))

    def check(self) -> None:
        """AssertionError if the index contradicts itself."""
        with self._lock:
            self._tree.check()
            runs = list(self._tree.runs())
            assert self._held == sum(run.held for run in runs)
            assert self._held_size == sum(run.held * run.size for run in runs)
            assert self._ghosts.keys() == {run for run in runs if run.held < len(run.keys)}
            assert self._ghost_blocks == sum(len(run.keys) - run.held for run in self._ghosts)
            assert self._ghost_blocks <= self._policy.ghost_blocks_max
            assert all(count > 0 for count in self._pins.values())
            for run in runs:
                if run.is_candidate:
                    assert run.held
                    assert not run.held_children
                elif run.held and not run.held_children:
                    assert self._parked.get(run.keys[run.held - 1]) is run
