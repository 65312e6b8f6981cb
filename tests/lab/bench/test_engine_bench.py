"""The engine bench without engines: who is compared, whose turn it is, what is asked, what bad input says."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvtide_lab.bench import engine
from kvtide_lab.bench.engine import Contest, EngineBenchSize, Turn
from kvtide_lab.bench.engine_peers import LOSSLESS, Contender, contenders, link_contenders, settle
from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess

PYTHON = Path("/usr/bin/false")
SMALL = EngineBenchSize(rounds=2, memory=1, misses=2)


def test_contenders_have_stores_of_their_own(tmp_path: Path) -> None:
    found = contenders(PYTHON, PYTHON, ("native", "lmcache"), tmp_path)
    names = ["plain", "kvtide", "kvtide lossless", "native", "lmcache"]
    assert [each.name for each in found] == names
    assert [each.is_kvtide for each in found] == [False, True, True, False, False]
    folders = [each.folder for each in found if each.folder]
    assert len(set(folders)) == 4


def test_unknown_peer_and_missing_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown peer 'redis'"):
        contenders(PYTHON, None, ("redis",), tmp_path)
    with pytest.raises(ValueError, match="--lmcache-python"):
        contenders(PYTHON, None, ("lmcache",), tmp_path)
    with pytest.raises(ValueError, match="must be positive"), link_contenders(PYTHON, -1.0, tmp_path):
        pass


def test_engine_or_nursery_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has died"):
        EngineProcess(PYTHON, tmp_path, tmp_path / "log").open()
    with pytest.raises(RuntimeError, match="no engines"), EngineNursery(PYTHON, tmp_path / "log"):
        pass


def test_settling_waits_until_nothing_is_written_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    store = tmp_path / "store"

    def sleep(wait_s: float) -> None:
        waits.append(wait_s)
        if store.is_dir() and len(waits) <= 3:
            (store / str(len(waits))).write_bytes(bytes(8192))

    monkeypatch.setattr("kvtide_lab.bench.engine_peers.time.sleep", sleep)
    settle(None)
    assert not waits
    settle(store)
    quiet = len(waits)
    assert 0.5 <= sum(waits) < 1
    waits.clear()
    store.mkdir()
    settle(store)
    assert len(waits) == quiet + 3


class _Seat:
    """Takes its turns without an engine; `broken` fails at its second start."""

    def __init__(self, name: str, diary: list[tuple[str, str]]) -> None:
        self.contender = Contender(name, PYTHON, None if name == "plain" else {}, is_brief=" " in name)
        self.turns: dict[str, list[Turn]] = {}
        self.engine = Mock()
        self.diary = diary
        self.starts = 0

    def open(self, warm_up: Any) -> None:
        self.starts += 1
        if self.contender.name == "native" and self.starts == 2:
            raise RuntimeError("no port")

    def close(self) -> None:
        pass

    def take(self, workload: str, prompts: list[list[int]]) -> None:
        seconds = {"plain": 8.0, "kvtide": 0.5}.get(self.contender.name, 1.0)
        answers = [{"ids": [7, 7], "ttft_s": seconds, "cached_tokens": 128, "finish": "length"} for _ in prompts]
        self.turns.setdefault(workload, []).append(Turn(answers, seconds, seconds / 2, sum(map(len, prompts))))
        self.diary.append((workload, self.contender.name))


def _played(*names: str) -> tuple[Contest, list[tuple[str, str]]]:
    diary: list[tuple[str, str]] = []
    seats: list[Any] = [_Seat(name, diary) for name in names]
    contest = Contest(seats, range(20_000), SMALL, lambda *step: None)
    contest.play()
    return contest, diary


def test_engines_answer_the_same_request_one_after_another_and_another_one_first_each_time() -> None:
    _, diary = _played("plain", "kvtide")
    misses = [name for workload, name in diary if workload == "misses"]
    pairs = [set(misses[i : i + 2]) for i in range(0, len(misses), 2)]
    assert pairs == [{"plain", "kvtide"}] * SMALL.rounds * SMALL.misses
    assert misses[0] != misses[2]


def test_everyone_with_a_store_is_restarted_in_every_round() -> None:
    contest, _ = _played("plain", "kvtide", "lmcache")
    assert [seat.starts for seat in contest.seats] == [1, 1 + SMALL.rounds, 1 + SMALL.rounds]  # type: ignore[attr-defined]
    assert all(len(seat.turns["restart"]) == SMALL.rounds for seat in contest.seats)


def test_peer_that_fails_is_left_out_and_named() -> None:
    contest, _ = _played("plain", "kvtide", "native")
    assert contest.failures == {"native": "no port"}
    assert [seat.contender.name for seat in contest.seats] == ["plain", "kvtide"]


def test_ratios_are_medians_over_pairs_and_rows_compare_answers_with_plain() -> None:
    contest, _ = _played("plain", "kvtide", LOSSLESS, "lmcache", "kvtide raw, link", "kvtide tide, link")
    turns = {seat.contender.name: seat.turns for seat in contest.seats}
    turns["lmcache"]["restart"][0].answers[0]["ids"] = [1]
    result = engine.result_of(turns, {"native": "no\nport"}, 1000.0, "model")
    assert (result.ttft_speedup_vs_plain, result.miss_throughput_vs_plain) == (16.0, 16.0)
    assert result.miss_engine_cpu_vs_plain == 16.0
    assert (result.restart_vs_lmcache, result.restart_vs_native, result.link_tide_vs_raw) == (2.0, None, 1.0)
    assert (result.is_identical, result.tokens_restored, result.failed_requests) == (True, 128, 0)
    assert (result.lossless_ttft_speedup_vs_plain, result.lossless_is_identical) == (8.0, True)
    wrong = [(row.engine, row.workload) for row in result.rows if not row.is_identical]
    assert wrong == [("lmcache", "restart")]


def test_misses_share_no_beginning() -> None:
    begins = {tuple(engine.miss(range(20_000), step)[0][:64]) for step in range(12)}
    assert len(begins) == 12
