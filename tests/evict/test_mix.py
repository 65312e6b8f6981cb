"""`mix`: the best of its shadows rules, and the cache holds what the ruler's shadow holds."""

from __future__ import annotations

import itertools
import random

import pytest

from kvtide.clock import ManualClock
from kvtide.evict.policies import mix, policy_named
from kvtide.index import RadixIndex
from kvtide.testing import namespace
from kvtide.testing.policy_suite import chain


def hits(index: RadixIndex, clock: ManualClock, prompts: list[tuple[int, ...]]) -> int:
    """Ask for prompts and store them; return how many blocks were there."""
    found = 0
    for prompt in prompts:
        clock.advance(1.0)
        found += len(index.match(chain(*prompt)).blocks)
        index.insert(namespace(), chain(*prompt))
    return found


def scans(count: int, documents: int, seed: int) -> list[tuple[int, ...]]:
    """Return a loop over documents, a few of which are read in between too: LRU keeps none of the loop."""
    rng = random.Random(seed)
    return [(rng.randrange(30) if rng.random() < 0.2 else n % documents, 1, 2, 3) for n in range(count)]


def test_best_policy_rules_and_what_the_cache_holds_is_what_its_shadow_holds() -> None:
    policy, clock = policy_named("mix")(120), ManualClock()
    assert isinstance(policy, mix.MixPolicy)
    index = RadixIndex(clock, lambda _: policy, 120)
    hits(index, clock, scans(2000, 200, 1))
    assert policy.ruler in {"s3fifo", "arc"}
    shadow = policy._shadows[policy.ruler]
    known = [key for run in shadow._tree.runs() for key in run.keys]
    assert [key for key in known if shadow.is_held(key)] == [key for key in known if index.is_held(key)]
    assert index.stats().held_blocks == shadow.stats().held_blocks
    index.check()


@pytest.mark.parametrize("shadow_blocks", [4096, 240])
def test_mix_hits_about_what_the_best_policy_hits(monkeypatch: pytest.MonkeyPatch, shadow_blocks: int) -> None:
    monkeypatch.setattr(mix, "SHADOW_BLOCKS_MAX", shadow_blocks)
    found = {}
    for name in ("lru", "s3fifo", "arc", "reuse", "mix"):
        clock = ManualClock()
        found[name] = hits(RadixIndex(clock, policy_named(name), 480), clock, scans(6000, 800, 2))
    assert found["lru"] < 0.7 * found["arc"]
    assert found["mix"] > 0.9 * max(found.values())


def test_blocks_that_leave_for_want_of_bytes_leave_the_shadows_too() -> None:
    policy, clock = policy_named("mix")(40), ManualClock()
    assert isinstance(policy, mix.MixPolicy)
    index = RadixIndex(clock, lambda _: policy, 40)
    hits(index, clock, [(number, 1, 2, 3) for number in range(20)])
    index.victims(25)
    assert index.stats().held_blocks == 15
    assert [shadow.stats().held_blocks for shadow in policy._shadows.values()] == [15] * 5


def test_keys_that_only_a_shadow_knows_to_be_no_chain_leave_first() -> None:
    policy, clock = policy_named("mix")(4), ManualClock()
    index = RadixIndex(clock, lambda _: policy, 4)
    hits(index, clock, [(1, 2), (3, 4), (5, 6)])
    # The cache has forgotten these, not so a shadow.
    strange = [chain(1, 2)[1], chain(1)[0]]
    index.insert(namespace(), strange)
    index.check()
    hits(index, clock, [(7,), (8,)])
    assert not index.match(strange).blocks
    index.check()


def test_costs_and_values_reach_the_shadows() -> None:
    policy = policy_named("mix")(8)
    assert isinstance(policy, mix.MixPolicy)
    index = RadixIndex(ManualClock(), lambda _: policy, 8)
    index.insert(namespace(), chain(1, 2), value=3.0, cost=5.0)
    for shadow in policy._shadows.values():
        assert {(run.value, run.given_cost) for run in shadow._tree.runs()} == {(3.0, 5.0)}


def test_switch_forgets_a_bounded_number_of_blocks_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SHADOW_BLOCKS_MAX", 8)
    monkeypatch.setattr(mix, "FORGOTTEN_MAX", 4)
    policy, clock = policy_named("mix")(40), ManualClock()
    assert isinstance(policy, mix.MixPolicy)
    index = RadixIndex(clock, lambda _: policy, 40)
    hits(index, clock, [(number, 1, 2, 3) for number in range(300)])
    policy._crown("lru")
    known = [index.stats().known_blocks]
    for number in range(300, 460):
        hits(index, clock, [(number, 1, 2, 3)])
        known.append(index.stats().known_blocks)
    # What a request brings and what it forgets; runs of up to three blocks go as a whole.
    assert max(before - after for before, after in itertools.pairwise(known)) <= 4 + 3
    assert known[0] > 600 > known[-1] == 40
