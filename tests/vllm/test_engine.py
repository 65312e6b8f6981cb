"""The connector in real vLLM with a real model: restart, faults while serving, soak."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS

from kvtide.bench.engine_process import EngineProcess, kvtide_transfer

pytestmark = pytest.mark.timeout(900)

FULL_PAGES = (PROMPT_TOKENS - 1) // PAGE_TOKENS
# So little that every block comes from the disk.
NO_MEMORY = {"memory_bytes_max": 1 << 16}
SOAK_REQUESTS = 48
SOAK_AT_ONCE = 8


def _flip_bytes(store: Path) -> int:
    """Change a byte in every 64 KiB of every segment; return how many."""
    flipped = 0
    for segment in (store / "segments").iterdir():
        data = bytearray(segment.read_bytes())
        for offset in range(40_000, len(data), 1 << 16):
            data[offset] ^= 0x55
            flipped += 1
        with segment.open("r+b") as file:
            file.write(data)
    return flipped


def test_restarted_engine_restores_every_full_page_and_says_the_same(
    engine: Any, plain: Any, filled_store: Path, tokens: list[int], record_property: Any
) -> None:
    with engine(kvtide_transfer(str(filled_store))) as process:
        process.ask(tokens[-300:], 2)
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        stats = process.do("check")["stats"]
    assert answer["cached_tokens"] == FULL_PAGES * PAGE_TOKENS
    assert answer["ids"] == plain["long"]["ids"]
    assert stats["free_pages"] == stats["pages"]
    speedup = plain["long"]["ttft_s"] / answer["ttft_s"]
    print(json.dumps({"ttft_speedup_vs_plain": round(speedup, 1)}))
    assert speedup >= 5


def test_faults_while_serving_never_fail_a_request(
    engine: Any, plain: Any, filled_store: Path, tokens: list[int], tmp_path: Path
) -> None:
    store, expected = tmp_path / "store", plain["long"]["ids"]
    shutil.copytree(filled_store, store)

    def ask(process: EngineProcess) -> Any:
        assert process.do("reset")["is_done"]
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["finish"]) == (expected, "length")
        process.do("settle")
        return process.do("check")["stats"]

    with engine(kvtide_transfer(str(store), **NO_MEMORY)) as process:
        assert ask(process)["blocks_loaded"] == FULL_PAGES
        assert _flip_bytes(store) > FULL_PAGES
        stats = ask(process)
        assert stats["misses"].get("corrupt", 0) >= 1
        # What was found corrupt and recomputed has been stored anew; the next corrupt block shows in turn.
        assert ask(process)["blocks_loaded"] > stats["blocks_loaded"]
        shutil.rmtree(store)
        ask(process)
        assert ask(process)["pinned_blocks"] == 0


def test_layers_are_waited_for_within_the_step_and_faults_are_recomputed(
    engine: Any, plain: Any, filled_store: Path, tokens: list[int], tmp_path: Path
) -> None:
    store, expected = tmp_path / "store", plain["long"]["ids"]
    shutil.copytree(filled_store, store)
    with engine(kvtide_transfer(str(store), load="layers", **NO_MEMORY)) as process:
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["cached_tokens"]) == (expected, FULL_PAGES * PAGE_TOKENS)
        process.do("reset")
        _flip_bytes(store)
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["finish"]) == (expected, "length")
        process.do("settle")
        stats = process.do("check")["stats"]
        assert stats["misses"].get("corrupt", 0) >= 1
        # A reset that includes the connector makes it forget everything.
        assert process.do("reset", is_deep=True)["is_done"]
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["cached_tokens"]) == (expected, 0)


def test_soak_on_a_full_disk_with_aborts_and_preemptions_leaks_nothing(
    engine: Any, plain: Any, soak_prompts: list[list[int]], tmp_path: Path, fault_factor: int
) -> None:
    # Pages for four requests of eight until their answers need more, and a disk for half of the blocks.
    small = {"num_gpu_blocks_override": 14, "max_model_len": 1024, "disable_log_stats": False}
    transfer = kvtide_transfer(str(tmp_path / "store"), disk_bytes_max=32 << 20, **NO_MEMORY)
    requests = 500 if fault_factor > 1 else SOAK_REQUESTS
    peaks, failed, wrong, aborted = [], 0, 0, 0
    with engine(transfer, **small) as process:
        for first in range(0, requests, SOAK_AT_ONCE):
            chosen = [(7 * number) % len(soak_prompts) for number in range(first, first + SOAK_AT_ONCE)]
            prompts = [
                {"ids": soak_prompts[c], "answer_tokens": 8, "abort_after": 2 if i % 5 == 4 else None}
                for i, c in enumerate(chosen, first)
            ]
            result = process.generate(prompts)
            for prompt, choice, answer in zip(prompts, chosen, result["answers"], strict=True):
                expected = plain["soak"][choice]
                failed += answer["finish"] not in ("length", "abort")
                wrong += answer["ids"] != expected[: len(answer["ids"])]
                aborted += prompt["abort_after"] is not None
            peaks.append(result["rss_bytes"])
            if first % 16 == 0:
                process.do("reset")
        process.do("settle")
        stats = process.do("check")["stats"]
    print(json.dumps({"requests": requests, "failed": failed, "wrong": wrong, "aborted": aborted, **stats}))
    assert (failed, wrong) == (0, 0)
    assert stats["preemptions"] > 0
    assert stats["pinned_blocks"] == 0
    assert stats["free_pages"] == stats["pages"]
    assert peaks[-1] <= 1.05 * peaks[len(peaks) // 2]
