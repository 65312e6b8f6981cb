"""Faults are misses: whatever happens to the store, or in llama.cpp's own calls, answers are those of the model."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from tests.llama.conftest import Answer, ask, ask_fresh

from kvtide.config import Limits
from kvtide.engines.llamacpp import attach

LENGTHS = (300, 500, 700, 900)
# Asks for prompts again and again, in a process of its own, and prints each answer.
ASKING = """
import sys, llama_cpp
from kvtide.engines.llamacpp import attach
from tests.llama.conftest import ask
store, model, first, count = sys.argv[1:]
tokens = [int(each) for each in sys.stdin.read().split()]
llm = llama_cpp.Llama(model, n_ctx=2048, n_batch=128, n_threads=1, n_threads_batch=1, verbose=False)
with attach(llm, store, codec="raw"):
    for number in range(int(first), int(first) + int(count)):
        llm.reset()
        print(number % 4, *ask(llm, tokens[: (300, 500, 700, 900)[number % 4]]).ids, flush=True)
"""
FAULTS = {
    "no state": ("llama_state_get_data", lambda *each: 0),
    "garbage": ("llama_state_get_data", lambda context, data, size: size),
    "another size": ("llama_state_get_size", lambda context: 1 << 20),
    "not taken": ("llama_state_seq_set_data", lambda *each: 0),
}


@pytest.fixture
def plain(opened: Any, tokens: list[int]) -> dict[int, Answer]:
    """What the model says by itself."""
    return {length: ask_fresh(opened, tokens[:length]) for length in LENGTHS}


def damage(store: Path, rng: random.Random) -> str:
    """Flip bits in a file of a store that no process has open, cut it, remove it, or write something into it."""
    files = sorted(each for each in store.rglob("*") if each.is_file())
    if not files:
        return "nothing is left"
    file = rng.choice(files)
    data, what = bytearray(file.read_bytes()), rng.choice(["flip", "cut", "remove", "garbage"])
    at = rng.randrange(len(data) + 1)
    if what == "flip" and data:
        data[at - 1] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del data[at:]
    elif what == "garbage":
        data[at : at + 5000] = rng.randbytes(5000)
    file.write_bytes(data)
    if what == "remove":
        file.unlink()
    return f"{what} {file.name} at {at}"


def test_damaged_stores_change_no_answer(
    opened: Any, plain: dict[int, Answer], tokens: list[int], tmp_path: Path, fault_factor: int
) -> None:
    rng, restored = random.Random(1), 0
    with opened() as llm, attach(llm, tmp_path / "good") as cached:
        for length in LENGTHS:
            ask(llm, tokens[:length])
        assert cached.flush(60)
    with opened() as llm:
        for turn in range(40 * fault_factor):
            shutil.rmtree(tmp_path / "bad", ignore_errors=True)
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            done, length = [damage(tmp_path / "bad", rng) for _ in range(rng.randrange(1, 4))], rng.choice(LENGTHS)
            with attach(llm, tmp_path / "bad") as cached:
                assert ask(llm, tokens[:length]).is_same(plain[length]), (turn, done)
                restored += cached.last is not None and cached.last.hit_tokens > 0
    assert 0 < restored < 40 * fault_factor


@pytest.mark.parametrize("fault", FAULTS)
def test_llama_cpp_that_gives_or_takes_no_state_is_served(
    opened: Any, plain: Any, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for has_fault in (True, False, True):
        with opened() as llm, attach(llm, tmp_path) as cached, monkeypatch.context() as patch:
            if has_fault:
                patch.setattr(llama_cpp, *FAULTS[fault])
            assert ask(llm, tokens[:500]).is_same(plain[500])
            assert cached.flush(60) and cached.hit_tokens(tokens[:500]) in ((0, 384) if has_fault else (384,))


def test_answer_may_end_after_its_model(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    with opened() as llm, attach(llm, tmp_path):
        answer = llm.generate(tokens[:300], temp=0.0)
        next(answer)
        llm.close()
        answer.close()


def test_store_without_room_and_a_full_queue_change_no_answer(
    opened: Any, plain: dict[int, Answer], tokens: list[int], tmp_path: Path
) -> None:
    small = Limits(store_queue_bytes_max=200_000, memory_bytes_max=1 << 20)
    for name, limits in (("queue", small), ("disk", Limits(disk_bytes_max=1 << 20))):
        for _ in range(3):
            with opened() as llm, attach(llm, tmp_path / name, codec="raw", limits=limits) as cached:
                assert ask(llm, tokens[:900]).is_same(plain[900])
                assert cached.flush(60)


def test_processes_on_one_store_and_killed_ones_change_no_answer(
    opened: Any, plain: dict[int, Answer], models: Any, tokens: list[int], tmp_path: Path, fault_factor: int
) -> None:
    path, said = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), list[str]()
    (tmp_path / "tokens").write_text(" ".join(map(str, tokens)))

    def start(first: int, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ASKING, str(tmp_path / "store"), str(models()), str(first), str(count)]
        with (tmp_path / "tokens").open() as source:
            given: Any = {"stdin": source, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": path}}
            return subprocess.Popen(command, text=True, **given)

    for turn in range(2 * fault_factor):
        killed, whole = start(turn, 100_000), start(turn + 2, 8)
        assert killed.stdout is not None and killed.stdout.readline()
        killed.kill()
        said += [*whole.communicate(timeout=120)[0].splitlines(), *killed.communicate()[0].splitlines()[:-1]]
        assert whole.returncode == 0
    assert len(said) >= 16 * fault_factor
    for line in said:
        number, *ids = map(int, line.split())
        assert ids == plain[LENGTHS[number]].ids
