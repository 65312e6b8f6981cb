"""Models with caches, and caches that are kept from storing."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.codec.tide_profiles import fitted_on
from tests.doors.user import PROMPT

from kvtide.codec import Profile
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.groups import model_layout
from kvtide.engines.transformers.selective import SparseSettings
from kvtide.store.cache import Cache

HoldBack = Callable[[Cache], threading.Event]


def attached(model: Any, store: Path | str, **settings: Any) -> CachedModel:
    return attach(model, str(store), block_tokens=16, **settings)


def in_part(model: Any, store: Path | str, importance: float | SparseSettings | None = 0.25) -> CachedModel:
    """The same, with a profile that fits the fixture's prompt, and by default with importance."""
    return attached(model, store, codec="packed:0.01:4", profiles=[_profile(model)], importance=importance)


@cache
def _profile(model: Any) -> Profile:
    return fitted_on(model, model_layout(model, 16), PROMPT)


@pytest.fixture
def held_back(stack: ExitStack) -> HoldBack:
    """Let a cache store nothing until the test ends or the event is set."""

    def hold(cache: Cache) -> threading.Event:
        gate, put = threading.Event(), cache.tiers.put_from
        cache.tiers.put_from = lambda *rest: gate.wait(30) and put(*rest)  # type: ignore[method-assign]
        stack.callback(gate.set)
        return gate

    return hold


def no_threads() -> AbstractContextManager[Any]:
    return patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
