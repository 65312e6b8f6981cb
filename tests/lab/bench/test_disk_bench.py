from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from kvtide.clock import SystemClock
from kvtide_lab.bench import disk


@pytest.mark.parametrize("fio", [None, shutil.which("fio")])
def test_round_measures_both_sides_and_leaves_nothing(fio: str | None, tmp_path: Path) -> None:
    row = disk._measure(512 << 10, 4 << 20, 2, tmp_path, fio, SystemClock())
    assert row.write_gb_s > 0 and row.read_gb_s > 0 and row.cpu_s_per_gb_read > 0 and row.cpu_floor_s_per_gb > 0
    assert (row.seal_vs_plain is None) == (row.sealed_write_vs_plain is None) == (find_spec("cryptography") is None)
    assert (row.read_vs_fio is None) == (fio is None)
    assert [path.name for path in tmp_path.iterdir()] == (["fio"] if fio else [])


def test_result_has_the_promised_keys_and_a_table(tmp_path: Path) -> None:
    row = disk._measure(512 << 10, 4 << 20, 1, tmp_path, None, SystemClock())
    result = disk.DiskBenchResult(1.0, 0.9, 0.1, 0.08, 0.9, str(tmp_path), 1, None, "fio is not installed", [row])
    keys = json.loads(msgspec.json.encode(result))
    assert {"read_vs_fio", "write_vs_fio", "cpu_s_per_gb_read", "cpu_floor_s_per_gb", "seal_vs_plain"} <= keys.keys()


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory"):
        disk.run(quick=True, folder=tmp_path / "none")
