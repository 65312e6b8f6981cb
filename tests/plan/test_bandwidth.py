from __future__ import annotations

import pytest

from kvtide.plan.speeds import HarmonicRate


def fed(estimator: HarmonicRate, *transfers: tuple[int, float, float]) -> float | None:
    for transfer in transfers:
        estimator.add(*transfer)
    return estimator.bytes_per_s()


@pytest.mark.parametrize("samples", [1, 5])
def test_steady_link_has_its_own_rate(samples: int) -> None:
    assert HarmonicRate(samples).bytes_per_s() is None
    assert fed(HarmonicRate(samples), *((500, 0.5 * i, 0.5 * i + 0.5) for i in range(9))) == pytest.approx(1000)


@pytest.mark.parametrize(("estimator", "expected"), [(HarmonicRate(1), 400), (HarmonicRate(3), 480)])
def test_estimators_read_a_falling_rate_each_in_its_way(estimator: HarmonicRate, expected: float) -> None:
    # Rates 500, 600 (in half the time), 400.
    assert fed(estimator, (500, 0, 1), (300, 1, 1.5), (400, 1.5, 2.5)) == pytest.approx(expected)


def test_window_forgets() -> None:
    assert fed(HarmonicRate(2), (9000, 0, 1), (100, 1, 2), (100, 2, 3)) == pytest.approx(100)


def test_idle_time_counts_for_nobody() -> None:
    assert fed(HarmonicRate(), (100, 0, 1), (100, 50, 51)) == pytest.approx(100)


def test_overlapping_transfers_share_the_link() -> None:
    # Four requests at once, 100 bytes each, one done every second: the link carries 100 bytes/s, not 25 to 100.
    assert fed(HarmonicRate(), *((100, 0, float(stop)) for stop in (1, 2, 3, 4))) == pytest.approx(100)


def test_transfers_of_no_time_are_added_to_the_next() -> None:
    assert fed(HarmonicRate(1), (100, 1, 1), (100, 1, 1)) is None
    assert fed(HarmonicRate(1), (100, 1, 1), (100, 1, 3)) == pytest.approx(100)
