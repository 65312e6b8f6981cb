"""The installed package: portable machine code, one line where there is no compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide import _native

ROOT = Path(__file__).parents[2]
EMULATOR = "qemu-x86_64-static"
# A processor of 2008: SSE 4.2 and nothing newer. numpy 2 asks for as much.
OLD_PROCESSOR = "Nehalem"
ROUND_TRIP = """
import sys
sys.path[:] = {path}
import numpy
from kvtide import _native
values = numpy.arange(4096, dtype=numpy.uint8)
planes, back = numpy.empty_like(values), numpy.empty_like(values)
_native.split_planes(values, "bfloat16", planes)
_native.join_planes(planes, "bfloat16", back)
assert (back == values).all()
print(*_native.rans_paths())
"""


@pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"needs {EMULATOR}")
def test_native_module_runs_on_a_processor_without_avx() -> None:
    command = [EMULATOR, "-cpu", OLD_PROCESSOR, sys.executable, "-c", ROUND_TRIP.format(path=sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["portable"]
    assert _native.rans_paths()[-1] == "portable"


def test_only_files_named_after_an_instruction_set_are_compiled_for_one() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert "march" not in text
    for files, flags in re.findall(
        r"set_source_files_properties\((.*?)PROPERTIES\s+COMPILE_OPTIONS(.*?)\)", text, re.DOTALL
    ):
        if "-mavx" in flags or "avx512_flags" in flags:
            assert all("avx" in file or "amx" in file for file in files.split()), files


def test_machine_without_a_compiler_is_told_in_one_line(tmp_path: Path) -> None:
    cmake = ["env", "CXX=/nowhere/c++", "cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Unix Makefiles"]
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    done = subprocess.run(cmake, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "No C++ compiler: install one" in " ".join(done.stderr.split())


def test_make_without_a_compiler_ends_in_one_line() -> None:
    make = ["make", "--always-make", "--no-print-directory", "CXX=/nowhere/c++", "PIP=false", ".venv/demo"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert done.stdout == "kvtide is built with a C++ compiler. Debian, Ubuntu: apt install g++\n"
