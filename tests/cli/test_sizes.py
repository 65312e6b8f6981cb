"""`kvtide size`, and version, help and completion of every program."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvtide
import kvtide.cli.app
import kvtide_lab.cli.app
from kvtide.cli.app import app

GQA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
KINDS = ["sliding_attention"] * 30 + ["full_attention"] * 6


@pytest.mark.parametrize(
    ("config", "elements", "others"),
    [
        (GQA | {"dtype": "bfloat16"}, 32 * 2 * 8 * 128, 0),
        (GQA | {"head_dim": 256, "torch_dtype": "bfloat16"}, 32 * 2 * 8 * 256, 0),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 768, 0),
        ({"text_config": GQA, "vision_config": {"num_hidden_layers": 3}}, 32 * 2 * 8 * 128, 0),
        ({**GQA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576, 0),
        ({**GQA, "num_hidden_layers": 36, "layer_types": KINDS}, 6 * 2 * 8 * 128, 30),
    ],
)
def test_size_is_what_the_models_cache_takes(
    config: dict[str, Any], elements: int, others: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = json.loads(CliRunner().invoke(app, ["size", "--model", str(tmp_path), "--disk-gb", "50", "--json"]).stdout)
    assert (said["shape"]["elements_a_token"], said["shape"]["other_layers"]) == (elements, others)
    rows = {row["codec"]: row for row in said["rows"]}
    assert rows["raw"]["gb_per_1000_tokens"] == pytest.approx(1000 * elements * 2 / 1e9)
    assert rows["raw"]["disk_tokens"] == int(50e9 / (elements * 2))
    sizes = [row["gb_per_1000_tokens"] for row in said["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["size", "--model", str(tmp_path)]).stdout.splitlines()
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"num_hidden_layers": "x"}', json.dumps({**GQA, "dtype": "int4"})]
)
def test_config_that_does_not_say_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["size", "--model", str(tmp_path)])
    assert isinstance(result.exception, ValueError) and "\n" not in str(result.exception)


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
