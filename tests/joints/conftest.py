"""Models with caches, and caches that are kept from storing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.codec import Profile
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.groups import model_layout
from kvtide.store.cache import Cache

# As the fixture's prompt.
TALK = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(1))


HoldBack = Callable[[Cache], threading.Event]


def attached(model: Any, store: Path | str, **settings: Any) -> CachedModel:
    return attach(model, str(store), block_tokens=16, **settings)


def in_part(model: Any, store: Path | str) -> CachedModel:
    """The same, with importance and a profile that fits the fixture's prompt."""
    return attached(model, store, codec="packed:0.01:4", profiles=[_profile(model)], importance=0.25)


@cache
def _profile(model: Any) -> Profile:
    return fitted_on(model, model_layout(model, 16), TALK)


@pytest.fixture
def held_back(stack: ExitStack) -> HoldBack:
    """Let a cache store nothing until the test ends or the event is set."""

    def hold(cache: Cache) -> threading.Event:
        gate, put = threading.Event(), cache.tiers.put_from
        cache.tiers.put_from = lambda *rest: gate.wait(30) and put(*rest)  # type: ignore[method-assign]
        stack.callback(gate.set)
        return gate

    return hold


@contextmanager
def no_threads() -> Iterator[None]:
    """Have the system give no threads."""

    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
