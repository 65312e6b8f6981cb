from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise, zip_longest

import pytest

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex
from kvtide.testing import chain, namespace
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.policies import policy_named

NS = namespace()
OTHER = Namespace(b"o" * 32)


def index_of(blocks_max: int = 100, policy: str = "lru") -> RadixIndex:
    return RadixIndex(ManualClock(), policy_named(policy), blocks_max)


def count(index: RadixIndex, *numbers: int) -> int:
    return index.match(chain(*numbers))


def masks(index: RadixIndex, keys: Sequence[BlockKey]) -> bytes:
    """The tiers of held blocks, a bit each."""
    runs = [(index._tree.run_of(key), key) for key in keys[: index.match(keys)]]
    return bytes(run.tiers[run.keys.index(key)] for run, key in runs if run is not None)


def test_match_is_the_longest_leading_run() -> None:
    index = index_of()
    index.insert(NS, chain(1, 2, 3))
    assert count(index, 1, 2, 9) == 2
    assert count(index, 1, 2, 3, 4) == 3
    assert count(index, 2) == 0
    assert index.match([]) == 0


def test_diverging_prefix_splits_the_run() -> None:
    index = index_of()
    index.insert(NS, chain(1, 2, 3, 4))
    index.insert(NS, chain(1, 2, 7, 8))
    assert (count(index, 1, 2, 3, 4), count(index, 1, 2, 7, 8), count(index, 1, 2, 9)) == (4, 4, 2)
    index.check()


def test_blocks_stored_one_by_one_are_one_run() -> None:
    index = index_of()
    keys = chain(*range(50))
    for position, key in enumerate(keys):
        index.insert(NS, [key], keys[position - 1] if position else None)
    assert index.match(keys) == 50
    assert len(list(index._tree.runs())) == 1


def test_namespace_is_the_parent_of_the_first_block() -> None:
    index = index_of()
    index.insert(NS, chain(1), BlockKey(NS))
    assert count(index, 1) == 1


def test_chain_behind_an_unknown_parent_is_not_inserted() -> None:
    index = index_of()
    assert index.insert(NS, chain(1, 2)[1:], chain(1)[0]) == []
    assert index.stats().known_blocks == 0


def test_inner_block_is_not_evicted_while_a_child_is_held() -> None:
    index = index_of(4)
    index.insert(NS, chain(1, 2))
    index.insert(NS, chain(1, 2, 3))
    index.insert(NS, chain(8))
    assert index.insert(NS, chain(9)) == [chain(1, 2, 3)[2]]
    assert count(index, 1, 2, 3) == 2


def test_prefix_pinned_twice_needs_two_unpins() -> None:
    index = index_of(2)
    keys = chain(1, 2)
    index.insert(NS, keys)
    index.pin(keys)
    index.pin(keys)
    index.unpin(keys)
    assert index.insert(NS, chain(9)) == chain(9)
    index.unpin(keys)
    assert index.insert(NS, chain(9)) == [keys[1]]
    with pytest.raises(AssertionError, match="not pinned"):
        index.unpin(keys)


def test_pin_of_a_middle_block_holds_what_is_before_it() -> None:
    index = index_of(4)
    keys = chain(1, 2, 3, 4)
    index.insert(NS, keys)
    index.pin(keys[1:2])
    assert index.victims(4) == [keys[3], keys[2]]
    index.check()
    index.unpin(keys[1:2])
    assert index.victims(4) == [keys[1], keys[0]]


def test_pinned_blocks_may_exceed_the_bound_and_nothing_else_does() -> None:
    index = index_of(2)
    keys = chain(1, 2, 3, 4)
    index.pin(keys)
    assert index.insert(NS, keys) == []
    assert index.insert(NS, chain(9)) == chain(9)
    assert index.stats().held_blocks == 4


def test_pin_outlives_removal() -> None:
    index = index_of()
    keys = chain(1, 2, 3)
    index.insert(NS, keys)
    index.pin(keys[:1])
    assert index.remove(keys[1]) == [keys[2], keys[1]]
    assert index.remove(keys[0]) == [keys[0]]
    assert index.is_pinned(keys[0])
    assert index.remove(keys[0]) == []
    index.check()


def test_index_knows_what_each_tier_has() -> None:
    index = index_of()
    keys = chain(1, 2, 3, 4)
    index.insert(NS, keys, tier=1)
    index.insert(NS, keys[:2], tier=0)
    assert masks(index, keys) == b"\3\3\2\2"
    assert index.remove(keys[1], tier=1) == []
    assert masks(index, keys) == b"\3\1\2\2"
    assert index.remove(keys[1], tier=0) == [keys[3], keys[2], keys[1]]
    index.check()


def test_insertion_behind_a_parent_says_nothing_of_the_parents_tiers() -> None:
    index, keys = index_of(), chain(1, 2, 3, 4)
    index.insert(NS, keys[:3], tier=1)
    index.insert(NS, keys[3:], keys[2], tier=0)
    assert masks(index, keys) == b"\2\2\2\1"
    index.insert(NS, keys[2:], keys[1], tier=0)
    assert masks(index, keys) == b"\2\2\3\1"
    index.check()


def test_placed_block_is_in_both_tiers_until_it_leaves_one() -> None:
    index, keys = index_of(), chain(1, 2, 3)
    index.insert(NS, keys, tier=1)
    index.place(keys[1], 0)
    index.place(chain(9)[0], 0)
    assert masks(index, keys) == b"\2\3\2"
    assert index.remove(keys[1], 0) == []
    assert masks(index, keys) == b"\2\2\2"
    index.victims(1)
    index.place(keys[2], 0)
    assert masks(index, keys) == b"\2\2"


def test_evicted_block_that_comes_back_is_in_its_new_tier_only() -> None:
    index = index_of(4, "arc")
    index.insert(NS, chain(1, 2), tier=3)
    index.victims(1)
    index.insert(NS, chain(1, 2), tier=0)
    assert masks(index, chain(1, 2)) == b"\t\1"


def test_remembered_blocks_are_not_matched() -> None:
    index = index_of(2, "arc")
    index.insert(NS, chain(1, 2))
    index.insert(NS, chain(3, 4))
    assert index.stats().known_blocks == 4
    assert count(index, 1, 2) == 0


@pytest.mark.parametrize("keys", [chain(1, 1)[:1] * 2, chain(1, 2, 3)[::-1], [*chain(1, 2), *chain(1)]])
def test_keys_that_are_no_chain_are_refused(keys: list[BlockKey]) -> None:
    index = index_of()
    index.insert(NS, chain(1, 2, 3))
    with pytest.raises(ValueError, match="chain"):
        index.insert(NS, keys)
    index.check()


def test_key_of_another_namespace_is_refused() -> None:
    index = index_of()
    index.insert(NS, chain(1))
    with pytest.raises(ValueError, match="not as block 1"):
        index.insert(OTHER, chain(1))


@pytest.mark.parametrize("tier", [-1, 8])
def test_tier_out_of_range_is_refused(tier: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 7"):
        index_of().insert(NS, chain(1), tier=tier)
    with pytest.raises(ValueError, match="tier must be from 0 to 7"):
        index_of().place(chain(1)[0], tier)


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks_max must not be negative"):
        index_of(-1)


def test_index_is_rebuilt_from_parents_first_and_passes_over_who_has_none() -> None:
    first, second, lost = chain(*range(6)), chain(0, 1, 9, 10), chain(77, 66)
    edges = [pairwise([BlockKey(NS), *keys]) for keys in (first, second)]
    blocks = {key: parent for rank in zip_longest(*edges) for parent, key in filter(None, rank)}
    index = index_of()
    found = [(ObjectId(NS, key), parent) for key, parent in [*blocks.items(), (lost[1], lost[0]), (lost[0], lost[0])]]
    assert index.restore(found) == 8
    assert (index.match(first), index.match(second), index.match(lost)) == (6, 4, 0)
    index.check()


def test_block_takes_bounded_memory() -> None:
    tracemalloc.start()
    index = index_of(20_000)
    for start in range(0, 20_000, 50):
        index.insert(NS, chain(start, *range(49)))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes / 20_000 <= 300


def test_threads_leave_it_consistent() -> None:
    index = index_of(50, "reuse")

    def work(seed: int) -> None:
        for number in range(300):
            keys = chain(number * seed % 7, *range(number % 9))
            index.pin(keys)
            index.insert(NS, keys)
            index.match(keys)
            index.unpin(keys)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    index.victims(0)
    index.check()
    assert index.stats().pinned_blocks == 0
