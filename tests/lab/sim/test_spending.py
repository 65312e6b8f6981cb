from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.codec.tide.law import DEFAULT_POSITIONS, LossLaw, Purpose
from kvtide_lab.judge.spending import cheapest, order

LAW = LossLaw(DEFAULT_POSITIONS, (0.7, 0.09, 0.007, 0.0009))


def sizes_of(blocks: int, seed: int = 0) -> list[list[int]]:
    steps = np.random.default_rng(seed).integers(0, 400, size=(blocks, 4)) + np.array([100, 400, 700, 900])
    return np.cumsum(steps, axis=1).tolist()


def spent(sizes: list[list[int]], kept: list[int]) -> int:
    return sum(size[each] for size, each in zip(sizes, kept, strict=True))


def holds(kept: list[int], kl_max: float) -> bool:
    return all(LAW.kl(kept, 256, purpose) <= kl_max * (1 + 1e-9) for purpose in Purpose)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 9), st.floats(1e-4, 1.0))
def test_cheapest_holds_the_loss_and_costs_no_more_than_one_refinement_for_all(n: int, seed: int, kl: float) -> None:
    sizes = sizes_of(n, seed)
    found = cheapest(LAW, sizes, 256, kl)
    flats = [[kept] * n for kept in range(4)]
    good = [spent(sizes, flat) for flat in flats if holds(flat, kl)]
    assert holds(found, kl) if good else found == flats[-1]
    assert spent(sizes, found) <= min(good, default=spent(sizes, found))


def test_cheapest_is_near_the_best_of_all_choices() -> None:
    sizes = sizes_of(5, 3)
    every = np.array(np.meshgrid(*[range(4)] * 5)).reshape(5, -1).T.tolist()
    for kl in (0.003, 0.01, 0.03, 0.1):
        best = min(spent(sizes, kept) for kept in every if holds(kept, kl))
        assert best <= spent(sizes, cheapest(LAW, sizes, 256, kl)) <= 1.15 * best


def test_newest_block_is_refined_first_and_the_middle_last() -> None:
    found = order(LAW, (0.16, 0.77, 1.83, 3.24), 12, 256)
    assert found[:13] == [*((block, 0) for block in range(12)), (11, 1)]
    assert sorted(found) == [(block, refinement) for block in range(12) for refinement in range(4)]
    assert all(found.index((block, 2)) > found.index((block, 1)) for block in range(12))
    assert {0, 10} <= {block for block, refinement in found[12:20] if refinement == 1}


@pytest.mark.parametrize(("sizes", "kl"), [([[4, 3, 2, 1]], 0.1), ([[1, 2]], 0.1), ([[1, 2, 3, 4]], 0.0)])
def test_sizes_and_goals_that_can_not_be_are_refused(sizes: list[list[int]], kl: float) -> None:
    assert cheapest(LAW, [], 256, 1e-3) == []
    with pytest.raises(ValueError, match="rising sizes"):
        cheapest(LAW, sizes, 256, kl)
