from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtide.evict.policies.pool import FreePool
from kvtide.types import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def test_oldest_use_goes_first_then_longest_prefix() -> None:
    pool = FreePool(4)
    for number, (last_use_s, prefix_blocks) in enumerate([(2.0, 1), (1.0, 1), (1.0, 3), (1.0, 2)]):
        assert pool.add(key(number), last_use_s, prefix_blocks) is None
    assert [pool.evict() for _ in range(5)] == [key(2), key(3), key(1), key(0), None]


def test_full_pool_gives_one_for_each_that_comes() -> None:
    pool = FreePool(2)
    assert [pool.add(key(n), float(n), 1) for n in range(4)] == [None, None, key(0), key(1)]
    assert len(pool) == 2


def test_pool_of_zero_gives_every_block_back_at_once() -> None:
    pool = FreePool(0)
    assert pool.add(key(1), 1.0, 1) == key(1)
    assert len(pool) == 0
    assert pool.evict() is None


def test_block_back_in_use_is_not_evicted() -> None:
    pool = FreePool(2)
    pool.add(key(1), 1.0, 1)
    assert pool.take_back(key(1))
    assert not pool.take_back(key(1))
    assert pool.evict() is None


def test_block_freed_again_counts_by_its_new_use() -> None:
    pool = FreePool(3)
    pool.add(key(1), 1.0, 1)
    pool.add(key(2), 2.0, 1)
    pool.take_back(key(1))
    pool.add(key(1), 3.0, 1)
    assert [pool.evict(), pool.evict()] == [key(2), key(1)]


def test_blocks_that_come_and_go_leave_nothing_behind() -> None:
    pool = FreePool(4)
    for number in range(2000):
        pool.add(key(number % 4), float(number), 1)
        pool.take_back(key(number % 4))
    assert len(pool._heap) <= 130
    pool.check()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=60))
def test_pool_agrees_with_sorting(steps: list[tuple[int, int, int, bool]]) -> None:
    pool, model = FreePool(5), dict[BlockKey, tuple[int, int]]()
    for number, last_use_s, prefix_blocks, is_taken in steps:
        name = key(number)
        if is_taken or name in model:
            assert pool.take_back(name) == (model.pop(name, None) is not None)
            continue
        model[name] = (last_use_s, -prefix_blocks)
        expected = min(model, key=lambda each: (*model[each], each)) if len(model) > 5 else None
        assert pool.add(name, last_use_s, prefix_blocks) == expected
        model.pop(expected, None) if expected else None
        pool.check()
