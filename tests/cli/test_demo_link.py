"""`kvtide demo` before it loads a model: what it refuses, and the server of a demo over a link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_cli import refused
from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.cli.demo import rate_bits_s


@pytest.mark.parametrize("words", ["--codec zip", "--store memory://", "--link fast", "--link 20mbit --codec zip"])
def test_bad_choices_are_refused_before_any_work(words: str, tmp_path: Path) -> None:
    store = [] if "--store" in words else ["--store", tmp_path / "new/store"]
    refused("demo", *words.split(), *store)
    assert not list(tmp_path.iterdir())


def test_short_prefix_is_refused() -> None:
    assert CliRunner().invoke(app, ["demo", "--prefix-tokens", "10"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "rate"), [("5mbit", 5e6), ("200mbit", 2e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("1mbit", 1e6)]
)
def test_rate_is_bits_a_second(text: str, rate: float) -> None:
    assert rate_bits_s(text) == rate


@pytest.mark.parametrize(
    "text", ["", "20", "20mb", "-5mbit", "0mbit", "0.5mbit", "101gbit", "nanmbit", "1e9", "5 mbit"]
)
def test_other_rates_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="as 20mbit or 1gbit, got"):
        rate_bits_s(text)


# Whoever starts the tests in the background may have them ignore an interrupt, which children inherit.
STOPPED = """
import signal
import sys
from pathlib import Path
from kvtide.cli.demo import limited_server
signal.signal(signal.SIGINT, signal.default_int_handler)
with limited_server(Path(sys.argv[1]), 2e7) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_ends_with_a_demo_that_is_told_to(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True) as demo:
        assert demo.stdout is not None and demo.stdout.readline().startswith("http://127.0.0.1:")
        [server] = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        demo.send_signal(number)
        assert demo.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(server), 0)
