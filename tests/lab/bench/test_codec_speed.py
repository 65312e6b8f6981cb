"""The benchmark's arithmetic on a small workload; its figures are for the command."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvtide.codec.entropy import RansTables
from kvtide.codec.published.integers import PrefixTables
from kvtide_lab.bench import codec_speed


def test_rows_carry_sizes_that_are_true() -> None:
    work = codec_speed.make_workload(2)
    rows: list[codec_speed.PathSpeed] = []
    for coder in (RansTables, PrefixTables):
        tables = coder.build(work.counts, "portable")
        rows.append(codec_speed.measure_path(coder.name, "portable", tables, work, 10.0, 0.01, rows))
    rans, prefix = rows
    assert 0 < rans.size_over_entropy <= 0.007
    assert 0 < prefix.size_over_rans <= 0.04
    assert rans.decode_vs_memcpy == pytest.approx(rans.decode_gsym_s / 10, abs=1e-3)
    assert rans.decode_spread[0] <= rans.decode_gsym_s <= rans.decode_spread[1]


def test_entropy_of_equal_shares_is_their_logarithm() -> None:
    assert codec_speed.entropy_bits(np.full((2, 32), 7, np.uint64)) == pytest.approx(2 * 32 * 7 * 5)


def test_pinning_is_undone() -> None:
    before = os.sched_getaffinity(0)
    with codec_speed.pinned():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_quick_run_renders_a_row_for_each_path_and_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_speed, "STREAMS_QUICK", 32)
    monkeypatch.setattr(codec_speed, "SECONDS_QUICK", 0.02)
    result = codec_speed.run(quick=True)
    assert [row.coder for row in result.rows] == ["rans", "prefix"] * (len(result.rows) // 2)
    assert result.decode_gsym_s == max(row.decode_gsym_s for row in result.rows if row.coder == "rans")
