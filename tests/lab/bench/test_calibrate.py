"""The cost of calibrating on a tiny shape; its figures are for the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide_lab.bench.calibrate import MEMORY_BYTES_MAX, Shape, ShapeResult, measure_shape, render, run


def test_a_shape_is_calibrated_by_the_command_in_its_bound(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text of its own, again and again. " * 200)
    row = measure_shape(Shape("tiny", 2, 2, 1, 16), tmp_path, ["--tokens", "400", "--text", str(tmp_path / "text")])
    assert list(row.stages) == ["moments", "shares", "counts", "curve"]
    assert 0 < row.weight_bytes < row.peak_bytes < MEMORY_BYTES_MAX
    assert (row.texts, row.tokens) == (1, 256 - 4)
    assert "tiny" in render(ShapeResult("tide-layer", 400, [row]))


def test_a_failed_calibration_says_why(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short")
    with pytest.raises(ValueError, match="at least one full block"):
        measure_shape(Shape("tiny", 2, 2, 1, 16), tmp_path, ["--text", str(tmp_path / "text")])


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="135M, 1B, 8B"):
        run(["70B"], 700, lambda name, done, total: None)
