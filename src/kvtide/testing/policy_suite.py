"""Conformance of an eviction policy under an index. Inherit and give a fixture `policy_of` that returns its maker.

class TestLru(PolicySuite):
    @pytest.fixture
    def policy_of(self): ...
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvtide.clock import ManualClock
from kvtide.evict.policies import PolicyOf
from kvtide.index import RadixIndex
from kvtide.keys import block_keys
from kvtide.testing import namespace
from kvtide.types import BlockKey

__all__ = ["PolicySuite", "chain"]


def chain(*numbers: int) -> list[BlockKey]:
    """Return made-up chained keys: equal numbers from the first on give equal keys."""
    return block_keys(namespace(), numbers, 1)


def drive(index: RadixIndex, clock: ManualClock, rng: random.Random, requests: int) -> list[Sequence[BlockKey]]:
    """Insert requests of up to 12 blocks that share prefixes; return them."""
    done: list[Sequence[BlockKey]] = []
    for _ in range(requests):
        clock.advance(rng.expovariate(1 / 20))
        keys = chain(rng.randrange(3), *(rng.randrange(4) for _ in range(rng.randrange(12))))
        index.insert(namespace(), keys)
        done.append(keys)
    return done


class PolicySuite:
    """Conformance of a policy."""

    @pytest.mark.parametrize("blocks_max", [0, 1, 7, 40])
    def test_bound_and_accounts_hold_after_each_step(self, policy_of: PolicyOf, blocks_max: int) -> None:
        clock, rng = ManualClock(), random.Random(blocks_max)
        index = RadixIndex(clock, policy_of, blocks_max)
        for _ in range(60):
            drive(index, clock, rng, 3)
            index.check()
            assert index.stats().held_blocks <= blocks_max

    def test_what_it_returns_is_what_it_no_longer_holds(self, policy_of: PolicyOf) -> None:
        clock, rng, held = ManualClock(), random.Random(1), set[BlockKey]()
        index = RadixIndex(clock, policy_of, 20)
        for _ in range(200):
            keys = chain(rng.randrange(3), *(rng.randrange(3) for _ in range(rng.randrange(8))))
            held.update(keys)
            held.difference_update(index.insert(namespace(), keys))
            leading = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            assert index.match(keys) == leading
            assert len(held) == index.stats().held_blocks

    def test_evicts_deepest_block_of_a_prefix_first(self, policy_of: PolicyOf) -> None:
        index = RadixIndex(ManualClock(), policy_of, 8)
        keys = chain(*range(8))
        index.insert(namespace(), keys)
        assert index.victims(8) == keys[::-1]

    def test_never_evicts_a_pinned_prefix(self, policy_of: PolicyOf) -> None:
        clock, rng = ManualClock(), random.Random(2)
        index = RadixIndex(clock, policy_of, 12)
        pinned = chain(9, 9, 9, 9)
        index.pin(pinned)
        index.insert(namespace(), pinned)
        drive(index, clock, rng, 100)
        assert index.match(pinned) == 4
        index.unpin(pinned)
        index.check()
        assert set(pinned) <= set(index.victims(12))

    def test_holds_on_to_what_is_used_all_the_time(self, policy_of: PolicyOf) -> None:
        clock, rng = ManualClock(), random.Random(3)
        index = RadixIndex(clock, policy_of, 64)
        hot, hits = chain(7, 7, 7, 7), 0
        for number in range(400):
            clock.advance(5.0)
            hits += index.match(hot) == 4
            index.insert(namespace(), hot)
            index.insert(namespace(), chain(100 + number, *(rng.randrange(9) for _ in range(5))))
        assert hits >= 360

    def test_remembers_no_more_than_it_says(self, policy_of: PolicyOf) -> None:
        clock = ManualClock()
        index = RadixIndex(clock, policy_of, 16)
        for number in range(300):
            clock.advance(1.0)
            index.insert(namespace(), chain(number, 1, 2, 3, 4))
        stats = index.stats()
        assert stats.known_blocks <= stats.held_blocks + policy_of(16).ghost_blocks_max
