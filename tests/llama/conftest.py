"""Tests on real llama.cpp, collected where it is: in an environment of its own (`make test-llama`)."""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

# Threads of llama.cpp that wait spin, for minutes where processors are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Their modules import llama_cpp.
collect_ignore_glob = [] if importlib.util.find_spec("llama_cpp") else ["test_*.py", "tiny.py"]


class Answer(NamedTuple):
    """Tokens, and the logits that each was taken from."""

    ids: list[int]
    logits: Any

    def is_same(self, other: "Answer") -> bool:
        """Tell whether both are alike in every bit."""
        return self.ids == other.ids and bool((self.logits == other.logits).all())


def ask(llm: Any, prompt: list[int], tokens: int = 12) -> Answer:
    """Have a model go on after a prompt by itself: the greedy answer."""
    ids: list[int] = []
    logits = []
    for token in llm.generate(prompt, temp=0.0):
        ids.append(token)
        logits.append(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy())
        if len(ids) == tokens:
            break
    return Answer(ids, np.array(logits))


def ask_fresh(opened: Callable[..., Any], prompt: list[int], tokens: int = 12, **options: Any) -> Answer:
    """Have a model that was just loaded answer by itself."""
    with opened(**options) as llm:
        return ask(llm, prompt, tokens)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a tiny model, once for each kind."""
    from tests.llama.tiny import write_model

    logging.getLogger("gguf").setLevel(logging.WARNING)
    folder, written = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(arch: str = "llama", seed: int = 0, **options: Any) -> Path:
        name = f"{arch}-{seed}-{'-'.join(map(str, options.values()))}.gguf"
        more = {"layers": 7, "window": 64} if arch.startswith("gemma") else {}
        if name not in written:
            written[name] = write_model(folder / name, arch, seed=seed, **more, **options)
        return written[name]

    return find


@pytest.fixture(scope="session")
def opened(models: Callable[..., Path]) -> Callable[..., Any]:
    """Load a model for the time of a `with`, the tiny one by default."""
    import llama_cpp

    @contextmanager
    def load(model: Path | str = "llama", **options: Any) -> Iterator[Any]:
        path = model if isinstance(model, Path) else models(model)
        given = {"n_ctx": 2048, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
        with closing(llama_cpp.Llama(str(path), **given)) as llm:
            yield llm

    return load


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """Token ids of a tiny model, no two stretches alike."""
    return [int(each) for each in np.random.default_rng(5).integers(3, 259, 2000)]
