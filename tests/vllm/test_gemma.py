"""Gemma 3 270M, a real model with windows of 512 tokens, in vLLM."""

from pathlib import Path
from typing import Any

import pytest

from kvtide.engines.calibrate.texts import evaluation_texts
from kvtide_lab.bench.engine_process import kvtide_transfer
from kvtide_lab.subjects import GEMMA, subject


@pytest.fixture(scope="module")
def gemma() -> Any:
    try:
        return subject(GEMMA)
    except ValueError as error:
        pytest.skip(str(error))


def test_windows_of_a_real_model_come_back_exactly(gemma: Any, answers_of: Any, tmp_path: Path) -> None:
    ids = gemma.tokenize(evaluation_texts()[1].content[:8000])
    long, branch, short = ids[:1400], [*ids[:900], *ids[1500:1600]], ids[:500]
    kept = kvtide_transfer(str(tmp_path / "store"), codec="lossless")
    prompts = [long, branch, short, long]
    plain, found = answers_of(gemma.folder, (None, kept), prompts, 12, enable_prefix_caching=False)
    assert [each["ids"] for each in found] == [each["ids"] for each in plain]
    # Another end behind a shared beginning, within the window, across it. Of the first load nobody knows yet what it
    # takes; after it a busy machine may compute sooner.
    assert [each["cached_tokens"] for each in found[:2]] == [0, 896]
    assert found[2]["cached_tokens"] in (0, 384) and found[3]["cached_tokens"] in (0, 1280)
