"""Kernels for tests: the twin everywhere, the device's own where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.twin import TwinKernels, compile_twin


@pytest.fixture(scope="session")
def twin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_twin(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="session")
def twin(twin_library: Path) -> TwinKernels:
    return TwinKernels(twin_library)
