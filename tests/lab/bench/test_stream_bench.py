from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.codec.tide_profiles import fitted

from kvtide.block import BlockLayout
from kvtide.codec import Profile
from kvtide.codec.published.cachegen import ProfileFitter
from kvtide.engines.calibrate.judge import capture_blocks
from kvtide.engines.transformers.fingerprint import model_layout
from kvtide.plan import PrefillSpeed
from kvtide_lab.bench import stream
from kvtide_lab.bench.stream import StreamSize
from kvtide_lab.bench.stream_rig import Speeds
from kvtide_lab.sim.links import Link
from kvtide_lab.sim.stream import Costs

pytestmark = pytest.mark.usefixtures("any_block_fits")

STEADY = Link("steady", [0, 100], [0, 100e6])


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [(7 * i * i + 3 * i) % 256 for i in range(400)]


def profiles_of(model: Any, ids: list[int], layout: BlockLayout) -> Sequence[Profile]:
    fitter = ProfileFitter("cachegen", "tiny", layout)
    blocks = capture_blocks(model, ids[:320], layout)
    fitter.scale(blocks)
    for bits in blocks:
        fitter.add(bits)
    return [fitter.profile(1), fitted(layout)]


def test_every_policy_stands_beside_its_prediction(tiny_model: Any, ids: list[int]) -> None:
    layout = model_layout(tiny_model, stream.BLOCK_TOKENS)
    profiles = profiles_of(tiny_model, ids, layout)
    size = StreamSize(context_tokens=256, repeats=1, slo_share=20.0)
    result = stream.run(tiny_model, ids, layout, profiles, [STEADY], size, lambda step, done, total: None)
    assert [row.policy for row in result.rows] == ["fixed", "cachegen", "layered", "two-ended"]
    assert all(0 <= row.kl_mean < 1 and row.ttft_p50_s > 0 for row in result.rows)
    assert result.rows[0].kl_mean == result.rows[0].predicted_kl_mean == stream.LEVEL_KL[1]
    assert result.rows_predicted == sum(row.is_predicted for row in result.rows) >= 1
    assert min(result.ttft_two_ended_s, result.ttft_load_s, result.ttft_recompute_s) > 0
    assert min(result.break_even_ratio, result.break_even_ratio_unknown) > 0
    assert stream.render(result).row_count == 4


def test_row_says_how_far_the_prediction_was_off() -> None:
    def pair(ttft_s: float, kl: float, predicted_kl: float) -> stream.Pair:
        return stream.Pair(1.0, ttft_s, kl, 0.5, 1.05, predicted_kl, 0.4)

    row = stream.row_of("link", "policy", [pair(1.0, 0.01, 0.02), pair(1.09, 0.02, 0.01)])
    assert (row.miss_rate, row.predicted_miss_rate, row.kl_difference, row.is_predicted) == (0.0, 0.0, 0.0, True)
    late = stream.row_of("link", "policy", [pair(1.0, 0.01, 0.01), pair(1.2, 0.01, 0.01)])
    assert (late.miss_rate, late.miss_difference, late.is_predicted) == (0.5, 0.5, False)
    assert not stream.row_of("link", "policy", [pair(1.0, 0.012, 0.01)]).is_predicted
    assert stream.row_of("link", "policy", [pair(1.0, 0.01, 0.0)]).kl_difference == 1.0


def test_slower_machine_takes_longer_for_all_but_the_link() -> None:
    speeds = Speeds(PrefillSpeed(100.0, 50.0), Costs(0.1, (0.001, 0.002), 0.5), 0.3).slowed(2.0)
    assert speeds == Speeds(PrefillSpeed(50.0, 50.0), Costs(0.1, (0.002, 0.004), 1.0), 0.6)
    assert speeds.tail_s(100) == pytest.approx(0.4 + 0.6)


def test_text_that_is_too_short_is_refused(tiny_model: Any, ids: list[int]) -> None:
    layout = model_layout(tiny_model, stream.BLOCK_TOKENS)
    profiles = profiles_of(tiny_model, ids, layout)
    with pytest.raises(ValueError, match="need 1040 tokens, got 400"):
        stream.run(tiny_model, ids, layout, profiles, [], stream.FULL, lambda step, done, total: None)
    with pytest.raises(ValueError, match="cachegen and tide-layer must fit"):
        stream.run(tiny_model, ids, layout, profiles[:1], [], stream.FULL, lambda step, done, total: None)
