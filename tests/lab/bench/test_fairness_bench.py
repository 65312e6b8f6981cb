from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from kvtide_lab.bench import fairness
from kvtide_lab.cli.bench import app
from kvtide_lab.sim.fairness import ClientMix, FairnessRow, FairnessSetup

SETUP = FairnessSetup(mix=(ClientMix(4 << 20, 1, 2), ClientMix(128 << 10, 2)), slots=2, duration_s=1.0, link_bits_s=2e8)


def test_every_policy_is_measured_over_a_real_link() -> None:
    result = fairness.run(SETUP, 0.93, 1)
    rows = {row.policy: row for row in result.rows}
    assert list(rows) == ["fifo", "lottery", "vtc"]
    # No more than the link carries; short and on a busy machine it may be less.
    assert all(1 < row.throughput_mb_s <= 25 for row in rows.values())
    assert result.jain_vtc > max(result.jain_fifo, result.jain_lottery)
    assert rows["vtc"].largest_share < rows["fifo"].largest_share
    assert "vtc" in str(msgspec.json.encode(result))


def test_without_a_namespace_the_sender_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(fairness, "POLICIES", ["vtc", "fifo", "lottery"])
    setup = msgspec.structs.replace(SETUP, mix=(ClientMix(4 << 20, 1), ClientMix(128 << 10, 1)), duration_s=0.5)
    result = fairness.run(setup, 0.5, 1)
    assert result.link.startswith("token bucket in the sender")
    assert (result.pace, result.rows[0].policy) == (1.0, "vtc")
    # The bucket starts with a slice in flight and one ahead.
    assert result.rows[0].throughput_mb_s <= 25 + 2 * 2 * 0.75


def test_rounds_are_summed_up_by_medians_and_spread() -> None:
    rows = [FairnessRow("vtc", jain, *[10 * jain] * 7) for jain in (0.2, 0.9, 0.5)]
    assert fairness._median(rows) == FairnessRow("vtc", 0.5, *[5.0] * 7)


@pytest.mark.parametrize("pace", ["-0.1", "1.1"])
def test_bad_pace_is_refused(pace: str) -> None:
    result = CliRunner().invoke(app, ["fairness", "--pace", pace])
    assert "pace is a share" in str(result.exception)
