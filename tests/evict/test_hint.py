"""Advice that comes with requests: what is told true helps, what is false is found out, and none of it buys room."""

from __future__ import annotations

import random

import pytest

from kvtide.clock import ManualClock
from kvtide.evict import Hint, order_named
from kvtide.evict.hint import SESSIONS_MAX, TENANTS_MAX, Sessions
from kvtide.evict.policies import PolicyOrder, reuse
from kvtide.evict.policies.advised import Trust
from kvtide.evict.policies.reuse import ReusePolicy
from kvtide.index import RadixIndex
from kvtide.testing import chain, namespace
from kvtide.types import BlockKey, Namespace, ObjectId

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


def test_told_ends_of_sessions_leave_first() -> None:
    assert hit_rate(ReusePolicy(200), is_told=True) > hit_rate(ReusePolicy(200), is_told=False) + 0.05


def test_ends_that_are_told_afterwards_help_as_much() -> None:
    told, late = (hit_rate(ReusePolicy(200), is_told=True, is_late=is_late) for is_late in (False, True))
    assert late == pytest.approx(told, abs=0.02)


def test_lies_cost_hardly_a_hit_and_are_counted() -> None:
    policy = ReusePolicy(200)
    assert hit_rate(policy, is_told=True, is_false=True) > hit_rate(ReusePolicy(200), is_told=False) - 0.01
    counts = policy.trust
    assert 0 < counts.ignored <= counts.heard


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


@pytest.mark.parametrize(
    "nonsense",
    [
        {name: value}
        for name, value in [
            *(("session", each) for each in ("", 7, "a\n")),
            ("is_last", 1),
            *(("retain_s", each) for each in (-1, True, float("nan"), "5")),
            *(("priority", each) for each in (101, "high")),
        ]
    ],
)
def test_nonsense_is_an_error_where_it_is_written_and_passed_over_where_it_is_read(nonsense: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(nonsense))):
        Hint(**nonsense)  # type: ignore[arg-type]
    assert Hint.parse(nonsense) is None
    assert Hint.parse({"is_last": True, "other": [1]} | nonsense) in {None, Hint(is_last=True)}


@pytest.mark.parametrize("said", [None, 3, "last", ["session"], {}, {3: 4}])
def test_what_says_nothing_is_no_hint(said: object) -> None:
    assert Hint.parse(said) is None


def test_sessions_that_are_remembered_are_bounded_by_tenant() -> None:
    sessions, neighbour = Sessions[BlockKey](), Namespace(bytes([1]) * 32)
    first, second = chain(1, 2)
    assert sessions.note(neighbour, "mine", first) is None
    for number in range(SESSIONS_MAX + 5):
        sessions.note(namespace(), str(number), first)
    assert sessions.note(neighbour, "mine", second) == first
    assert sessions.note(namespace(), "0", second) is None


def test_end_that_is_said_afterwards_is_no_use() -> None:
    clock = ManualClock()
    order = PolicyOrder(ReusePolicy, clock, 1 << 20)
    keys = chain(1, 2, 3)
    order.enter(ObjectId(namespace(), keys[0]), keys[0], 4096)
    order.note_request(namespace(), keys, Hint("a"))
    assert order._tree is not None
    run = order._tree._tree.run_of(keys[-1])
    assert run is not None
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
