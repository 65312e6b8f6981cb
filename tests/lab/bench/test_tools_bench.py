"""Peers' tools without servers: what they are given, and what becomes of what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide_lab.bench import peer_tools
from kvtide_lab.bench.agents_sessions import AgentSession, AgentTurn
from kvtide_lab.bench.peer_tools import RAG, WORKLOADS, ToolsSetup

SESSIONS = [
    AgentSession("a", "coder", [AgentTurn([1] * 200, 3), AgentTurn([1] * 300, 99)]),
    AgentSession("b", "coder", [AgentTurn([1] * 128 + [2], 3)]),
]


def test_timed_trace_names_what_prompts_share_alike() -> None:
    first, other, later = peer_tools.timed_trace(SESSIONS)
    assert (first["input_length"], other["input_length"], later["input_length"]) == (200, 129, 300)
    assert first["hash_ids"][0] == other["hash_ids"][0] == later["hash_ids"][0]
    assert len({*first["hash_ids"], *other["hash_ids"], *later["hash_ids"]}) == 5
    assert first["timestamp"] < other["timestamp"] < later["timestamp"]
    assert later["output_length"] == 16


def test_questions_have_their_answer_in_a_passage() -> None:
    for question in peer_tools.rag_questions(["some text"] * 3):
        assert any(question["answers"][0] in passage for passage in question["contexts"])


def test_tool_that_fails_says_why(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; print('bad'); sys.exit('no such option')"]
    assert peer_tools._called(words, tmp_path / "result") == "no such option"
    code = f"open({str(tmp_path / 'result')!r}, 'w').write('1')"
    assert peer_tools._called([sys.executable, "-c", code], tmp_path / "result") == ""


def test_every_workload_is_asked_of_both_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    @contextmanager
    def served(setup: Any, name: str, transfer: Any) -> Iterator[str]:
        ran.append(name)
        yield "http://127.0.0.1:1"

    def called(command: list[str], result: Path) -> str:
        ttft_ms = 800.0 if ran == ["plain"] else 200.0
        if "--dataset-path" in command:
            found: Any = {"completed": 3, "median_ttft_ms": ttft_ms, "p90_ttft_ms": ttft_ms, "median_e2el_ms": 900.0}
        elif "random-prefill" in command:
            return "no room"
        else:
            names = ("p50_ttft_ms", "p90_ttft_ms", "p50_request_latency_ms")
            found = {"results": {"total_requests": 2, "failed_requests": 1, **dict.fromkeys(names, ttft_ms)}}
        result.write_text(json.dumps(found))
        (tmp_path / "rag.json").write_text(json.dumps({"summary": {"f1_mean": 0.5}}))
        return ""

    monkeypatch.setattr(peer_tools, "served", served)
    monkeypatch.setattr(peer_tools, "_called", called)
    setup = ToolsSetup(Path("python"), Path("python"), Path("model"), tmp_path)
    result = peer_tools.run(setup, SESSIONS, ["text"] * 6, lambda step, done, total: None)
    assert len(result.rows) == 2 * (len(WORKLOADS) + 2)
    assert result.ttft_vs_plain == dict.fromkeys(
        ("timed_trace", *(each for each in WORKLOADS if each != "random-prefill"), RAG), 4.0
    )
    assert {row.failure for row in result.rows if row.workload == "random-prefill"} == {"no room"}
    assert {row.quality for row in result.rows if row.workload == RAG} == {0.5}
    assert peer_tools.table(result).row_count == len(result.rows)
