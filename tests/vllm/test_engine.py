"""The connector in real vLLM with a real model: restart, faults while serving, soak, beside other things of vLLM's."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.stores import flip_bytes
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS, offloading

from kvtide.engines.settings import TAIL_TOKENS
from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer

pytestmark = pytest.mark.timeout(900)

FULL_PAGES = (PROMPT_TOKENS - 1) // PAGE_TOKENS
PIECES = (PROMPT_TOKENS - 1) % PAGE_TOKENS // TAIL_TOKENS
RESTORED = FULL_PAGES * PAGE_TOKENS + PIECES * TAIL_TOKENS
# So little memory that every block comes from the disk.
FROM_DISK = {"memory_bytes_max": 1 << 16, "codec": "lossless"}
SOAK_REQUESTS = 48
SOAK_AT_ONCE = 8


class Restarted(NamedTuple):
    process: EngineProcess
    store: Path
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def restarted(engine: Any, filled_store: Path, small_disk: Path, tokens: list[int]) -> Iterator[Restarted]:
    """An engine, just started on a store that another has filled, and what it said to the long prompt."""
    store = small_disk / "store"
    shutil.copytree(filled_store, store)
    with engine(kvtide_transfer(str(store), disk_bytes_max=512 << 20, **FROM_DISK)) as process:
        process.ask(tokens[-300:], 2)
        yield Restarted(process, store, process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS))


@pytest.mark.real_time
def test_restarted_engine_restores_every_full_page_and_says_the_same(
    restarted: Restarted, plain: Any, tokens: list[int]
) -> None:
    stats = restarted.process.do("check")["stats"]
    assert restarted.answer["cached_tokens"] == RESTORED
    assert restarted.answer["ids"] == plain["long"]["ids"]
    assert stats["free_pages"] == stats["pages"]
    # The best of three: a machine that is held up once is not what is measured.
    times_s = [restarted.answer["ttft_s"]]
    for _ in range(2):
        assert restarted.process.do("reset")["is_done"]
        times_s.append(restarted.process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)["ttft_s"])
    speedup = plain["long"]["ttft_s"] / min(times_s)
    print(json.dumps({"ttft_speedup_vs_plain": round(speedup, 1)}))
    assert speedup >= 3


def _ask(process: EngineProcess, prompt: list[int], expected: list[int]) -> Any:
    """Ask an engine whose own cache is empty; return kvtide's counters."""
    assert process.do("reset")["is_done"]
    answer = process.ask(prompt, ANSWER_TOKENS)
    assert (answer["ids"], answer["finish"]) == (expected, "length")
    process.do("settle")
    return process.do("check")["stats"]


def test_full_disk_under_the_engine_fails_no_request(
    restarted: Restarted, plain: Any, soak_prompts: list[list[int]], tokens: list[int]
) -> None:
    process, ballast = restarted.process, restarted.store.parent / "ballast"
    free = os.statvfs(ballast.parent)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))
    before = process.do("check")["stats"]
    answers = process.generate([{"ids": prompt, "answer_tokens": 8} for prompt in soak_prompts])["answers"]
    assert [(each["ids"], each["finish"]) for each in answers] == [(ids, "length") for ids in plain["soak"]]
    process.do("settle")
    # What is asked for again and again takes the place of what came once, and is served from a full disk.
    first, *_, third, fourth = (_ask(process, tokens[:PROMPT_TOKENS], plain["long"]["ids"]) for _ in range(4))
    assert first["blocks_stored"] > before["blocks_stored"]
    assert fourth["blocks_loaded"] >= third["blocks_loaded"] + FULL_PAGES
    ballast.unlink()


@pytest.mark.parametrize(("load", "codec"), [("auto", "raw"), ("async", "lossless")])
def test_blocks_come_within_the_step_or_aside_and_faults_are_recomputed(
    engine: Any, plain: Any, tokens: list[int], tmp_path: Path, load: str, codec: str
) -> None:
    store, expected = tmp_path / "store", plain["long"]["ids"]
    with engine(kvtide_transfer(str(store), **{**FROM_DISK, "load": load, "codec": codec})) as process:
        assert process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)["cached_tokens"] == 0
        process.do("settle")
        process.do("reset")
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["cached_tokens"]) == (expected, RESTORED)
        process.do("reset")
        flip_bytes(store)
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["finish"]) == (expected, "length")
        process.do("settle")
        stats = process.do("check")["stats"]
        assert stats["misses"].get("corrupt", 0) >= 1
        # A reset that includes the connector makes it forget everything.
        assert process.do("reset", is_deep=True)["is_done"]
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["cached_tokens"]) == (expected, 0)


def test_what_a_prompt_has_behind_its_last_full_block_is_restored_in_pieces(
    engine: Any, plain: Any, tokens: list[int], tmp_path: Path
) -> None:
    store, expected, options = tmp_path / "store", plain["long"]["ids"], {"codec": "raw", "load": "layers"}
    stored, pieces = PROMPT_TOKENS - 40, (PROMPT_TOKENS - 40) % PAGE_TOKENS // TAIL_TOKENS
    with engine(kvtide_transfer(str(store), **{**FROM_DISK, **options})) as process:
        assert process.ask(tokens[:stored], 2)["cached_tokens"] == 0
        process.do("settle")
        process.do("reset")
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        restored = stored // PAGE_TOKENS * PAGE_TOKENS + TAIL_TOKENS * pieces
        assert pieces == 6
        assert (answer["ids"], answer["cached_tokens"]) == (expected, restored)
        process.do("settle")
        # What was computed on top of pieces is stored as usual.
        process.do("reset")
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["cached_tokens"]) == (expected, RESTORED)
        process.do("reset")
        flip_bytes(store)
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
        assert (answer["ids"], answer["finish"]) == (expected, "length")


def test_soak_on_a_full_disk_with_aborts_and_preemptions_leaks_nothing(
    engine: Any, plain: Any, soak_prompts: list[list[int]], tmp_path: Path, fault_factor: int
) -> None:
    # Pages for four requests of eight until their answers need more, and a disk for half of the blocks.
    small = {"num_gpu_blocks_override": 14, "max_model_len": 1024, "disable_log_stats": False}
    transfer = kvtide_transfer(str(tmp_path / "store"), disk_bytes_max=32 << 20, **FROM_DISK)
    requests = 500 if fault_factor > 1 else SOAK_REQUESTS
    sizes, failed, wrong, aborted = [], 0, 0, 0
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
            sizes.append(result["rss_bytes"])
            if first % 16 == 0:
                process.do("reset")
        process.do("settle")
        stats = process.do("check")["stats"]
    print(
        json.dumps({"requests": requests, "failed": failed, "wrong": wrong, "aborted": aborted, "rss": sizes, **stats})
    )
    assert (failed, wrong) == (0, 0)
    assert stats["metrics"]["vllm:num_preemptions"] > 0
    assert stats["pinned_blocks"] == 0
    assert stats["free_pages"] == stats["pages"]
    middle = len(sizes) // 2
    assert max(sizes[middle:]) <= 1.05 * max(sizes[1:middle])


# Five steps for the prompt.
CHUNKED = {"max_num_batched_tokens": 512, "async_scheduling": True}


def _beside_offloading(store: Path) -> dict[str, Any]:
    """Return MultiConnector of kvtide and vLLM's own offloading."""
    connectors = [kvtide_transfer(str(store), **FROM_DISK), offloading()]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def test_beside_another_connector_prompts_in_chunks_and_weights_that_are_loaded_anew(
    engine: Any, plain: Any, tokens: list[int], tmp_path: Path
) -> None:
    store, expected = tmp_path / "store", (plain["long"]["ids"], "length")
    with engine(_beside_offloading(store), **CHUNKED) as process:

        def ask() -> int:
            answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
            assert (answer["ids"], answer["finish"]) == expected
            assert process.do("settle")["is_done"]
            assert process.do("reset")["is_done"]
            cached: int = answer["cached_tokens"]
            return cached

        assert [ask(), ask()] == [0, RESTORED]
        assert process.do("check")["stats"]["blocks_loaded"] == FULL_PAGES + PIECES
        flip_bytes(store)
        ask()
        assert process.do("check")["stats"]["misses"].get("corrupt", 0) >= 1
        # Nothing that was stored with the old weights is found with the new ones.
        assert process.do("reload")["is_done"]
        assert [ask(), ask()] == [0, RESTORED]


def test_without_a_prefix_cache_of_vllm_s_own_each_prompt_is_restored(
    engine: Any, plain: Any, tokens: list[int], filled_store: Path
) -> None:
    transfer = kvtide_transfer(str(filled_store), codec="lossless")
    with engine(transfer, enable_prefix_caching=False, **CHUNKED) as process:
        prompts = [{"ids": tokens[:PROMPT_TOKENS], "answer_tokens": ANSWER_TOKENS}] * 3
        answers = process.generate(prompts)["answers"] + process.generate(prompts[:1])["answers"]
    assert [each["ids"] for each in answers] == [plain["long"]["ids"]] * 4
    assert [each["cached_tokens"] for each in answers] == [RESTORED] * 4
