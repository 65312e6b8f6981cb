"""`kvtide doctor --gpu`: a verdict for each goal, and none on what was not measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.doors.user import kvtide

from kvtide.cli import doctor
from kvtide_gpu.report import judge

GOOD: dict[str, Any] = {
    "is_measured": True,
    "device": "NVIDIA H200",
    "commit": "abc",
    "build": {"compile_s": {}},
    "tests": {"status": 0, "log": ""},
    "sanitizer": {"status": 0, "memcheck": {"status": 0}},
    "kernels": {"rans_decode": True, "block_copy": True},
    "cases": {
        "rans": {"decode_tsym_s": 0.41},
        "swap": {"swap_out_of_pinned": 0.95, "swap_in_of_pinned": 0.9},
        "overlap": {"gemm_slowdown": 1.02},
        "nvcomp": {"reason": "not installed"},
    },
}


def statuses(folder: Path, report: dict[str, Any]) -> dict[str, str]:
    path = folder / "gpu.json"
    path.write_text(json.dumps(report))
    return {finding.subject: finding.status for finding in judge(path, has_device=False)}


def test_goals_that_are_reached_are_ok(tmp_path: Path) -> None:
    found = statuses(tmp_path, GOOD)
    assert set(found.values()) == {"ok"}
    assert {"decode_tsym_s", "swap_out_of_pinned", "swap_in_of_pinned", "gemm_slowdown", "gpu tests"} <= set(found)


@pytest.mark.parametrize(
    ("case", "figure", "value"),
    [
        ("rans", "decode_tsym_s", 0.39),
        ("swap", "swap_out_of_pinned", 0.89),
        ("swap", "swap_in_of_pinned", 0.1),
        ("overlap", "gemm_slowdown", 1.06),
    ],
)
def test_goal_that_is_missed_is_bad_and_no_other(tmp_path: Path, case: str, figure: str, value: float) -> None:
    cases = {**GOOD["cases"], case: {**GOOD["cases"][case], figure: value}}
    found = statuses(tmp_path, {**GOOD, "cases": cases})
    assert [subject for subject, status in found.items() if status != "ok"] == [figure]


def test_dry_run_has_no_verdict_on_goals(tmp_path: Path) -> None:
    cases = {"rans": {"decode_tsym_s": None}, "swap": {}, "overlap": {"gemm_slowdown": None}}
    report = {**GOOD, "is_measured": False, "device": None, "cases": cases, "kernels": {"rans_decode": None}}
    del report["tests"]
    found = statuses(tmp_path, report)
    assert found.pop("gpu sanitizer") == "ok"
    assert set(found.values()) == {"off"}


def test_each_kernel_is_proven_here_or_not_run_here(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({**GOOD, "kernels": {"pack": True, "rans_decode": None, "tide_put": False}}))
    found = {finding.subject: (finding.status, finding.detail) for finding in judge(path, has_device=False)}
    assert found["kernel pack"] == ("ok", "proven here")
    assert found["kernel rans_decode"] == ("off", "not run here")
    assert found["kernel tide_put"] == ("bad", "in a case that failed")


def test_what_failed_is_bad(tmp_path: Path) -> None:
    cases = {**GOOD["cases"], "tide-layer": {"failed": "AssertionError: keys"}}
    found = statuses(tmp_path, {**GOOD, "cases": cases, "tests": {"status": 1}, "sanitizer": {"status": None}})
    assert (found["tide-layer"], found["gpu tests"], found["gpu sanitizer"]) == ("bad", "bad", "off")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"is_measured": 1}', b" " * (2 << 20)])
def test_what_is_no_report_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="is no report"):
        judge(tmp_path / "x", has_device=False)


def test_without_file_and_device_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without a CUDA device .* docs/gpu.md"):
        judge(tmp_path / "gpu.json", has_device=False)


def test_device_is_measured_where_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        assert Path(command[1]).name == "gpu.py"
        Path(command[3]).write_text(json.dumps(GOOD))

    monkeypatch.setattr(subprocess, "run", run)
    assert judge(tmp_path / "gpu.json", has_device=True)


def test_doctor_says_which_way_pages_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_GPU_FILES", (tmp_path,))
    assert "torch copies vLLM's pages; for kernels" in doctor._gpu().detail
    monkeypatch.setattr(doctor, "_GPU_FILES", ())
    assert doctor._gpu().detail.startswith("no CUDA device here")


def test_doctor_judges_a_report_by_the_distribution_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(GOOD))
    assert {row["status"] for row in kvtide("doctor", "--gpu", tmp_path / "gpu.json")["rows"]} == {"ok"}


def test_doctor_without_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.engines.entry_points", lambda **wanted: ())
    with pytest.raises(ValueError, match=r"pip install 'kvtide\[gpu\]', or ./gpu in a checkout"):
        doctor.doctor(gpu=tmp_path / "gpu.json")
