"""States of hybrid models: each leaves with the block that it needs, and a session's older ones first."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evict.test_order import leaving
from tests.suites import chain, namespace

from kvtide.clock import ManualClock
from kvtide.evict.policies import PolicyOrder, PoolOrder
from kvtide.evict.policies.mix import AGREEMENT, Shadows
from kvtide.evict.policies.order import LINKS_MAX, LinkedStates
from kvtide.index import Run
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.policies import policy_named

NS, OF_STATES = namespace(), Namespace(b"s" * 32)


def state(*path: int) -> ObjectId:
    return ObjectId(OF_STATES, chain(*path)[-1])


class Served:
    """An order whose prompts are asked for and then stored, with a state after each of some numbers of blocks."""

    def __init__(self, policy: str = "lru", blocks_max: int = 20) -> None:
        self.clock = ManualClock(0.0)
        self.order = PolicyOrder(policy_named(policy), self.clock, 1 << 20, blocks_max)

    def serve(self, *branch: int, states: tuple[int, ...] = ()) -> None:
        keys = chain(*branch)
        self.clock.advance(1.0)
        self.order.note_request(NS, keys, states=[[ObjectId(OF_STATES, each) for each in keys]])
        for before, each in zip([BlockKey(NS), *keys], keys, strict=False):
            if each not in self.order._blocks:
                self.order.enter(ObjectId(NS, each), before, 1)
        for count in states:
            self.order.enter(ObjectId(OF_STATES, keys[count - 1]), BlockKey(OF_STATES), 6)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "reuse", "mix"])
def test_state_leaves_just_before_its_block(policy: str) -> None:
    served = Served(policy)
    served.serve(1, 2, 3, states=(3,))
    served.serve(4, 5, states=(2,))
    gone = leaving(served.order)
    assert len(gone) == 7
    assert gone.index(state(1, 2, 3)) + 1 == gone.index(ObjectId(NS, chain(1, 2, 3)[-1]))
    assert gone.index(state(4, 5)) + 1 == gone.index(ObjectId(NS, chain(4, 5)[-1]))


def test_state_that_a_session_has_gone_on_from_leaves_first() -> None:
    served = Served()
    served.serve(9, states=(1,))
    served.serve(1, 2, states=(2,))
    served.serve(1, 2, 3, states=(3,))
    assert leaving(served.order)[:3] == [state(1, 2), state(9), ObjectId(NS, chain(9)[-1])]


def test_superseded_state_that_is_read_again_stays_with_its_block() -> None:
    served = Served()
    served.serve(9, states=(1,))
    served.serve(1, 2, states=(2,))
    served.serve(1, 2, 3, states=(3,))
    served.order.note_use(state(1, 2))
    served.serve(1, 2, 4, states=(3,))
    assert leaving(served.order)[0] == state(9)


def test_state_where_prompts_branch_is_not_superseded() -> None:
    served = Served()
    served.serve(9, states=(1,))
    served.serve(1, 2, 3)
    served.serve(1, 2, 4, states=(2, 3))
    served.serve(1, 2, 5, states=(3,))
    assert leaving(served.order)[0] == state(9)


def test_state_whose_block_is_not_here_is_refused_and_leaves_first() -> None:
    served = Served(blocks_max=2)
    served.serve(1, 2, states=(2,))
    served.serve(3, 4, states=(2,))
    assert not served.order.wants(state(1, 2))
    assert served.order.wants(state(3, 4))
    assert leaving(served.order)[0] == state(1, 2)


def test_states_that_came_before_anybody_named_them_are_linked_at_the_next_request() -> None:
    served = Served()
    served.order.enter(state(1, 2), BlockKey(OF_STATES), 6)
    served.serve(1, 2)
    served.serve(3)
    assert leaving(served.order)[:3] == [state(1, 2), ObjectId(NS, chain(1, 2)[-1]), ObjectId(NS, chain(1)[-1])]


def test_state_in_use_stays_though_its_block_leaves() -> None:
    served = Served()
    served.serve(1, states=(1,))
    assert leaving(served.order, lambda each: each != state(1)) == [ObjectId(NS, chain(1)[-1])]
    assert leaving(served.order) == [state(1)]
    assert len(served.order) == 0


def test_first_state_does_not_say_how_many_blocks_fit() -> None:
    order = PolicyOrder(policy_named("lru"), ManualClock(0.0), 12)
    order.note_request(NS, chain(1), states=[[state(1)]])
    order.enter(state(1), BlockKey(OF_STATES), 6)
    for number in range(5):
        order.enter(ObjectId(NS, chain(number)[-1]), BlockKey(NS), 1)
    assert order._tree.stats().held_blocks == 5


def test_links_of_states_that_never_come_are_bounded() -> None:
    states = LinkedStates()
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(LINKS_MAX + 5)]
    states.announce(keys, [ObjectId(OF_STATES, each) for each in keys])
    assert states.block_of(ObjectId(OF_STATES, keys[4])) is None
    assert states.block_of(ObjectId(OF_STATES, keys[5])) == keys[5]


def test_prompt_of_more_states_than_links_are_kept_for_is_ranked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtide.evict.policies.order.LINKS_MAX", 3)
    order, keys = PolicyOrder(policy_named("lru"), ManualClock(0.0), 1 << 20, 20), chain(1, 2, 3, 4, 5)
    states = [ObjectId(OF_STATES, each) for each in keys]
    # As after a restart: it is listed before a prompt names it, and its link is dropped for those behind it.
    order.enter(states[0], BlockKey(OF_STATES), 1)
    assert order.note_request(NS, keys, None, [states]) in (True, False)
    assert leaving(order) == [states[0]]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=60))
def test_pool_agrees_with_sorting_and_uses_leave_nothing_behind(steps: list[tuple[int, int, bool]]) -> None:
    clock, keys, model = ManualClock(), chain(*range(10)), dict[ObjectId, tuple[float, int]]()
    order = PoolOrder(clock)
    for at, pause_s, is_read in steps:
        clock.advance(pause_s)
        block, parent = ObjectId(NS, keys[at]), keys[at - 1] if at else BlockKey(NS)
        if block not in model:
            order.enter(block, parent, 1)
            model[block] = (clock.monotonic_s(), model.get(ObjectId(NS, parent), (0.0, 0))[1] - 1)
        elif is_read:
            order.note_use(block)
            model[block] = (clock.monotonic_s(), model[block][1])
        else:
            order.leave(block)
            del model[block]
    for block in [*model] * 20:
        order.note_use(block)
        model[block] = (clock.monotonic_s(), model[block][1])
        assert len(order._heap) <= 64 + 2 * len(model)
    assert leaving(order) == sorted(model, key=lambda each: (*model[each], each))


# Shadows of several policies: who holds what is known, and a policy that goes by it.

LIKE = Run([], None, 0, bytearray(), set(), state=namespace())


def shadows_of(blocks_max: int) -> Shadows:
    return Shadows({name: policy_named(name) for name in ("lru", "lfu")}, ManualClock(), blocks_max)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_by_which_two_are_apart_are_counted_exactly(seed: int) -> None:
    rng, shadows, known = random.Random(seed), shadows_of(20), set[BlockKey]()
    for number in range(300):
        keys = chain(rng.randrange(12), *(rng.randrange(2) for _ in range(rng.randrange(6))))
        known.update(keys)
        shadows.learn(shadows.lengths(keys), 0.999)
        shadows.insert(keys, None, LIKE)
        if not number % 50:
            shadows.shrink()
        sets = {name: {key for key in known if shadows[name].is_held(key)} for name in shadows.names}
        for one in shadows.names:
            for other in shadows.names:
                assert shadows.apart(one, other) == len(sets[one] - sets[other])


def test_agreement_keeps_what_is_asked_for_though_the_first_shadow_gives_it_up() -> None:
    shadows = shadows_of(16)
    hits = dict.fromkeys(shadows.names, 0)
    for number in range(400):
        # Four prompts come round, each twice; between them are many blocks of which none comes again.
        often, once = chain(number % 4, 1), chain(100 + number, *range(7))
        for keys in (often, often, once):
            lengths = shadows.lengths(keys)
            hits = {name: hits[name] + length for name, length in zip(shadows.names, lengths, strict=True)}
            shadows.learn(lengths, 0.999)
            shadows.insert(keys, None, LIKE)
    assert hits["lfu"] > 1.8 * hits["lru"]
    assert hits[AGREEMENT] > 1.6 * hits["lru"]
