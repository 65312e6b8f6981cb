"""`kvtide doctor --gpu`: a verdict on what tools/gpu.py measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

import kvtide
from kvtide.cli.report import DoctorFinding

REPORT_BYTES_MAX = 1 << 20
# It takes some minutes on a GPU.
MEASURING_S_MAX = 1800.0


class _Goal(NamedTuple):
    """A figure of a case and the bound that it must reach, or stay below if `is_ceiling`."""

    case: str
    figure: str
    bound: float
    is_ceiling: bool = False


GOALS = (
    _Goal("rans", "decode_tsym_s", 0.4),
    _Goal("swap", "swap_out_of_pinned", 0.9),
    _Goal("swap", "swap_in_of_pinned", 0.9),
    _Goal("overlap", "gemm_slowdown", 1.05, is_ceiling=True),
)


class _Case(msgspec.Struct, frozen=True):
    """A case's figures that have goals, or why it failed."""

    failed: str = ""
    decode_tsym_s: float | None = None
    swap_out_of_pinned: float | None = None
    swap_in_of_pinned: float | None = None
    gemm_slowdown: float | None = None


class _Run(msgspec.Struct, frozen=True):
    """A run of tests: exit status, None if it did not run or end."""

    status: int | None = None
    reason: str = ""


class _Report(msgspec.Struct, frozen=True):
    is_measured: bool
    device: str | None
    commit: str
    build: _Case
    sanitizer: _Run
    cases: dict[str, _Case]
    # Whether a device's results were the processor's, None where none has run the kernel.
    kernels: dict[str, bool | None]
    # A dry run leaves them to `make test`.
    tests: _Run | None = None


def judge(path: Path, has_device: bool) -> list[DoctorFinding]:
    """Judge a report of tools/gpu.py, which measures this GPU first if there is no file: a line for each kernel,
    goal, fault, and proof on a device that is here. ValueError if there is no report, nor a way to one.
    """
    if not path.exists():
        _measure(path, has_device)
    if not has_device:
        return _verdicts(path)
    # A report from elsewhere is judged without torch.
    from kvtide_gpu.proofs import device_proofs

    return [*_verdicts(path), *device_proofs()]


def _measure(path: Path, has_device: bool) -> None:
    script = Path(kvtide.__file__).parents[2] / "tools" / "gpu.py"
    if not has_device or not script.exists():
        missing = "a checkout of kvtide" if has_device else "a CUDA device"
        raise ValueError(f"no file {path}, and without {missing} it can't be measured: see docs/gpu.md")
    command = [sys.executable, str(script), "--out", str(path)]
    # What it is at goes to stderr; stdout has the file once more.
    try:
        subprocess.run(command, check=False, timeout=MEASURING_S_MAX, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{script} did not end within {MEASURING_S_MAX:.0f} s") from error
    if not path.exists():
        raise ValueError(f"{script} ended without writing {path}")


def _verdicts(path: Path) -> list[DoctorFinding]:
    with path.open("rb") as file:
        data = file.read(REPORT_BYTES_MAX + 1)
    try:
        report = msgspec.json.decode(data, type=_Report)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no report of tools/gpu.py: {error}") from error
    dry = "nothing: a dry run on the kernels' twin, by request or because torch saw no CUDA device,"
    status, device = ("ok", report.device) if report.is_measured else ("off", dry)
    where = DoctorFinding("measured on", status, f"{device} at {report.commit}")
    runs = [("gpu tests", report.tests), ("gpu sanitizer", report.sanitizer)]
    return [
        where,
        *(_of_run(name, run) for name, run in runs if run is not None),
        *(DoctorFinding(name, "bad", case.failed) for name, case in _all_cases(report) if case.failed),
        *(_of_kernel(name, is_right) for name, is_right in sorted(report.kernels.items())),
        *(_of_goal(goal, report.cases.get(goal.case, _Case())) for goal in GOALS),
    ]


def _all_cases(report: _Report) -> list[tuple[str, _Case]]:
    return [("build", report.build), *report.cases.items()]


def _of_run(name: str, run: _Run) -> DoctorFinding:
    if run.status is None:
        return DoctorFinding(name, "off", run.reason or "did not end in time")
    return DoctorFinding(
        name, "bad" if run.status else "ok", f"failed with status {run.status}" if run.status else "passed"
    )


def _of_kernel(name: str, is_right: bool | None) -> DoctorFinding:
    if is_right is None:
        return DoctorFinding(f"kernel {name}", "off", "not run here")
    return DoctorFinding(f"kernel {name}", *(("ok", "proven here") if is_right else ("bad", "in a case that failed")))


def _of_goal(goal: _Goal, case: _Case) -> DoctorFinding:
    figure: float | None = getattr(case, goal.figure)
    wanted = f"the goal is {'at most' if goal.is_ceiling else 'at least'} {goal.bound}"
    if figure is None:
        return DoctorFinding(goal.figure, "off", f"not measured, {wanted}")
    is_reached = figure <= goal.bound if goal.is_ceiling else figure >= goal.bound
    return DoctorFinding(goal.figure, "ok" if is_reached else "bad", f"{figure:.3g}, {wanted}")
