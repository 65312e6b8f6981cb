"""The native core outside of Python: AVX-512 kernels under emulation, decoders and the mover under sanitizers."""

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
DECODERS = ("rans", "rans_tables", "prefix", "prefix_tables", "tide")
CORE = ["rans.cpp", "rans_table.cpp", "rans_format.cpp", "rans_dispatch.cpp", "rans_portable.cpp"]
CORE += ["prefix.cpp", "prefix_table.cpp"]
TIDE = ["tide.cpp", "tide_portable.cpp", "tide_avx2.cpp", "tide_avx512.cpp"]
# Never emulated: its row asks the processor, and is left out where the compiler knows no AMX.
AMX = ["tide_amx.cpp"]
AVX512 = ["rans_avx512.cpp", "rans_avx512_vbmi2.cpp"]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="the kernels are for x86-64"),
]
HAS_SIMDE = any((Path(root) / "simde/x86/avx512.h").exists() for root in ("/usr/include", "/usr/local/include"))
# SIMDe adds signed lanes as C++ does, which overflows where the instruction wraps.
EMULATED = ["-DKVTIDE_SIMDE", "-fwrapv", "-fno-sanitize=signed-integer-overflow", "-Wno-psabi"]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vbmi2", "-mavx512vnni", "-mpopcnt"]
AMX_FLAGS = ["-mamx-tile", "-mamx-int8"]


def flags_of(source: Path) -> list[str]:
    """Return the flags of a file's instruction set; without SIMDe the AVX-512 files are built for a CPU that has it."""
    if source.stem.endswith("avx2"):
        return ["-mavx2", "-mpopcnt"]
    if "avx512" in source.stem:
        return EMULATED if HAS_SIMDE else AVX512_FLAGS
    if source.stem.endswith("amx"):
        return AVX512_FLAGS + AMX_FLAGS
    return []


def knows_amx() -> bool:
    empty = ["g++", *AMX_FLAGS, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(empty, capture_output=True, check=False).returncode == 0


def compile_program(target: Path, sources: list[Path], flags: list[str]) -> None:
    """Compile each source on its own, several at a time, then link."""
    base = ["g++", "-std=c++20", "-w", "-ffp-contract=off", f"-I{NATIVE}", f"-I{HERE}", *flags]

    def compile_one(source: Path) -> Path:
        compiled = target.with_name(f"{target.name}-{source.stem}.o")
        subprocess.run([*base, *flags_of(source), "-c", source, "-o", compiled], check=True)
        return compiled

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([*base, *objects, "-o", target], check=True)


@pytest.mark.skipif(not HAS_SIMDE, reason="needs SIMDe's headers (Debian: libsimde-dev) to emulate AVX-512")
def test_avx512_kernels_give_and_take_the_portable_bytes_under_emulation(tmp_path: Path) -> None:
    program = tmp_path / "rans_identity"
    sources = [NATIVE / name for name in (*CORE, *AVX512, "rans_avx2.cpp")]
    compile_program(program, [HERE / "rans_identity.cpp", *sources], ["-O1"])
    done = subprocess.run([program, str(SEED), "150"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "150 cases\n"


@pytest.fixture(scope="module")
def fuzzers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A fuzzer for each decoder, all at the same time."""
    program = tmp_path_factory.mktemp("fuzz") / "fuzz"
    amx, defines = (AMX, ["-DKVTIDE_AMX"]) if knows_amx() else ([], [])
    sources = [NATIVE / name for name in (*CORE, *AVX512, "rans_avx2.cpp", *TIDE, *amx)]
    flags = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *defines]
    compile_program(program, [HERE / "fuzz.cpp", *sources], flags)
    with ExitStack() as stack:
        running = {}
        for decoder in DECODERS:
            command = [str(program), decoder, str(FUZZ_S), str(SEED)]
            fuzzer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running[decoder] = stack.enter_context(fuzzer)
            stack.callback(fuzzer.kill)
        yield running


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("decoder", DECODERS)
def test_fuzzed_decoder_stays_within_its_buffers(fuzzers: dict[str, subprocess.Popen[str]], decoder: str) -> None:
    said, _ = fuzzers[decoder].communicate()
    assert fuzzers[decoder].returncode == 0, f"seed {SEED}\n{said[-4000:]}"


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("sanitize", "batches"), [("address,undefined", 30), ("thread", 5)])
def test_mover_keeps_to_its_jobs_whatever_peers_and_owners_do(tmp_path: Path, sanitize: str, batches: int) -> None:
    program, sources = tmp_path / "mover_stress", [HERE / "mover_stress.cpp", NATIVE / "mover.cpp"]
    compile_program(program, sources, ["-O1", "-g", "-pthread", f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"])
    done = subprocess.run([program, str(batches), str(SEED)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr[-4000:]}"
    assert done.stdout == f"{batches} batches\n"
