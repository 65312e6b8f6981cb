"""`mix`: the best of its shadows rules, and the cache holds what the ruler's shadow holds."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from kvtide.clock import ManualClock
from kvtide.evict import policies
from kvtide.evict.policies import INGREDIENTS, mix
from kvtide.index import RadixIndex
from kvtide.testing import chain, namespace
from kvtide_lab.sim.policies import policy_named

MIXED = [name for name in INGREDIENTS if name != "reuse"]


def hits(index: RadixIndex, clock: ManualClock, prompts: list[tuple[int, ...]]) -> int:
    """Ask for prompts and store them; return how many blocks were there."""
    found = 0
    for prompt in prompts:
        clock.advance(1.0)
        found += index.match(chain(*prompt))
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
    monkeypatch.setattr(policies, "FULL_BLOCKS_MAX", shadow_blocks)
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", shadow_blocks)
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
    assert [shadow.stats().held_blocks for shadow in policy._shadows._shadows] == [15] * 6


def test_keys_that_only_a_shadow_knows_to_be_no_chain_leave_first() -> None:
    policy, clock = policy_named("mix")(4), ManualClock()
    index = RadixIndex(clock, lambda _: policy, 4)
    hits(index, clock, [(1, 2), (3, 4), (5, 6)])
    # The cache has forgotten these, not so a shadow.
    strange = [chain(1, 2)[1], chain(1)[0]]
    index.insert(namespace(), strange)
    index.check()
    hits(index, clock, [(7,), (8,)])
    assert not index.match(strange)
    index.check()


def test_lead_of_two_hits_is_chance_where_policies_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, clock = policy_named("mix")(40), ManualClock()
    assert isinstance(policy, mix.MixPolicy)
    index = RadixIndex(clock, lambda _: policy, 40)
    monkeypatch.setattr(policy._shadows, "lengths", lambda keys: [int(name == "lru") for name in policy._shadows.names])
    rulers = []
    for _ in range(3):
        hits(index, clock, [(1,)])
        rulers.append(policy.ruler)
    assert rulers == ["reuse", "reuse", "lru"]


def test_sizes_reach_the_shadows() -> None:
    policy = policy_named("mix")(8)
    assert isinstance(policy, mix.MixPolicy)
    index = RadixIndex(ManualClock(), lambda _: policy, 8)
    index.insert(namespace(), chain(1, 2), size=500)
    for shadow in policy._shadows._shadows:
        assert {run.size for run in shadow._tree.runs()} == {500}


def test_switch_forgets_a_bounded_number_of_blocks_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "FULL_BLOCKS_MAX", 8)
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 8)
    monkeypatch.setattr(mix, "FORGOTTEN_MAX", 4)
    policy, clock = policy_named("mix")(40), ManualClock()
    assert isinstance(policy, mix.SampledMixPolicy)
    index = RadixIndex(clock, lambda _: policy, 40)
    hits(index, clock, [(number, 1, 2, 3) for number in range(300)])
    policy._small.ruler = "lru"
    policy._crown("lru")
    known = [index.stats().known_blocks]
    for number in range(300, 460):
        hits(index, clock, [(number, 1, 2, 3)])
        known.append(index.stats().known_blocks)
    # What a request brings and what it forgets; runs of up to three blocks go as a whole.
    assert max(before - after for before, after in itertools.pairwise(known)) <= 4 + 3
    assert known[0] > 600 > known[-1] == 40


def _the(policy: mix.SampledMixPolicy, blocks_max: int) -> mix.SampledMixPolicy:
    return policy


def test_each_policy_can_rule_a_large_cache_and_reuse_goes_on_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 8)
    for name in MIXED:
        policy, clock = mix.SampledMixPolicy({each: policy_named(each) for each in MIXED}, 40), ManualClock()
        index = RadixIndex(clock, partial(_the, policy), 40)
        for ruler in (name, "reuse", name):
            hits(index, clock, scans(40, 30, 3))
            policy._small.ruler = ruler
            policy._crown(ruler)
        hits(index, clock, scans(40, 30, 4))
        index.check()


def test_sample_is_a_cache_of_whole_sessions_that_learns_with_the_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 128)
    policy, clock = mix.SampledMixPolicy({each: policy_named(each) for each in MIXED}, 512), ManualClock()
    index = RadixIndex(clock, partial(_the, policy), 512)
    hits(index, clock, [(number % 97, 1, *range(number % 5)) for number in range(1000)])
    seen = [run for run, is_sampled in policy._runs.items() if is_sampled]
    assert 0.1 < len(seen) / len(policy._runs) < 0.45
    assert all(policy._runs[run.parent] for run in seen if run.parent in policy._runs)
    assert policy._sample.stats().held_blocks <= 128
    assert policy._small._reuse.model is policy._reuse.model
    policy._sample.check()


def test_policies_of_the_sample_hear_how_many_blocks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 8)
    policy = mix.SampledMixPolicy({each: policy_named(each) for each in MIXED}, 40)
    index = RadixIndex(ManualClock(), partial(_the, policy), 40)
    for fitting, share in ((40, 8), (400, 80), (20, 4)):
        index.plan(fitting)
        remembered = {name: policy._small._shadows[name]._policy.ghost_blocks_max for name in ("s3fifo", "arc")}
        assert remembered == {"s3fifo": share, "arc": share}
