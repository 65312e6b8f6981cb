"""`kvtide llama`, a process as a user starts it: OpenAI's API, a log line a request, and an end that loses nothing."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from kvtide.engines.llamacpp import attach

MESSAGES = [{"role": "user", "content": "Tell me what tides are. " * 20}]


@contextmanager
def served(model: Path, store: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command until it is killed; its process, and where it is."""
    command = [sys.executable, "-m", "kvtide.cli", "llama", str(model), "--store", str(store), "--port", "0", *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            lines = [process.stdout.readline(), process.stdout.readline()]
            found = re.search(r"on (http://\S+)", lines[1])
            assert found, (lines, log.read_text())
            yield process, found[1]
        finally:
            process.kill()


def ask_chat(url: str) -> dict[str, Any]:
    """Ask by OpenAI's API; return the answer."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 8, "temperature": 0.0}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.real_time
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_prompt_outlives_a_server_that_was_told_to_end(models: Any, tmp_path: Path, number: signal.Signals) -> None:
    said = []
    for log in (tmp_path / "first.log", tmp_path / "second.log"):
        with served(models(), tmp_path / "store", log, "--context", "1024") as (process, url):
            said.append(ask_chat(url)["choices"][0]["message"])
            process.send_signal(number)
            assert process.wait(30) == 0, log.read_text()
    assert said[0] == said[1]
    assert "0 from the store" in (tmp_path / "first.log").read_text()
    assert re.search(r"\d+ prompt tokens: 0 from the context, 640 from the store in \d\.\d\d s", log.read_text())


def test_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide.cli", "llama", str(tmp_path / "no.gguf"), "--store", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "give the path of a model in GGUF" in ended.stderr


def test_demo_is_a_chat_with_a_gguf_model(models: Any, opened: Any, tmp_path: Path) -> None:
    sizes = ("--prefix-tokens", "512", "--answer-tokens", "4")
    command = [sys.executable, "-m", "kvtide.cli", "demo", "--model", str(models()), "--store", str(tmp_path), *sizes]
    said = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    requests = said["requests"]
    assert (said["model"], len(requests)) == (models().stem, 10)
    # So small a model may be found to compute sooner than the store answers; what it stored is there in any case.
    assert requests[0]["hit_tokens"] == 0 and {each["hit_tokens"] % 128 for each in requests} == {0}
    with opened(models()) as llm, attach(llm, tmp_path) as cached:
        text = "\n\n".join(f"{name}\n{topics[name]}" for name in sorted(topics))
        assert cached.hit_tokens(llm.tokenize(text[:8000].encode())[:513]) == 512
    assert [each["is_answer_same"] for each in requests if each["is_measured"]] == [True] * 3
