"""The kernels compile for the GPUs that they are for, without one."""

from __future__ import annotations

import re

import pytest
from tests.gpu.twin import SOURCES

from kvtide.errors import DeviceFault
from kvtide_gpu.program import compile_kernels, kernel_sources

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra gpu")


def test_kernels_compile_to_machine_code() -> None:
    code = compile_kernels("sm_90")
    assert code[:4] == b"\x7fELF"
    names = re.findall(r"^KERNEL (\w+)\(", "".join(text.decode() for text in kernel_sources().values()), re.M)
    assert len(names) > 8
    assert all(f".text.{name}".encode() in code for name in names)


def test_all_sources_are_shipped() -> None:
    assert sorted(kernel_sources()) == sorted(path.name for path in SOURCES.iterdir())


def test_unknown_architecture_is_refused_with_a_reason() -> None:
    with pytest.raises(DeviceFault, match="sm_1"):
        compile_kernels("sm_1")
