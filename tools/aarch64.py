"""Cross-compiles the wheel for aarch64, into dist/, and runs the tests of golden bytes on it in an emulator.

Usage: aarch64.py [PAGE_BYTES…]   (default: 4096 65536, the pages that Linux has on such machines)

The emulator runs Debian's Python of this one's version with wheels of the package index, all in a folder of its own:
the system stays as it is. The headers are of the Python that runs this: Debian's of 3.11 won't do.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from wheel import PIP, ROOT, check_wheel, run

PYTHON = f"python3.{sys.version_info.minor}"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user-static", "apt-get": "apt", "dpkg-deb": "dpkg"}
TAGS = ("linux_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
# Armv8.0, with nothing newer: no SVE, no atomics in one instruction.
OLD_PROCESSOR = "cortex-a72"
GOLDEN = [f"codec/{name}" for name in ("test_lossless.py", "test_packed.py", "test_tide.py", "entropy/test_coders.py")]
GOLDEN += ["wire/test_frame.py", "wire/test_object.py", "tier/test_log.py"]


def build_wheel(folder: Path) -> Path:
    """Cross-compile the wheel and return it."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX").replace("x86_64", "aarch64")
    system = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER={COMPILER}"
    cross = ["_PYTHON_HOST_PLATFORM=linux-aarch64", f"SETUPTOOLS_EXT_SUFFIX={suffix}", f"CMAKE_ARGS={system}"]
    run("env", *cross, sys.executable, "-m", *PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("kvtide-*_aarch64.whl")
    check_wheel(wheel)
    return wheel


def unpack_python(folder: Path) -> None:
    """Unpack Debian's Python for arm64 into the folder `root`, by lists of packages apart from the system's."""
    (folder / "state/lists/partial").mkdir(parents=True)
    (folder / "cache/archives/partial").mkdir(parents=True)
    (folder / "status").touch()
    places = {"State": "state", "State::status": "status", "Cache": "cache"}
    options = [f"Dir::{name}={folder / place}" for name, place in places.items()]
    options += ["APT::Architecture=arm64", "APT::Architectures::=arm64", "APT::Sandbox::User=root"]
    apt = ("apt-get", "--quiet=2", *(word for each in options for word in ("--option", each)))
    run(*apt, "update", cwd=folder)
    run(*apt, "install", "--yes", "--download-only", "--no-install-recommends", PYTHON, "libstdc++6", cwd=folder)
    for each in sorted((folder / "cache/archives").glob("*.deb")):
        run("dpkg-deb", "--extract", each, folder / "root", cwd=folder)


def install(wheel: Path, site: Path) -> None:
    """Install the wheel, as one for aarch64, and what its tests need."""
    tags = [word for each in TAGS for word in ("--platform", each)]
    pip = (sys.executable, "-m", *PIP, "install", "--no-compile", "--target", site, *tags, "--only-binary", ":all:")
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, "pytest", "pytest-timeout", "hypothesis", cwd=ROOT)


def try_golden_bytes(folder: Path, page_bytes: int) -> str:
    """Run the tests on an emulated machine with pages of this size; return pytest's last line."""
    # Threads of OpenBLAS were seen to lose their way in the emulator.
    settings = ("PYTHONDONTWRITEBYTECODE=1", "OPENBLAS_NUM_THREADS=1", f"PYTHONPATH={folder / 'site'}:{ROOT / 'lab'}")
    emulator = (EMULATOR, "-cpu", OLD_PROCESSOR, "-p", page_bytes, "-L", folder / "root")
    python = ("env", *settings, *emulator, folder / "root/usr/bin" / PYTHON)
    sizes = run(*python, "-c", "import mmap, platform; print(platform.machine(), mmap.PAGESIZE)", cwd=folder).split()
    if sizes != ["aarch64", str(page_bytes)]:
        raise ValueError(f"the emulator was to be aarch64 with pages of {page_bytes} bytes, it is {' '.join(sizes)}")
    pytest = (*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "golden")
    return run(*pytest, *(ROOT / "tests" / each for each in GOLDEN), cwd=ROOT).splitlines()[-1]


def main(sizes: list[int]) -> None:
    """Build the wheel and try it."""
    if lacking := [package for program, package in PACKAGES.items() if shutil.which(program) is None]:
        raise ValueError(f"a wheel for aarch64 needs more. Debian, Ubuntu: apt install {' '.join(lacking)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        unpack_python(folder)
        install(wheel, folder / "site")
        for page_bytes in sizes:
            print(f"{wheel.name}, pages of {page_bytes} bytes: {try_golden_bytes(folder, page_bytes)}", flush=True)
        (ROOT / "dist").mkdir(exist_ok=True)
        shutil.copy(wheel, ROOT / "dist")


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    try:
        main([int(each) for each in sys.argv[1:]] or [4096, 65536])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed with status {error.returncode}: {error.output[-4000:]}")
    except ValueError as error:
        sys.exit(str(error))
