"""The script that measures GPUs starts, and what it measures runs: it is of use on the day when a GPU comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.gpu.twin import TwinKernels, needs_compiler

from kvtide_gpu.report import GOALS

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_cases

    return gpu_cases


def test_script_starts() -> None:
    command = [sys.executable, str(TOOLS / "gpu.py"), "--help"]
    assert "--dry-run" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_compiler
@pytest.mark.parametrize("goal", GOALS)
def test_figures_that_the_doctor_judges_are_measured(cases: ModuleType, twin: TwinKernels, goal: Any) -> None:
    assert goal.figure in getattr(cases, f"{goal.case}_case")(twin, cases.DRY)


@needs_compiler
@pytest.mark.parametrize("case", ["copy_case", "rans_case", "swap_case", "pages_case", "overlap_case"])
def test_cases_run_on_the_twin_and_time_nothing(cases: ModuleType, twin: TwinKernels, case: str) -> None:
    found = getattr(cases, case)(twin, cases.DRY)
    assert None in found.values()
    assert not any(isinstance(value, float) for name, value in found.items() if name != "bits")
