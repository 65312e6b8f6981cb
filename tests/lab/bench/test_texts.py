from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.engines.calibrate.texts import calibration_texts, evaluation_texts, read_texts, snippets


def test_texts_are_many_long_and_of_mixed_kinds() -> None:
    for texts in (evaluation_texts(), calibration_texts()):
        assert len(texts) >= 10
        assert len({text.kind for text in texts}) >= 6
        assert all(len(text.content) >= 7000 for text in texts)


def test_no_text_is_fitted_on_and_judged_on() -> None:
    fitted = {text.content[:2000] for text in calibration_texts()}
    assert not fitted & {text.content[:2000] for text in evaluation_texts()}


def test_two_hundred_snippets_are_of_many_kinds_and_none_is_judged_on() -> None:
    found, judged = snippets(200), "".join(text.content for text in evaluation_texts())
    assert len({text.content for text in found}) == 200
    assert len({text.kind for text in found}) >= 5
    assert not any(text.content[:2000] in judged for text in found)


def test_unreadable_text_of_the_user_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "latin", tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match="can't read text"):
            read_texts([path])
