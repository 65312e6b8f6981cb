from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines import installed_profiles
from kvtide.engines.transformers.groups import model_layout
from kvtide.errors import UnencodableBlock
from kvtide_lab.bench import codec_quality as quality
from kvtide_lab.judge.quality import QualityJudge

LAYOUT = BlockLayout(layers=30, tokens=256, kv_heads=3, head_dim=64, dtype=KVDtype.FLOAT32)


@pytest.mark.parametrize("qualities", [quality.TIDE_QUALITIES, quality.TIDE_QUALITIES_QUICK])
@pytest.mark.parametrize("where", ["shared", "payload"])
def test_each_case_is_judged_once_and_parts_take_the_best_tables(
    qualities: tuple[tuple[float, int], ...], where: str
) -> None:
    found = quality.cases(installed_profiles() if where == "shared" else [], LAYOUT, qualities)
    assert len({case.id for case in found}) == len(found)
    parts = [(*case[:4], case.refinements) for case in found if case.refinements is not None]
    assert parts == [("cachegen", 4, "rans", where, refinements) for refinements in quality.SINGLE_DELTAS]


@pytest.fixture
def subject(tiny_model: Any) -> quality.Subject:
    return subject_with(tiny_model, seed=1)


def subject_with(model: Any, seed: int) -> quality.Subject:
    rng = np.random.default_rng(seed)
    size = quality.QualitySize(contexts=2, context_tokens=48, continuation=20, greedy=6)
    ids = [rng.integers(0, 256, size=69).tolist() for _ in range(2)]
    return quality.Subject(model, "tiny", model_layout(model, 16), size, ids, ["noise", "noise"], ["a", "b"])


class Stopped(Exception):
    pass


def judged(
    subject: quality.Subject, path: Path | None, codecs: tuple[str, ...] = (), results_max: int = 1000
) -> quality.CodecQuality:
    """QualityJudge; after so many results as if the user had stopped it."""

    def stop(_: str, done: int, total: int) -> None:
        if done >= results_max and done < total:
            raise Stopped

    return quality.run(subject, [], codecs, quality.partial_of(subject, [], path), stop)


def findings(result: quality.CodecQuality) -> list[tuple[Any, ...]]:
    """Return all of the rows but speeds."""
    fields = [name for name in quality.QualityRow.__struct_fields__ if not name.endswith("_mb_s")]
    return [tuple(getattr(row, name) for name in fields) for row in result.rows]


@pytest.mark.parametrize("results_max", [1, 30])
def test_run_broken_off_goes_on_to_the_same_rows(subject: quality.Subject, tmp_path: Path, results_max: int) -> None:
    path = tmp_path / "partial"
    with pytest.raises(Stopped):
        judged(subject, path, results_max=results_max)
    kept = len(quality.partial_of(subject, [], path))
    assert kept >= results_max
    assert findings(judged(subject, path)) == findings(judged(subject, None))
    assert len(quality.partial_of(subject, [], path)) > kept


def test_what_was_found_is_not_judged_again(
    subject: quality.Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = judged(subject, tmp_path / "partial", ("lossless", "chunkwise"))
    monkeypatch.setattr(quality, "QualityJudge", None)
    assert judged(subject, tmp_path / "partial", ("lossless", "chunkwise")) == first


def test_results_of_other_inputs_are_refused_by_name(subject: quality.Subject, tiny_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "partial"
    judged(subject, path, ("raw",))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="another texts:"):
        quality.partial_of(subject_with(tiny_model, seed=2), [], path)
    with pytest.raises(ValueError, match="another greedy_tokens:"):
        quality.partial_of(subject._replace(size=subject.size._replace(greedy=5)), [], path)
    with pytest.raises(ValueError, match="another profiles:"):
        quality.partial_of(subject, installed_profiles()[:1], path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{}", b'{"inputs": {}, "results": {}}', b"\x93NUMPY"])
def test_foreign_file_is_refused(subject: quality.Subject, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "partial").write_bytes(content)
    with pytest.raises(ValueError, match="holds no results"):
        quality.partial_of(subject, [], tmp_path / "partial")


def test_text_that_a_codec_refuses_is_named(subject: quality.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(judge: QualityJudge, *arguments: Any) -> None:
        raise UnencodableBlock("the profile does not fit")

    monkeypatch.setattr(QualityJudge, "code", refuse)
    with pytest.raises(ValueError, match=r"^a, raw.*: the profile does not fit\. Such blocks are stored losslessly"):
        judged(subject, None, ("raw",))


def test_exact_bytes_are_judged_once_and_as_perfect(subject: quality.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    judge = QualityJudge.judge
    monkeypatch.setattr(QualityJudge, "judge", lambda *args: asked.append(1) or judge(*args))
    rows = judged(subject, None, ("raw", "lossless")).rows
    assert [(row.kl, row.greedy_match) for row in rows] == [(0.0, 6), (0.0, 6)]
    assert len(asked) == len(subject.ids)


@pytest.mark.usefixtures("any_block_fits")
def test_tide_is_judged_text_by_text(subject: quality.Subject, tiny_model: Any) -> None:
    profile = fitted_on(tiny_model, subject.layout, torch.tensor([subject.ids[0]]))
    results = quality.partial_of(subject, [profile], None)
    result = quality.run(subject, [profile], ["tide-layer"], results, lambda *_: None)
    assert [(row.codec, row.text) for row in result.by_text] == [("tide-layer", "a"), ("tide-layer", "b")]
    last = dict(quality.TIDE_QUALITIES)
    whole = [row.kl / row.quality for row in result.rows if row.quality and row.refinements == last[row.quality]]
    for number, mean in enumerate(whole):
        assert np.mean([row.kls_over_asked[number] for row in result.by_text]) == pytest.approx(mean)


def goal_row(codec: str, bits: float, kl: float, coder: str = "rans", where: str = "shared") -> quality.QualityRow:
    return quality.QualityRow(codec, 0, coder, where, None, 0, None, bits, kl, 0.0, 0.0, 1.0, 1.0, None, 1.0, 1.0)


ROWS = [
    goal_row("raw", 32, 0.0),
    goal_row("tide-deep", 1, 2e-2),
    goal_row("tide-deep", 1.2, 3e-2),  # worse than the one before it: not on the line
    msgspec.structs.replace(goal_row("tide-deep", 2, 1.25e-3), over_single=0.003),
    goal_row("cachegen", 3, 5e-2),
    goal_row("cachegen", 5, 5e-4),
    goal_row("cachegen", 3.5, 4e-3, "prefix", "payload"),
]


def test_bits_lie_between_the_rows_in_bits_and_log_kl_and_nothing_is_said_beyond_them() -> None:
    found = quality.bits_at_kl(ROWS)
    assert quality.bits_of(found, 5e-3, "tide-deep", "shared") == pytest.approx(1.5)
    assert quality.ratio_to_tide(found, "cachegen", "shared") == pytest.approx(4 / 1.5)
    said = next(each for each in found if (each.codec, each.kl) == ("tide-deep", 5e-3))
    assert said.between == (quality.Point(1, 2e-2), quality.Point(2, 1.25e-3))
    assert quality.bits_of(found, 1e-3, "tide-deep", "shared") is None
    assert quality.ratio_to_tide(found, "cachegen", "payload") is None
    assert {(each.codec, each.kl): each.bits_of_row for each in found}["tide-deep", 5e-3] == 2
    assert {each.codec for each in found} == {"tide-deep", "cachegen"}


def test_penalty_is_the_worst_prefixs() -> None:
    assert quality.embedded_penalty(ROWS) == 0.003
    assert quality.embedded_penalty(ROWS[:1]) is None
