"""The user's own calls: completions, chats, streams and grammars, by `attach` and by `set_cache`."""

import logging
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from tests.llama.conftest import ask
from tests.llama.tiny import write_mamba, write_model

from kvtide.engines.llamacpp import KVTideCache, attach

SEA = "The sea " * 40
MESSAGES = [
    {"role": "system", "content": "You answer in one line, and you never say anything else. " * 6},
    {"role": "user", "content": "What is a tide?"},
]


def calls(llm: Any) -> list[Any]:
    """Call a model as users do, each time as if it were new; return what it says."""
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    found, common = list[Any](), {"max_tokens": 24, "temperature": 0.7, "seed": 7}
    for options in (common, {**common, "grammar": grammar}):
        llm.reset()
        found.append(llm.create_chat_completion(MESSAGES, **options)["choices"])
    llm.reset()
    found += [each["choices"][0]["delta"] for each in llm.create_chat_completion(MESSAGES, stream=True, **common)]
    llm.reset()
    return [*found, llm.create_completion(SEA, max_tokens=9, temperature=0.0)["choices"]]


def test_calls_of_users_say_what_they_say_without_a_cache(opened: Any, tmp_path: Path) -> None:
    with opened() as llm:
        plain = calls(llm)
    for _ in range(2):
        with opened() as llm, attach(llm, tmp_path) as cached:
            assert calls(llm) == plain
            assert cached.last is not None and cached.flush(60)
            assert cached.hit_tokens(llm.tokenize(SEA.encode())) > 0


def test_set_cache_attaches_the_model_that_asks(
    opened: Any, tokens: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as llm:
        plain = calls(llm)
    for is_second in (False, True):
        cache = KVTideCache(tmp_path, codec="raw")
        with opened() as llm, caplog.at_level(logging.INFO, "kvtide.engines.llamacpp"):
            llm.set_cache(cache)
            assert calls(llm) == plain
            assert cache.attached is not None and cache.attached.flush(60)
            assert cache.cache_size > 0
            # Its owner may go on without it.
            llm.set_cache(None)
            cache.close()
            assert ask(llm, tokens[:50]).ids
        line = next(each for each in caplog.messages if "prompt tokens" in each)
        assert ("context, 0 from the store" not in line) == is_second
        caplog.clear()


@pytest.mark.parametrize(("write", "reason"), [(write_mamba, "layers that keep a state"), (write_model, "no file")])
def test_model_that_can_not_be_served_runs_without_the_cache(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Any, reason: str
) -> None:
    with opened(path := write(tmp_path / "model.gguf")) as llm:
        path.unlink()
        llm.set_cache(KVTideCache(tmp_path / "store"))
        for _ in range(2):
            assert llm.create_completion([5, 6, 7], max_tokens=3)["choices"]
    assert sum(f"running without the cache: {reason}" in each for each in caplog.messages) == 1
