from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.codec import Profile
from kvtide.codec.tide.fit import COSTS, Moments
from kvtide.codec.tide.model import TideModel
from kvtide.engines.calibrate.judge import block_metas, capture_blocks
from kvtide.engines.transformers.fingerprint import model_layout
from kvtide_lab.bench import local_window
from kvtide_lab.bench.codec_quality import QualitySize, Subject
from kvtide_lab.bench.local_window import LocalTide, predicted_blocks, residual, residual_profile

TOKENS, BLOCK = 48, 16


@pytest.fixture
def ids() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.permutation(np.arange(69)).tolist() for _ in range(4)]


@pytest.fixture
def profile(tiny_model: Any, ids: list[list[int]]) -> Profile:
    return fitted_on(tiny_model, model_layout(tiny_model, BLOCK), torch.tensor([ids[0]]))


def errors(model: Any, ids: list[int], window: int) -> list[float]:
    """Return the largest error of a window's prediction in each block."""
    layout = model_layout(model, BLOCK)
    pairs = zip(capture_blocks(model, ids, layout), predicted_blocks(model, ids, layout, window), strict=True)
    return [float(np.abs(residual(exact, guess).view(np.float32)).max()) for exact, guess in pairs]


def test_window_predicts_exactly_as_far_as_it_reaches(tiny_model: Any, ids: list[list[int]]) -> None:
    assert max(errors(tiny_model, ids[0][:TOKENS], TOKENS)) < 1e-5
    first, *later = errors(tiny_model, ids[0][:TOKENS], BLOCK)
    assert first < 1e-5
    assert min(later) > 1e-3


def test_prediction_and_residual_are_the_cache_but_for_the_step(
    tiny_model: Any, ids: list[list[int]], profile: Profile
) -> None:
    layout = model_layout(tiny_model, BLOCK)
    moments, model = Moments(layout, COSTS["layer"]), TideModel(profile)
    for each in ids:
        exact, guess = capture_blocks(tiny_model, each, layout), predicted_blocks(tiny_model, each, layout, 8)
        for meta, bits, said in zip(block_metas(each, layout), exact, guess, strict=True):
            moments.add(meta, residual(bits, said), model.rotary)
    local = residual_profile(profile, layout, moments.state)
    weights = local.profile.arrays["weight"] / profile.arrays["weight"]
    assert weights == pytest.approx(float(weights.mean()), rel=1e-3)
    coder, found = LocalTide(local.profile), []
    for units in (-80, -20):
        restored = coder.through(
            block_metas(ids[0], layout), exact_of(tiny_model, ids[0]), guessed(tiny_model, ids[0]), units
        )
        pairs = zip(restored.blocks, exact_of(tiny_model, ids[0]), strict=True)
        worst = max(float(np.abs(residual(bits, said).view(np.float32))[:, :, 4:].max()) for bits, said in pairs)
        found.append((restored.stored_bytes, worst))
    (fine_bytes, fine), (coarse_bytes, coarse) = found
    assert fine < coarse / 4
    assert fine_bytes > coarse_bytes


def exact_of(model: Any, ids: list[int]) -> list[Any]:
    return capture_blocks(model, ids, model_layout(model, BLOCK))


def guessed(model: Any, ids: list[int]) -> list[Any]:
    return predicted_blocks(model, ids, model_layout(model, BLOCK), 8)


def test_bench_has_a_row_for_each_way_and_step(tiny_model: Any, ids: list[list[int]], profile: Profile) -> None:
    layout = model_layout(tiny_model, BLOCK)
    size = QualitySize(contexts=2, context_tokens=TOKENS, continuation=20, greedy=1)
    subject = Subject(tiny_model, "tiny", layout, size, ids[:2], ["noise", "noise"], ["a", "b"])
    found = local_window.run(subject, profile, ids[2:], (8, 16), lambda *_: None)
    ways = {(row.window if row.layers else 0, row.layers) for row in found.rows}
    assert ways == {(0, 0), (8, 3), (16, 3)}
    assert len(found.rows) == 3 * len(local_window.QUALITIES)
    assert set(found.pass_of_prefill) == {8, 16}
