from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.codec.tide.law import Purpose
from kvtide.engines.transformers.groups import model_layout
from kvtide_lab.bench import position
from kvtide_lab.bench.position import EXACT, PositionSize, PositionSubject, flats
from kvtide_lab.judge.position_judge import Mixture, Patch, PositionJudge

ANSWER, BLOCK = 8, 16


@pytest.fixture
def subject(tiny_model: Any) -> PositionSubject:
    layout = model_layout(tiny_model, BLOCK)
    rng = np.random.default_rng(3)
    words = rng.integers(4, 256, size=64)
    ids = [rng.choice(words, size=512 + ANSWER + 1).tolist() for _ in range(2)]
    profile = fitted_on(tiny_model, layout, torch.from_numpy(words)[None])
    size = PositionSize(ANSWER, {512: 2})
    return PositionSubject(tiny_model, "tiny", layout, size, profile, ids, ["noise"] * 2)


def test_exact_mixture_loses_nothing_and_a_rough_passage_is_felt_by_its_copy(subject: PositionSubject) -> None:
    judge = PositionJudge(subject.model, subject.layout, subject.ids[0][:200], 128, ANSWER)
    judge.code(subject.codec)
    assert list(judge.kls(Mixture("exact", EXACT), (32,))) == pytest.approx([0, 0], abs=1e-6)
    fine, rough = (list(judge.kls(flat, (32,))) for flat in (flats()[3], flats()[0]))
    assert all(0 < a < b for a, b in zip(fine, rough, strict=True))
    same = Mixture("patched", 0, (Patch(0, 128, 3),))
    assert list(judge.kls(same, (32,))) == pytest.approx(fine)
    assert all(size == sorted(size) for size in judge.sizes) and len(judge.sizes) == 8


class Stopped(Exception):
    pass


def test_bench_goes_on_from_its_file_beside_the_law_of_the_profile(
    subject: PositionSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(step: str, done: int, total: int) -> None:
        if done:
            raise Stopped

    with pytest.raises(Stopped):
        position.run(subject, position.partial_of(subject, tmp_path / "partial"), stop)
    result = position.run(subject, position.partial_of(subject, tmp_path / "partial"), lambda *_: None)
    assert {row.texts for row in result.rows} == {2}
    law = subject.codec.law
    assert law is not None and result.law == law.positions
    flat = next(row for row in result.rows if (row.mixture, row.passage) == ("all 1", None))
    assert flat.law == pytest.approx(law.kl([1] * 8, 64, Purpose.GOES_ON))
    monkeypatch.setattr(position, "_judge_job", None)
    again = position.run(subject, position.partial_of(subject, tmp_path / "partial"), lambda *_: None)
    assert again.rows == result.rows


def test_text_that_is_too_short_for_any_prefix_is_an_error(subject: PositionSubject) -> None:
    with pytest.raises(ValueError, match="long enough"):
        position.run(subject._replace(ids=[[1, 2, 3]]), position.partial_of(subject, None), lambda *_: None)
