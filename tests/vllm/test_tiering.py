"""kvtide below vLLM's own tiering, in the real engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS

pytestmark = pytest.mark.timeout(900)


def _transfer(store: Path) -> dict[str, Any]:
    tier = {"type": "KVTideTier", "module_path": "kvtide.engines.vllm.tiering", "store": str(store)}
    config = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "kvtide_lab.vllm.cpu_offload",
        "cpu_bytes_to_use": 256 << 20,
        "secondary_tiers": [tier],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}


def test_restarted_engine_restores_what_its_own_tiering_gave_to_kvtide(
    engine: Any, plain: Any, tokens: list[int], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with engine(_transfer(store)) as process:
        process.ask(tokens[:PROMPT_TOKENS], 2)
    with engine(_transfer(store)) as process:
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
    assert answer["ids"] == plain["long"]["ids"]
    assert answer["cached_tokens"] == (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_python_hashes_are_pinned_as_vllms_chunk_names_need() -> None:
    from kvtide_lab.config import engine_environment

    assert engine_environment({})["PYTHONHASHSEED"] == "0"
    assert engine_environment({"X": "1"})["X"] == "1"
    assert engine_environment({}).keys() >= os.environ.keys()
