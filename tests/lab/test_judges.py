"""Judges of quality: exact is perfect, coarser is worse; positions of a prefix; texts by their beginnings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.codec import LosslessCodec
from kvtide.codec.published import CachegenCodec
from kvtide.codec.tide.law import Purpose
from kvtide.engines.calibrate.texts import Text, calibration_texts, evaluation_texts
from kvtide.engines.transformers.groups import model_layout
from kvtide_lab.bench import beginnings, position
from kvtide_lab.bench.beginnings import BEGINNINGS, RUNS, run, texts
from kvtide_lab.bench.position import EXACT, PositionSize, PositionSubject, flats
from kvtide_lab.judge.law import CURVE_OVER_MEAN, LossLaw
from kvtide_lab.judge.position_judge import Mixture, Patch, PositionJudge
from kvtide_lab.judge.quality import QualityJudge
from kvtide_lab.subjects import LoadedModel


@pytest.fixture(scope="module")
def judge(tiny_model: Any) -> QualityJudge:
    judge = QualityJudge(tiny_model, model_layout(tiny_model, 16), context_tokens=48, continuation=20, greedy=6)
    judge.add(np.random.default_rng(1).integers(0, 256, size=80).tolist())
    return judge


def test_exact_cache_is_judged_as_perfect(judge: QualityJudge) -> None:
    coded = judge.code(0, LosslessCodec())
    verdict = judge.judge(0, coded.decoded)
    assert (verdict.kl, verdict.nll_change, verdict.top1, verdict.greedy_match) == (0.0, 0.0, 1.0, 6)
    assert coded.stored_bytes < coded.raw_bytes == 3 * judge.layout.raw_bytes


def test_leading_refinements_are_counted_and_judged_alone(judge: QualityJudge) -> None:
    codec = CachegenCodec(level=1)
    anchors, some, whole = (judge.code(0, codec, refinements) for refinements in (0, 4, None))
    assert (anchors.refinements, some.refinements, whole.refinements) == (0, 4, 9)
    assert anchors.stored_bytes < some.stored_bytes < whole.stored_bytes == judge.code(0, codec, 9).stored_bytes
    kls = [judge.judge(0, coded.decoded).kl for coded in (anchors, some, whole)]
    assert kls[0] > kls[1] > kls[2] > 0


def test_garbage_cache_is_judged_as_bad(judge: QualityJudge) -> None:
    garbage = [np.zeros_like(bits) for bits in judge.contexts[0].blocks]
    assert judge.judge(0, garbage).kl > 1e-3


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


def test_bench_goes_on_from_its_file_beside_the_law_of_the_profile(
    subject: PositionSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = position.run(subject, position.partial_of(subject, tmp_path / "partial"), lambda *_: None)
    assert {row.texts for row in result.rows} == {2}
    law = LossLaw.of(subject.codec)
    assert result.law == law.positions
    flat = next(row for row in result.rows if (row.mixture, row.passage) == ("all 1", None))
    assert CURVE_OVER_MEAN * flat.law == pytest.approx(law.kl([1] * 8, 64, Purpose.GOES_ON))
    monkeypatch.setattr(position, "_judge_job", None)
    again = position.run(subject, position.partial_of(subject, tmp_path / "partial"), lambda *_: None)
    assert again.rows == result.rows


def test_beginnings_stand_before_four_bodies_and_runs_within_them() -> None:
    found = texts(None, quick=False)
    assert len({text.name for text in found}) == len(found) == 4 * (len(BEGINNINGS) + len(RUNS))
    assert len(set(BEGINNINGS)) == len(BEGINNINGS) >= 40
    assert all(sum(text.content.startswith(each) for text in found) >= 4 for each in BEGINNINGS)
    assert all(sum(0 < text.content.find(each) < 2000 for text in found) >= 4 for each in RUNS)
    known = [*evaluation_texts(), *calibration_texts()]
    assert not any(text.content[-5000:] == each.content[-5000:] for text in found for each in known)
    assert 1 < len(texts(None, quick=True)) < 10


@pytest.mark.usefixtures("any_block_fits")
def test_worst_text_is_named_and_a_run_goes_on(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginnings, "CONTEXT_TOKENS", 512)
    rng = np.random.default_rng(3)
    of = LoadedModel(Path("tiny"), tiny_model, lambda text: [ord(each) % 256 for each in text])
    chosen = [Text(name, "noise", "".join(map(chr, rng.integers(32, 126, 700)))) for name in "abc"]
    profile = fitted_on(tiny_model, model_layout(tiny_model, 256), torch.tensor([of.tokenize(chosen[0].content)[:512]]))
    shown: list[tuple[str, int, int]] = []
    result = run(of, [profile], chosen, tmp_path / "partial", lambda *each: shown.append(each))
    assert shown == [("texts", number, 3) for number in range(4)]
    (over,) = result.over_asked
    lost = {row.text: row.kl_over_asked or 0.0 for row in result.rows}
    assert (over.codec, over.texts, over.unencodable, over.worst_text) == ("tide", 3, 0, result.rows[0].text)
    assert over.worst == max(lost.values()) == lost[over.worst_text]
    assert over.mean == pytest.approx(np.mean(list(lost.values())))
    assert 0 < over.bits_per_element < 32
    monkeypatch.setattr(beginnings, "WholeJudge", None)
    assert run(of, [profile], chosen, tmp_path / "partial", lambda *_: None) == result
