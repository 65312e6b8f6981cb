from __future__ import annotations

import pytest

from kvtide_lab.sim.fairness import ClientMix, FairnessSetup, Served, fairness_row, run_fairness

QUICK = 10.0


def test_byte_fair_policies_share_what_the_others_do_not() -> None:
    report = run_fairness(FairnessSetup(duration_s=QUICK))
    assert report.jain_vtc >= 0.99
    assert report.jain_lottery < 0.7
    assert report.jain_fifo < 0.3


def test_small_bodies_wait_for_three_rounds_at_most() -> None:
    report = run_fairness(FairnessSetup(duration_s=QUICK))
    waits = {row.policy: row.small_wait_ms_p99 for row in report.rows}
    assert waits["vtc"] <= 3 * report.slice_round_ms < waits["lottery"]


@pytest.mark.parametrize("connections", [1, 8])
def test_more_connections_buy_no_bytes(connections: int) -> None:
    mix = (ClientMix(1 << 20, 1, connections), ClientMix(1 << 20, 3))
    report = run_fairness(FairnessSetup(mix=mix, duration_s=QUICK))
    assert report.jain_vtc >= 0.99


def test_bytes_follow_weights() -> None:
    mix = (ClientMix(16 << 20, 1, 4, 4.0), ClientMix(512 << 10, 2, 4, 1.0))
    report = run_fairness(FairnessSetup(mix=mix, duration_s=QUICK))
    rows = {row.policy: row for row in report.rows}
    assert rows["vtc"].largest_share == pytest.approx(4 / 6, abs=0.02)


def test_jain_of_one_taker_is_one_over_the_clients() -> None:
    served = [Served(100, 1.0, sent, [], []) for sent in (800, 0, 0, 0)]
    row = fairness_row("fifo", served, 1.0)
    assert (row.jain, row.wait_ms_p99) == (0.25, 0.0)


def test_percentiles_are_of_the_smallest_bodies() -> None:
    small, large = Served(10, 1.0, 100, [n / 100 for n in range(100)], [0.5]), Served(99, 1.0, 100, [9.0] * 100, [9.0])
    row = fairness_row("vtc", [small, large], 1.0)
    assert (row.small_wait_ms_p50, row.small_wait_ms_p99, row.small_request_ms_p99) == (500.0, 990.0, 500.0)
    assert row.wait_ms_p99 == 9000.0


@pytest.mark.parametrize(
    "changes", [{"mix": ()}, {"mix": (ClientMix(0, 1),)}, {"slots": 0}, {"link_bits_s": -1.0}, {"round_trip_s": -1.0}]
)
def test_bad_setup_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"positive|needs|negative"):
        FairnessSetup(**changes)  # type: ignore[arg-type]
