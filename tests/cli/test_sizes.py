"""`kvtide size`, and version, help and completion of every program."""

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvtide
import kvtide.cli.app
import kvtide_lab.cli.app
from kvtide.cli import size
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
    "content",
    ["", "[]", "{}", '{"num_hidden_layers": "x"}', json.dumps({**GQA, "dtype": "int4"}), '{"x": ' + "[" * 100_000]
    + [json.dumps({**GQA, name: -8}) for name in ("num_hidden_layers", "head_dim", "kv_lora_rank")],
)
def test_config_that_does_not_say_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["size", "--model", str(tmp_path)])
    assert isinstance(result.exception, ValueError) and "\n" not in str(result.exception)


def _prompts(count: int) -> list[dict[str, Any]]:
    """Sessions of ten blocks that take turns and come twice."""
    sessions = [{"timestamp": 0, "hash_ids": list(range(100 * each, 100 * each + 10))} for each in range(count)]
    return [{**row, "timestamp": at} for at, row in enumerate([*sessions, *sessions])]


def _sized(folder: Path, *arguments: str, **config: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**GQA, "dtype": "bfloat16", **config}))
    command = ["size", "--model", str(folder / "config.json"), "--trace", str(folder / "logs"), *arguments]
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, command)


def _write(folder: Path, rows: list[dict[str, Any]], name: str = "a.jsonl") -> None:
    (folder / "logs").mkdir(exist_ok=True)
    content = "\n".join(map(json.dumps, rows)).encode()
    (folder / "logs" / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def test_trace_hits_more_in_a_codec_that_takes_less(tmp_path: Path) -> None:
    _write(tmp_path, _prompts(8))
    said = json.loads(_sized(tmp_path, "--json").stdout)
    assert said["trace"] == {"block_tokens": 512, "prompts": 16, "blocks": 160, "different_blocks": 80}
    assert max(row["gb"] for row in said["hits"]) == pytest.approx(80 * 512 * 131072 / 1e9)
    rates = [row["hit_rates"] for row in said["hits"]]
    # Last used first hits nothing of a loop that is longer than the room, and all of one that fits.
    assert rates[-1] == {"raw": 0.5, "lossless": 0.5, "tide:5e-3": 0.5}
    assert rates[-2] == {"raw": 0.0, "lossless": 0.0, "tide:5e-3": 0.5}
    lines = _sized(tmp_path).stdout.splitlines()
    assert max(map(len, lines)) <= 80 and any("█ 0.500" in line for line in lines)


def test_cache_that_does_not_grow_with_the_prompt_needs_no_room_for_a_trace(tmp_path: Path) -> None:
    _write(tmp_path, _prompts(2))
    said = json.loads(_sized(tmp_path, "--json", layer_types=["sliding_attention"] * 32).stdout)
    assert (said["trace"], said["hits"]) == (None, [])


def test_folder_of_texts_is_read_in_order_of_time(tmp_path: Path) -> None:
    first, longer = "a" * 1024, "a" * 1024 + "b" * 600
    _write(tmp_path, [{"timestamp": 2, "input": longer, "output": "more"}], "a.jsonl.gz")
    _write(tmp_path, [{"timestamp": 1, "input": first}], "b.jsonl")
    (tmp_path / "logs" / "b.jsonl.md5").write_text("neither of both kinds")
    said = json.loads(_sized(tmp_path, "--json").stdout)
    assert said["trace"] == {"block_tokens": 128, "prompts": 2, "blocks": 5, "different_blocks": 3}
    assert said["hits"][-1]["hit_rates"]["raw"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no full block"),
        (b'{"hash_ids": [1, 2', "line 1 is no request (cut off"),
        (b'{"hash_ids": [1]}\n{"hash_ids": [' + b"9" * 5000 + b"]}", "line 2 is no request"),
        (b'{"hash_ids": "abc"}', "line 1 is no request"),
        (b'{"timestamp": 1}', "must have hash_ids, or a text"),
        (b'{"hash_ids": [1], "input": "x"}', "must have hash_ids, or a text"),
        (b'{"hash_ids": [1]}\n{"input": "' + b"x" * 600 + b'"}', "has [128, 512]"),
        (b"[" * 100_000, "line 1 is no request"),
        (b'{"x": ' + b"[" * 100_000, "line 1 is no request"),
        (b'{"input": "' + b"x" * 4096 + b'"}', "line 1 is no request (cut off, or too long?)"),
        (b'{"hash_ids": [1, 2, 3, 4, 5]}\n' * 2, "line 2 is beyond 9 blocks"),
        (b'{"hash_ids": []}\n' * 5, "has no full block"),
    ],
)
def test_trace_that_is_none_or_too_large_is_refused_with_its_line(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "BLOCKS_MAX", 9)
    monkeypatch.setattr(size, "LINE_BYTES_MAX", 4096 if b"input" in content else size.LINE_BYTES_MAX)
    _write(tmp_path, [])
    (tmp_path / "logs" / "a.jsonl").write_bytes(content)
    error = _sized(tmp_path).exception
    assert isinstance(error, ValueError) and reason in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("cut", [slice(None, -9), slice(3, None), slice(20, None)])
def test_damaged_gzip_is_refused(cut: slice, tmp_path: Path) -> None:
    _write(tmp_path, _prompts(8), "a.jsonl.gz")
    path = tmp_path / "logs" / "a.jsonl.gz"
    path.write_bytes(path.read_bytes()[cut])
    assert "can't read" in str(_sized(tmp_path).exception)


ROOT = Path(__file__).parents[2]
PROGRAMS = {"kvtide": kvtide.cli.app.app, "kvtide-lab": kvtide_lab.cli.app.app}


@pytest.mark.parametrize("name", PROGRAMS)
def test_version_is_printed_and_completion_offered(name: str) -> None:
    version, said = (CliRunner().invoke(PROGRAMS[name], [word]) for word in ("--version", "--help"))
    assert (version.output, version.exit_code) == (f"{name} {kvtide.__version__}\n", 0)
    assert "--show-completion" in said.output and str(PROGRAMS[name].info.help) in said.output


def test_both_distributions_have_the_packages_version() -> None:
    for file in ("pyproject.toml", "lab/pyproject.toml"):
        assert tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]["version"] == kvtide.__version__
