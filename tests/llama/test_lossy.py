"""Lossy codecs on llama.cpp's rows: channels in the order that profiles know, and what the model then says."""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.llama.conftest import ask, ask_fresh

from kvtide.block import BlockLayout
from kvtide.cli.profile import llama_losses, with_noise
from kvtide.codec import Profile
from kvtide.engines import installed_profiles
from kvtide.engines.llamacpp import attach
from kvtide.engines.llamacpp.state import halved, paired
from kvtide.engines.paged import gguf_fingerprint
from kvtide_lab.bench.llama import packaged_model


def test_halves_of_each_head_are_what_neighbours_were() -> None:
    keys = np.arange(24).reshape(2, 12)
    assert list(halved(keys, 2)[0]) == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert (paired(halved(keys, 2), 2) == keys).all()


def test_lossy_blocks_are_apart_and_quantised_rows_refuse_them(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    with opened() as llm, attach(llm, tmp_path, codec="cachegen:1") as cached:
        ask(llm, tokens[:600], 1)
        assert cached.flush(60)
    with opened() as llm, attach(llm, tmp_path, codec="cachegen:1") as cached:
        assert cached.hit_tokens(tokens[:600]) == 512
        assert len(ask(llm, tokens[:600]).ids) == 12
    with opened() as llm, attach(llm, tmp_path) as cached:
        assert cached.hit_tokens(tokens[:600]) == 0
    with opened(type_k=8) as llm, pytest.raises(ValueError, match="must be lossless or raw"):
        attach(llm, tmp_path, codec="cachegen:1")


def test_tide_without_a_profile_is_lossless_and_names_the_command(
    opened: Any, models: Any, tokens: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ask_fresh(opened, tokens[:400])
    for _ in range(2):
        with opened() as llm, attach(llm, tmp_path, codec="tide:5e-3") as cached:
            assert cached.served.weights == gguf_fingerprint(models())
            assert ask(llm, tokens[:400]).is_same(plain)
            assert cached.flush(60) and cached.hit_tokens(tokens[:400]) == 384
    assert any(f"kvtide calibrate {models()} --store" in each for each in caplog.messages)


@pytest.mark.real_model
def test_tide_keeps_its_promise_by_llama_cpp_s_own_answers(opened: Any) -> None:
    (profile,) = (each for each in installed_profiles() if each.kind == "tide-layer")
    with opened(packaged_model(), n_ctx=512) as llm:
        texts = [llm.tokenize(Path(str(each.__file__)).read_bytes()[:4000])[:385] for each in (random, argparse)]
    (noise,) = llama_losses(packaged_model(), [profile], texts[:1], lambda *each: None)
    # The packaged profile is that of float32 activations, whose promise does not know of llama.cpp's rounding.
    assert 5e-4 < noise < 5e-3
    noisy = with_noise(profile, noise)
    (kl,) = llama_losses(packaged_model(), [noisy], texts[1:], lambda *each: None, 5e-3)
    assert 0 < kl < 1.5 * 5e-3


def test_curve_with_noise_rises_and_falls_below_it(layout: BlockLayout) -> None:
    curve = np.array([[unit, 1, kl] for unit, kl in enumerate((1e-6, 4e-4, 5e-4, 6e-4, 5e-3))], np.float32)
    profile = Profile.make("tide-layer", "any", layout, (1, 1), {"curve": curve})
    kls = with_noise(profile, 4e-3).arrays["curve"][:, 2]
    assert kls == pytest.approx([9e-6, 3.6e-3, 4.5e-3, 4.6e-3, 9e-3])
