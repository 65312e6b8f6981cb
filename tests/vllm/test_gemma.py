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
    # Within the window, across it, and another end behind a shared beginning. What is left to compute is too short to
    # be timed, so that no load is given up for being slower, on however busy a machine.
    prompts = [ids[:440], ids[:700], [*ids[:650], *ids[1500:1550]]]
    kept = kvtide_transfer(str(tmp_path / "store"), codec="lossless", load_s_max=100)
    plain, stored, restored = answers_of(gemma.folder, (None, kept, kept), prompts, 12, enable_prefix_caching=False)
    assert [each["ids"] for each in stored] == [each["ids"] for each in plain]
    assert [each["ids"] for each in restored] == [each["ids"] for each in plain]
    assert [each["cached_tokens"] for each in restored] == [384, 640, 640]
