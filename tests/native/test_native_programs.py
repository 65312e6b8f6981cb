"""The native core outside of Python: decoders, AVX-512 kernels' too, and the mover under sanitizers.

A processor without AVX-512 has it emulated.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
HERE = Path(__file__).parent
# The environment is read by this test alone; CI asks for more, of all decoders at once.
FUZZ_S = float(os.environ.get("KVTIDE_FUZZ_S", "3"))
SEED = 20251121
DECODERS = ("rans", "rans_tables", "prefix", "prefix_tables", "lossless", "tide")
CORE = ["rans.cpp", "rans_table.cpp", "rans_format.cpp", "rans_dispatch.cpp", "rans_portable.cpp"]
CORE += ["prefix.cpp", "prefix_table.cpp", "split.cpp", "lossless.cpp"]
TIDE = ["tide.cpp", "tide_portable.cpp", "tide_avx2.cpp", "tide_avx512.cpp"]
# Never emulated: its row asks the processor, and is left out where the compiler knows no AMX.
AMX = ["tide_amx.cpp"]
AVX512 = ["rans_avx512.cpp", "rans_avx512_vbmi2.cpp"]

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="the kernels are for x86-64"),
]
HAS_SIMDE = any((Path(root) / "simde/x86/avx512.h").exists() for root in ("/usr/include", "/usr/local/include"))
CPUINFO = Path("/proc/cpuinfo")
HAS_AVX512 = CPUINFO.exists() and {"avx512_vbmi2", "avx512_vnni"} <= set(CPUINFO.read_text(encoding="ascii").split())
# SIMDe adds signed lanes as C++ does, which overflows where the instruction wraps.
EMULATED = ["-DKVTIDE_SIMDE", "-fwrapv", "-fno-sanitize=signed-integer-overflow", "-Wno-psabi"]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vbmi2", "-mavx512vnni", "-mpopcnt"]
AMX_FLAGS = ["-mamx-tile", "-mamx-int8"]
BASE = ["g++", "-std=c++20", "-w", "-ffp-contract=off", f"-I{NATIVE}", f"-I{HERE}"]
# Where these two would look the other sanitizer does. Compiling takes a third less without them, and a third of that
# without optimising.
SANITIZED = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZED += ["-fno-sanitize=null,object-size"]


def flags_of(source: Path) -> list[str]:
    if source.stem.endswith("avx2"):
        return ["-mavx2", "-mpopcnt"]
    if "avx512" in source.stem:
        return AVX512_FLAGS if HAS_AVX512 or not HAS_SIMDE else EMULATED
    if source.stem.endswith("amx"):
        return AVX512_FLAGS + AMX_FLAGS
    return []


def knows_amx() -> bool:
    empty = ["g++", *AMX_FLAGS, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(empty, capture_output=True, check=False).returncode == 0


def compiled(folder: Path, sources: list[Path], flags: list[str]) -> list[Path]:
    """Compile each source on its own, several at a time."""

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([*BASE, *flags, *flags_of(source), "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The core under sanitizers, compiled once for all programs."""
    amx, defines = (AMX, ["-DKVTIDE_AMX"]) if knows_amx() else ([], [])
    sources = [NATIVE / name for name in (*CORE, *AVX512, "rans_avx2.cpp", *TIDE, *amx)]
    return compiled(tmp_path_factory.mktemp("decoders"), sources, [*SANITIZED, *defines])


def linked(folder: Path, name: str, objects: list[Path], flags: list[str]) -> Path:
    """Compile a program's own source, and return it linked with objects."""
    program = folder / name
    own = compiled(folder, [HERE / f"{name}.cpp"], flags)
    subprocess.run([*BASE, *flags, *own, *objects, "-o", program], check=True)
    return program


@pytest.mark.skipif(
    not (HAS_AVX512 or HAS_SIMDE), reason="needs AVX-512, or SIMDe's headers (Debian: libsimde-dev) to emulate it"
)
def test_avx512_kernels_give_and_take_the_portable_bytes(decoders: list[Path], tmp_path: Path) -> None:
    program = linked(tmp_path, "rans_identity", decoders, SANITIZED)
    cases = 80 if HAS_AVX512 else 40
    done = subprocess.run([program, str(SEED), str(cases)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{cases} cases\n"


@pytest.fixture(scope="module")
def fuzzers(
    decoders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A fuzzer for each decoder, all at the same time."""
    program = linked(tmp_path_factory.mktemp("fuzz"), "fuzz", decoders, SANITIZED)
    with ExitStack() as stack:
        running = {}
        for decoder in DECODERS:
            command = [str(program), decoder, str(FUZZ_S), str(SEED)]
            fuzzer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running[decoder] = stack.enter_context(fuzzer)
            stack.callback(fuzzer.kill)
        yield running


@pytest.mark.parametrize("decoder", DECODERS)
def test_fuzzed_decoder_stays_within_its_buffers(fuzzers: dict[str, subprocess.Popen[str]], decoder: str) -> None:
    said, _ = fuzzers[decoder].communicate()
    assert fuzzers[decoder].returncode == 0, f"seed {SEED}\n{said[-4000:]}"


@pytest.mark.parametrize(("sanitize", "batches"), [("address,undefined", 30), ("thread", 5)])
def test_mover_keeps_to_its_jobs_whatever_peers_and_owners_do(tmp_path: Path, sanitize: str, batches: int) -> None:
    flags = ["-O1", "-g", "-pthread", f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    program = linked(tmp_path, "mover_stress", compiled(tmp_path, [NATIVE / "mover.cpp"], flags), flags)
    done = subprocess.run([program, str(batches), str(SEED)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr[-4000:]}"
    assert done.stdout == f"{batches} batches\n"
