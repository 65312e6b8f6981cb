"""The agents bench without engines: which sessions are taken, what is asked, what is kept, what the rows say."""

import gzip
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtide_lab.bench import agents
from kvtide_lab.bench.engine_peers import StoreRoom, trim

SIZE = agents.AgentsSize(at_once=(1, 2), sessions=2, turns=3, context_tokens=1000, answer_tokens_max=4, no_reuse=4)


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def _write(path: Path, lengths: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"timestamp": -at, "input": "a " * length, "output": "b b"} for at, length in enumerate(lengths)]
    content = b"\n".join(map(msgspec.json.encode, rows))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_sessions_come_from_each_kind_in_turn_and_hold_what_fits_the_context(tmp_path: Path) -> None:
    _write(tmp_path / "coder" / "1.jsonl.gz", [2000, 500, 400, 10, 300])
    _write(tmp_path / "coder" / "2.jsonl.gz", [300, 300])
    _write(tmp_path / "shop" / "3.jsonl", [300, 300])
    _write(tmp_path / "shop" / "4.jsonl", [300, 10])
    found = agents.read_sessions(tmp_path, words, context_tokens=1000, turns_max=2)
    assert [session.name for session in found] == ["1.jsonl.gz", "3.jsonl", "2.jsonl.gz"]
    # The times of the file go backwards.
    assert [len(turn.ids) for turn in found[0].turns] == [300, 400]
    assert found[0].turns[0].answer_tokens == 2


def test_files_that_are_no_sessions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no session in"):
        agents.read_sessions(tmp_path, words, 1000, 2)
    (tmp_path / "x.jsonl").write_text('{"output": "b"}\n')
    with pytest.raises(ValueError, match="is not a session"):
        agents.read_sessions(tmp_path, words, 1000, 2)


def test_made_up_turns_go_on_from_those_before() -> None:
    (session,) = agents.made_up_sessions(["word " * 2000, "short"], words, context_tokens=1000, turns_max=3)
    first, second, _ = (turn.ids for turn in session.turns)
    assert len(second) > len(first)
    assert second[: len(first)] == first


def test_working_set_has_what_prompts_share_once() -> None:
    turns = [agents.AgentTurn(ids, 1) for ids in ([1] * 256, [1] * 256 + [2] * 10, [3] + [1] * 255)]
    assert agents.working_set_pages([agents.AgentSession("a", "coder", turns)], 128) == 5


def sessions() -> list[agents.AgentSession]:
    turns = [agents.AgentTurn(list(range(stop)), 9) for stop in (300, 400, 500)]
    return [agents.AgentSession(name, "coder", turns) for name in ("a", "b")]


def test_prompts_without_reuse_begin_unlike() -> None:
    *loops, alone = agents._rows(sessions(), SIZE)
    assert [row.at_once for row in loops] == [1, 2]
    assert [[len(chain) for chain in chains] for chains in loops[0].phases.values()] == [[2, 2], [1, 1]]
    prompts = [prompt for chain in alone.phases[agents.BEFORE] for prompt in chain]
    assert len(prompts) == SIZE.no_reuse
    assert len({prompt["ids"][0] for prompt in prompts}) == SIZE.no_reuse
    assert {prompt["answer_tokens"] for prompt in prompts} == {SIZE.answer_tokens_max}


def _phase(seconds: float, count: int, ids: tuple[int, ...] = (5, 5)) -> agents.AgentPhase:
    answers = [agents.AgentAnswer(list(ids), seconds / 2, seconds, 128, "length") for _ in range(count)]
    return agents.AgentPhase(answers, 200 * count, seconds, [8.0] * count)


class _Engines:
    """Answers for engines: each contender takes its own seconds; the peer that is `broken` does not start."""

    def __init__(self, seconds: dict[str, float], broken: str = "") -> None:
        self.seconds = seconds
        self.broken = broken
        self.talked: list[tuple[str, str]] = []

    def talk(self, setup: Any, name: str, row: Any, options: Any, nursery: Any) -> list[agents.AgentPhase]:
        if name == self.broken:
            # Mooncake's servers are not installed, or an engine has died.
            raise ValueError("Mooncake is not installed") if name == "mooncake" else RuntimeError("no port")
        self.talked.append((row.name, name))
        changed = (6, 6) if name == "native" else (5, 5)
        return [_phase(self.seconds[name], 2, changed) for _ in row.phases]


def _run(
    engines: _Engines,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    path: Path | None = None,
    size: agents.AgentsSize = SIZE,
) -> agents.AgentsBench:
    monkeypatch.setattr(agents, "EngineNursery", lambda *_: nullcontext())
    monkeypatch.setattr(agents, "_talk", engines.talk)
    setup = agents.AgentsSetup(Path("python"), None, names, Path("work"), Path("model"))
    results = agents.partial_of("model", size, sessions(), path)
    return agents.run(setup, sessions(), size, results, lambda step, done, total: None)


def test_answers_of_a_few_tokens_say_nothing_of_interactivity() -> None:
    long, short = _phase(2.0, 4, (5,) * agents.ANSWER_TOKENS_MIN), _phase(100.0, 1, (5,))
    phase = msgspec.structs.replace(long, answers=[*long.answers, *short.answers])
    found = {
        (row, name): [[each]]
        for row, each in (("1 at once", phase), (agents.NO_REUSE, long))
        for name in ("plain", "kvtide")
    }
    for row in agents.result_of(found, {}, "model", 1, (256, 128)).rows[:2]:
        assert (row.requests, row.p90_interactivity) == (5, pytest.approx(agents.ANSWER_TOKENS_MIN / 2.0))
        assert row.ttft_p90_s > 1.0


def test_rows_say_how_kvtide_stands_to_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = _Engines({"plain": 8.0, "kvtide": 1.0, "native": 2.0})
    result = _run(engines, monkeypatch, ("plain", "kvtide", "native"))
    assert [row.p90_interactivity for row in result.rows if row.engine == "kvtide"] == pytest.approx([2.0] * 5)
    assert (result.least_of_best, result.no_reuse_vs_plain) == (pytest.approx(2.0), pytest.approx(8.0))
    assert result.is_first_or_tied
    assert (result.answers_changed_exact, result.failed_requests) == (0, 0)
    assert [row.answers_changed for row in result.rows if row.engine == "native"] == [2] * 5
    loops = {(f"{count} at once", phase) for count in (1, 2) for phase in (agents.BEFORE, agents.AFTER)}
    assert {(row.row, row.phase) for row in result.rows} == loops | {(agents.NO_REUSE, agents.BEFORE)}


def test_run_goes_on_where_it_was_and_names_peers_that_do_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = {"plain": 2.0, "kvtide": 2.0, "native": 1.0}
    _run(_Engines(seconds), monkeypatch, ("plain", "kvtide"), tmp_path / "state")
    further = _Engines(seconds, broken="mooncake")
    result = _run(further, monkeypatch, ("plain", "kvtide", "native", "mooncake"), tmp_path / "state")
    assert {name for _, name in further.talked} == {"native"}
    assert not result.is_first_or_tied
    assert result.least_of_best == pytest.approx(0.5)
    assert result.failures == {"mooncake": "Mooncake is not installed"}


def test_short_stores_are_a_row_each_and_told_as_shares_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_page_bytes", lambda model: 1000)
    size = msgspec.structs.replace(SIZE, store_shares=(0.5, 0.25), no_reuse=0)
    engines = _Engines({"plain": 8.0, "bound": 1.0, "kvtide": 2.0, "native": 4.0})
    result = _run(engines, monkeypatch, ("plain", "bound", "kvtide", "native"), size=size)
    assert len({row.row for row in result.rows}) == 4 and result.no_reuse_vs_plain is None
    found = {row.engine: (row.of_best, row.of_bound, row.hits_of_bound) for row in result.rows}
    assert found["kvtide"] == pytest.approx((2.0, 0.5, 1.0))
    assert found["native"] == pytest.approx((1.0, 0.25, 1.0))


def test_rooms_are_shares_of_the_working_set_with_memory_for_one_request() -> None:
    size = msgspec.structs.replace(SIZE, store_shares=(1.0, 0.1), no_reuse=0)
    rooms = [row.room for row in agents._rows(sessions(), size, page_bytes=1000)]
    # Both sessions say the same: 300, 400 and 500 tokens are four pages and three ends of prompts.
    pages = agents.working_set_pages(sessions(), agents.PAGE_TOKENS)
    assert rooms == [StoreRoom(pages * 1000, pages * 1000), StoreRoom(4000, pages * 100)] * 2
    options = rooms[0].options()
    assert options["memory_bytes_max"] + options["store_queue_bytes_max"] == rooms[0].memory_bytes
    assert options["disk_bytes_max"] == rooms[0].disk_bytes


def test_folder_is_kept_within_its_bound_by_what_was_used_last(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes(1 << 17))
        os.utime(tmp_path / str(number), (number, number))
    os.utime(tmp_path / "0", (9, 0))
    (tmp_path / "config").write_text("small")
    trim(tmp_path, (2 << 17) + 5000)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "3", "config"}


def test_kl_is_that_of_first_tokens_as_far_as_they_are_named() -> None:
    def answer(*shares: float) -> agents.AgentAnswer:
        return agents.AgentAnswer([5], 0.1, 0.1, 0, "length", [{at: math.log(each) for at, each in enumerate(shares)}])

    assert agents._kl(answer(0.5, 0.25), answer(0.5, 0.25)) == pytest.approx(0)
    assert agents._kl(answer(0.5, 0.25), answer(0.25, 0.5)) == pytest.approx(0.25 * math.log(2))
