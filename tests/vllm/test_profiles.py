"""`codec=tide` in real vLLM on a store that holds a profile of the model, and on one that does not yet."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.families import VOCABULARY, checkpoint
from tests.vllm.conftest import PAGE_TOKENS

from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer

pytestmark = pytest.mark.timeout(900)

PROMPT_TOKENS, ANSWER_TOKENS = 900, 8
FULL_PAGES = (PROMPT_TOKENS - 1) // PAGE_TOKENS
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_logprobs": VOCABULARY, "max_num_batched_tokens": 4096}


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(count)]


def answered(model: Path, log: Path, transfer: Any, asked: list[list[int]], nursery: Any) -> tuple[list[Any], Any]:
    """Ask a new engine; return answers with the logarithms of all probabilities, and the connector's counters."""
    with EngineProcess(Path(sys.executable), model, log, transfer, OPTIONS, nursery=nursery) as process:
        answers = [process.ask(ids, ANSWER_TOKENS, VOCABULARY) for ids in asked]
        if transfer is None:
            return answers, None
        assert process.do("settle")["is_done"]
        return answers, process.do("check")["stats"]


def divergence(exact: Any, found: Any) -> float:
    """Mean KL over the places of two answers up to the first token that differs."""
    kls = []
    names = ("logprobs", "ids")
    for right, one, said, other in zip(*(each[name] for each in (exact, found) for name in names), strict=True):
        kls.append(sum(math.exp(p) * (p - said[token]) for token, p in right.items()))
        if one != other:
            break
    return float(np.mean(kls))


def test_profile_in_the_store_is_all_that_vllm_needs(tmp_path: Path, nursery: Any) -> None:
    model, store, asked = checkpoint("llama", tmp_path / "model"), str(tmp_path / "store"), prompts(3)
    transfer = kvtide_transfer(store, codec="tide")
    exact, _ = answered(model, tmp_path / "log", None, asked, nursery)
    _, before = answered(model, tmp_path / "log", transfer, asked[:1], nursery)
    assert (before["blocks_stored"], before["blocks_without_profile"]) == (FULL_PAGES, FULL_PAGES)
    # The command is the one in the log.
    (said,) = {line for line in nursery.log.read_text().splitlines() if "kvtide calibrate" in line}
    words = said.partition("kvtide calibrate ")[2].split()
    assert words[:3] == [str(model), "--store", store]
    command = [sys.executable, "-m", "kvtide.cli", "calibrate", *words[:3], "--tokens", "800"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    _, stored = answered(model, tmp_path / "log", transfer, asked[1:], nursery)
    counts = (stored["blocks_stored"], stored["blocks_without_profile"], stored["blocks_unencodable"])
    assert counts == (2 * FULL_PAGES, 0, 0)
    assert stored["bytes_stored"] < stored["raw_bytes_stored"] / 8
    found, loaded = answered(model, tmp_path / "log", transfer, asked[1:], nursery)
    assert [each["cached_tokens"] for each in found] == [FULL_PAGES * PAGE_TOKENS] * 2
    assert loaded["blocks_loaded"] == 2 * FULL_PAGES
    kls = [divergence(one, other) for one, other in zip(exact[1:], found, strict=True)]
    print(f"kl_model {np.mean(kls):.2g}")
    assert 0 < np.mean(kls) <= 5e-3
