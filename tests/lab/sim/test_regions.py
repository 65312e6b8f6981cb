from __future__ import annotations

import pytest

from kvtide_lab.sim.regions import SHARED_SHARES, SYNC_BYTES_S, run_regions


def test_centre_helps_more_the_more_regions_share_and_nothing_is_sent_twice() -> None:
    report = run_regions(seed=1, requests=400)
    rows = {(row.shared_share, row.sync_mb_s): row for row in report.rows}
    assert len(rows) == len(SHARED_SHARES) * len(SYNC_BYTES_S)
    for row in report.rows:
        assert row.own_hit_rate <= row.without_centre_hit_rate <= row.hit_rate
        assert row.synchronised_per_new_byte <= 1.0
    fast = SYNC_BYTES_S[-1] / 1e6
    gains = [rows[share, fast].hit_rate - rows[share, fast].without_centre_hit_rate for share in SHARED_SHARES]
    assert gains == sorted(gains) and gains[-1] > gains[0]
    assert rows[0.5, fast].waiting_blocks < rows[0.5, SYNC_BYTES_S[0] / 1e6].waiting_blocks


def test_no_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="expected requests"):
        run_regions(0, 0)
