"""Builds, checks and times the GPU kernels in one call of some minutes, and writes one JSON object.

Usage: gpu.py [--out FILE] [--dry-run] [--sanitized]

Without a GPU, or with --dry-run, it does all but the timing, on the kernels' twin: times are null then, and
`is_measured` is false. `kvtide doctor --gpu FILE` judges the result.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT / "gpu" / "tests"))

from gpu_cases import DRY, FULL, copy_case, is_real, overlap_case, pages_case, rans_case, ratio, swap_case  # noqa: E402
from gpu_codecs import groups_case, tide_case  # noqa: E402
from gpu_peers import lmcache_case, nvcomp_case  # noqa: E402
from kvtide.cli.report import envelope  # noqa: E402
from kvtide_gpu.kernels import Budget, CudaKernels, Kernels  # noqa: E402
from kvtide_gpu.program import compile_kernels, kernel_sources  # noqa: E402
from twin import TwinKernels, compile_twin  # noqa: E402

# A100, H100 and H200, B200, RTX 50: each has machine code of its own.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
DISASSEMBLED = "sm_90"
PROFILES = ("tide-light", "tide-layer", "tide-deep")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_S_MAX = 180
# A compiler that a test starts would be preloaded too, and leaks. Tests of faults repeat the others' calls; cases of
# this script run by themselves. What is refused as not finite is encoded from what nobody wrote, and thrown away.
SANITIZED_NOT = "program or fails or report"


def build() -> dict[str, Any]:
    """Compile for every architecture; count what a symbol takes on Hopper where a disassembler is there."""
    compile_s, codes = {}, {}
    for architecture in ARCHITECTURES:
        started = time.perf_counter()
        codes[architecture] = compile_kernels(architecture)
        compile_s[architecture] = time.perf_counter() - started
    found: dict[str, Any] = {"compile_s": compile_s, "cubin_bytes": {name: len(code) for name, code in codes.items()}}
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        return found
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(codes[DISASSEMBLED])
        file.flush()
        text = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    kernels = re.split(r"^\.text\.", text, flags=re.M)[1:]
    found["instructions"] = {
        part.split(":")[0]: len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", part, re.M)) for part in kernels
    }
    return found


def run_tests(which: str = "", environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run gpu/tests: the twin's, and the device's where there is one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu/tests", "-k", which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    return {"status": done.returncode, "summary": done.stdout.strip().splitlines()[-1:], "log": done.stdout[-2000:]}


def sanitize() -> dict[str, Any]:
    """Run the device's tests under compute-sanitizer, its tools side by side."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return {"status": None, "reason": "no compute-sanitizer"}
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        found = dict(zip(TOOLS, pool.map(partial(_sanitized, program), TOOLS), strict=True))
    statuses = [each["status"] for each in found.values()]
    # A failure says more than a tool that did not end.
    return {"status": next(filter(None, statuses), None if None in statuses else 0), **found}


def _sanitized(program: str, tool: str) -> dict[str, Any]:
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all", "--print-limit", "20"]
    if tool == "memcheck":
        # torch asks for functions that a driver may not have.
        options += ["--report-api-errors", "no"]
    try:
        done = subprocess.run(
            [program, *options, sys.executable, __file__, "--sanitized"],
            capture_output=True,
            text=True,
            check=False,
            timeout=SANITIZER_S_MAX,
            # Each tensor gets an allocation of its own: torch's larger ones would hide where it ends.
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    except subprocess.TimeoutExpired:
        return {"status": None, "log": f"not done after {SANITIZER_S_MAX} s"}
    return {"status": done.returncode, "log": done.stdout[-1500:]}


def sanitize_twin() -> dict[str, Any]:
    """Run the twin's tests under the compiler's sanitizers: arrays are the allocator's, so it knows where they end."""
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": options,
        "KVTIDE_TWIN_SANITIZED": "1",
    }
    return run_tests(f"not cuda and not ({SANITIZED_NOT})", environment)


def timed(name: str, case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one case; what it raises becomes its result, so that the others still run."""
    started = time.perf_counter()
    try:
        found = case()
    except Exception as error:  # noqa: BLE001
        found = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    took = time.perf_counter() - started
    print(f"{name}: {took:.1f} s {found if 'log' not in found else found.get('summary')}", file=sys.stderr, flush=True)
    return found


class Noted(NamedTuple):
    """Findings of cases, and of each kernel that they launched whether all these cases had the processor's results."""

    cases: dict[str, Any]
    is_right: dict[str, bool]


def cases(kernels: Kernels, launched: set[str]) -> Noted:
    """Time everything on a device. launched: names of kernels, to which the kernels add."""
    size = FULL if is_real(kernels) else DRY
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "copy": lambda: copy_case(kernels, size),
        "rans": lambda: rans_case(kernels, size),
        # Emulated products of a deep profile take minutes.
        **{kind: partial(tide_case, kernels, size, kind) for kind in PROFILES[: None if is_real(kernels) else 2]},
        **{kind: partial(groups_case, kernels, size, kind) for kind in ("cachegen", "chunkwise")},
        "swap": lambda: swap_case(kernels, size),
        "pages": lambda: pages_case(kernels, size),
        "overlap": lambda: overlap_case(kernels, size),
        "nvcomp": lambda: nvcomp_case(kernels, size),
        "lmcache": lambda: lmcache_case(kernels, size),
    }
    found: dict[str, Any] = {}
    is_right: dict[str, bool] = {}
    for name, work in works.items():
        launched.clear()
        found[name] = timed(name, work)
        for kernel in launched:
            is_right[kernel] = is_right.get(kernel, True) and "failed" not in found[name]
    moved = found["rans"].get("decode_fp16_tb_s")
    copied = found["copy"].get("memcpy_gb_s")
    # A copy reads as much as it writes; decoding writes fp16 and reads a sixth of that.
    found["rans"]["decode_of_memcpy"] = ratio(moved, copied and copied / 2e3)
    return Noted(found, is_right)


def noting(kind: type[Any]) -> type[Any]:
    """Return kernels that note in their class which were launched, also by copies of them on other streams."""

    class NotingKernels(kind):  # type: ignore[misc]
        launched: ClassVar[set[str]] = set()

        def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
            if blocks > 0:
                self.launched.add(name)
            super().launch(name, args, blocks, threads)

    return NotingKernels


def device_name() -> str:
    """Return what the figures are of."""
    name = torch.cuda.get_device_name()
    return f"{name}, driver and runtime of CUDA {torch.version.cuda}, torch {torch.__version__}"


def main() -> int:
    """Do it all; the exit status says whether everything that could run did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the JSON goes besides stdout")
    parser.add_argument("--dry-run", action="store_true", help="leave out the timing although there is a GPU")
    parser.add_argument(
        "--sanitized", action="store_true", help="only the device's tests, as compute-sanitizer runs them"
    )
    options = parser.parse_args()
    if options.sanitized:
        return int(run_tests("cuda and not processor and not fails and not finite")["status"])
    has_device = torch.cuda.is_available() and not options.dry_run
    result: dict[str, Any] = {**envelope(), "is_measured": has_device, "device": device_name() if has_device else None}
    if has_device:
        result["build"] = timed("build", build)
        result["tests"] = timed("tests", run_tests)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        noting_kernels = noting(CudaKernels)
        with noting_kernels(torch.device("cuda"), Budget.of_multiprocessors(multiprocessors)) as kernels:
            noted = cases(kernels, noting_kernels.launched)
        result["sanitizer"] = timed("sanitizer", sanitize)
    else:
        # Nothing is timed, so that the tests' process and this one may share the machine.
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as other:
            sanitizer = other.submit(timed, "sanitizer", sanitize_twin)
            result["build"] = timed("build", build)
            noting_kernels = noting(TwinKernels)
            noted = cases(noting_kernels(compile_twin(Path(folder))), noting_kernels.launched)
            result["sanitizer"] = sanitizer.result()
    names = re.findall(r"^KERNEL (\w+)\(", b"".join(kernel_sources().values()).decode(), re.M)
    # What no device has run has no verdict.
    result["kernels"] = {name: noted.is_right.get(name) if has_device else None for name in sorted(names)}
    result["cases"] = noted.cases
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    has_failed = any("failed" in case for case in (result["build"], *result["cases"].values()))
    if unmet := set(names) - noted.is_right.keys():
        print(f"no case launched {sorted(unmet)}", file=sys.stderr)
    # A dry run leaves tests without the sanitizers to `make test`; what a GPU's sanitizer says is for people to judge.
    tests = result["tests" if has_device else "sanitizer"]
    return int(has_failed or bool(unmet) or tests.get("status") != 0)


if __name__ == "__main__":
    sys.exit(main())
