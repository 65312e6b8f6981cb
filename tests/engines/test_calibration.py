"""Calibration: what it is fitted on, what it says of its loss, and that a stopped one goes on."""

import csv
import gzip
import hashlib
import importlib.resources
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.codec import Profile
from kvtide.codec.tide import COSTS, Moments, Steps, TideCodec, draft_profiles
from kvtide.engines.calibrate import calibration as module
from kvtide.engines.calibrate import split_texts
from kvtide.engines.calibrate import texts as corpus
from kvtide.engines.calibrate.calibration import TideCalibration
from kvtide.engines.calibrate.judge import (
    LossShares,
    WholeJudge,
    cache_sensitivity,
    coded_prefixes,
    finer_weights,
    loss_shares,
    own_losses,
)
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


def calibration(model: Any, partial: Path, count: int = 6, cost: str = "layer", unlike: float = 1.0) -> TideCalibration:
    return TideCalibration(model, "tiny", cost, split_texts(texts(count)), 16, partial, unlike)


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
    assert profile.arrays["own_gains"].shape == (3, 3)
    assert profile.arrays["excess"].shape == (3, 2) and profile.arrays["excess"][:, 1].min() >= 1
    assert 0 <= profile.arrays["own_deviation"][0] < 1
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


def test_texts_that_are_unlike_those_held_out_are_allowed_for(fitted: Any, tiny_model: Any, tmp_path: Path) -> None:
    _, report = calibration(tiny_model, tmp_path / "p.partial", unlike=1.5).run(Watch())
    assert [each.kl for each in report.points] == pytest.approx([1.5 * each.kl for each in fitted[1].points])


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


def test_own_losses_find_what_goes_with_gains_and_trust_few_texts_little() -> None:
    rng = np.random.default_rng(5)
    found = {}
    for count in (1, 5, 200):
        excess = rng.normal(size=count)
        gains = np.stack([3 + excess, 2 + 0.5 * excess], axis=1)
        kls = np.exp(0.4 * excess)[:, None] * np.array([1e-3, 1e-2])
        (own,), usual = own_losses([gains], (-20, 0), kls)
        found[count] = own["own_deviation"][0], usual
        assert np.allclose(own["own_gains"][:, 1], gains.mean(axis=0), rtol=1e-5)
        assert own["own_gains"][0, 2] == pytest.approx(1, abs=0.4)
    assert found[1][0] == 0 < found[5][0] < found[200][0] == pytest.approx(0.4, abs=0.06)
    # Of many texts the rest of their deviation is known: there is none here.
    assert np.allclose(found[200][1], [1e-3, 1e-2], rtol=0.15)


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
    assert profile.digest == fitted[0][0].digest


@pytest.mark.parametrize("change", ["texts", "weights", "cut", "empty", "later version"])
def test_state_of_another_calibration_or_damaged_is_not_used(tiny_model: Any, tmp_path: Path, change: str) -> None:
    partial, model, watch = tmp_path / "p.partial", deepcopy(tiny_model), Watch(("moments", 1))
    with pytest.raises(KeyboardInterrupt):
        calibration(model, partial, count=3).run(Watch(("moments", 2)))
    if change == "weights":
        next(model.parameters()).data += 1e-3
    data = partial.read_bytes()
    at = data.rindex(b"PK\1\2") + 6
    damaged = {"cut": data[:1000], "empty": b"", "later version": data[:at] + b"\xff" + data[at + 1 :]}
    partial.write_bytes(damaged.get(change, data))
    with pytest.raises(KeyboardInterrupt):
        calibration(model, partial, count=4 if change == "texts" else 3).run(watch)
    assert watch.seen[0] == ("moments", 0)


@pytest.mark.parametrize("cost", ["light", "layer"])
def test_few_texts_still_make_a_profile(tiny_model: Any, tmp_path: Path, cost: str) -> None:
    (profile,), report = calibration(tiny_model, tmp_path / "p", count=3, cost=cost).run(Watch())
    assert (report.held_out_texts, report.held_out_over_fitted, report.is_overfitted) == (0, None, False)
    assert Profile.parse(profile.to_bytes()).digest == profile.digest


def test_bad_calibrations_are_refused(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="full block"):
        TideCalibration(tiny_model, "tiny", "layer", split_texts([[1] * 100]), 16, tmp_path / "p")
    with pytest.raises(ValueError, match="light"):
        TideCalibration(tiny_model, "tiny", "cheap", split_texts(texts(1)), 16, tmp_path / "p")
    monkeypatch.setattr(WholeJudge, "kl", lambda *given: 0.0)
    with pytest.raises(ValueError, match="hardly depends on its cache"):
        calibration(tiny_model, tmp_path / "p", 1).run(Watch())


def test_two_calibrations_at_once_both_end(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (calibration(tiny_model, tmp_path / "p", count, "light") for count in (1, 2))
    savez = np.savez
    # The other runs while the first state is being written.
    monkeypatch.setattr(np, "savez", lambda *to, **of: (monkeypatch.undo(), savez(*to, **of), other.run(Watch())))
    assert one.run(Watch())[0][0].texts == 1


def test_values_matter_more_than_keys_to_a_random_model(tiny_model: Any) -> None:
    ids, contexts = texts(1)[0][:42], ModelContexts(tiny_model, 16)
    context = contexts.capture(ids[:32])
    (found,) = cache_sensitivity(contexts, context, ids[32:], [None], torch.Generator().manual_seed(1))
    assert found.shape == (contexts.shapes[0].layout.layers, 2, 32)
    assert np.isfinite(found).all() and (found > 0).all()
    # Values matter directly, keys through the attention's softmax: of random weights the former matter more.
    assert found[:, 1].mean() > found[:, 0].mean()


TOKENS = 48


def test_products_of_errors_and_gradients_add_up_to_the_kl(tiny_model: Any) -> None:
    ids, contexts = texts(1)[0], ModelContexts(tiny_model, 16)
    judge, rotaries, layout = WholeJudge(contexts, ids, TOKENS), contexts.rotaries(), contexts.shapes[0].layout
    context, moments = judge.context, Moments(layout, COSTS["layer"])
    for meta, bits in zip(context.metas[0], context.blocks[0], strict=True):
        moments.add(meta, bits, rotaries[0])
    moments.add_text(cache_sensitivity(contexts, context, ids[TOKENS:], rotaries, torch.Generator())[0])
    (draft,) = draft_profiles("tiny", "layer", [(layout, moments.state)], rotaries)
    codec = TideCodec(draft).with_steps(Steps(-12, 0))
    (coded,) = coded_prefixes([codec], context)
    weights = [codec.model.weight]
    (found,) = loss_shares(contexts, context, coded.decoded, ids[TOKENS:], rotaries, weights)
    assert found.kl.shape == found.error.shape == (layout.layers, 2, layout.kv_heads)
    assert (found.error > 0).all()
    # Tokens that are kept apart have errors, too, but small ones.
    assert float(found.kl.sum()) == pytest.approx(judge.kl(coded.decoded), rel=0.15)


def test_a_head_that_the_model_minds_less_gets_coarser_steps(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deepcopy(tiny_model)
    with torch.no_grad():
        # Query heads 2 and 3 read the second of two heads of keys and values.
        model.model.layers[1].self_attn.o_proj.weight[:, 32:] *= 0.1

    def weights() -> Any:
        (profile,), _ = calibration(model, tmp_path / "p", count=3).run(lambda *_: None)
        return profile.arrays["weight"].reshape(3, 2, 2, 16).mean(axis=-1)

    found = weights()
    monkeypatch.setattr(module, "finer_weights", lambda shares: [np.ones(each.kl.shape) for each in shares])
    over_even = found / weights()
    # Keys of both heads of this layer mean little to a random model.
    assert over_even[1, 0, 1] < 0.9 * over_even[1, 0, 0]
    assert over_even[1, 1, 1] < 0.6 * over_even[1, 1, 0]


def test_transforms_in_two_stages_are_fitted_once(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = list[str]()
    monkeypatch.setattr("kvtide.codec.tide.is_staged", lambda cost, layout: True)
    calibration(tiny_model, tmp_path / "p", count=1).run(lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["moments", "counts", "curve"]


def test_weights_follow_what_a_head_has_more_of_the_kl_than_of_the_error() -> None:
    error = np.ones((1, 2, 2))
    (even,) = finer_weights([LossShares(3 * error, error)])
    assert even == pytest.approx(1.0)
    (minded,) = finer_weights([LossShares(np.array([[[16.0, 1.0], [1.0, 1.0]]]), error)])
    assert minded[0, 0, 0] == pytest.approx(16**0.3 * minded[0, 0, 1])
    assert float(np.log(minded).sum()) == pytest.approx(0.0)
    (none,) = finer_weights([LossShares(0 * error, error)])
    assert (none == 1).all()
    first, second = finer_weights([LossShares(16 * error, error), LossShares(error, error)])
    assert (first > 1).all() and (second < 1).all()


def test_texts_are_many_long_of_mixed_kinds_and_none_is_fitted_on_and_judged_on() -> None:
    lists = corpus.evaluation_texts(), corpus.texts_at(corpus._TUNED), corpus.calibration_texts()
    for texts in lists:
        assert len(texts) >= 10
        assert len({text.kind for text in texts}) >= 6
        assert all(len(text.content) >= 7000 for text in texts)
    assert len({text.content[:2000] for texts in lists for text in texts}) == sum(map(len, lists))


def test_curve_is_judged_on_a_text_of_each_kind_that_is_used_for_nothing_else() -> None:
    found = corpus.held_out_texts()
    others = [*corpus.calibration_texts(), *corpus.texts_at(corpus._TUNED), *corpus.evaluation_texts()]
    kinds = {text.kind for text in found}
    assert len(kinds) == len(found) and kinds >= {"python", "c header", "c++ header", "json", "readme"}
    assert not any(text.content[:1000] in other.content for text in found for other in others)


def test_two_hundred_snippets_are_of_many_kinds_and_none_is_judged_on() -> None:
    found = corpus.snippets(200)
    judged = "".join(text.content for text in [*corpus.evaluation_texts(), *corpus.texts_at(corpus._TUNED)])
    assert len({text.content for text in found}) == 200 and found[:50] == corpus.snippets(50)
    assert len({text.kind for text in found}) >= 5
    assert not any(text.content[:2000] in judged for text in found)
    with pytest.raises(ValueError, match=r"no texts of kind klingon, expected some of .*chinese"):
        corpus.snippets(1, ["klingon"])


def message_file(originals: list[str], translations: list[str]) -> bytes:
    """GNU gettext's .mo: two tables of lengths and offsets, then all strings."""
    strings = [each.encode() for each in (*originals, *translations)]
    start = 28 + 8 * len(strings)
    offsets = [start + sum(len(each) + 1 for each in strings[:i]) for i in range(len(strings))]
    tables = b"".join(struct.pack("<II", len(each), at) for each, at in zip(strings, offsets, strict=True))
    head = struct.pack("<7I", 0x950412DE, 0, len(originals), 28, 28 + 4 * len(strings), 0, start)
    return head + tables + b"".join(each + b"\0" for each in strings)


def test_messages_are_the_translations_of_short_scripts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    originals, translations = ["", *["a message"] * 2000], ["Language: zh", *["\u6d88\u606f"] * 2000]
    (tmp_path / "zh.mo").write_bytes(message_file(originals, translations))
    monkeypatch.setattr("kvtide.engines.calibrate.texts._SNIPPETS", (("chinese", f"{tmp_path}/*.mo"),))
    (found,) = corpus.snippets(1, ["chinese"])
    assert set(found.content) == {"\u6d88", "\u606f", "\n"}


def test_damaged_files_of_the_system_are_no_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(bytes(range(256)) * 99)
    (tmp_path / "kvtide.1.gz").write_bytes(whole[:20] + bytes([whole[20] ^ 0xFF]) + whole[21:])
    monkeypatch.setattr("kvtide.engines.calibrate.texts._SNIPPETS", (("manual", f"{tmp_path}/*.gz"),))
    assert not corpus.snippets(1, ["manual"])


def test_unreadable_text_of_the_user_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "latin", tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match="can't read text"):
            corpus.read_texts([path])
    # A long one is cut between two characters.
    (tmp_path / "long").write_text("文" * (corpus.TEXT_BYTES_MAX + 1))
    assert len(corpus.read_texts([tmp_path / "long"])[0].content) == corpus.TEXT_BYTES_MAX


def test_no_piece_of_the_shipped_profiles_is_of_an_evaluation_text() -> None:
    folder = importlib.resources.files("kvtide_lab.profiles")
    fitted = list(csv.DictReader(folder.joinpath("texts.csv").read_text().splitlines()))
    assert len(fitted) > 300
    for text in corpus.evaluation_texts():
        # A piece lies around a file's first third.
        sizes = {int(row["characters"]) for row in fitted}
        starts = {size: max(0, len(text.content) // 3 - 3000) for size in sizes}
        pieces = {text.content[start : start + size] for size, start in starts.items()}
        digests = {hashlib.sha256(piece.encode()).hexdigest()[:16] for piece in pieces}
        assert not digests & {row["sha256"] for row in fitted}
