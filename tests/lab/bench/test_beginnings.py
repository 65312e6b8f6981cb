from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.engines.calibrate.texts import Text, calibration_texts, evaluation_texts
from kvtide.engines.transformers import model_layout
from kvtide_lab.bench import beginnings
from kvtide_lab.bench.beginnings import BEGINNINGS, RUNS, run, texts
from kvtide_lab.subjects import LoadedModel


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


def test_model_without_a_profile_is_refused(tiny_model: Any) -> None:
    of = LoadedModel(Path("tiny"), tiny_model, lambda text: [ord(each) % 256 for each in text])
    with pytest.raises(ValueError, match="kvtide calibrate"):
        run(of, [], [Text("a", "noise", "x" * 2000)], None, lambda *_: None)
