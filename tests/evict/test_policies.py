"""Policies of eviction: each alone, their mix, and advice that comes with requests."""

import itertools
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from tests.suites import chain, namespace

from kvtide.clock import ManualClock
from kvtide.evict import Hint, order_named, policies
from kvtide.evict.hint import TENANTS_MAX
from kvtide.evict.policies import INGREDIENTS, PolicyOf, PolicyOrder, mix, reuse
from kvtide.evict.policies.order import SESSIONS_MAX
from kvtide.evict.policies.reuse import HazardModel, Kind, ReusePolicy, Trust
from kvtide.index import RadixIndex
from kvtide.types import Namespace, ObjectId
from kvtide_lab.sim.policies import POLICIES, policy_named


@pytest.fixture(params=POLICIES)
def policy_of(request: pytest.FixtureRequest) -> PolicyOf:
    return policy_named(request.param)


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
    stats = indexed(policy_of, 16, [(number, 1, 2, 3, 4) for number in range(300)]).stats()
    assert stats.known_blocks <= stats.held_blocks + policy_of(16).ghost_blocks_max


def hits(index: RadixIndex, clock: ManualClock, prompts: Iterable[tuple[int, ...]]) -> int:
    """Ask for prompts and store them; return how many blocks were there."""
    found = 0
    for prompt in prompts:
        clock.advance(1.0)
        found += index.match(chain(*prompt))
        index.insert(namespace(), chain(*prompt))
    return found


def indexed(policy_of: PolicyOf, blocks_max: int, prompts: Iterable[tuple[int, ...]]) -> RadixIndex:
    clock = ManualClock()
    index = RadixIndex(clock, policy_of, blocks_max)
    hits(index, clock, prompts)
    return index


def hits_by_policy(blocks_max: int, prompts: list[tuple[int, ...]], *names: str) -> dict[str, int]:
    clock = ManualClock()
    return {name: hits(RadixIndex(clock, policy_named(name), blocks_max), clock, prompts) for name in names}


def once(start: int, stop: int) -> list[tuple[int, ...]]:
    """Return prompts of a block each that are asked for once."""
    return [(number,) for number in range(start, stop)]


@pytest.mark.parametrize(
    ("policy", "blocks_max", "prompts", "kept", "gone"),
    [
        ("lru", 3, [(1,), (2,), (3,), (1,), (4,)], (1, 3, 4), (2,)),
        ("lfu", 2, [(1,), (1,), (2,), (3,)], (1, 3), (2,)),
        ("slru", 10, [(1,), (1,), *once(10, 40)], (1, 39), (10,)),
        ("arc", 4, [(1,), (1,), (2,), (2,), *once(10, 30)], (1, 2), ()),
        ("s3fifo", 10, [(1,), (1,), *once(10, 40)], (1,), (10,)),
        ("s3fifo", 10, [*once(0, 11), (0,), *once(20, 40)], (0,), (1,)),
        # Also what was used twice has a bound.
        ("slru", 10, [*sorted(once(0, 10) * 2), (99,)], (1, 9, 99), (0,)),
    ],
)
def test_policies_keep_what_their_names_say(
    policy: str, blocks_max: int, prompts: list[tuple[int, ...]], kept: tuple[int, ...], gone: tuple[int, ...]
) -> None:
    index = indexed(policy_named(policy), blocks_max, prompts)
    assert [number for number in (*kept, *gone) if index.match(chain(number))] == list(kept)


def test_arc_gives_room_to_recency_after_early_evictions() -> None:
    frequent = [(n,) for n in (1, 2, 3, 4) for _ in range(2)]
    index = indexed(policy_named("arc"), 4, [*frequent, *((n,) for n in (10, 11, 10, 11, 12, 13, 12, 13))])
    assert sum(index.match(chain(number)) for number in (1, 2, 3, 4)) < 3


def test_reuse_learns_that_one_kind_of_prompt_never_returns() -> None:
    # Sessions of four blocks return every 100 s for eight turns; single prompts of 40 blocks never do.
    prompts: list[tuple[int, ...]] = []
    for step in range(3000):
        slot, turn = step % 50, step // 50 % 8
        prompts += [(slot + 1000 * (step // 400), *range(4 + turn)), (10**6 + step, *range(39))]
    found = hits_by_policy(200, prompts, "lru", "reuse")
    assert found["reuse"] > 2 * found["lru"] + 1000


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


@pytest.mark.parametrize(("grows", "role"), [(False, "shared"), (True, "session")])
def test_prompt_that_is_asked_again_is_no_turn(grows: bool, role: str) -> None:
    policy, clock = ReusePolicy(40), ManualClock()
    index = RadixIndex(clock, lambda _: policy, 40)
    hits(index, clock, [(1, 2, *range(3, 4 + grows * turn)) for turn in range(5)])
    first = index._tree.run_of(chain(1)[0])
    assert policy.model.kinds[first.state.queue.row].role == role


def test_many_uses_at_once_say_nothing_about_what_is_old_by_now() -> None:
    model = HazardModel(40)
    rows = [model.row(Kind("shared", level)) for level in (6, 1)]
    for row, young_uses in zip(rows, (480.0, 20.0), strict=True):
        model.reached[row][0], model.used[row][0] = 500.0, young_uses
        model.reached[row][40] = 20.0
    model.learn()
    popular, rare = (model.worth[row] for row in rows)
    assert popular[0] > 10 * rare[0]
    assert popular[40] == pytest.approx(rare[40], rel=0.1)


def test_reuse_goes_by_age_where_it_has_learned_nothing_yet() -> None:
    # Four sessions at a time, each of another length: kinds of their own, none worth more for being new.
    prompts = [
        (n, *range(n % 7 + turn)) for first in range(0, 40, 4) for turn in range(3) for n in range(first, first + 4)
    ]
    found = hits_by_policy(40, prompts, "lru", "reuse")
    assert found["reuse"] >= 0.95 * found["lru"] > 0


# `mix`: the best of its shadows rules, and the cache holds what the ruler's shadow holds.

MIXED = [name for name in INGREDIENTS if name != "reuse"]


def ruled(policy: Any, blocks: int) -> tuple[Any, RadixIndex, ManualClock]:
    """Return a policy, an index of so many blocks that it rules, and their clock."""
    clock = ManualClock()
    return policy, RadixIndex(clock, lambda blocks_max: policy, blocks), clock


def scans(count: int, documents: int, seed: int) -> list[tuple[int, ...]]:
    """Return a loop over documents, a few of which are read in between too: LRU keeps none of the loop."""
    rng = random.Random(seed)
    return [(rng.randrange(30) if rng.random() < 0.2 else n % documents, 1, 2, 3) for n in range(count)]


def test_best_policy_rules_and_what_the_cache_holds_is_what_its_shadow_holds() -> None:
    policy, index, clock = ruled(policy_named("mix")(120), 120)
    hits(index, clock, scans(2000, 200, 1))
    assert policy.ruler in {"s3fifo", "arc"}
    shadow = policy._shadows[policy.ruler]
    known = [key for run in shadow._tree.runs() for key in run.keys]
    assert [key for key in known if shadow.is_held(key)] == [key for key in known if index.is_held(key)]
    assert index.stats().held_blocks == shadow.stats().held_blocks
    index.check()


@pytest.mark.parametrize("shadow_blocks", [4096, 120])
def test_mix_hits_about_what_the_best_policy_hits(monkeypatch: pytest.MonkeyPatch, shadow_blocks: int) -> None:
    monkeypatch.setattr(policies, "FULL_BLOCKS_MAX", shadow_blocks)
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", shadow_blocks)
    found = hits_by_policy(240, scans(3000, 400, 2), "lru", "s3fifo", "arc", "reuse", "mix")
    assert found["lru"] < 0.7 * found["arc"]
    assert found["mix"] > 0.9 * max(found.values())


def test_blocks_that_leave_for_want_of_bytes_leave_the_shadows_too() -> None:
    policy, index, clock = ruled(policy_named("mix")(40), 40)
    hits(index, clock, [(number, 1, 2, 3) for number in range(20)])
    index.victims(25)
    assert index.stats().held_blocks == 15
    assert [shadow.stats().held_blocks for shadow in policy._shadows] == [15] * 6


def test_keys_that_only_a_shadow_knows_to_be_no_chain_leave_first() -> None:
    _, index, clock = ruled(policy_named("mix")(4), 4)
    hits(index, clock, [(1, 2), (3, 4), (5, 6)])
    # The cache has forgotten these, not so a shadow.
    strange = [chain(1, 2)[1], chain(1)[0]]
    index.insert(namespace(), strange)
    index.check()
    hits(index, clock, [(7,), (8,)])
    assert not index.match(strange)
    index.check()


def test_lead_of_two_hits_is_chance_where_policies_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, index, clock = ruled(policy_named("mix")(40), 40)
    monkeypatch.setattr(policy._shadows, "lengths", lambda keys: [int(name == "lru") for name in policy._shadows.names])
    rulers = []
    for _ in range(3):
        hits(index, clock, [(1,)])
        rulers.append(policy.ruler)
    assert rulers == ["reuse", "reuse", "lru"]


def test_switch_forgets_a_bounded_number_of_blocks_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "FULL_BLOCKS_MAX", 8)
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 8)
    monkeypatch.setattr(mix, "FORGOTTEN_MAX", 4)
    policy, index, clock = ruled(policy_named("mix")(40), 40)
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


def test_each_policy_can_rule_a_large_cache_and_reuse_goes_on_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 8)
    for name in MIXED:
        policy, index, clock = ruled(mix.SampledMixPolicy({each: policy_named(each) for each in MIXED}, 40), 40)
        for ruler in (name, "reuse", name):
            hits(index, clock, scans(40, 30, 3))
            policy._small.ruler = ruler
            policy._crown(ruler)
        hits(index, clock, scans(40, 30, 4))
        index.check()


def test_sample_is_a_cache_of_whole_sessions_that_learns_with_the_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 128)
    policy, index, clock = ruled(mix.SampledMixPolicy({each: policy_named(each) for each in MIXED}, 512), 512)
    hits(index, clock, [(number % 97, 1, *range(number % 5)) for number in range(1000)])
    seen = [run for run, is_sampled in policy._runs.items() if is_sampled]
    assert 0.1 < len(seen) / len(policy._runs) < 0.45
    assert all(policy._runs[run.parent] for run in seen if run.parent in policy._runs)
    assert policy._sample.stats().held_blocks <= 128
    assert policy._small._reuse.model is policy._reuse.model
    policy._sample.check()


def test_policies_of_the_sample_hear_how_many_blocks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SAMPLED_BLOCKS", 8)
    policy, index, _ = ruled(mix.SampledMixPolicy({each: policy_named(each) for each in MIXED}, 40), 40)
    for fitting, share in ((40, 8), (400, 80), (20, 4)):
        index.plan(fitting)
        remembered = {name: policy._small._shadows[name]._policy.ghost_blocks_max for name in ("s3fifo", "arc")}
        assert remembered == {"s3fifo": share, "arc": share}


# Advice that comes with requests: what is told true helps, what is false is found out, and none of it buys room.

LAST = Hint(is_last=True).mark


def hit_rate(policy: ReusePolicy, is_told: bool, is_false: bool = False, is_late: bool = False) -> float:
    """Replay sessions of which half go on after a while, in a cache that has no room for all.

    is_late: ends are told after their requests.
    """
    rng, clock = random.Random(4), ManualClock()
    index = RadixIndex(clock, lambda _: policy, 200)
    waiting: list[tuple[int, ...]] = []
    hits = blocks = 0
    for number in range(2500):
        clock.advance(2.0)
        is_next = len(waiting) > 40
        words = (*waiting.pop(0), 7, 8, 9) if is_next else (number + 100, 1, 2, 3, 4, 5)
        goes_on = not is_next and rng.random() < 0.5
        if goes_on:
            waiting.append(words)
        mark = Hint(is_last=goes_on == is_false).mark if is_told else 0
        policy.hear(0 if is_late else mark)
        keys = chain(*words)
        hits, blocks = hits + index.match(keys), blocks + len(keys)
        index.insert(namespace(), keys)
        if is_late and mark:
            policy.hear(mark)
            index.advise(keys[-1])
    index.check()
    return hits / blocks


def test_told_ends_of_sessions_leave_first_also_afterwards_and_lies_cost_hardly_a_hit_and_are_counted() -> None:
    plain, told = (hit_rate(ReusePolicy(200), is_told) for is_told in (False, True))
    assert told > plain + 0.05
    assert hit_rate(ReusePolicy(200), is_told=True, is_late=True) == pytest.approx(told, abs=0.02)
    liar = ReusePolicy(200)
    assert hit_rate(liar, is_told=True, is_false=True) > plain - 0.01
    assert liar.trust.ignored > 0


def test_liar_is_not_believed_and_his_neighbour_is() -> None:
    trust, liar, neighbour = Trust(), Namespace(bytes(32)), Namespace(bytes([1]) * 32)
    for _ in range(20):
        trust.believed(liar, LAST)
        trust.note_next_turn(liar, LAST)
    assert trust.believed(liar, LAST) == 0
    assert trust.believed(neighbour, LAST) == LAST
    for _ in range(400):
        trust.believed(liar, LAST)
    assert trust.believed(liar, LAST) == LAST


def test_tenants_and_rows_of_advice_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    trust = Trust()
    for number in range(TENANTS_MAX + 5):
        trust.believed(Namespace(number.to_bytes(32, "big")), LAST)
    assert len(trust._ends) == TENANTS_MAX
    monkeypatch.setattr(reuse, "ROWS_MAX", 3)
    model = reuse.HazardModel(100)
    rows = {model.row(reuse.Kind("session", 0, size, True, mark)) for size in range(2) for mark in range(16)}
    assert rows == {0, 1, 2, 3}


def test_marks_tell_ends_times_and_priorities_apart() -> None:
    hints = [Hint(retain_s=time_s, priority=sign) for time_s in (None, 5, 500, 3000, 1e6) for sign in (0, 1, -1)]
    assert sorted(hint.mark for hint in [*hints, Hint(is_last=True)]) == list(range(16))
    assert Hint(is_last=True, retain_s=5, priority=3).mark == LAST


BAD = {"session": ("", 7, "a\n"), "is_last": (1,), "retain_s": (-1, True, math.nan, "5")}
BAD |= {"priority": (101, "high", 10**400)}


@pytest.mark.parametrize("nonsense", [{name: each} for name, values in BAD.items() for each in values])
def test_nonsense_is_an_error_where_it_is_written_and_passed_over_where_it_is_read(nonsense: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(nonsense))):
        Hint(**nonsense)  # type: ignore[arg-type]
    assert Hint.parse(nonsense) is None
    assert Hint.parse({"is_last": True, "other": [1]} | nonsense) in {None, Hint(is_last=True)}


@pytest.mark.parametrize("said", [None, 3, "last", ["session"], {}, {3: 4}])
def test_what_says_nothing_is_no_hint(said: object) -> None:
    assert Hint.parse(said) is None


def test_sessions_that_are_remembered_are_bounded_by_tenant() -> None:
    order, neighbour, keys = PolicyOrder(policy_named("lru"), ManualClock(), 1, 4), Namespace(bytes([1]) * 32), chain(1)
    order.note_request(neighbour, keys, Hint("mine"))
    for number in range(SESSIONS_MAX + 5):
        order.note_request(namespace(), keys, Hint(str(number)))
    ends = order._session_ends
    assert ends[neighbour] == {"mine": keys[-1]}
    assert next(iter(ends[namespace()])) == "5" and len(ends[namespace()]) == SESSIONS_MAX


def test_end_that_is_said_afterwards_is_no_use() -> None:
    clock = ManualClock()
    order = PolicyOrder(ReusePolicy, clock, 1 << 20)
    keys = chain(1, 2, 3)
    order.enter(ObjectId(namespace(), keys[0]), keys[0], 4096)
    order.note_request(namespace(), keys, Hint("a"))
    run = order._tree._tree.run_of(keys[-1])
    uses, trace = run.uses, run.state
    clock.advance(60.0)
    assert order.note_request(namespace(), keys[-1:], Hint("a", is_last=True))
    assert (run.uses, trace.mark) == (uses, LAST)


@pytest.mark.parametrize("policy", ["mix", "lru"])
def test_order_hears_advice_with_requests(policy: str) -> None:
    order = order_named(policy, ManualClock(), 1 << 20)
    keys = chain(1, 2, 3)
    order.enter(ObjectId(namespace(), keys[0]), keys[0], 4096)
    assert order.note_request(namespace(), chain(4, 5), Hint(is_last=True)) == (policy != "lru")
    assert not order.note_request(namespace(), chain(6, 7))
