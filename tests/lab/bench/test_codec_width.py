"""The measurement of widths on a small one; its figures are for the command."""

from __future__ import annotations

import pytest

from kvtide_lab.bench.codec_width import Width, WidthResult, measure_width, render, run


def test_a_wide_layer_is_measured_in_two_stages() -> None:
    row = measure_width(Width("3 x 96, random", 3, 96, 96), 3, 0.01)
    assert row.transform.startswith("blocks of ")
    assert 0 < row.profile_bytes <= 64_000_000
    assert 0 < row.bits < row.light_bits
    assert row.over_light == pytest.approx(row.gelem_s / row.light_gelem_s)
    assert "3 x 96" in render(WidthResult([row]))


def test_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match="16 x 256"):
        run(lambda name, done, total: None, ["7 x 7"])
