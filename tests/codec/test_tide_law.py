from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.tide_profiles import LAYOUT, fitted

from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import DEFAULT_POSITIONS, DISTANCES, LossLaw, PositionLaw, Powers, Purpose, law_table
from kvtide.errors import CorruptPayload

LAW = LossLaw(DEFAULT_POSITIONS, (0.7, 0.09, 0.007, 0.0009), (0.16, 0.77, 1.83, 3.24))
BLOCKS = st.lists(st.integers(0, 4), min_size=1, max_size=40)
LINEAR, WEIGHTS = Powers(1, 1, 1), (1.0,) * len(DISTANCES)
KL_MAX = st.floats(1e-4, 1.0)


def sizes_of(blocks: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 400, size=(blocks, 4)) + np.array([100, 400, 700, 900])
    return np.cumsum(steps, axis=1).tolist()


def spent(sizes: list[list[int]], kept: list[int]) -> int:
    return sum(size[each] for size, each in zip(sizes, kept, strict=True))


def holds(kept: list[int], kl_max: float) -> bool:
    return all(LAW.kl(kept, 256, purpose) <= kl_max * (1 + 1e-9) for purpose in Purpose)


@settings(deadline=None)
@given(BLOCKS, st.data())
def test_more_refinements_never_lose_more(kept: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(kept) - 1))
    finer = [*kept[:at], min(kept[at] + 1, 4), *kept[at + 1 :]]
    for purpose in Purpose:
        assert LAW.kl(finer, 256, purpose) <= LAW.kl(kept, 256, purpose) + 1e-12


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 9), KL_MAX)
def test_cheapest_holds_the_loss_and_costs_no_more_than_one_refinement_for_all(n: int, seed: int, kl: float) -> None:
    sizes = sizes_of(n, seed)
    found = LAW.cheapest(sizes, 256, kl)
    flats = [[kept] * n for kept in range(4)]
    good = [spent(sizes, flat) for flat in flats if holds(flat, kl)]
    assert holds(found, kl) if good else found == flats[-1]
    assert spent(sizes, found) <= min(good, default=spent(sizes, found))


def test_cheapest_is_near_the_best_of_all_choices() -> None:
    sizes = sizes_of(5, 3)
    every = np.array(np.meshgrid(*[range(4)] * 5)).reshape(5, -1).T.tolist()
    for kl in (0.003, 0.01, 0.03, 0.1):
        best = min(spent(sizes, kept) for kept in every if holds(kept, kl))
        assert best <= spent(sizes, LAW.cheapest(sizes, 256, kl)) <= 1.15 * best


def test_newest_block_is_refined_first_and_the_middle_last() -> None:
    order = list(LAW.order(12, 256))
    assert order[:12] == [(block, 0) for block in range(12)]
    assert order[12] == (11, 1)
    assert sorted(order) == [(block, refinement) for block in range(12) for refinement in range(4)]
    assert all(order.index((block, 2)) > order.index((block, 1)) for block in range(12))
    assert {0, 10} <= {block for block, refinement in order[12:20] if refinement == 1}


def test_loss_of_a_hit_does_not_depend_on_how_it_is_cut_into_blocks() -> None:
    coarse = [1, 0, 2, 3]
    for purpose in Purpose:
        fine = [each for each in coarse for _ in range(4)]
        assert LAW.kl(fine, 64, purpose) == pytest.approx(LAW.kl(coarse, 256, purpose))


def test_copies_are_judged_by_the_passage_that_is_named() -> None:
    kept = [3, 0, 3, 3]
    mean = LAW.kl(kept, 256, Purpose.COPIES)
    good, bad = (LAW.kl(kept, 256, Purpose.COPIES, [block]) for block in (0, 1))
    assert good < mean < bad
    assert LAW.kl(kept, 256, Purpose.GOES_ON, [1]) == LAW.kl(kept, 256, Purpose.GOES_ON)


def test_nothing_and_exact_blocks_lose_nothing() -> None:
    for purpose in Purpose:
        assert LAW.kl([], 256, purpose) == LAW.kl([4] * 8, 256, purpose) == 0.0
    assert LAW.cheapest([], 256, 1e-3) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: LAW.kl([5], 256, Purpose.COPIES),
        lambda: LAW.kl([-1], 256, Purpose.COPIES),
        lambda: LAW.kl([1], 0, Purpose.COPIES),
        lambda: LAW.cheapest([[4, 3, 2, 1]], 256, 0.1),
        lambda: LAW.cheapest([[1, 2]], 256, 0.1),
        lambda: LAW.cheapest([[1, 2, 3, 4]], 256, 0.0),
        lambda: PositionLaw(1, 1, (), LINEAR, LINEAR, LINEAR),
        lambda: PositionLaw(-1, 1, WEIGHTS, LINEAR, LINEAR, LINEAR),
        lambda: PositionLaw(1, 1, WEIGHTS, LINEAR, LINEAR, Powers(1, 0, 1)),
        lambda: PositionLaw(1, 1, WEIGHTS, Powers(1, 1, float("inf")), LINEAR, LINEAR),
        lambda: PositionLaw(1, 1, (0.0, *WEIGHTS[1:]), LINEAR, LINEAR, LINEAR),
    ],
)
def test_what_is_no_law_and_no_hit_is_refused(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]


def with_law(table: np.ndarray) -> Profile:
    return fitted(LAYOUT).with_arrays({"law": table})


def test_profile_carries_its_law_through_its_bytes_and_one_without_has_the_default() -> None:
    positions = (PositionLaw(0.5, 0, WEIGHTS, LINEAR, Powers(0.5, 1, 1), Powers(1, 0.75, 0.25)), DEFAULT_POSITIONS[1])
    profile = Profile.parse(with_law(law_table(positions)).to_bytes())
    found, default = (TideCodec(each, 1e-2, 2).law for each in (profile, fitted(LAYOUT)))
    assert found is not None and default is not None
    assert found.positions[0] == positions[0] and default.positions == DEFAULT_POSITIONS
    assert found.losses == default.losses and len(found.losses) == len(found.sizes) == 3
    assert list(found.sizes) == sorted(found.sizes)
    assert TideCodec().law is None


@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 5)])
def test_damaged_law_of_a_profile_is_found(place: tuple[int, int]) -> None:
    table = law_table(DEFAULT_POSITIONS)
    table[place] = -1
    for bad in (table, table[:, :-1], table[:1]):
        with pytest.raises(CorruptPayload):
            TideCodec(with_law(bad), 1e-2)
