"""Gemma 3 270M, a real model with windows: what is restored answers as the model itself does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.engines.calibrate.texts import evaluation_texts
from kvtide.engines.transformers import attach
from kvtide_lab.subjects import GEMMA, LoadedModel, gemma_file, subject

WINDOW = 512


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    try:
        return subject(GEMMA)
    except ValueError as error:
        pytest.skip(str(error))


def test_its_four_parts_make_one_file(gemma: LoadedModel) -> None:
    data = gemma_file().read_bytes()
    assert (data[:4], len(data)) == (b"GGUF", 253113024)
    digest = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert hashlib.sha256(data).hexdigest() == digest
    assert gemma.tokenize("\n\nThe capital")[0] == 2


# Around the window, at a block's border and behind it.
@pytest.mark.parametrize("tokens", [WINDOW, WINDOW + 130, 2 * WINDOW + 1])
@pytest.mark.usefixtures("unhurried", "one_thread")
def test_a_restart_answers_as_the_model_does(gemma: LoadedModel, tmp_path: Path, tokens: int) -> None:
    prompt = torch.tensor([gemma.tokenize(evaluation_texts()[0].content)[:tokens]])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = gemma.model.generate(prompt, **settings)
    for restored in (0, (tokens - 1) // 64 * 64):
        with attach(gemma.model, tmp_path, block_tokens=64, codec="lossless") as cached:
            assert torch.equal(cached.generate(prompt, **settings), plain)
            assert cached.last is not None and cached.last.hit_tokens == restored
            assert cached.flush(60)
