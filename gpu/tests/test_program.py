"""The kernels compile without a GPU, and their machine code is kept on disk: read only if it is as it was written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtide.errors import DeviceFault
from kvtide_gpu import program
from kvtide_gpu.kernels import Budget, CudaKernels
from kvtide_gpu.program import CUBINS_MAX, compile_kernels, kept_kernels, kernel_sources
from twin import SOURCES

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")


@pytest.fixture(scope="module")
def code() -> bytes:
    return compile_kernels("sm_90")


def test_kernels_compile_to_machine_code(code: bytes) -> None:
    assert code[:4] == b"\x7fELF"
    names = re.findall(r"^KERNEL (\w+)\(", "".join(text.decode() for text in kernel_sources().values()), re.M)
    assert len(names) > 8
    assert all(f".text.{name}".encode() in code for name in names)


def test_all_sources_are_shipped() -> None:
    assert sorted(kernel_sources()) == sorted(path.name for path in SOURCES.iterdir())


def test_unknown_architecture_is_refused_with_a_reason() -> None:
    with pytest.raises(DeviceFault, match="sm_1"):
        compile_kernels("sm_1")


# Kept machine code


@pytest.fixture
def compiled(code: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that were compiled; each gets the machine code of sm_90."""
    found: list[str] = []
    monkeypatch.setattr(program, "compile_kernels", lambda architecture: found.append(architecture) or code)
    return found


def test_second_worker_starts_without_the_compiler(
    tmp_path: Path, compiled: list[str], code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    loaded: list[bytes] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: None)
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, 1))
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda code: (0, loaded.append(code)))
    for _ in range(2):
        CudaKernels(torch.device("cuda"), Budget(1)).open()
    assert compiled == ["sm_90"]
    assert loaded == [code, code]


def replace_by_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "the checksum": lambda path: path.write_bytes(bytes(32) + path.read_bytes()[32:]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "machine code alone": lambda path: path.write_bytes(path.read_bytes()[32:]),
    "unreadable": lambda path: (path.unlink(), path.mkdir()),
    "a link": replace_by_link,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_or_foreign_file_is_compiled_again(
    tmp_path: Path, compiled: list[str], code: bytes, damage: str
) -> None:
    kept_kernels("sm_90", tmp_path)
    (path,) = tmp_path.iterdir()
    DAMAGES[damage](path)
    assert kept_kernels("sm_90", tmp_path) == code
    assert len(compiled) == 2
    if damage != "unreadable":
        assert kept_kernels("sm_90", tmp_path) == code
        assert len(compiled) == 2


def test_file_of_another_architecture_is_not_taken(tmp_path: Path, compiled: list[str]) -> None:
    kept_kernels("sm_90", tmp_path)
    (path,) = tmp_path.iterdir()
    kept_kernels("sm_80", tmp_path)
    (other,) = set(tmp_path.iterdir()) - {path}
    other.write_bytes(path.read_bytes())
    kept_kernels("sm_80", tmp_path)
    assert compiled == ["sm_90", "sm_80", "sm_80"]


def test_another_user_s_file_is_not_taken(tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept_kernels("sm_90", tmp_path)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    kept_kernels("sm_90", tmp_path)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("compiler_version", lambda: "1.0"),
        ("COMPILE_OPTIONS", ("-G",)),
        ("kernel_sources", lambda: {"a.cu": b""}),
    ],
)
def test_what_the_code_depends_on_is_in_its_name(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, part: str, other: object
) -> None:
    kept_kernels("sm_90", tmp_path)
    monkeypatch.setattr(program, part, other)
    kept_kernels("sm_90", tmp_path)
    assert len(compiled) == len(list(tmp_path.iterdir())) == 2


def test_folder_is_bounded_and_keeps_the_newest(tmp_path: Path, compiled: list[str]) -> None:
    for number in range(CUBINS_MAX + 3):
        kept_kernels(f"sm_{number}", tmp_path)
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == {f"sm_{number}" for number in range(3, CUBINS_MAX + 3)}


def test_folder_that_can_not_be_had_costs_time_only(tmp_path: Path, compiled: list[str], code: bytes) -> None:
    (tmp_path / "file").write_text("no folder")
    assert kept_kernels("sm_90", tmp_path / "file") == code
