"""The installed package: portable machine code, one line where there is no compiler, two engines on one store."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.doors.user import kvtide
from tests.stores import disk_bytes

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
back = numpy.empty_like(values)
section = _native.lossless_encode("portable", values, "bfloat16")
assert _native.lossless_decode("portable", section, "bfloat16", back) == ""
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
    options = r"set_source_files_properties\((.*?)PROPERTIES\s+COMPILE_OPTIONS(.*?)\)"
    for files, flags in re.findall(options, text, re.DOTALL):
        if "-mavx" in flags or "avx512_flags" in flags:
            assert all("avx" in file or "amx" in file for file in files.split()), files


BUILD = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def test_sdist_holds_every_source_and_nothing_that_was_built(tmp_path: Path) -> None:
    tracked = ["git", "ls-files", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "NOTICE", "src", "native"]
    names = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    for name in ("_native.abi3.so", "__pycache__/block.cpython-311.pyc"):
        (tmp_path / "tree/src/kvtide" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tree/src/kvtide" / name).touch()
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=tmp_path / "tree", check=True)
    with tarfile.open(next(tmp_path.glob("kvtide-*.tar.gz"))) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert held == {*names, "PKG-INFO"}


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


ENGINE = """
import json, sys, torch
from transformers import LlamaForCausalLM
from kvtide.engines.transformers import attach
torch.set_num_threads(1)
model = LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
prompts = torch.load(sys.argv[2])
answers = []
with attach(model, sys.argv[3], block_tokens=16) as cached:
    print("ready", flush=True)
    sys.stdin.readline()
    for prompt in prompts:
        answers.append(cached.generate(prompt[None], max_new_tokens=8, do_sample=False)[0].tolist())
    cached.cache.flush(60)
    print(json.dumps({"answers": answers, "misses": cached.cache.stats().misses}), flush=True)
"""


def test_two_engines_at_once_are_both_right_and_leave_no_torn_object(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path / "model")
    prompts = torch.randint(1, 256, (6, 90), generator=torch.Generator().manual_seed(2))
    prompts[3:, :64] = prompts[0, :64]
    torch.save(prompts, tmp_path / "prompts")
    store = tmp_path / "store"
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "model"), str(tmp_path / "prompts"), str(store)]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    for engine in engines:
        assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
    for engine in engines:
        engine.stdin.write("go\n")
        engine.stdin.flush()
    results = [json.loads(engine.communicate(timeout=120)[0]) for engine in engines]
    expected = [tiny_model.generate(p[None], max_new_tokens=8, do_sample=False)[0].tolist() for p in prompts]
    for result in results:
        assert result["answers"] == expected
        assert "corrupt" not in result["misses"]
    rows = kvtide("ls", "--verify", "--store", store)["rows"]
    assert len(rows) >= 3 * 6
    assert [row["problem"] for row in rows] == [""] * len(rows)
    # Nothing half-made is left, and no space that was reserved.
    assert list(store.glob("*.part")) == []
    assert disk_bytes(store) < 1 << 20
