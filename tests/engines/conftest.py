"""Fixtures of tests that run models of all families: small layers, which take next to no time."""

from collections.abc import Iterator

import pytest

from kvtide_lab.judge.quality import one_torch_thread


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small layers wait longer for a second thread than they compute, on a busy machine a hundred times."""
    with one_torch_thread():
        yield
