"""Objects of unlike size under one bound of bytes: how many fit, and which are worth their room."""

from __future__ import annotations

import random

import pytest
from tests.evict.test_order import NS, PAGE, made_up_requests, prompt
from tests.tier.test_stack import nothing_pinned

from kvtide.clock import ManualClock
from kvtide.evict.policies import PolicyOrder
from kvtide.evict.policies.order import Sizes
from kvtide.index import USUAL_SIZE, RadixIndex
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.policies import policy_named

OTHER = Namespace(b"o" * 32)
ROOM = 40


class Asked:
    """A memory of ROOM pages that engines ask for prompts; `hits` by namespace."""

    def __init__(self, policy: str) -> None:
        self._clock = ManualClock(0.0)
        order = PolicyOrder(policy_named(policy), self._clock, ROOM * PAGE)
        self.memory = MemoryTier(ROOM * PAGE, self._clock, nothing_pinned, order, frame_bytes=PAGE)
        self._stack = TierStack([self.memory])
        self._stack.open()
        self.hits = {NS: 0, OTHER: 0}

    def ask(self, space: Namespace, keys: list[BlockKey], size: int) -> None:
        self._clock.advance(1.0)
        asked = [ObjectId(space, each) for each in keys]
        self._stack.note_request(asked)
        hits = next((i for i, each in enumerate(asked) if not self._stack.contains(each)), len(keys))
        self.hits[space] += hits
        for each in asked[hits:]:
            self._stack.put_from(each, bytes(size))


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc", "reuse", "mix"])
def test_larger_first_object_does_not_lessen_what_is_planned_for(policy: str) -> None:
    usual, misled = Asked(policy), Asked(policy)
    misled.ask(NS, prompt(200), 10 * PAGE)
    usual.ask(NS, prompt(200), PAGE)
    for keys in made_up_requests(seed=5, count=400):
        usual.ask(NS, keys, PAGE)
        misled.ask(NS, keys, PAGE)
    assert misled.hits[NS] > 0.95 * usual.hits[NS]


@pytest.mark.parametrize("policy", ["reuse", "mix"])
def test_tenant_whose_blocks_take_less_room_keeps_more_and_all_hit_more(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def total(asked: Asked) -> int:
        rng = random.Random(3)
        for _ in range(1500):
            keys = prompt(*(min(11, int(rng.expovariate(0.25))) for _ in range(2)))
            asked.ask(NS, keys, 6 * PAGE)
            asked.ask(OTHER, [BlockKey(each[:31] + b"o") for each in keys], PAGE)
        return sum(asked.hits.values())

    told = Asked(policy)
    with_sizes = total(told)
    assert told.hits[OTHER] > 1.5 * told.hits[NS]
    monkeypatch.setattr(Sizes, "measured", lambda self, size: USUAL_SIZE)
    assert with_sizes > 1.04 * total(Asked(policy))


def test_index_counts_its_room_by_size() -> None:
    index = RadixIndex(ManualClock(), policy_named("lru"), 4)
    assert index.insert(NS, prompt(1, 1, 1, 1), size=USUAL_SIZE // 2) == []
    assert index.insert(NS, prompt(2, 2), size=USUAL_SIZE) == []
    assert index.insert(NS, prompt(3), size=USUAL_SIZE // 2) == [prompt(1, 1, 1, 1)[3]]
    # One of two rooms goes for two of half a room.
    assert index.insert(NS, prompt(4), size=3 * USUAL_SIZE // 2) == [*prompt(1, 1, 1)[::-1]]
    index.check()


def test_sizes_that_are_nearly_alike_are_the_usual_one() -> None:
    sizes = Sizes(1000)
    for number in range(40):
        sizes.enter(ObjectId(NS, prompt(number)[0]), 100 + number % 5)
        sizes.enter(ObjectId(OTHER, prompt(number)[0]), 25)
    assert (sizes.of(NS), sizes.of(OTHER)) == (USUAL_SIZE, USUAL_SIZE // 4)
    assert sizes.fitting(10) == 1000 * 80 // sizes.used_bytes
    assert sizes.fitting(15) == 15
    assert sizes.of(Namespace(b"x" * 32)) == round(USUAL_SIZE * sizes.used_bytes / 80 / 100)
