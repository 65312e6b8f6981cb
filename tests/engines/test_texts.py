from __future__ import annotations

import csv
import hashlib
import importlib.resources
import struct
from pathlib import Path

import pytest

from kvtide.engines.calibrate.texts import (
    calibration_texts,
    evaluation_texts,
    held_out_texts,
    read_texts,
    snippets,
    tuned_texts,
)


def test_texts_are_many_long_and_of_mixed_kinds() -> None:
    for texts in (evaluation_texts(), tuned_texts(), calibration_texts()):
        assert len(texts) >= 10
        assert len({text.kind for text in texts}) >= 6
        assert all(len(text.content) >= 7000 for text in texts)


def test_no_text_is_fitted_on_and_judged_on() -> None:
    every = [*evaluation_texts(), *tuned_texts(), *calibration_texts()]
    assert len({text.content[:2000] for text in every}) == len(every)


def test_curve_is_judged_on_five_kinds_of_texts_that_are_used_for_nothing_else() -> None:
    found, others = held_out_texts(), [*calibration_texts(), *tuned_texts(), *evaluation_texts()]
    assert len({text.kind for text in found}) == len(found) == 5
    assert not any(text.content[:1000] in other.content for text in found for other in others)


def test_two_hundred_snippets_are_of_many_kinds_and_none_is_judged_on() -> None:
    found, judged = snippets(200), "".join(text.content for text in [*evaluation_texts(), *tuned_texts()])
    assert len({text.content for text in found}) == 200 and found[:50] == snippets(50)
    assert len({text.kind for text in found}) >= 5
    assert not any(text.content[:2000] in judged for text in found)


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
    (found,) = snippets(1, ["chinese"])
    assert set(found.content) == {"\u6d88", "\u606f", "\n"}


def test_snippets_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no texts of kind klingon, expected some of .*chinese"):
        snippets(1, ["klingon"])


def test_unreadable_text_of_the_user_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "latin", tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match="can't read text"):
            read_texts([path])


def test_no_piece_of_the_shipped_profiles_is_of_an_evaluation_text() -> None:
    folder = importlib.resources.files("kvtide_lab.profiles")
    fitted = list(csv.DictReader(folder.joinpath("texts.csv").read_text().splitlines()))
    assert len(fitted) > 300
    for text in evaluation_texts():
        # A piece lies around a file's first third.
        sizes = {int(row["characters"]) for row in fitted}
        starts = {size: max(0, len(text.content) // 3 - 3000) for size in sizes}
        pieces = {text.content[start : start + size] for size, start in starts.items()}
        digests = {hashlib.sha256(piece.encode()).hexdigest()[:16] for piece in pieces}
        assert not digests & {row["sha256"] for row in fitted}
