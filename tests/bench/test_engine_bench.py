"""The engine bench without engines: who is compared, what is asked, what bad input says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtide.bench import engine
from kvtide.bench.engine_peers import contenders, settle
from kvtide.bench.engine_process import EngineProcess

PYTHON = Path("/usr/bin/false")


def test_contenders_have_stores_of_their_own(tmp_path: Path) -> None:
    found = contenders(PYTHON, PYTHON, ("native", "lmcache"), ("raw=http://host:1",), tmp_path)
    assert [each.name for each in found] == ["plain", "kvtide", "kvtide raw=http://host:1", "native", "lmcache"]
    folders = [each.folder for each in found if each.folder]
    assert len(set(folders)) == 3


def test_unknown_peer_and_missing_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown peer 'redis'"):
        contenders(PYTHON, None, ("redis",), (), tmp_path)
    with pytest.raises(ValueError, match="codec=URL"):
        contenders(PYTHON, None, (), ("http://host:1",), tmp_path)
    with pytest.raises(ValueError, match="--lmcache-python"):
        contenders(PYTHON, None, ("lmcache",), (), tmp_path)


def test_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have"):
        engine.run(tmp_path, range(100), PYTHON, None, (), (), engine.QUICK, tmp_path, lambda *step: None)


def test_engine_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has died"):
        EngineProcess(PYTHON, tmp_path, tmp_path / "log").open()


def test_settling_waits_for_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    settle(None)
    settle(tmp_path / "absent")


def _asked(ttft_s: float, ids: list[int]) -> Any:
    answer = {"ids": ids, "ttft_s": ttft_s, "cached_tokens": 128, "finish": "length"}
    workloads = ("restart", "misses", "memory")
    return engine._Asked(
        {name: [answer, answer] for name in workloads},
        dict.fromkeys(workloads, 2 * ttft_s),
        dict.fromkeys(workloads, 300),
    )


def test_rows_compare_answers_and_times_with_plain() -> None:
    plain, ours, theirs = _asked(8.0, [1, 2]), _asked(0.5, [1, 2]), _asked(1.0, [1, 3])
    rows = [
        engine._row(name, workload, found, plain)
        for name, found in (("plain", plain), ("kvtide", ours), ("native", theirs))
        for workload in found.answers
    ]
    result = engine._result(rows, {"kvtide": ours}, {"lmcache": "no\nport"}, "model", "float32")
    assert result.ttft_speedup_vs_plain == 16.0
    assert (result.restart_vs_native, result.memory_vs_native, result.restart_vs_lmcache) == (2.0, 2.0, None)
    assert result.is_identical
    assert {row.engine: row.is_identical for row in rows} == {"plain": True, "kvtide": True, "native": False}
    assert result.tokens_restored == 128
    assert engine.table(result).row_count == len(rows) + 1


def test_chat_grows_by_the_answers() -> None:
    size = engine.EngineBenchSize(users=2, rounds=2)
    found = engine._Asked({}, {}, {})
    rounds = []
    for prompts in engine._chat(range(20_000), size, found):
        rounds.append(prompts)
        answers = [{"ids": [7, 7]} for _ in prompts]
        engine._note(found, "chat", answers, 1.0, prompts)
    first, second = rounds
    for before, after in zip(first, second, strict=True):
        assert after[: len(before) + 2] == [*before, 7, 7]
        assert len(after) == len(before) + 152
