"""`kvtide`: what it says of odd objects and of mistakes, before a demo and before it serves."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.doors.user import kvtide
from tests.store.test_cache import fill, metas_of
from tests.stores import stored_records
from tests.suites.tier_suite import object_bytes, object_id
from typer.testing import CliRunner

from kvtide.block import BlockLayout
from kvtide.cli.app import app
from kvtide.cli.demo import DemoRequest, shown
from kvtide.clock import SystemClock
from kvtide.importance import UseRecord, record_id
from kvtide.plan import JudgeRecord
from kvtide.server.settings import read_settings
from kvtide.store.notes import USES_CODEC, write_judge, write_note
from kvtide.tier.disk import DiskTier
from kvtide.tier.http.tier import http_tier


def refused(*words: Any) -> str:
    """Return a command's complaint, one line; nothing else is printed."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, ValueError), result.output
    assert result.stdout == "" and "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture
def store(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> Path:
    fill(open_cache(tmp_path / "store"), metas_of(layout, 3))
    return tmp_path / "store"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(60))))
    return tmp_path / "tokens.json"


def tier_at(store: Path) -> DiskTier:
    tier = DiskTier(store, 1 << 30, SystemClock(), lambda key: False)
    tier.open()
    return tier


def test_ls_shows_good_and_broken_objects(store: Path) -> None:
    stored_records(store)[0].write_body(b"garbage")
    rows = kvtide("ls", "--store", store)["rows"]
    assert sorted(bool(row["problem"]) for row in rows) == [False, False, True]
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["ls", "--store", str(store)]).stdout
    assert sorted(re.findall(r"\[\d+, \d+\)", shown)) == sorted(
        f"[{row['start']}, {row['start'] + row['tokens']})" for row in rows if not row["problem"]
    )


def test_a_record_of_uses_is_listed_as_one(store: Path, layout: BlockLayout) -> None:
    """Issue 11: it lies beside its block, and is neither an object nor a problem."""
    block = metas_of(layout, 1)[0].id
    importance = np.ones((layout.layers, layout.tokens), dtype=np.float32)
    record = UseRecord(block.key, layout.layers, layout.tokens).noted(b"writer-1", importance, 1e9)
    tier = tier_at(store)
    assert write_note(tier, record_id(block), USES_CODEC, record.to_bytes())
    tier.close()
    for verify in ([], ["--verify"]):
        rows = kvtide("ls", *verify, "--store", store)["rows"]
        assert [row["problem"] for row in rows] == [""] * 4
        found = next(row for row in rows if row["codec"] == USES_CODEC)
        assert (found["model"], found["tokens"]) == ("uses of a block", 0)
    assert kvtide("stats", "--store", store)["problems"] == 0


def test_what_a_judge_knows_is_no_block(store: Path) -> None:
    tier = tier_at(store)
    assert write_judge(tier, JudgeRecord(bytes_per_s=1e9))
    tier.close()
    rows = kvtide("stats", "--store", store)["rows"]
    found = sorted((row["codec"][:8], row["objects"], row["tokens"]) for row in rows)
    assert found == [("judge-1", 1, 0), ("lossless", 3, 48)]


def test_explain_names_the_reason(store: Path, layout: BlockLayout, tokens: Path) -> None:
    kvtide("rm", metas_of(layout, 2)[1].id.key.hex(), "--store", store)
    result = kvtide("explain", "--tokens", tokens, "--block-tokens", 16, "--store", store)
    assert (result["hit_tokens"], result["prompt_tokens"], result["full_blocks"]) == (16, 60, 3)
    assert "removed" in result["reason"]


@pytest.mark.parametrize("words", [[], ["xyzq"], ["ab"], ["abcd", "--all"]])
def test_rm_without_a_clear_choice_removes_nothing(words: list[str], store: Path) -> None:
    refused("rm", *words, "--store", store)
    assert len(stored_records(store)) == 3


@pytest.mark.parametrize("content", ["", "{}", "[1, 'a']", '["a"]', "\xff"])
def test_explain_refuses_a_bad_token_file(content: str, store: Path, tokens: Path) -> None:
    tokens.write_text(content, encoding="latin-1")
    refused("explain", "--tokens", tokens, "--store", store)


def test_doctor_names_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "not a directory" in result.stdout


def test_chart_says_which_waits_were_not_measured() -> None:
    measured = [DemoRequest("", "", 10 * n, 0, 0.5, float(n), n in (1, 10), None) for n in range(1, 11)]
    console = Console(width=80, record=True, file=io.StringIO())
    for each in shown(measured, "SmolLM2-135M", 1536):
        console.print(each)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.count("~") for line in lines[4:]] == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert lines[-1].count("█") + lines[-1].count("░") == 27


ROOT = Path(__file__).parents[2]


def test_example_configuration_is_valid() -> None:
    settings = read_settings(ROOT / "deploy/kvtide.toml", {})
    assert [grant.tenant for grant in settings.grants] == ["search", "operators"]
    assert settings.sending.weights == {"search": 2.0}


def test_unix_socket_serves_and_is_taken_over_from_a_killed_server(tmp_path: Path) -> None:
    path = tmp_path / "kvtide.sock"
    for _ in range(2):
        command = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", f"unix:{path}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and str(path) in process.stdout.readline()
            tier = http_tier(f"http+unix://{path}", SystemClock())
            tier.open()
            assert tier.put_from(object_id(1), object_bytes(1)) and tier.contains(object_id(1))
            tier.close()
            process.kill()
