"""kvtide beside other things of vLLM's: a connector, chunked prefill, async scheduling, no prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS, flip_bytes

from kvtide_lab.bench.engine_process import kvtide_transfer

pytestmark = pytest.mark.timeout(900)

RESTORED = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
FROM_DISK = {"memory_bytes_max": 1 << 16, "codec": "lossless"}
# Five steps for the prompt.
CHUNKED = {"max_num_batched_tokens": 512, "async_scheduling": True}


def _beside_offloading(store: Path) -> dict[str, Any]:
    """Return MultiConnector of kvtide and vLLM's own offloading."""
    own = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "kvtide_lab.vllm.cpu_offload",
            "cpu_bytes_to_use": 256 << 20,
        },
    }
    connectors = [kvtide_transfer(str(store), **FROM_DISK), own]
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
        assert process.do("check")["stats"]["blocks_loaded"] == RESTORED // PAGE_TOKENS
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
