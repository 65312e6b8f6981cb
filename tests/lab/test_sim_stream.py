from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide_lab.cli.sim import app

FAST = ["--context", "9600", "--slo", "1", "--trials", "4"]


def test_rows_have_what_they_promise(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("0,100\n1,5000\n2,1\n", encoding="utf-8")
    (tmp_path / "a.down").write_text("1\n1\n3\n7\n", encoding="utf-8")
    arguments = ["stream", "--link", "ar1", "--link", str(tmp_path), "--policy", "all", "--json", *FAST]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    keys = ["link", "context_tokens", "slo_s", "policy", "miss_rate", "kl_mean", "ttft_p50_s", "ttft_p95_s"]
    assert all({*keys, "text_share"} <= set(row) for row in report["rows"])
    assert list(dict.fromkeys(row["link"] for row in report["rows"])) == ["ar1", "a.down", "b.csv"]
    assert {"cachegen", "two-ended", "oracle"} <= {row["policy"] for row in report["rows"]}
    assert report["setup"]["context_tokens"] == [9600]


def test_table_is_for_people() -> None:
    result = CliRunner().invoke(app, ["stream", "--link", "constant", "--policy", "two-ended", *FAST])
    assert result.exit_code == 0 and "two-ended" in result.stdout


def test_traces_keep_their_own_mean_if_asked(tmp_path: Path) -> None:
    # 1 Mbit/s: nobody loads 9,600 tokens in a second.
    (tmp_path / "slow.csv").write_text("0 1\n9 1\n", encoding="utf-8")
    arguments = ["stream", "--link", str(tmp_path / "slow.csv"), "--mean-gbit", "0", "--policy", "layered", "--json"]
    rows = json.loads(CliRunner().invoke(app, [*arguments, *FAST]).stdout)["rows"]
    assert rows[0]["miss_rate"] == 1
    assert rows[0]["ttft_p50_s"] > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "nowhere"], "unknown link 'nowhere'"),
        (["--link", "EMPTY"], "no traces in"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--mean-gbit", "-1"], "--mean-gbit must not be negative"),
        (["--trials", "-1"], "must be given and positive"),
        (["--context", "0"], "must be given and positive"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    given = [str(tmp_path) if argument == "EMPTY" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["stream", *given])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
