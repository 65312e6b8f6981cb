"""Kernels for tests: the twin everywhere, a GPU's own where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtide_gpu.kernels import Budget, CudaKernels, Kernels
from tests.conftest import (
    any_block_fits,
    fault_factor,
    layout,
    pytest_ignore_collect,
    pytest_make_collect_report,
    pytest_runtest_logfinish,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
)
from twin import TwinKernels, compile_twin

# What all tests have; options are those of tests/conftest.py alone.
__all__ = [
    "any_block_fits",
    "fault_factor",
    "layout",
    "pytest_ignore_collect",
    "pytest_make_collect_report",
    "pytest_runtest_logfinish",
    "pytest_runtest_logreport",
    "pytest_runtest_makereport",
]
has_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> TwinKernels:
    return TwinKernels(compile_twin(tmp_path_factory.mktemp("twin")))


@pytest.fixture(scope="session", params=["twin", pytest.param("cuda", marks=[pytest.mark.gpu, has_device])])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "twin":
        yield request.getfixturevalue("twin")
        return
    with CudaKernels(torch.device("cuda"), Budget(264)) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def kernels_alone(any_block_fits: None) -> Iterator[None]:
    """Kernels are compared here, not how well profiles fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtide_gpu.tide_encode.check_promise", lambda fit, tokens: 0)
        yield
