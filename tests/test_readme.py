"""What README shows can be typed: its example runs, its commands exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

import kvtide.cli.app
import kvtide_lab.cli.app
import wheel

README = (wheel.ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
BLOCKS = "\n".join(content for language, content in FENCED if language in {"sh", "text"})
APPS = {"kvtide": kvtide.cli.app.app, "kvtide-lab": kvtide_lab.cli.app.app}


def test_example_finds_in_its_second_run_what_the_first_stored(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    input_ids = torch.randint(1, 256, (1, 600), generator=torch.Generator().manual_seed(1))
    for said in ("0 tokens came", "512 tokens came"):
        exec(wheel.readme_example(tmp_path), {"model": tiny_model, "input_ids": input_ids})
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("target", re.findall(r"^make (\S+)", BLOCKS, re.MULTILINE))
def test_make_knows_the_target(target: str) -> None:
    subprocess.run(["make", "--dry-run", target], cwd=wheel.ROOT, check=True, capture_output=True)


def commands() -> list[tuple[str, ...]]:
    """Every command that a line begins with, `a | b` as two."""
    found = []
    for program, rest in re.findall(r"^(kvtide(?:-lab)?) (.*?)(?:  |$)", BLOCKS, re.MULTILINE):
        first, *others = rest.split(" | ")
        words = [word for word in first.split() if word.islower() and re.fullmatch(r"[a-z-]+", word)]
        head = words[: 2 if words[0] in {"bench", "sim"} else 1]
        found += [(program, *head), *((program, *head[:-1], other.split()[0]) for other in others)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_command_exists(command: tuple[str, ...]) -> None:
    group: Any = typer.main.get_command(APPS[command[0]])
    for word in command[1:]:
        assert word in group.commands, f"README shows {' '.join(command)}"
        group = group.commands[word]
