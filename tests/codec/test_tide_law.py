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

LAW = LossLaw(DEFAULT_POSITIONS, (0.7, 0.09, 0.007, 0.0009))
LINEAR, WEIGHTS = Powers(1, 1, 1), (1.0,) * len(DISTANCES)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_more_refinements_never_lose_more(kept: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(kept) - 1))
    finer = [*kept[:at], min(kept[at] + 1, 4), *kept[at + 1 :]]
    for purpose in Purpose:
        assert LAW.kl(finer, 256, purpose) <= LAW.kl(kept, 256, purpose) + 1e-12


@pytest.mark.parametrize("purpose", Purpose)
def test_loss_of_a_hit_does_not_depend_on_how_it_is_cut_into_blocks(purpose: Purpose) -> None:
    coarse = [1, 0, 2, 3]
    fine = [each for each in coarse for _ in range(4)]
    assert LAW.kl(fine, 64, purpose) == pytest.approx(LAW.kl(coarse, 256, purpose))
    assert LAW.lost(4, 256)[purpose, range(4), coarse].sum() == pytest.approx(LAW.kl(coarse, 256, purpose))


def test_copies_are_judged_by_the_passage_that_is_named() -> None:
    kept = [3, 0, 3, 3]
    mean = LAW.kl(kept, 256, Purpose.COPIES)
    good, bad = (LAW.kl(kept, 256, Purpose.COPIES, [block]) for block in (0, 1))
    assert good < mean < bad
    assert LAW.kl(kept, 256, Purpose.GOES_ON, [1]) == LAW.kl(kept, 256, Purpose.GOES_ON)


def test_nothing_and_exact_blocks_lose_nothing() -> None:
    for purpose in Purpose:
        assert LAW.kl([], 256, purpose) == LAW.kl([4] * 8, 256, purpose) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: LAW.kl([5], 256, Purpose.COPIES),
        lambda: LAW.kl([-1], 256, Purpose.COPIES),
        lambda: LAW.kl([1], 0, Purpose.COPIES),
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
    assert found.losses == default.losses and len(found.losses) == 3
    assert TideCodec().law is None


@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 5)])
def test_damaged_law_of_a_profile_is_found(place: tuple[int, int]) -> None:
    table = law_table(DEFAULT_POSITIONS)
    table[place] = -1
    for bad in (table, table[:, :-1], table[:1]):
        with pytest.raises(CorruptPayload):
            TideCodec(with_law(bad), 1e-2)
