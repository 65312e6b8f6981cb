from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from kvtide_lab.bench import siege
from kvtide_lab.cli.bench import app


def test_attack_is_measured_beside_the_servers_quiet() -> None:
    result = siege.run(True, ["pipelined-401"])
    row = json.loads(msgspec.json.encode(result))["rows"][0]
    assert row["attack"] == "pipelined-401" and row["errors"] == 0
    assert 0 < row["p50_ms"] <= row["p99_ms"] and row["quiet_p99_ms"] > 0 and row["reads"] > 1
    assert 0 < row["rss_over_bound"] <= 1.0 and row["drain_s"] > 0


@pytest.mark.parametrize(
    ("took_ms", "errors", "rss", "drain_s", "holds"),
    [
        (249.0, 0, 1.0, 2.9, True),
        (251.0, 0, 1.0, 2.9, False),
        (9.0, 1, 0.5, 1.0, False),
        (9.0, 0, 1.1, 1.0, False),
        (9.0, 0, 0.5, 9.0, False),
    ],
)
def test_row_can_come_out_against_us(took_ms: float, errors: int, rss: float, drain_s: float, holds: bool) -> None:
    quiet, found = siege._Reads([1.0, 2.0], 0), siege._Reads([took_ms] * 10, errors)
    assert siege._row("any", quiet, found, rss, drain_s).holds is holds


def test_attack_that_there_is_not_is_refused() -> None:
    assert "no attack is called" in str(CliRunner().invoke(app, ["siege", "--attack", "sleep"]).exception)
