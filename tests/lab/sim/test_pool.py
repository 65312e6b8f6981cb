from __future__ import annotations

import pytest

from kvtide_lab.sim.pool import run_pool


def test_table_shows_what_is_known_of_each_placement() -> None:
    report = run_pool(seed=3, counts=[8, 13], keys=50_000)
    rows = {(row.servers, row.distribution): row for row in report.rows}
    assert rows[8, "step 8"].mod == pytest.approx(8.0), "all keys on one server"
    assert rows[13, "step 8"].mod < 1.05, "a prime hides the step"
    assert rows[8, "step 8"].rendezvous < 1.1, "mixing hides it for any number"
    assert rows[8, "zipf"].rendezvous > 1.2
    assert all(row.less_loaded < 1.06 for row in report.rows)
    assert all(row.join_moved_mod > 0.85 for row in report.rows)
    assert report.moved_of_ideal_max <= 1.15
    assert len(report.rows) == 6


def test_run_repeats() -> None:
    assert run_pool(1, [8], 10_000) == run_pool(1, [8], 10_000)
    assert run_pool(1, [8], 10_000) != run_pool(2, [8], 10_000)


@pytest.mark.parametrize(("counts", "keys"), [([], 10), ([1], 10), ([8], 0)])
def test_nothing_to_simulate_is_refused(counts: list[int], keys: int) -> None:
    with pytest.raises(ValueError, match="at least 2 servers"):
        run_pool(0, counts, keys)
