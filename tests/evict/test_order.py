"""Orders of eviction: the policies of the simulator decide what a real tier keeps, and what is in use never leaves."""

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.stores import nothing_pinned
from tests.suites import chain, namespace
from tests.suites.tier_suite import object_bytes

from kvtide.clock import ManualClock
from kvtide.config import Limits
from kvtide.errors import TierFull
from kvtide.evict import EvictionOrder, order_named
from kvtide.evict.policies import PolicyOrder
from kvtide.evict.policies.order import Sizes
from kvtide.index import USUAL_SIZE, RadixIndex
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.url import tiers_of
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.policies import POLICIES, policy_named

NS = namespace()
PAGE = 4096
BLOCKS = 40


def made_up_requests(seed: int, count: int) -> list[list[BlockKey]]:
    rng = random.Random(seed)
    return [chain(*(min(3, int(rng.expovariate(0.9))) for _ in range(rng.randint(1, 9)))) for _ in range(count)]


def ids(keys: Sequence[BlockKey]) -> list[ObjectId]:
    return [ObjectId(NS, each) for each in keys]


def serve(stack: TierStack, asked: Sequence[ObjectId], size: int = PAGE) -> int:
    """Ask for a prompt and store what is not here, as an engine does; return how many leading blocks were here."""
    stack.note_request(asked)
    hits = next((i for i, each in enumerate(asked) if not stack.contains(each)), len(asked))
    for each in asked[hits:]:
        stack.put_from(each, bytes(size))
    return hits


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_real_tier_keeps_block_by_block_what_the_simulator_says(policy: str) -> None:
    clock = ManualClock(0.0)
    order = PolicyOrder(policy_named(policy), clock, BLOCKS * PAGE, BLOCKS)
    stack = TierStack([MemoryTier(BLOCKS * PAGE, clock, nothing_pinned, order, frame_bytes=PAGE)])
    simulated = RadixIndex(clock, policy_named(policy), BLOCKS)
    stack.open()
    for keys in made_up_requests(seed=5, count=400):
        clock.advance(1.0)
        expected = simulated.match(keys)
        simulated.insert(NS, keys)
        assert serve(stack, ids(keys)) == expected
        kept = {key for run in simulated._tree.runs() for key in run.keys[: run.held]}
        assert {info.id.key for info in stack.objects()} == kept
    stack.check()
    stack.close()


ORDERS = ["pool", *sorted(POLICIES)]


def order_of(policy: str, clock: ManualClock, bytes_max: int) -> EvictionOrder:
    """Also by policies that users can't choose."""
    if policy == "pool":
        return order_named(policy, clock, bytes_max)
    return PolicyOrder(policy_named(policy), clock, bytes_max)


def filled(policy: str, count: int) -> tuple[EvictionOrder, list[ObjectId]]:
    """Return an order with a prompt's blocks in it, and their ids."""
    order = order_of(policy, ManualClock(0.0), count * PAGE)
    found = ids(chain(*range(1, count + 1)))
    for before, each in zip([None, *found], found, strict=False):
        order.enter(each, before.key if before is not None else BlockKey(NS), PAGE)
    return order, found


def leaving(order: EvictionOrder, may_leave: Callable[[ObjectId], bool] = lambda each: True) -> list[ObjectId]:
    """Let everything leave that may; return it in that order."""
    with closing(order.victims(may_leave)) as victims:
        return list(victims)


@pytest.mark.parametrize("policy", ORDERS)
def test_everything_leaves_once_and_what_is_in_use_stays(policy: str) -> None:
    order, found = filled(policy, 10)
    # A block in use keeps those before it, for policies over prefixes.
    used = {found[0], found[1]}
    assert sorted(leaving(order, lambda each: each not in used)) == sorted(set(found) - used)
    assert len(order) == 2
    assert set(leaving(order)) == used
    assert len(order) == 0


IN_ORDER = range(30)
ENTRIES = [IN_ORDER, IN_ORDER[::-1], *(random.Random(seed).sample(IN_ORDER, 30) for seed in (1, 2))]


@pytest.mark.parametrize(("policy", "entries"), [("pool", IN_ORDER), *itertools.product(sorted(POLICIES), ENTRIES)])
def test_prompt_that_entered_in_any_order_leaves_from_its_end(policy: str, entries: Sequence[int]) -> None:
    order, found = order_of(policy, ManualClock(0.0), 30 * PAGE), ids(chain(*range(1, 31)))
    for position in entries:
        order.enter(found[position], found[position - 1].key if position else BlockKey(NS), PAGE)
    assert leaving(order) == found[::-1]


def test_read_state_is_used_though_prompts_of_another_group_are_told() -> None:
    order = PolicyOrder(policy_named("lru"), ManualClock(0.0), 4 * PAGE, 4)
    rows, states = ids(chain(1)), [ObjectId(Namespace(bytes([7]) * 32), each.key) for each in ids(chain(2, 3))]
    for state in states:
        order.enter(state, BlockKey(state.namespace), PAGE)
    order.note_request(NS, [each.key for each in rows])
    order.note_use(states[0])
    assert leaving(order)[0] == states[1]


@pytest.mark.parametrize("policy", ["s3fifo", "reuse", "mix"])
def test_block_that_lost_its_place_is_remembered_when_its_object_leaves(policy: str) -> None:
    order = PolicyOrder(policy_named(policy), ManualClock(0.0), 4 * PAGE, 4)
    prompts = [ids(chain(branch, 1, 2)) for branch in range(3)]
    for each in prompts:
        for before, block in zip([BlockKey(NS), *(found.key for found in each)], each, strict=False):
            order.enter(block, before, PAGE)
    known, lost = order._tree.stats().known_blocks, list(order._orphans)
    assert lost
    for block in lost:
        order.leave(block)
    assert order._tree.stats().known_blocks == known


@pytest.mark.parametrize("policy", ORDERS)
def test_what_left_is_no_victim_and_may_come_back(policy: str) -> None:
    order, found = filled(policy, 5)
    order.leave(found[2])
    order.leave(found[2])
    assert len(order) == 4
    order.enter(found[2], found[1].key, PAGE)
    assert sorted(leaving(order)) == sorted(found)


@pytest.mark.parametrize("policy", ORDERS)
def test_keys_that_are_no_chain_cost_their_owner_alone(policy: str) -> None:
    order, found = filled(policy, 8)
    order.note_request(NS, [found[3].key, found[1].key, found[3].key])
    other = ObjectId(Namespace(b"o" * 32), found[3].key)
    order.enter(other, BlockKey(bytes(32)), PAGE)
    assert len(order) == 9
    assert sorted(leaving(order, lambda each: each != other)) == sorted(found)
    assert leaving(order) == [other]


@pytest.mark.parametrize("policy", ORDERS)
def test_what_leaves_while_it_is_passed_over_is_gone(policy: str) -> None:
    order, found = filled(policy, 4)
    victims = order.victims(lambda each: each != found[3])
    yielded = list(itertools.islice(victims, 2))
    order.leave(found[3])
    victims.close()
    assert sorted([*yielded, *leaving(order)]) == sorted(found[:3])


@pytest.mark.parametrize("policy", ORDERS)
def test_put_that_finds_no_room_evicts_nothing(policy: str) -> None:
    clock = ManualClock(0.0)
    pinned = {each.key for each in ids(chain(1, 2))}
    order = order_of(policy, clock, 4 * PAGE)
    tier = MemoryTier(4 * PAGE, clock, lambda each: each in pinned, order, frame_bytes=PAGE)
    tier.open()
    here = [*ids(chain(1, 2)), *ids(chain(3)), *ids(chain(4))]
    for each in here:
        assert tier.put_from(each, b"x" * PAGE)
    with pytest.raises(TierFull):
        tier.put_from(ids(chain(5))[0], b"x" * 3 * PAGE)
    assert all(map(tier.contains, here))
    tier.check()
    tier.close()


def test_objects_on_a_disk_are_real_ones_of_their_policy_after_a_restart(tmp_path: Path) -> None:
    clock, limits = ManualClock(1e9), Limits(disk_bytes_max=400_000)
    url = f"disk://{tmp_path}?policy=s3fifo"
    for _ in range(2):
        stack = tiers_of([url], limits, clock, nothing_pinned)
        stack.open()
        for number in range(60):
            stack.put_from(ids(chain(number))[0], object_bytes(number, 8000))
        stack.check()
        kept = [stack.contains(ids(chain(number))[0]) for number in range(60)]
        assert 0 < sum(kept) < 60
        stack.close()


# Objects of unlike size under one bound of bytes: how many fit, and which are worth their room.

OTHER = Namespace(b"o" * 32)


class Asked:
    """A memory of BLOCKS pages that engines ask for prompts; `hits` by namespace."""

    def __init__(self, policy: str) -> None:
        self._clock = ManualClock(0.0)
        order = PolicyOrder(policy_named(policy), self._clock, BLOCKS * PAGE)
        self.memory = MemoryTier(BLOCKS * PAGE, self._clock, nothing_pinned, order, frame_bytes=PAGE)
        self._stack = TierStack([self.memory])
        self._stack.open()
        self.hits = {NS: 0, OTHER: 0}

    def ask(self, space: Namespace, keys: list[BlockKey], size: int) -> None:
        self._clock.advance(1.0)
        self.hits[space] += serve(self._stack, [ObjectId(space, each) for each in keys], size)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc", "reuse", "mix"])
def test_larger_first_object_does_not_lessen_what_is_planned_for(policy: str) -> None:
    usual, misled = Asked(policy), Asked(policy)
    misled.ask(NS, chain(200), 10 * PAGE)
    usual.ask(NS, chain(200), PAGE)
    for keys in made_up_requests(seed=5, count=400):
        usual.ask(NS, keys, PAGE)
        misled.ask(NS, keys, PAGE)
    assert misled.hits[NS] > 0.95 * usual.hits[NS]


@pytest.mark.parametrize(("policy", "gain"), [("reuse", 1.08), ("mix", 1.01)])
def test_tenant_whose_blocks_take_less_room_keeps_more_and_all_hit_more(
    policy: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def total(asked: Asked) -> int:
        rng = random.Random(3)
        for _ in range(1500):
            keys = chain(*(min(11, int(rng.expovariate(0.25))) for _ in range(2)))
            asked.ask(NS, keys, 6 * PAGE)
            asked.ask(OTHER, [BlockKey(each[:31] + b"o") for each in keys], PAGE)
        return sum(asked.hits.values())

    told = Asked(policy)
    with_sizes = total(told)
    assert told.hits[OTHER] > 1.5 * told.hits[NS]
    monkeypatch.setattr(Sizes, "measured", lambda self, size: USUAL_SIZE)
    assert with_sizes > gain * total(Asked(policy))


def test_index_counts_its_room_by_size() -> None:
    index = RadixIndex(ManualClock(), policy_named("lru"), 4)
    assert index.insert(NS, chain(1, 1, 1, 1), size=USUAL_SIZE // 2) == []
    assert index.insert(NS, chain(2, 2), size=USUAL_SIZE) == []
    assert index.insert(NS, chain(3), size=USUAL_SIZE // 2) == [chain(1, 1, 1, 1)[3]]
    # One of two rooms goes for two of half a room.
    assert index.insert(NS, chain(4), size=3 * USUAL_SIZE // 2) == [*chain(1, 1, 1)[::-1]]
    index.check()


def test_sizes_that_are_nearly_alike_are_the_usual_one() -> None:
    sizes = Sizes(1000)
    for number in range(40):
        sizes.enter(ObjectId(NS, chain(number)[0]), 100 + number % 5)
        sizes.enter(ObjectId(OTHER, chain(number)[0]), 25)
    assert (sizes.of(NS), sizes.of(OTHER)) == (USUAL_SIZE, USUAL_SIZE // 4)
    assert sizes.fitting(10) == 1000 * 80 // sizes.used_bytes
    assert sizes.fitting(15) == 15
    assert sizes.of(Namespace(b"x" * 32)) == round(USUAL_SIZE * sizes.used_bytes / 80 / 100)
