"""Load or compute: what the measured speeds say."""

from __future__ import annotations

import msgspec
import pytest

from kvtide.plan import Judge, JudgeRecord, PrefillSpeed, Way, decide
from kvtide.plan.base import Chunk, Request
from kvtide.plan.judge import DEADLINE_S_MIN, MEMORY_S


def test_slower_load_is_declined_once_both_speeds_are_known_and_until_it_is_forgotten() -> None:
    judge = Judge(10.0)
    assert judge.is_load_faster(1000, 0.0)
    judge.note_prefill(0, 1000, 1.0)
    assert judge.is_load_faster(1000, 0.0)
    judge.note_load(1000, 2.0, 0.0)
    assert not judge.is_load_faster(1000, 1.0)
    assert judge.is_load_faster(1000, MEMORY_S + 1)
    # Newer samples weigh more.
    judge.note_load(1000, 0.1, 1.0)
    assert judge.is_load_faster(1000, 1.0)


def test_short_steps_say_nothing() -> None:
    judge = Judge(10.0)
    judge.note_prefill(0, 8, 1.0)
    judge.note_load(8, 100.0, 0.0)
    assert judge.deadline_s(100_000) == 10.0


def test_deadline_is_what_computing_would_take_within_bounds() -> None:
    judge = Judge(10.0)
    assert judge.deadline_s(1000) == 10.0
    judge.note_prefill(0, 1000, 1.0)
    assert judge.deadline_s(2000) == pytest.approx(2.0)
    assert judge.deadline_s(50_000) == 10.0
    assert judge.deadline_s(1) == DEADLINE_S_MIN


def test_what_one_process_learnt_is_where_the_next_begins() -> None:
    judge, chunks = Judge(), tuple(Chunk(start, start + 100, (1000,), (0.0,)) for start in range(0, 1000, 100))
    judge.link.estimator.add(10_000, 0.0, 1.0)
    judge.link.latency_s = 0.02
    judge.note_prefill(0, 1000, 2.0)
    judge.note_decode("tide-1", 1000, 0.5)
    later = Judge()
    later.restore(msgspec.json.decode(msgspec.json.encode(judge.record()), type=JudgeRecord))
    request = Request(chunks, True, PrefillSpeed(500.0), 0.0)
    assert later.decide(request, "tide-1") == judge.decide(request, "tide-1")
    assert (later.deadline_s(1000), later.latency_s()) == (pytest.approx(2.0), 0.02)
    later.note_prefill(0, 1000, 4.0)
    assert later.deadline_s(1000) == pytest.approx(4.0), "what this process measured counts"


def test_decoding_counts_where_it_is_slower_than_the_link() -> None:
    chunks = tuple(Chunk(start, start + 100, (1000,), (0.0,)) for start in range(0, 1000, 100))
    request = Request(chunks, True, PrefillSpeed(500.0), 0.0)
    quick, slow = decide(request, 1e6), decide(request, 1e6, decode_token_s=0.01)
    assert (quick.way, slow.way) == (Way.LOAD, Way.RECOMPUTE)
    assert slow.load_s == pytest.approx(quick.load_s + 10.0)


@pytest.mark.parametrize("bad", [{"bytes_per_s": -1.0}, {"latency_s": float("nan")}, {"tokens_per_s": float("inf")}])
def test_record_with_figures_that_can_not_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        JudgeRecord(**bad)  # type: ignore[arg-type]
