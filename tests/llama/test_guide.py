"""The guide for one's own machine, tried as a newcomer does: every command and example of it, with a tiny model."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import newcomer
from wheel import ROOT

GUIDE = ROOT / "docs" / "llamacpp.md"
# What the guide leaves to the reader.
PRELUDE = 'messages = [{"role": "user", "content": "What is a tide? " * 20}]\n'


@pytest.mark.real_time
def test_guide_works_as_shown(models: Any, tmp_path: Path) -> None:
    blocks = [each for each in newcomer.blocks_of(GUIDE.read_text()) if each.language in {"sh", "python"}]
    with newcomer.Page(tmp_path, PRELUDE) as page:
        shutil.copy(models(), tmp_path / "work" / "MODEL.gguf")
        found = [(block.line, problem) for block in blocks for problem in page.run(block)]
    # Other programs' output is as wide as it is: curl's, and llama.cpp's.
    found = [each for each in found if "a table of" not in each[1]]
    assert (found, [each.language for each in blocks]) == ([], ["sh", "sh", "python"])
    assert list((tmp_path / "var" / "cache" / "kvtide").iterdir())
