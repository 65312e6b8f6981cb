"""A run is looked up in few questions, and its answer is what single look-ups give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.clock import SystemClock
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.stack.tier import LOOK_UPS_MAX
from kvtide.types import ObjectId
from kvtide_lab.wrapped import Counting

IDS = [object_id(number) for number in range(12)]


class Remote(Counting):
    is_batched = True

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        self.before("count_leading", 0)
        return sum(1 for _ in takewhile(self.tier.contains, object_ids))

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        self.before("contains_each", 0)
        return [self.tier.contains(each) for each in object_ids]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 2)), min_size=12, max_size=12), st.sets(st.integers(0, 2)))
def test_run_ends_where_no_tier_has_the_next(held: list[set[int]], batched: set[int]) -> None:
    plain = [MemoryTier(1 << 16, SystemClock(), lambda key: False) for _ in range(3)]
    stack = TierStack([Remote(tier) if number in batched else tier for number, tier in enumerate(plain)])
    stack.open()
    for number, tiers in enumerate(held):
        for tier in tiers:
            plain[tier].put_from(IDS[number], b"x")
    expected = [min(tiers) for tiers in takewhile(bool, held)]
    assert stack.run_places(IDS) == expected
    stack.close()


def test_long_run_behind_memory_takes_few_questions() -> None:
    clock = SystemClock()
    near, far = MemoryTier(1 << 20, clock, lambda key: False), MemoryTier(8 << 20, clock, lambda key: False)
    remote = Remote(far)
    stack = TierStack([near, remote])
    stack.open()
    ids = [object_id(number) for number in range(2 * LOOK_UPS_MAX)]
    for number, each in enumerate(ids[:-5]):
        far.put_from(each, object_bytes(number, 100))
    near.put_from(ids[3], object_bytes(3, 100))
    remote.calls.clear()
    assert stack.run_places(ids) == [1, 1, 1, 0] + [1] * (len(ids) - 9)
    assert sum(remote.calls.values()) <= 6
    stack.close()
