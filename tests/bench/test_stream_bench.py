from __future__ import annotations

from typing import Any

import pytest

from kvtide.bench import stream
from kvtide.bench.stream import StreamSize
from kvtide.block import BlockLayout
from kvtide.codec.calibrate import ProfileFitter
from kvtide.engines.judge import capture_blocks
from kvtide.engines.transformers import model_layout
from kvtide.sim.links import Link


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [(7 * i * i + 3 * i) % 256 for i in range(400)]


def profile_of(model: Any, ids: list[int], layout: BlockLayout) -> Any:
    fitter = ProfileFitter("cachegen", "tiny", layout)
    blocks = capture_blocks(model, ids[:320], layout)
    fitter.scale(blocks)
    for bits in blocks:
        fitter.add(bits)
    return fitter.profile(1)


def test_every_policy_stands_beside_its_prediction(tiny_model: Any, ids: list[int]) -> None:
    layout = model_layout(tiny_model, stream.BLOCK_TOKENS)
    profile = profile_of(tiny_model, ids, layout)
    link = Link("steady", [0, 100], [0, 100e6])
    size = StreamSize(context_tokens=256, repeats=1, slo_share=20.0)
    result = stream.run(tiny_model, ids, layout, profile, [link], size, lambda step, done, total: None)
    assert [row.policy for row in result.rows] == ["fixed", "cachegen", "layered", "two-ended"]
    assert all(0 <= row.kl_mean < 1 and row.ttft_p50_s > 0 for row in result.rows)
    assert result.rows[0].kl_mean == result.rows[0].predicted_kl_mean == stream.LEVEL_KL[1]
    assert min(result.ttft_two_ended_s, result.ttft_load_s, result.ttft_recompute_s) > 0
    assert stream.render(result).row_count == 4


def test_text_that_is_too_short_is_refused(tiny_model: Any, ids: list[int]) -> None:
    layout = model_layout(tiny_model, stream.BLOCK_TOKENS)
    profile = profile_of(tiny_model, ids, layout)
    with pytest.raises(ValueError, match="need 1040 tokens, got 400"):
        stream.run(tiny_model, ids, layout, profile, [], stream.FULL, lambda step, done, total: None)
