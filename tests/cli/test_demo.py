"""`kvtide demo` before it loads a model: what it refuses."""

from pathlib import Path

import pytest
from tests.cli.test_cli import refused
from typer.testing import CliRunner

from kvtide.cli.app import app


@pytest.mark.parametrize("words", ["--codec zip", "--store memory://"])
def test_bad_choices_are_refused_before_any_work(words: str, tmp_path: Path) -> None:
    store = [] if "--store" in words else ["--store", tmp_path / "new/store"]
    refused("demo", *words.split(), *store)
    assert not list(tmp_path.iterdir())


def test_short_prefix_is_refused() -> None:
    assert CliRunner().invoke(app, ["demo", "--prefix-tokens", "10"]).exit_code == 2
