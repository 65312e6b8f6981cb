"""Version, help and completion of every program."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvtide
import kvtide.cli.app
import kvtide_lab.cli.app

ROOT = Path(__file__).parents[2]
PROGRAMS = {"kvtide": kvtide.cli.app.app, "kvtide-lab": kvtide_lab.cli.app.app}


@pytest.mark.parametrize("name", PROGRAMS)
def test_version_is_printed(name: str) -> None:
    result = CliRunner().invoke(PROGRAMS[name], ["--version"])
    assert (result.output, result.exit_code) == (f"{name} {kvtide.__version__}\n", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_completion_is_offered(name: str) -> None:
    result = CliRunner().invoke(PROGRAMS[name], ["--help"])
    assert "--show-completion" in result.output
    assert str(PROGRAMS[name].info.help) in result.output


def test_both_distributions_have_the_packages_version() -> None:
    for file in ("pyproject.toml", "lab/pyproject.toml"):
        assert tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]["version"] == kvtide.__version__
