"""The real model as a user runs it: the demo, calibration, and judging texts and a profile of one's own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvtide.cli.app import app, run
from kvtide.engines.calibrate.texts import calibration_texts, evaluation_texts
from kvtide_lab.cli import app as lab

# The first one converts the model.
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]


def said(program: typer.Typer, *words: Any) -> Any:
    """Run a command in this process, where torch is loaded already, and return its JSON."""
    result = CliRunner().invoke(program, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_chat_of_the_demo_restores_every_full_block_across_a_restart(tmp_path: Path) -> None:
    # The speed is judged by the demo itself, not here.
    result = said(app, "demo", "--answer-tokens", 4, "--store", tmp_path / "store", "--prefix-tokens", 300)
    requests = result["requests"]
    assert len(requests) == 10 and result["restart_before"] == 6
    tokens = [each["prompt_tokens"] for each in requests]
    # Restored is what was said before this request, in blocks of 256.
    for each, known in zip(requests, [0, *tokens], strict=False):
        assert (known - 1) // 256 * 256 <= each["hit_tokens"] <= (each["prompt_tokens"] - 1) // 256 * 256
    assert [each["is_answer_same"] for each in requests if each["is_measured"]] == [True, True, True]
    assert sum(each["plain_ttft_s"] for each in requests) == pytest.approx(result["plain_wait_s"])
    assert result["plain_wait_s"] / result["wait_s"] == pytest.approx(result["speedup"])
    assert result["was_warm"] is False
    assert 0 < result["read_bytes"] < result["raw_bytes"]


def test_own_profile_judges_own_text(tmp_path: Path) -> None:
    fit, judge, profile = (tmp_path / name for name in ("fit", "judge", "own.kvprofile"))
    fit.write_text(calibration_texts()[1].content)
    judge.write_text(evaluation_texts()[0].content)
    fitted = said(app, "calibrate", "--codec", "chunkwise", "--text", fit, "--tokens", 512, "-o", profile)
    assert fitted["tokens"] == 512
    codecs = ("--codec", "raw", "--codec", "lossless", "--codec", "chunkwise")
    options = ("--quick", "--profile", profile, "--text", judge)
    rows = said(lab.app, "bench", "codec-quality", *codecs, *options)["rows"]
    judged = {(row["codec"], row["profile"]) for row in rows}
    assert judged == {("raw", "none"), ("lossless", "none"), ("chunkwise", "payload"), ("chunkwise", "shared")}
    by_name = {row["codec"]: row for row in rows if row["level"] == 0}
    assert by_name["raw"]["kl"] == by_name["lossless"]["kl"] == 0.0
    assert by_name["raw"]["greedy_match"] == 8
    assert 32 < by_name["raw"]["bits_per_element"] < 32.1
    fine = {
        row["profile"]: row for row in rows if (row["codec"], row["level"], row["coder"]) == ("chunkwise", 1, "rans")
    }
    assert 3 < fine["shared"]["bits_per_element"] < fine["payload"]["bits_per_element"] < 8
    assert 0 < fine["shared"]["kl"] < 0.05


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
