from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.store.test_cache import fill, metas_of
from tests.stores import stored_records

from kvtide.block import BlockLayout
from kvtide.clock import SystemClock
from kvtide.importance import UseRecord, record_id
from kvtide.outcomes import Choice, Decided, Why
from kvtide.plan import JudgeRecord
from kvtide.store.cache import Cache
from kvtide.store.notes import USES_CODEC, write_judge, write_note
from kvtide.tier.disk import DiskTier


def kvtide(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtide.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def kvtide_json(*arguments: Any) -> Any:
    run = kvtide(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert set(result) >= {"machine", "cpu", "commit", "command"}
    return result


@pytest.fixture
def store(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> Path:
    cache: Cache = open_cache(tmp_path / "store")
    fill(cache, metas_of(layout, 3))
    return tmp_path / "store"


def test_stats_counts_by_namespace(store: Path) -> None:
    result = kvtide_json("stats", "--store", store)
    assert result["objects"] == 3
    assert [(row["objects"], row["tokens"], row["codec"][:8]) for row in result["rows"]] == [(3, 48, "lossless")]


def test_ls_shows_good_and_broken_objects(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    stored_records(store)[0].write_body(b"garbage")
    rows = kvtide_json("ls", "--store", store)["rows"]
    assert sorted(bool(row["problem"]) for row in rows) == [False, False, True]
    spans = re.findall(r"\[\d+, \d+\)", kvtide("ls", "--store", store).stdout)
    assert sorted(spans) == sorted(
        f"[{row['start']}, {row['start'] + row['tokens']})" for row in rows if not row["problem"]
    )


def test_ls_verify_finds_a_flipped_bit_that_the_header_does_not_show(store: Path) -> None:
    record = stored_records(store)[0]
    data = bytearray(record.body())
    data[-1] ^= 1
    record.write_body(bytes(data))
    assert not any(row["problem"] for row in kvtide_json("ls", "--store", store)["rows"])
    assert sum(bool(row["problem"]) for row in kvtide_json("ls", "--verify", "--store", store)["rows"]) == 1


def test_a_record_of_uses_is_listed_as_one(store: Path, layout: BlockLayout) -> None:
    """Issue 11: it lies beside its block, and is neither an object nor a problem."""
    block = metas_of(layout, 1)[0].id
    importance = np.ones((layout.layers, layout.tokens), dtype=np.float32)
    record = UseRecord(block.key, layout.layers, layout.tokens).noted(b"writer-1", importance, 1e9)
    tier = DiskTier(store, 1 << 30, SystemClock(), lambda key: False)
    tier.open()
    assert write_note(tier, record_id(block), USES_CODEC, record.to_bytes())
    tier.close()
    for verify in ([], ["--verify"]):
        rows = kvtide_json("ls", *verify, "--store", store)["rows"]
        assert [row["problem"] for row in rows] == [""] * 4
        found = next(row for row in rows if row["codec"] == USES_CODEC)
        assert (found["model"], found["tokens"]) == ("uses of a block", 0)
    assert kvtide_json("stats", "--store", store)["problems"] == 0


def test_what_a_judge_knows_is_no_block(store: Path) -> None:
    tier = DiskTier(store, 1 << 30, SystemClock(), lambda key: False)
    tier.open()
    assert write_judge(tier, JudgeRecord(bytes_per_s=1e9))
    tier.close()
    rows = kvtide_json("stats", "--store", store)["rows"]
    assert sorted((row["codec"][:8], row["objects"], row["tokens"]) for row in rows) == [
        ("judge-1", 1, 0),
        ("lossless", 3, 48),
    ]


def test_rm_removes_by_prefix_and_all(store: Path, layout: BlockLayout) -> None:
    key = metas_of(layout, 1)[0].id.key.hex()
    assert kvtide_json("rm", key[:8], "--store", store)["removed"] == 1
    assert kvtide_json("rm", "--all", "--yes", "--store", store)["removed"] == 2
    assert stored_records(store) == []


@pytest.mark.parametrize("arguments", [[], ["xyzq"], ["ab"], ["abcd", "--all"]])
def test_rm_without_a_clear_choice_removes_nothing(arguments: list[str], store: Path) -> None:
    run = kvtide("rm", *arguments, "--store", store)
    assert run.returncode == 2
    assert run.stderr.startswith("kvtide: ")
    assert len(stored_records(store)) == 3


def test_explain_names_the_reason(store: Path, layout: BlockLayout, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(60))))
    kvtide("rm", metas_of(layout, 2)[1].id.key.hex(), "--store", store)
    tier = DiskTier(store, 1 << 30, SystemClock(), lambda key: False)
    tier.open()
    tier.note_decisions(metas_of(layout, 1)[0].id.namespace, {Decided(Choice.RECOMPUTE, Why.LINK_SLOWER): 5})
    tier.close()
    result = kvtide_json("explain", "--tokens", tmp_path / "tokens.json", "--block-tokens", 16, "--store", store)
    assert (result["hit_tokens"], result["prompt_tokens"], result["full_blocks"]) == (16, 60, 3)
    assert "removed" in result["reason"]
    meaning = "loading would not have been faster"
    decided = {"decision": "recompute", "reason": "link_slower", "meaning": meaning, "tokens": 5}
    assert result["decided"] == [decided]


def test_explain_weighs_loading_against_recomputing(store: Path, layout: BlockLayout, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(60))))
    explain = ("explain", "--tokens", tmp_path / "tokens.json", "--block-tokens", 16, "--store", store)
    slow = kvtide_json(*explain, "--link-mbit-s", 0.0001, "--prefill-tokens-s", 1000)
    assert slow["decision"]["way"] == "recompute"
    assert slow["decision"]["recompute_s"] == 0.048
    assert kvtide(*explain, "--link-mbit-s", 100).returncode == 2


@pytest.mark.parametrize("content", ["", "{}", "[1, 'a']", '["a"]', "\xff"])
def test_explain_refuses_a_bad_token_file(content: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(content, encoding="latin-1")
    run = kvtide("explain", "--tokens", tmp_path / "tokens.json", "--store", store)
    assert (run.returncode, run.stdout) == (2, "")
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("command", ["stats", "ls", "rm"])
@pytest.mark.parametrize("where", ["/nonexistent/store", "memory://", "ftp://x"])
def test_store_that_is_not_there_is_one_clear_line(command: str, where: str) -> None:
    run = kvtide(command, *(["--all", "--yes"] if command == "rm" else []), "--store", where)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1


def test_doctor_reports_what_is_here(store: Path) -> None:
    result = kvtide_json("doctor", "--store", store)
    findings = {row["subject"]: row["status"] for row in result["rows"]}
    assert findings["native core"] == findings["torch"] == findings["store"] == "ok"


def test_doctor_names_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = kvtide("doctor", "--store", tmp_path / "file")
    assert run.returncode == 1
    assert "not a directory" in run.stdout


def test_demo_refuses_bad_choices_before_any_work(tmp_path: Path) -> None:
    for arguments in (["--codec", "zip"], ["--store", "memory://"], ["--prefix-tokens", "10"]):
        run = kvtide("demo", *arguments)
        assert run.returncode == 2
        assert "Traceback" not in run.stderr
