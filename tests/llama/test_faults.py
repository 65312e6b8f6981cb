"""Faults are misses: whatever happens to the store, or in llama.cpp's own calls, answers are those of the model."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from tests.llama.conftest import Answer, ask

from kvtide.config import Limits
from kvtide.engines.llamacpp import attach

# Asks for prompts again and again, in a process of its own, and prints each answer.
ASKING = """
import sys, llama_cpp
from kvtide.engines.llamacpp import attach
from tests.llama.conftest import ask
store, model, seed, count = sys.argv[1:]
tokens = [int(each) for each in sys.stdin.read().split()]
llm = llama_cpp.Llama(model, n_ctx=2048, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
with attach(llm, store, codec="raw") as cached:
    for number in range(int(count)):
        llm.reset()
        length = 200 + 100 * ((number + int(seed)) % 6)
        print(length, *ask(llm, tokens[:length], 4).ids, flush=True)
"""


def damage(store: Path, rng: random.Random) -> str:
    """Do something to the files of a store that no process has open."""
    files = [each for each in store.rglob("*") if each.is_file()]
    file, what = rng.choice(files), rng.choice(["flip", "cut", "remove", "garbage", "longer"])
    data = bytearray(file.read_bytes())
    if what == "flip" and data:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif what == "garbage":
        start = rng.randrange(len(data) + 1)
        data[start : start + 5000] = rng.randbytes(5000)
    elif what == "longer":
        data += rng.randbytes(3000)
    if what == "remove":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{what} {file.name}"


def test_damaged_stores_change_no_answer(opened: Any, tokens: list[int], tmp_path: Path, fault_factor: int) -> None:
    lengths, rng = (300, 600, 900), random.Random(1)
    with opened(n_batch=64) as llm:
        plain = {length: (llm.reset(), ask(llm, tokens[:length], 4))[1] for length in lengths}
    with opened(n_batch=64) as llm, attach(llm, tmp_path / "good") as cached:
        for length in lengths:
            llm.reset()
            ask(llm, tokens[:length], 4)
        assert cached.flush(10)
    restored = 0
    with opened(n_batch=64) as llm:
        for turn in range(40 * fault_factor):
            shutil.rmtree(tmp_path / "bad", ignore_errors=True)
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            done = [damage(tmp_path / "bad", rng) for _ in range(rng.randrange(1, 4))]
            with attach(llm, tmp_path / "bad") as cached:
                length = rng.choice(lengths)
                assert ask(llm, tokens[:length], 4).is_same(plain[length]), (turn, done)
                restored += cached.last is not None and cached.last.hit_tokens > 0
    assert 0 < restored < 40 * fault_factor


@pytest.mark.parametrize("fault", ["read", "garbage", "write", "size"])
def test_llama_cpp_that_gives_or_takes_no_state_is_served(
    opened: Any, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def answer(store: Path, fails: bool) -> tuple[Answer, int]:
        with opened(n_batch=64) as llm, attach(llm, store) as cached, monkeypatch.context() as patch:
            if fails and fault == "read":
                patch.setattr(llama_cpp, "llama_state_get_data", lambda *each: 0)
            if fails and fault == "garbage":
                patch.setattr(llama_cpp, "llama_state_get_data", lambda context, data, size: size)
            if fails and fault == "size":
                patch.setattr(llama_cpp, "llama_state_get_size", lambda context: 1 << 20)
            if fails and fault == "write":
                patch.setattr(llama_cpp, "llama_state_seq_set_data", lambda *each: 0)
            known = cached.hit_tokens(tokens[:500])
            said = ask(llm, tokens[:500], 4)
            assert cached.flush(10) and cached.last is not None
            assert not (fails and cached.last.hit_tokens)
            return said, known

    with opened(n_batch=64) as llm:
        plain = ask(llm, tokens[:500], 4)
    first, _ = answer(tmp_path, fault != "write")
    second, _ = answer(tmp_path, False)
    third, hit_tokens = answer(tmp_path, fault == "write")
    assert all(each.is_same(plain) for each in (first, second, third))
    assert hit_tokens == 384


def test_store_without_room_and_a_full_queue_change_no_answer(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    with opened() as llm:
        plain = ask(llm, tokens[:900], 4)
    small = Limits(store_queue_bytes_max=200_000, memory_bytes_max=1 << 20)
    for name, limits in (("queue", small), ("disk", Limits(disk_bytes_max=1 << 20))):
        for _ in range(3):
            with opened() as llm, attach(llm, tmp_path / name, codec="raw", limits=limits) as cached:
                assert ask(llm, tokens[:900], 4).is_same(plain)
                assert cached.flush(10)


def test_processes_on_one_store_and_killed_ones_change_no_answer(
    opened: Any, models: Any, tokens: list[int], tmp_path: Path, fault_factor: int
) -> None:
    with opened(n_batch=64) as llm:
        plain = {n: (llm.reset(), ask(llm, tokens[:n], 4).ids)[1] for n in range(200, 800, 100)}

    def start(seed: int, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ASKING, str(tmp_path), str(models()), str(seed), str(count)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": path}, **pipes)
        assert process.stdin is not None
        process.stdin.write(" ".join(map(str, tokens[:800])))
        process.stdin.close()
        process.stdin = None
        return process

    rng, answers = random.Random(2), 0
    for turn in range(2 * fault_factor):
        killed, whole = start(turn, 100_000), start(turn + 3, 12)
        assert killed.stdout is not None and killed.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        killed.send_signal(signal.SIGKILL)
        said, errors = whole.communicate(timeout=120)
        rest, _ = killed.communicate()
        assert whole.returncode == 0, errors
        for line in [*said.splitlines(), *rest.splitlines()[:-1]]:
            length, *ids = map(int, line.split())
            assert ids == plain[length], line
            answers += 1
    assert answers >= 12
    with opened(n_batch=64) as llm, attach(llm, tmp_path) as cached:
        assert cached.hit_tokens(tokens[:800]) > 0
