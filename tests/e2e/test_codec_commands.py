"""Calibration and judging on the real model, as a user runs them on texts and a profile of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.app import app, run
from kvtide.engines.calibrate.texts import calibration_texts, evaluation_texts
from kvtide_lab.cli import app as lab

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]


def kvtide(*arguments: Any) -> subprocess.CompletedProcess[str]:
    module = "kvtide_lab.cli" if arguments[0] == "bench" else "kvtide.cli"
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)


def test_own_profile_judges_own_text(tmp_path: Path) -> None:
    (tmp_path / "fit").write_text(calibration_texts()[1].content)
    (tmp_path / "judge").write_text(evaluation_texts()[0].content)
    profile, plot = tmp_path / "own.kvprofile", tmp_path / "plot.png"
    fitted = kvtide(
        "calibrate", "--codec", "chunkwise", "--text", tmp_path / "fit", "--tokens", 512, "-o", profile, "--json"
    )
    assert fitted.returncode == 0, fitted.stderr
    assert json.loads(fitted.stdout)["tokens"] == 512
    options = ("--quick", "--profile", profile, "--text", tmp_path / "judge", "--plot", plot, "--json")
    judged = kvtide("bench", "codec-quality", *options)
    assert judged.returncode == 0, judged.stderr
    rows = json.loads(judged.stdout)["rows"]
    assert {(row["codec"], row["profile"]) for row in rows} == {
        ("raw", "none"),
        ("cachegen-snippet", "payload"),
        ("lossless", "none"),
        ("cachegen", "payload"),
        ("chunkwise", "payload"),
        ("chunkwise", "shared"),
    }
    by_name = {row["codec"]: row for row in rows if row["level"] == 0}
    assert by_name["raw"]["kl"] == by_name["lossless"]["kl"] == 0.0
    assert by_name["raw"]["greedy_match"] == 8
    assert 32 < by_name["raw"]["bits_per_element"] < 32.1
    fine = {
        row["profile"]: row for row in rows if (row["codec"], row["level"], row["coder"]) == ("chunkwise", 1, "rans")
    }
    assert 3 < fine["shared"]["bits_per_element"] < fine["payload"]["bits_per_element"] < 8
    assert 0 < fine["shared"]["kl"] < 0.05
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bad_choices_end_in_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short").write_text("too short")
    (tmp_path / "junk").write_bytes(b"not a profile")
    for arguments in (
        ("bench", "codec-quality", "--quick", "--text", tmp_path / "absent"),
        ("bench", "codec-quality", "--quick", "--profile", tmp_path / "junk"),
        ("bench", "offload", "--table", "answers", "--model", "Llama-3.1-8B-bf16"),
        ("calibrate", "--codec", "zip", "-o", tmp_path / "out"),
        ("calibrate", "--text", tmp_path / "short", "-o", tmp_path / "out"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["kvtide", *map(str, arguments)])
            run(lab.app if arguments[0] == "bench" else app)
        assert ended.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("kvtide: ")
        assert not (tmp_path / "out").exists()
