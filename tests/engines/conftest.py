"""Fixtures of tests that run models of all families: small layers, which take next to no time."""

from collections.abc import Iterator

import pytest

from kvtide_lab.judge.quality import one_torch_thread


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads take longer than computing, which takes such small layers a hundredth of a second."""
    monkeypatch.setattr("kvtide.plan.Judge.deadline_s", lambda judge, tokens: 30.0)
    monkeypatch.setattr("kvtide.store.cache.Cache.is_worth", lambda cache, tokens, is_near, namespace: True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small layers wait longer for a second thread than they compute, on a busy machine a hundred times."""
    with one_torch_thread():
        yield
