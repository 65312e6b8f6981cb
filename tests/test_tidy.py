"""The house rules, and that the tool which checks them can fail."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tidy

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["src/kvtide", "lab/kvtide_lab", "gpu/kvtide_gpu"])
def test_source_keeps_the_house_rules(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = tidy.main(str(ROOT / package))
    assert (capsys.readouterr().out, status) == ("", 0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("keys.py", "from kvtide.tier import Tier", "imports tier"),
        ("explain.py", "import kvtide_lab.sim", "kvtide_lab may be imported only"),
        ("explain.py", "import kvtide_gpu", "kvtide_gpu may be imported only"),
        ("explain.py", "import torch", "torch may be imported only"),
        ("codec/x.py", "import time", "is pure"),
        ("tier/x.py", "import pickle", "pickle may be imported only"),
        ("explain.py", "try:\n    pass\nexcept Exception:\n    pass", "swallows"),
        ("explain.py", "print(1)", "print()"),
        ("explain.py", "eval('1')", "eval"),
        ("explain.py", "import os\nos.environ['A']", "environment"),
        ("explain.py", "# TODO later", "issue number"),
        ("explain.py", "\n" * 701, "longer than 700"),
        ("explain.py", "def f():\n" + "    x = 1\n" * 60, "longer than 60"),
        ("novel.py", "x = 1", "no import rank"),
        ("explain.py", 'class Seen:\n    """What was seen."""', "begins with a relative clause"),
        ("explain.py", 'class Seen:\n    """Blocks seen anew."""', "'anew' is a private word; write again"),
        ("explain.py", "x = 1  # Written aside.", "'aside' is a private word"),
    ],
)
def test_broken_rule_is_found(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvtide" / name
    path.parent.mkdir(parents=True)
    path.write_text(f'"""Docstring."""\n{text}\n')
    assert tidy.main(str(tmp_path / "kvtide")) == 1
    assert message in capsys.readouterr().out


def test_tools_keep_to_the_words() -> None:
    for path in ROOT.joinpath("tools").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [*tidy.word_problems(text, ast.parse(text))], path


def test_class_of_a_name_that_is_taken_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("keys", "block"):
        (tmp_path / "kvtide").mkdir(exist_ok=True)
        (tmp_path / "kvtide" / f"{name}.py").write_text('"""Docstring."""\n\n\nclass Same:\n    """One."""\n')
    tidy.main(str(tmp_path / "kvtide"))
    assert "class Same is in block.py already" in capsys.readouterr().out


def test_import_past_a_door_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvtide" / "tier" / "disk").mkdir(parents=True)
    (tmp_path / "kvtide" / "tier" / "disk" / "log.py").write_text('"""Docstring."""\n')
    (tmp_path / "kvtide" / "explain.py").write_text('"""Docstring."""\n\nfrom kvtide.tier.disk.log import SegmentLog\n')
    tidy.main(str(tmp_path / "kvtide"))
    assert "tier.disk.log is inside tier.disk/" in capsys.readouterr().out


def test_method_that_nobody_documents_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvtide").mkdir()
    source = '"""Docstring."""\n\n\nclass {}:\n    """One."""\n\n    def victim(self) -> None:\n        pass\n'
    (tmp_path / "kvtide" / "keys.py").write_text(source.format("Silent"))
    (tmp_path / "kvtide" / "block.py").write_text(source.format("Policy(EvictionPolicy)"))
    tidy.main(str(tmp_path / "kvtide"))
    assert capsys.readouterr().out.count("has no docstring") == 1


def test_circle_of_files_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvtide").mkdir()
    for here, there in (("keys", "block"), ("block", "types"), ("types", "keys")):
        lazily = f'"""Docstring."""\n\n\ndef late():\n    from kvtide.{there} import X\n\n    return X\n'
        (tmp_path / "kvtide" / f"{here}.py").write_text(lazily)
    tidy.main(str(tmp_path / "kvtide"))
    assert capsys.readouterr().out.count("imports itself by way of others") == 3
