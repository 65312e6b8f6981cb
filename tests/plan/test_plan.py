"""Plans: contexts, progress, chunks, speeds as they are measured, and whether to load or to compute."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.plan import Judge, JudgeRecord, PrefillSpeed, Way, decide
from kvtide.plan.base import Chunk, Fetch, Progress, Request, cut, cut_for_meeting, is_ready, mean_kl
from kvtide.plan.judge import DEADLINE_S_MIN, MEMORY_S
from kvtide.plan.speeds import HarmonicRate, PrefillMeter

SPEED = PrefillSpeed(1000)
CHUNKS = (Chunk(0, 1000, (100, 50), (0.4, 0.1)), Chunk(1000, 4000, (300, 150), (0.4, 0.1)))
REQUEST = Request(CHUNKS, True, SPEED, 2.0)


def loaded(*here: int, now_s: float = 0.0, computed: tuple[int, ...] = ()) -> Progress:
    return Progress(now_s, here, here, frozenset(computed), frozenset(computed))


def test_loss_is_by_tokens_and_computed_chunks_lose_nothing() -> None:
    assert mean_kl(REQUEST, loaded(1, 2)) == pytest.approx((1000 * 0.4 + 3000 * 0.1) / 4000)
    assert mean_kl(REQUEST, loaded(0, 2, computed=(0,))) == pytest.approx(3000 * 0.1 / 4000)
    assert mean_kl(REQUEST, loaded(1, 1, computed=(0, 1))) == 0
    assert mean_kl(REQUEST, loaded(2, 0)) == math.inf


def test_engine_starts_at_the_deadline_with_what_is_there() -> None:
    assert not is_ready(REQUEST, loaded(1, 1, now_s=1.9))
    assert is_ready(REQUEST, loaded(1, 1, now_s=2.0))
    assert not is_ready(REQUEST, loaded(2, 0, now_s=9.0))


def test_engine_starts_early_when_the_goal_is_reached() -> None:
    eager = dataclasses.replace(REQUEST, kl_goal=0.2)
    assert not is_ready(eager, loaded(1, 1))
    assert is_ready(eager, loaded(1, 2))
    assert is_ready(REQUEST, loaded(0, 0, computed=(0, 1)))


def test_progress_keeps_what_it_was_made_from() -> None:
    start = Progress.start(REQUEST)
    later = start.asking(Fetch(1, 0)).arrived(Fetch(1, 0)).assigning([0]).computing_done(0).at(1.0, 5.0)
    assert later == Progress(1.0, (0, 1), (0, 1), frozenset({0}), frozenset({0}), 5.0, is_layered=True)
    assert start == Progress(0.0, (0, 0), (0, 0), is_layered=True)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((), "1 to 8192 chunks"),
        ((Chunk(1, 2, (1,), (0.0,)),), "starts at token 0"),
        ((Chunk(0, 0, (1,), (0.0,)),), "starts at token 0"),
        ((Chunk(0, 5, (1,), (0.0,)), Chunk(6, 7, (1,), (0.0,))), "starts at token 5"),
        ((Chunk(0, 5, (), ()),), "expected 0 steps"),
        ((Chunk(0, 5, (1, 1), (0.0,)),), "expected 2 steps"),
        ((Chunk(0, 5, (1,), (0.0,)), Chunk(5, 7, (1, 1), (0.0, 0.0))), "expected 1 steps"),
        ((Chunk(0, 5, (0,), (0.0,)),), "every step has bytes"),
        ((Chunk(0, 5, (1, 1), (0.1, 0.2)),), "lose no more"),
        ((Chunk(0, 5, (1,), (math.nan,)),), "lose no more"),
    ],
)
def test_contexts_that_can_not_be_are_refused(chunks: tuple[Chunk, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(chunks, True, SPEED, 1.0)


def test_prefill_slows_down_with_position() -> None:
    speed = PrefillSpeed(1000, double_at=2000)
    assert speed.seconds(0, 1000) == pytest.approx(1.25)
    assert speed.seconds(2000, 3000) == pytest.approx(2.25)
    assert SPEED.seconds(5000, 6000) == pytest.approx(1.0)


@given(st.floats(10, 1e5), st.floats(100, 1e6) | st.just(math.inf), st.integers(0, 100_000), st.integers(1, 100_000))
def test_reach_undoes_seconds(rate: float, double_at: float, start: int, tokens: int) -> None:
    speed = PrefillSpeed(rate, double_at)
    assert speed.reach(start, speed.seconds(start, start + tokens)) == pytest.approx(start + tokens, rel=1e-6)


# 600 bytes of bases, 4 s of recomputing.
EVEN = Request(tuple(Chunk(1000 * i, 1000 * i + 1000, (150,), (0.1,)) for i in range(4)), True, SPEED, 0.0)


@pytest.mark.parametrize(
    ("rate", "way", "seconds"),
    [
        (None, Way.UNKNOWN_LINK, (math.inf, 4, math.inf)),
        (0.0, Way.RECOMPUTE, (math.inf, 4, 4)),
        # In 3.9 s not one chunk: nothing would be saved.
        (30.0, Way.RECOMPUTE, (20, 4, 4)),
        # Three chunks computed while the last one comes.
        (50.0, Way.BOTH, (12, 4, 3)),
        (150.0, Way.BOTH, (4, 4, 2)),
        # 0.3 s for all, and the engine has not one chunk by then.
        (2000.0, Way.LOAD, (0.3, 4, 0.3)),
    ],
)
def test_break_even_takes_the_earliest_start(rate: float | None, way: Way, seconds: tuple[float, float, float]) -> None:
    decision = decide(EVEN, rate)
    assert decision.way is way
    assert decision[1:4] == pytest.approx(seconds)


def test_latency_alone_can_decide_for_recomputing() -> None:
    assert decide(EVEN, 1e9, latency_s=0.1).way is Way.LOAD
    assert decide(EVEN, 1e9, latency_s=4.0).way is Way.RECOMPUTE


@pytest.mark.parametrize(("rate", "latency_s"), [(-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0)])
def test_links_that_can_not_be_are_refused(rate: float, latency_s: float) -> None:
    with pytest.raises(AssertionError):
        decide(EVEN, rate, latency_s)


def test_cutting_covers_every_token_once() -> None:
    assert cut(10, 4) == [(0, 4), (4, 8), (8, 10)]
    # The engine is at token 1,000 at the deadline, between 800 and 1,200 if it is faster or slower.
    chunks = cut_for_meeting(2000, 200, SPEED, 1.0, chunk_tokens=400)
    assert chunks == [(0, 400), (400, 800), (800, 1000), (1000, 1200), (1200, 1600), (1600, 2000)]


def test_meter_learns_speed_and_growth_and_follows_changes() -> None:
    meter, true = PrefillMeter(), PrefillSpeed(1000, 4000)
    assert meter.speed() is None
    meter.note(0, 500, true.seconds(0, 500))
    assert meter.speed() == PrefillSpeed(500 / true.seconds(0, 500))
    for start in (4000, 1000, 8000):
        meter.note(start, start + 500, true.seconds(start, start + 500))
    found = meter.speed()
    assert found is not None
    assert (found.tokens_per_s, found.double_at) == (pytest.approx(1000), pytest.approx(4000))
    for _ in range(40):
        meter.note(0, 500, 1.0)
    slower = meter.speed()
    assert slower is not None
    assert slower.tokens_per_s == pytest.approx(500, rel=0.01)


def fed(estimator: HarmonicRate, *transfers: tuple[int, float, float]) -> float | None:
    for transfer in transfers:
        estimator.add(*transfer)
    return estimator.bytes_per_s()


@pytest.mark.parametrize("samples", [1, 5])
def test_steady_link_has_its_own_rate(samples: int) -> None:
    assert HarmonicRate(samples).bytes_per_s() is None
    assert fed(HarmonicRate(samples), *((500, 0.5 * i, 0.5 * i + 0.5) for i in range(9))) == pytest.approx(1000)


@pytest.mark.parametrize(("estimator", "expected"), [(HarmonicRate(1), 400), (HarmonicRate(3), 480)])
def test_estimators_read_a_falling_rate_each_in_its_way(estimator: HarmonicRate, expected: float) -> None:
    # Rates 500, 600 (in half the time), 400.
    assert fed(estimator, (500, 0, 1), (300, 1, 1.5), (400, 1.5, 2.5)) == pytest.approx(expected)


def test_window_forgets() -> None:
    assert fed(HarmonicRate(2), (9000, 0, 1), (100, 1, 2), (100, 2, 3)) == pytest.approx(100)


def test_idle_time_counts_for_nobody() -> None:
    assert fed(HarmonicRate(), (100, 0, 1), (100, 50, 51)) == pytest.approx(100)


def test_overlapping_transfers_share_the_link() -> None:
    # Four requests at once, 100 bytes each, one done every second: the link carries 100 bytes/s, not 25 to 100.
    assert fed(HarmonicRate(), *((100, 0, float(stop)) for stop in (1, 2, 3, 4))) == pytest.approx(100)


def test_transfers_of_no_time_are_added_to_the_next() -> None:
    assert fed(HarmonicRate(1), (100, 1, 1), (100, 1, 1)) is None
    assert fed(HarmonicRate(1), (100, 1, 1), (100, 1, 3)) == pytest.approx(100)


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


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (partial(Request, CHUNKS, True, SPEED), [(-1.0, 0.0), (NAN, 0.0), (1.0, -0.1), (INF, 0.0)], "deadline|KL goal"),
        (PrefillSpeed, [(0, 1), (-1, 1), (INF, 1), (1, 0), (NAN, 1), (1, NAN)], "must be positive"),
        (cut, [(0, 1), (1, 0)], "at least one token"),
        (cut_for_meeting, [(1000, 200, SPEED, 1.0, 100)], "1 to 100 tokens"),
        (
            PrefillMeter().note,
            [(0, 0, 1.0), (5, 3, 1.0), (-1, 3, 1.0), (0, 5, 0.0), (0, 5, NAN)],
            "takes time",
        ),
        (JudgeRecord, [(-1.0,), (1.0, NAN), (1.0, 1.0, INF)], "finite and not negative"),
    ],
)
def test_figures_that_can_not_be_are_refused(
    make: Callable[..., object], arguments: list[tuple[Any, ...]], message: str
) -> None:
    for given_ in arguments:
        with pytest.raises(ValueError, match=message):
            make(*given_)
