from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtide_lab.bench import insights
from kvtide_lab.cli.app import app


@pytest.mark.real_model
def test_insights_of_the_demo_model_on_a_short_text(tmp_path: Path) -> None:
    arguments = ["insights", "--tokens", "256", "--plot", str(tmp_path / "a.png"), "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).stdout)
    keys, values = found["delta_variance"]["keys"], found["delta_variance"]["values"]
    # Independent tokens would give 2; near ones are more alike than far ones.
    assert keys[0] < values[0] < values[-1] and keys[0] < 1.5 < keys[-1]
    assert [each[0] for each in found["layer_kl"]] == [0, 7, 15, 22] and found["layer_kl"][-1][1] == 30
    assert all(1e-5 < kl < 1 for *_, kl in found["layer_kl"])
    bits = found["entropy_bits"]
    assert bits["layer and channel"] < min(bits["channel"], bits["layer"]) < bits["all"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_entropy_is_that_of_each_distribution_by_itself() -> None:
    symbols = np.repeat(np.arange(4), 4096).reshape(4, 1, 1, 64, 64)
    assert insights._entropy_bits(symbols, (0,)) == pytest.approx(0.0)
    assert insights._entropy_bits(symbols, ()) == pytest.approx(2.0, abs=1e-3)


def test_text_that_is_too_short_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="not 64 more among 128 ids"):
        insights.run(tiny_model, "tiny", range(128), 128)
