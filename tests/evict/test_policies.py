from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from kvtide.clock import ManualClock
from kvtide.evict.policies import PolicyOf
from kvtide.index import RadixIndex
from kvtide.testing import chain, namespace
from kvtide.types import BlockKey
from kvtide_lab.sim.policies import POLICIES, policy_named


@pytest.fixture(params=POLICIES)
def policy_of(request: pytest.FixtureRequest) -> PolicyOf:
    return policy_named(request.param)


def drive(index: RadixIndex, clock: ManualClock, rng: random.Random, requests: int) -> list[Sequence[BlockKey]]:
    """Insert requests of up to 12 blocks that share prefixes; return them."""
    done: list[Sequence[BlockKey]] = []
    for _ in range(requests):
        clock.advance(rng.expovariate(1 / 20))
        keys = chain(rng.randrange(3), *(rng.randrange(4) for _ in range(rng.randrange(12))))
        index.insert(namespace(), keys)
        done.append(keys)
    return done


@pytest.mark.parametrize("blocks_max", [0, 1, 7, 40])
def test_bound_and_accounts_hold_after_each_step(policy_of: PolicyOf, blocks_max: int) -> None:
    clock, rng = ManualClock(), random.Random(blocks_max)
    index = RadixIndex(clock, policy_of, blocks_max)
    for _ in range(60):
        drive(index, clock, rng, 3)
        index.check()
        assert index.stats().held_blocks <= blocks_max


def test_what_it_returns_is_what_it_no_longer_holds(policy_of: PolicyOf) -> None:
    clock, rng, held = ManualClock(), random.Random(1), set[BlockKey]()
    index = RadixIndex(clock, policy_of, 20)
    for _ in range(200):
        keys = chain(rng.randrange(3), *(rng.randrange(3) for _ in range(rng.randrange(8))))
        held.update(keys)
        held.difference_update(index.insert(namespace(), keys))
        leading = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        assert index.match(keys) == leading
        assert len(held) == index.stats().held_blocks


def test_evicts_deepest_block_of_a_prefix_first(policy_of: PolicyOf) -> None:
    index = RadixIndex(ManualClock(), policy_of, 8)
    keys = chain(*range(8))
    index.insert(namespace(), keys)
    assert index.victims(8) == keys[::-1]


def test_never_evicts_a_pinned_prefix(policy_of: PolicyOf) -> None:
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


def test_holds_on_to_what_is_used_all_the_time(policy_of: PolicyOf) -> None:
    clock, rng = ManualClock(), random.Random(3)
    index = RadixIndex(clock, policy_of, 64)
    hot, hits = chain(7, 7, 7, 7), 0
    for number in range(400):
        clock.advance(5.0)
        hits += index.match(hot) == 4
        index.insert(namespace(), hot)
        index.insert(namespace(), chain(100 + number, *(rng.randrange(9) for _ in range(5))))
    assert hits >= 360


def test_remembers_no_more_than_it_says(policy_of: PolicyOf) -> None:
    clock = ManualClock()
    index = RadixIndex(clock, policy_of, 16)
    for number in range(300):
        clock.advance(1.0)
        index.insert(namespace(), chain(number, 1, 2, 3, 4))
    stats = index.stats()
    assert stats.known_blocks <= stats.held_blocks + policy_of(16).ghost_blocks_max


def test_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="expected one of lru, s3fifo"):
        policy_named("clock")


def indexed(policy: str, blocks_max: int, prompts: Iterable[tuple[int, ...]]) -> tuple[RadixIndex, ManualClock]:
    clock = ManualClock()
    index = RadixIndex(clock, policy_named(policy), blocks_max)
    for prompt in prompts:
        clock.advance(1.0)
        index.insert(namespace(), chain(*prompt))
    return index, clock


def held(index: RadixIndex, *prompts: int) -> list[bool]:
    return [bool(index.match(chain(prompt))) for prompt in prompts]


def test_lru_evicts_the_least_recently_used() -> None:
    index, _ = indexed("lru", 3, [(1,), (2,), (3,), (1,), (4,)])
    assert held(index, 1, 2, 3, 4) == [True, False, True, True]


def test_lfu_keeps_the_frequent_over_the_recent() -> None:
    index, _ = indexed("lfu", 2, [(1,), (1,), (2,), (3,)])
    assert held(index, 1, 2, 3) == [True, False, True]


def test_slru_keeps_what_was_used_twice_through_a_scan() -> None:
    index, _ = indexed("slru", 10, [(1,), (1,), *((n,) for n in range(10, 40))])
    assert held(index, 1, 10, 39) == [True, False, True]


def test_slru_bounds_what_it_protects() -> None:
    index, _ = indexed("slru", 10, [(n,) for n in range(10) for _ in range(2)])
    index.insert(namespace(), chain(99))
    assert held(index, 0, 1, 9, 99) == [False, True, True, True]


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    index, _ = indexed("arc", 4, [(1,), (1,), (2,), (2,), *((n,) for n in range(10, 30))])
    assert held(index, 1, 2) == [True, True]


def test_arc_gives_room_to_recency_after_early_evictions() -> None:
    frequent = [(n,) for n in (1, 2, 3, 4) for _ in range(2)]
    index, _ = indexed("arc", 4, [*frequent, *((n,) for n in (10, 11, 10, 11, 12, 13, 12, 13))])
    assert sum(held(index, 1, 2, 3, 4)) < 3


def test_s3fifo_drops_what_is_used_once_before_the_rest() -> None:
    index, _ = indexed("s3fifo", 10, [(1,), (1,), *((n,) for n in range(10, 40))])
    assert held(index, 1, 10) == [True, False]


def test_s3fifo_takes_what_comes_back_into_the_main_queue() -> None:
    index, _ = indexed("s3fifo", 10, [*((n,) for n in range(11)), (0,), *((n,) for n in range(20, 40))])
    assert held(index, 0, 1) == [True, False]


def test_sieve_spares_what_was_used_since_the_hand_passed() -> None:
    index, _ = indexed("sieve", 3, [(1,), (2,), (3,), (1,), (4,)])
    assert held(index, 1, 2, 3, 4) == [True, False, True, True]


def test_gdsf_keeps_what_costs_more_to_recompute() -> None:
    index, _ = indexed("gdsf", 201, [tuple(range(200)), (500,), (501,)])
    assert held(index, 500, 501) == [False, True]
    assert index.match(chain(*range(200))) == 200


def test_reuse_learns_that_one_kind_of_prompt_never_returns() -> None:
    # Sessions of four blocks return every 100 s for eight turns; single prompts of 40 blocks never do.
    clock = ManualClock()
    hits = {}
    for policy in ("lru", "reuse"):
        index = RadixIndex(clock, policy_named(policy), 200)
        hits[policy] = 0
        for step in range(3000):
            clock.advance(2.0)
            slot, turn = step % 50, step // 50 % 8
            prompt = chain(slot + 1000 * (step // 400), *range(4 + turn))
            hits[policy] += index.match(prompt)
            index.insert(namespace(), prompt)
            index.insert(namespace(), chain(10**6 + step, *range(39)))
    assert hits["reuse"] > 2 * hits["lru"] + 1000


@pytest.mark.parametrize(("sizes", "first_victim"), [((1024, 1024), 1), ((1100, 1000), 1), ((128, 1024), 2)])
@pytest.mark.parametrize("uses", [0, 200])
def test_reuse_weighs_the_room_that_blocks_take(sizes: tuple[int, int], first_victim: int, uses: int) -> None:
    clock = ManualClock()
    index = RadixIndex(clock, policy_named("reuse"), 1000)
    for number in range(uses):
        clock.advance(1.0)
        index.insert(namespace(), chain(100 + number % 50))
    clock.advance(10_000.0)
    for number, size in enumerate(sizes, 1):
        index.insert(namespace(), chain(number), size=size)
    order = index.victims(60)
    assert min(order.index(chain(number)[0]) for number in (1, 2)) == order.index(chain(first_victim)[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_stored_one_by_one_share_a_run(policy: str) -> None:
    index, keys = RadixIndex(ManualClock(), policy_named(policy), 1000), chain(*range(500))
    for key, parent in zip(keys, [None, *keys], strict=False):
        index.insert(namespace(), [key], parent)
    # A run each would cost each block a walk over all of those before it.
    assert len(list(index._tree.runs())) == 1
    index.check()


def test_reuse_goes_by_age_where_it_has_learned_nothing_yet() -> None:
    # Four sessions at a time, each of another length: kinds of their own, none worth more for being new.
    prompts = [
        (n, *range(n % 7 + turn)) for first in range(0, 40, 4) for turn in range(3) for n in range(first, first + 4)
    ]
    hits = {}
    for policy in ("lru", "reuse"):
        index, hits[policy] = RadixIndex(ManualClock(), policy_named(policy), 40), 0
        for prompt in prompts:
            hits[policy] += index.match(chain(*prompt))
            index.insert(namespace(), chain(*prompt))
    assert hits["reuse"] >= 0.95 * hits["lru"] > 0
