from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.codec import Profile
from kvtide.codec.tide import Steps, TideCodec
from kvtide.engines.calibrate import calibration as module
from kvtide.engines.calibrate import split_texts
from kvtide.engines.calibrate.calibration import TideCalibration
from kvtide.engines.calibrate.sensitivity import cache_sensitivity
from kvtide.engines.transformers import ModelContexts
from kvtide.engines.transformers.groups import model_layout
from kvtide_lab.judge.quality import QualityJudge

pytestmark = pytest.mark.usefixtures("any_block_fits")


def texts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, size=170 + 16 * (i % 2)).tolist() for i in range(count)]


class Watch:
    """Notes progress, and stops a calibration before a step if told to."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.seen: list[tuple[str, int]] = []
        self._stop_at = stop_at

    def __call__(self, step: str, done: int, total: int) -> None:
        self.seen.append((step, done))
        if (step, done) == self._stop_at:
            raise KeyboardInterrupt


def calibration(model: Any, partial: Path, count: int = 6, cost: str = "layer") -> TideCalibration:
    return TideCalibration(model, "tiny", cost, split_texts(texts(count)), 16, partial)


@pytest.fixture(scope="module")
def fitted(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return calibration(tiny_model, tmp_path_factory.mktemp("fit") / "p.partial").run(Watch())


def test_report_has_a_rising_curve_of_held_out_texts(fitted: Any) -> None:
    (profile,), report = fitted
    assert report.held_out_texts == 2
    assert len(report.points) >= 5
    for fine, coarse in zip(report.points, report.points[1:], strict=False):
        assert fine.kl < coarse.kl
        assert fine.bits_per_element > coarse.bits_per_element
    assert profile.texts == 4
    # Those of the levels that are asked for; rounded ones have a curve of their own.
    assert np.array_equal(profile.arrays["trellis_curve"][:, 2], np.array([p.kl for p in report.points], np.float32))
    assert len(profile.arrays["curve"]) >= 5
    assert not np.array_equal(profile.arrays["curve"], profile.arrays["trellis_curve"])


def test_of_many_texts_some_are_counted_and_some_gradients_taken(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, watch = [], Watch()
    monkeypatch.setattr(module, "SENSED_TEXTS", 2)
    monkeypatch.setattr(module, "COUNTED_TEXTS", 3)
    monkeypatch.setattr(module, "cache_sensitivity", lambda *given: seen.append(1) or cache_sensitivity(*given))
    (profile,), _ = calibration(tiny_model, tmp_path / "p.partial", 12).run(watch)
    assert len(seen) == 2
    assert profile.texts == 8
    assert max(done for step, done in watch.seen if step == "counts") == 3


def test_large_state_is_written_now_and_then_and_at_the_end_of_a_pass(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITTEN_BYTES", 10_000)
    partial = tmp_path / "p.partial"
    with pytest.raises(KeyboardInterrupt):
        calibration(tiny_model, partial).run(Watch(("moments", 3)))
    assert not partial.exists()
    with pytest.raises(KeyboardInterrupt):
        calibration(tiny_model, partial).run(Watch(("shares", 0)))
    again = Watch()
    calibration(tiny_model, partial).run(again)
    assert ("moments", 3) not in again.seen


def test_fitted_profile_keeps_what_the_model_says(fitted: Any, tiny_model: Any) -> None:
    judge = QualityJudge(tiny_model, model_layout(tiny_model, 16), 48, 20, 2)
    judge.add(np.random.default_rng(99).integers(0, 256, size=80).tolist())
    fine, coarse = (TideCodec(fitted[0][0], quality, 1) for quality in (1e-5, 1e-2))
    kls = [judge.judge(0, judge.code(0, codec).decoded).kl for codec in (fine, coarse)]
    assert 0 <= kls[0] < kls[1] < 0.1


def test_curve_of_few_held_out_texts_allows_for_others(fitted: Any, tiny_model: Any) -> None:
    (profile,), report = fitted
    point = report.points[len(report.points) // 2]
    codec = TideCodec(profile).with_steps(Steps(point.step_units, 0, is_trellis=True))
    kls = []
    for ids in split_texts(texts(6)).held_out:
        judge = QualityJudge(tiny_model, model_layout(tiny_model, 16), (len(ids) - 129) // 16 * 16, 128, 2)
        judge.add(ids)
        kls.append(judge.judge(0, judge.code(0, codec).decoded).kl)
    assert point.kl > 1.5 * np.mean(kls)


@pytest.mark.parametrize(("count", "held_out"), [(5, 0), (6, 2), (12, 4), (18, 6), (48, 8), (200, 12)])
def test_one_text_in_three_is_held_out_of_many_one_in_six_and_twelve_at_most(count: int, held_out: int) -> None:
    split = split_texts([[number] for number in range(count)])
    assert len(split.held_out) == held_out
    assert sorted(split.fitted + split.held_out) == [[number] for number in range(count)]


@pytest.mark.parametrize("stop_at", [("moments", 3), ("shares", 2), ("counts", 2), ("curve", 0)])
def test_stopped_calibration_goes_on_to_the_same_profile(
    fitted: Any, tiny_model: Any, tmp_path: Path, stop_at: tuple[str, int]
) -> None:
    partial = tmp_path / "p.partial"
    with pytest.raises(KeyboardInterrupt):
        calibration(tiny_model, partial).run(Watch(stop_at))
    assert partial.exists()
    again = Watch()
    (profile,), _ = calibration(tiny_model, partial).run(again)
    assert stop_at in again.seen
    assert ("moments", 0) not in again.seen
    assert not partial.exists()
    assert profile.digest == fitted[0][0].digest


def test_state_of_another_calibration_is_not_used(tiny_model: Any, tmp_path: Path) -> None:
    partial = tmp_path / "p.partial"
    with pytest.raises(KeyboardInterrupt):
        calibration(tiny_model, partial, count=3).run(Watch(("moments", 2)))
    watch = Watch(("moments", 1))
    with pytest.raises(KeyboardInterrupt):
        calibration(tiny_model, partial, count=4).run(watch)
    assert watch.seen[0] == ("moments", 0)


@pytest.mark.parametrize("cost", ["light", "layer"])
def test_few_texts_still_make_a_profile(tiny_model: Any, tmp_path: Path, cost: str) -> None:
    (profile,), report = calibration(tiny_model, tmp_path / "p", count=3, cost=cost).run(Watch())
    assert (report.held_out_texts, report.held_out_over_fitted, report.is_overfitted) == (0, None, False)
    assert Profile.parse(profile.to_bytes()).digest == profile.digest


def test_bad_calibrations_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="full block"):
        TideCalibration(tiny_model, "tiny", "layer", split_texts([[1] * 100]), 16, tmp_path / "p")
    with pytest.raises(ValueError, match="light"):
        TideCalibration(tiny_model, "tiny", "cheap", split_texts(texts(1)), 16, tmp_path / "p")


def test_values_matter_more_than_keys_to_a_random_model(tiny_model: Any) -> None:
    ids, contexts = texts(1)[0][:42], ModelContexts(tiny_model, 16)
    context = contexts.capture(ids[:32])
    (found,) = cache_sensitivity(contexts, context, ids[32:], [None], torch.Generator().manual_seed(1))
    assert found.shape == (contexts.shapes[0].layout.layers, 2, 32)
    assert np.isfinite(found).all() and (found > 0).all()
    # Values matter directly, keys through the attention's softmax: of random weights the former matter more.
    assert found[:, 1].mean() > found[:, 0].mean()
