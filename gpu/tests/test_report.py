"""What tools/gpu.py measures, and the verdicts of `kvtide doctor --gpu` on it: none without figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.doors.user import kvtide

from kvtide.cli import doctor
from kvtide.engines.paged.device import DevicePages
from kvtide_gpu.proofs import proofs
from kvtide_gpu.report import GOALS, judge
from twin import TwinKernels, needs_compiler

TOOLS = Path(__file__).parents[2] / "tools"
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


def verdicts(folder: Path, **changes: Any) -> dict[str, tuple[str, str]]:
    """Status and detail by subject, of a good report with changes."""
    path = folder / "gpu.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return {finding.subject: (finding.status, finding.detail) for finding in judge(path, has_device=False)}


def cases(case: str, **figures: Any) -> dict[str, Any]:
    return {**GOOD["cases"], case: {**GOOD["cases"].get(case, {}), **figures}}


def test_goals_that_are_reached_are_ok(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    assert {status for status, _ in found.values()} == {"ok"}
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
    found = verdicts(tmp_path, cases=cases(case, **{figure: value}))
    assert [subject for subject, (status, _) in found.items() if status != "ok"] == [figure]


def test_dry_run_has_no_verdict_on_goals(tmp_path: Path) -> None:
    none = {"rans": {"decode_tsym_s": None}, "swap": {}, "overlap": {"gemm_slowdown": None}}
    kernels = {"rans_decode": None}
    found = verdicts(tmp_path, is_measured=False, device=None, cases=none, kernels=kernels, tests=None)
    assert found.pop("gpu sanitizer")[0] == "ok"
    assert {status for status, _ in found.values()} == {"off"}


def test_each_kernel_is_proven_here_or_not_run_here(tmp_path: Path) -> None:
    found = verdicts(tmp_path, kernels={"pack": True, "rans_decode": None, "tide_put": False})
    assert found["kernel pack"] == ("ok", "proven here")
    assert found["kernel rans_decode"] == ("off", "not run here")
    assert found["kernel tide_put"] == ("bad", "in a case that failed")


def test_what_failed_is_bad(tmp_path: Path) -> None:
    failed = cases("tide-layer", failed="AssertionError: keys")
    found = verdicts(tmp_path, cases=failed, tests={"status": 1}, sanitizer={"status": None})
    assert [found[each][0] for each in ("tide-layer", "gpu tests", "gpu sanitizer")] == ["bad", "bad", "off"]


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
        assert Path(command[1]) == TOOLS / "gpu.py"
        Path(command[3]).write_text(json.dumps(GOOD))

    monkeypatch.setattr(subprocess, "run", run)
    assert judge(tmp_path / "gpu.json", has_device=True)


# `kvtide doctor`


def test_doctor_says_which_way_pages_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_GPU_FILES", (tmp_path,))
    assert "copied by kernels where they prove faster than torch" in doctor._gpu().detail
    monkeypatch.setattr(doctor, "_GPU_FILES", ())
    assert doctor._gpu().detail.startswith("no CUDA device here")


def test_doctor_judges_a_report_by_the_distribution_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(GOOD))
    assert {row["status"] for row in kvtide("doctor", "--gpu", tmp_path / "gpu.json")["rows"]} == {"ok"}


def test_doctor_without_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.engines.entry_points", lambda **wanted: ())
    with pytest.raises(ValueError, match=r"pip install 'kvtide\[gpu\]', or ./gpu in a checkout"):
        doctor.doctor(gpu=tmp_path / "gpu.json")


# tools/gpu.py


def test_script_starts() -> None:
    command = [sys.executable, str(TOOLS / "gpu.py"), "--help"]
    assert "--dry-run" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_cases

    return gpu_cases


@needs_compiler
@pytest.mark.parametrize("case", ["copy", "rans", "swap", "pages", "overlap"])
def test_cases_run_on_the_twin_and_time_nothing(measuring: ModuleType, twin: TwinKernels, case: str) -> None:
    found = getattr(measuring, f"{case}_case")(twin, measuring.DRY)
    assert {goal.figure for goal in GOALS if goal.case == case} <= set(found)
    assert None in found.values()
    assert not any(isinstance(value, float) for name, value in found.items() if name != "bits")


def test_proof_of_a_device_is_a_line_for_each_kind_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"float16", "float16 in groups", "bfloat16", "bfloat16 in groups", "float32", "float32 in groups", "states"}
    found = proofs(torch.device("cpu"))
    assert {finding.subject.removeprefix("proof ") for finding in found} == kinds
    assert all(finding.status == "ok" and "every bit came out and in on cpu" in finding.detail for finding in found)
    monkeypatch.setattr(DevicePages, "scatter", lambda *args: None)
    bad = {(each.status, each.detail[:22]) for each in proofs(torch.device("cpu"))}
    assert bad == {("bad", "a block that came in d")}
