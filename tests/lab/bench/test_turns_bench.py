from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.engines.calibrate.texts import Text
from kvtide.store.cache import Cache
from kvtide_lab.bench import turns
from kvtide_lab.bench.turns import ChatSize, ChatSubject, TurnsBench, TurnsSize, partial_of, run, subject_of, trend_of
from kvtide_lab.subjects import LoadedModel

SIZE = TurnsSize(2, ChatSize(turns=4, user_tokens=20, answer_tokens=4, block_tokens=8), ("lossless", "cachegen:4"))


@pytest.fixture
def subject(tiny_model: Any) -> ChatSubject:
    rng = np.random.default_rng(1)
    ids = [rng.integers(4, 256, size=SIZE.chat.tokens_needed).tolist() for _ in range(2)]
    return ChatSubject(tiny_model, "tiny", SIZE, ids, ["noise", "noise"])


def talked(subject: ChatSubject, path: Path | None = None) -> TurnsBench:
    return run(subject, [], partial_of(subject, [], path), lambda *_: None)


def test_exact_codec_is_exactly_exact_and_a_coarse_one_is_felt_from_the_second_turn_on(subject: ChatSubject) -> None:
    result = talked(subject)
    exact, coarse = ([row for row in result.rows if row.codec == codec] for codec in SIZE.codecs)
    assert result.exact_kl_max == 0.0
    assert {(row.kl, row.top1) for row in exact} == {(0.0, 1.0)}
    # Of 24, 48 and 72 tokens the last is not run, so that the last block is never whole.
    assert [row.hit_tokens for row in exact] == [row.hit_tokens for row in coarse] == [0, 16, 40, 64]
    assert [row.kl > 1e-9 for row in coarse] == [False, True, True, True]


def test_what_was_found_is_not_asked_again(
    subject: ChatSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = talked(subject, tmp_path / "partial")
    monkeypatch.setattr(turns, "_talked", None)
    assert talked(subject, tmp_path / "partial").rows == whole.rows


def test_turn_whose_past_does_not_come_back_is_an_error_not_a_good_figure(
    subject: ChatSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "store", lambda cache, blocks: 0)
    with pytest.raises(RuntimeError, match="restored 0 of 16 tokens"):
        talked(subject)


def test_growth_on_most_texts_is_a_trend_and_noise_or_few_texts_are_none() -> None:
    rng = np.random.default_rng(3)
    noise = rng.normal(0.005, 0.001, size=(12, 9))
    growing = noise + 0.001 * np.arange(9)
    assert trend_of(growing.tolist()).has_trend
    assert trend_of(growing.tolist()).slope == pytest.approx(0.001, abs=2e-4)
    assert not trend_of(noise.tolist()).has_trend
    assert not trend_of((noise - 0.001 * np.arange(9)).tolist()).has_trend
    few, none = trend_of(growing[:4].tolist()), trend_of([[0.0] * 9] * 5)
    assert (few.p, few.has_trend) == (1 / 16, False)
    assert (none.p, none.has_trend) == (1.0, False)


def test_short_texts_are_left_out_and_no_text_is_an_error(tiny_model: Any) -> None:
    texts = [Text("short", "prose", "abc"), Text("long", "prose", "abc" * 99)]
    of = LoadedModel(Path("tiny"), tiny_model, lambda text: [ord(letter) for letter in text])
    found = subject_of(of, texts, SIZE)
    assert [len(ids) for ids in found.ids] == [96]
    with pytest.raises(ValueError, match="no text has the 96 tokens"):
        subject_of(of, texts[:1], SIZE)
