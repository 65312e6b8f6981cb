"""The radix tree of block keys: what is held, what is in use, what goes next.

A key names its whole prefix, so that one table from key to run finds any prefix, and, since what is known is closed
under prefixes, bisection finds the longest one in O(log n) look-ups.
Invariant: a block is held only if all blocks before it are; held <= blocks_max unless more than that is pinned.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from kvtide.clock import Clock
from kvtide.index.base import IndexStats, ListedBlock, Match, Rebuild, RestoreReport
from kvtide.index.ledger import Account, Ledger, Rules
from kvtide.index.policy import EvictionPolicy, Use
from kvtide.index.run import Run
from kvtide.index.tree import TIERS_MAX, Anchor, Tree, mark_tier, tier_bit_of, tier_blocks
from kvtide.types import BlockKey, Namespace

_NO_RULES = Rules()


class RadixIndex:
    """Blocks of many namespaces under one bound and one policy. Safe to use from several threads.

    Memory: about `bytes_per_block` of `kvtide-lab bench index` for each block held or remembered; a policy remembers at
    most its `ghost_blocks_max` evicted blocks.
    """

    def __init__(
        self, clock: Clock, policy_of: Callable[[int], EvictionPolicy], blocks_max: int, rules: Rules = _NO_RULES
    ) -> None:
        self._clock = clock
        self._ttl_s = rules.ttl_s
        self._lock = threading.Lock()
        self._ledger = Ledger(policy_of, blocks_max, rules)
        self._tree = Tree()
        self._pins: dict[BlockKey, int] = {}
        # Candidates whose last held block turned out to be pinned, by that block.
        self._parked: dict[BlockKey, Run] = {}
        # All runs, least recently used first and children before parents; kept for the TTL only.
        self._by_use: OrderedDict[Run, None] = OrderedDict()
        self._uses = 0

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Find the longest leading run of held blocks, and of those in each tier."""
        with self._lock:
            known = self._tree.known_count(keys)
            if not known or not self._tree.is_at(keys[known - 1], known):
                return Match((), (0,) * TIERS_MAX, b"")
            oldest_s = self._oldest_s()
            count, masks = 0, bytearray()
            for run in self._tree.path_of(keys[known - 1]):
                if run.last_s <= oldest_s or not run.held:
                    break
                count = min(known, run.start + run.held)
                masks += run.tiers[: count - run.start]
                if run.held < len(run.keys):
                    break
        return Match(tuple(keys[:count]), tier_blocks(masks), bytes(masks))

    def _oldest_s(self) -> float:
        return float("-inf") if self._ttl_s is None else self._clock.monotonic_s() - self._ttl_s

    def insert(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None = None,
        tier: int = 0,
        priority: int = 0,
        value: float = 1.0,
        cost: float | None = None,
    ) -> list[BlockKey]:
        """Note a use of a prefix and make its blocks known in a tier; return the blocks that had to go for them.

        Blocks of the prefix itself may be among these: those that have no place or are worth less than all others.
        Higher `priority` goes later; `value` is the mean number of important tokens of the new blocks; costs: `Index`.
        """
        tier_bit = tier_bit_of(tier)
        if cost is not None and not cost > 0:
            raise ValueError(f"cost must be positive, got {cost}")
        evicted: list[BlockKey] = []
        with self._lock:
            self._expire(evicted)
            anchor = self._tree.anchor(namespace, parent) if keys else None
            if anchor is None:
                return evicted
            known = self._tree.checked_known_count(anchor, keys)
            self._tree.keep_root(namespace, anchor.root)
            account = self._ledger.account_of(namespace, priority)
            last = self._tree.run_of(anchor.key) if not known and anchor.key is not None else None
            if last is not None and last.may_grow(anchor.depth, account):
                last.note_cost(cost, len(keys))
                self._tree.extend(last, keys, tier_bit)
                account.policy.adopt(last, len(keys))
                self._hold(last)
                self._offer(last)
            else:
                path = self._path(anchor, keys, known, account, value, cost)
                self._use(path, anchor.depth, known, tier_bit)
            self._enforce(namespace, evicted)
        return evicted

    def _path(
        self, anchor: Anchor, keys: Sequence[BlockKey], known: int, account: Account, value: float, cost: float | None
    ) -> list[Run]:
        """Return the runs from the namespace's first block to the last key, the new ones made."""
        end = keys[known - 1] if known else anchor.key
        path: list[Run] = []
        if end is not None:
            lower = self._tree.cut_behind(end, anchor.depth + known)
            if lower is not None:
                self._note_split(lower)
            path = self._tree.path_of(end)
        for run in path:
            if run.account.priority < account.priority:
                self._move(run, account)
        fresh = list(keys[known:])
        for part in [fresh[:-1], fresh[-1:]] if account.policy.splits_tail else [fresh]:
            if part:
                run = self._tree.grow(path[-1] if path else anchor.root, part)
                run.account, run.value, run.given_cost = account, value, cost
                account.policy.adopt(run, len(part))
                path.append(run)
        return path

    def _note_split(self, lower: Run) -> None:
        upper = lower.parent
        assert upper is not None
        if lower.is_candidate and not lower.held:
            self._withdraw(lower)
        if upper.held < len(upper.keys):
            lower.account.ghosts[upper] = None
        if self._ttl_s is not None:
            self._by_use[upper] = None
        lower.account.policy.split(upper, lower)

    def _use(self, path: list[Run], depth: int, known: int, tier_bit: int) -> None:
        """Note a use of the path; the blocks behind the first `depth` ones, `known` of them known, are in that tier."""
        now_s = self._clock.monotonic_s()
        self._uses += 1
        held = 0
        for run in path:
            if run.is_candidate:
                self._withdraw(run)
            if run.start == held:
                held += run.held
            run.uses += 1
            run.last_s = now_s
            run.last_use = self._uses
        use = Use(now_s, path[-1].stop, depth + known, held)
        # A prefix that more urgent requests use has a policy of its own.
        for account, runs in groupby(path, key=attrgetter("account")):
            account.policy.touch(list(runs), use)
        for run in path:
            if run.held < len(run.keys):
                # What was evicted is in no tier any more.
                run.tiers[run.held :] = bytes((tier_bit,)) * (len(run.keys) - run.held)
                self._hold(run)
            mark_tier(run, max(0, depth - run.start), tier_bit)
        if self._ttl_s is not None:
            for run in reversed(path):
                self._by_use[run] = None
                self._by_use.move_to_end(run)
        self._offer(path[-1])

    def _hold(self, run: Run) -> None:
        """Hold all blocks of a run whose parent is held."""
        account = run.account
        delta = len(run.keys) - run.held
        if run in account.ghosts:
            del account.ghosts[run]
            account.ghost_blocks -= delta
        if not run.held and run.parent is not None:
            run.parent.held_children += 1
        self._add_held(run, delta)

    def _add_held(self, run: Run, delta: int) -> None:
        run.held += delta
        run.account.held += delta
        self._ledger.held += delta
        run.account.policy.resize(run, delta)

    def _offer(self, run: Run) -> None:
        """Make the run a candidate if it is a held leaf. Whether it is pinned is found out when its turn comes."""
        if run.held and not run.held_children and not run.is_candidate and run.parent is not None:
            run.is_candidate = True
            run.account.policy.enter(run)

    def _withdraw(self, run: Run) -> None:
        run.is_candidate = False
        run.account.policy.leave(run)

    def _move(self, run: Run, account: Account) -> None:
        """Put a run of lower priority under the account of the request that uses it now."""
        old = run.account
        if run.is_candidate:
            self._withdraw(run)
        ghosts = len(run.keys) - run.held
        if run in old.ghosts:
            del old.ghosts[run]
            old.ghost_blocks -= ghosts
            account.ghosts[run] = None
            account.ghost_blocks += ghosts
        held = run.held
        self._add_held(run, -held)
        old.policy.forget(run, len(run.keys))
        run.account = account
        account.policy.adopt(run, len(run.keys))
        self._add_held(run, held)

    def _enforce(self, namespace: Namespace, evicted: list[BlockKey]) -> None:
        over, accounts = self._ledger.excess(namespace)
        self._collect(over, accounts, evicted)
        over = self._ledger.held - self._ledger.blocks_max
        if over > 0:
            self._collect(over, self._ledger.payers(), evicted)

    def _collect(self, count: int, accounts: Sequence[Account], evicted: list[BlockKey]) -> None:
        for account in accounts:
            while count > 0:
                run = account.policy.victim()
                if run is None:
                    break
                keys = self._shrink(run, count)
                evicted += keys
                count -= len(keys)

    def _shrink(self, run: Run, count: int) -> list[BlockKey]:
        """Evict up to `count` blocks from the end of a candidate, deepest first; none if the last one is pinned."""
        stop = run.held
        start = max(0, stop - count)
        if self._pins:
            start = next((i + 1 for i in range(stop - 1, start - 1, -1) if run.keys[i] in self._pins), start)
        if start == stop:
            self._withdraw(run)
            self._parked[run.keys[stop - 1]] = run
            return []
        evicted = self._drop(run, start)
        self._trim(run.account)
        return evicted

    def _drop(self, run: Run, start: int) -> list[BlockKey]:
        """Stop holding blocks `[start, held)` of a run without held children; they are remembered. Deepest first."""
        dropped = run.keys[start : run.held]
        if dropped:
            self._add_held(run, -len(dropped))
            run.account.ghosts.setdefault(run)
            run.account.ghost_blocks += len(dropped)
            if not start:
                assert run.parent is not None
                if run.is_candidate:
                    self._withdraw(run)
                run.parent.held_children -= 1
                self._offer(run.parent)
        dropped.reverse()
        return dropped

    def _trim(self, account: Account) -> None:
        while account.ghost_blocks > account.policy.ghost_blocks_max:
            self._forget(next(iter(account.ghosts)))

    def _forget(self, run: Run) -> None:
        """Forget the blocks of a run that are not held, and whatever hangs below them."""
        for gone in self._tree.below(run) if run.children else [run]:
            account = gone.account
            del account.ghosts[gone]
            count = self._tree.forget_tail(gone)
            account.ghost_blocks -= count
            account.policy.forget(gone, count)
            if not gone.keys:
                self._by_use.pop(gone, None)

    def _expire(self, evicted: list[BlockKey]) -> None:
        oldest_s = self._oldest_s()
        put_back: list[Run] = []
        while self._by_use:
            run = next(iter(self._by_use))
            if run.last_s > oldest_s:
                break
            del self._by_use[run]
            self._offer(run)
            if run.is_candidate:
                evicted += self._shrink(run, run.held)
            if run.held:
                put_back.append(run)
        for run in put_back:
            # In use, or something below it is: as good as used now.
            run.last_s = self._clock.monotonic_s()
            self._by_use[run] = None

    def victims(self, count: int) -> list[BlockKey]:
        """Evict up to `count` blocks in the policy's order and return them; fewer if the others are in use."""
        evicted: list[BlockKey] = []
        with self._lock:
            self._expire(evicted)
            self._collect(count - len(evicted), self._ledger.payers(), evicted)
        return evicted

    def place(self, key: BlockKey, tier: int) -> None:
        """Note that a held block is in a tier too; not a use. Blocks that are not held are ignored."""
        bit = tier_bit_of(tier)
        with self._lock:
            run = self._tree.run_of(key)
            position = run.keys.index(key) if run is not None else 0
            if run is not None and position < run.held:
                run.tiers[position] |= bit

    def remove(self, key: BlockKey, tier: int | None = None) -> list[BlockKey]:
        """Drop a block from one tier or from all; if none has it then, all blocks below go too. Deepest first."""
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

    def restore(self, records: Iterable[ListedBlock], tier: int = 0) -> RestoreReport:
        """Make known what a tier lists, in any order; blocks whose parent is not listed are passed over."""
        rebuild, restored = Rebuild(records), 0
        for namespace, parent, chain in rebuild.chains():
            self.insert(namespace, chain, parent, tier)
            restored += len(chain)
        return RestoreReport(restored, rebuild.listed - restored)

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Protect blocks from eviction, once more for each call; they need not be known yet."""
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Take one pin of each block back."""
        with self._lock:
            for key in keys:
                count = self._pins.get(key, 0)
                assert count > 0, f"unpin of a block that is not pinned: {key.hex()}"
                if count > 1:
                    self._pins[key] = count - 1
                    continue
                del self._pins[key]
                parked = self._parked.pop(key, None)
                if parked is not None:
                    self._offer(parked)

    def is_held(self, key: BlockKey) -> bool:
        """Tell whether a block is held."""
        with self._lock:
            run = self._tree.run_of(key)
            return run is not None and run.keys.index(key) < run.held

    def is_pinned(self, key: BlockKey) -> bool:
        """Tell whether a block is protected from eviction."""
        with self._lock:
            return key in self._pins

    def stats(self) -> IndexStats:
        """Return the counts."""
        with self._lock:
            return IndexStats(self._ledger.held, len(self._tree), len(self._pins))

    def check(self) -> None:
        """AssertionError if the index contradicts itself."""
        with self._lock:
            self._tree.check()
            runs = list(self._tree.runs())
            self._ledger.check(runs)
            assert all(count > 0 for count in self._pins.values())
            for run in runs:
                if run.is_candidate:
                    assert run.held
                    assert not run.held_children
                elif run.held and not run.held_children:
                    assert self._parked.get(run.keys[run.held - 1]) is run
            if self._ttl_s is not None:
                assert self._by_use.keys() >= {run for run in runs if run.held}
