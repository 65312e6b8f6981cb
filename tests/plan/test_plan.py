"""Plans: contexts, progress, chunks, speeds as they are measured, and whether to load or to compute."""

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.outcomes import Why
from kvtide.plan import Judge, JudgeRecord, PrefillSpeed, decide
from kvtide.plan.base import (
    PLAN_FETCHES_MAX,
    Chunk,
    Fetch,
    Plan,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    cut,
    cut_for_meeting,
    expected_s,
    following,
    is_ready,
    leading_pass,
    mean_kl,
)
from kvtide.plan.judge import DEADLINE_S_MIN, MEMORY_S
from kvtide.plan.policies import POLICIES, AnchorFirst, CachegenRule, DeltasFirstWhenSlow, Layered, TwoEnded
from kvtide.plan.speeds import HarmonicRate, PrefillMeter

SPEED = PrefillSpeed(1000)
CHUNKS = (Chunk(0, 1000, (100, 50), (0.4, 0.1)), Chunk(1000, 4000, (300, 150), (0.4, 0.1)))
REQUEST = Request(CHUNKS, True, SPEED, 2.0)


def context(
    chunks: int,
    sizes: tuple[int, ...],
    kl: tuple[float, ...],
    deadline_s: float,
    kl_goal: float = 0.0,
    is_layered: bool = True,
    tokens: int = 1000,
) -> Request:
    cut = tuple(Chunk(tokens * i, tokens * i + tokens, sizes, kl) for i in range(chunks))
    return Request(cut, is_layered, SPEED, deadline_s, kl_goal)


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
    # Early, when the goal is reached.
    eager = replace(REQUEST, kl_goal=0.2)
    assert not is_ready(eager, loaded(1, 1))
    assert is_ready(eager, loaded(1, 2))
    assert is_ready(REQUEST, loaded(0, 0, computed=(0, 1)))


def test_progress_keeps_what_it_was_made_from() -> None:
    start = Progress.start(REQUEST)
    later = start.asking(Fetch(1, 0)).arrived(Fetch(1, 0)).assigning([0]).computing_done(0).at(1.0, 5.0)
    assert later == Progress(1.0, (0, 1), (0, 1), frozenset({0}), frozenset({0}), 5.0, is_layered=True)
    assert start == Progress(0.0, (0, 0), (0, 0), is_layered=True)


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
EVEN = context(4, (150,), (0.1,), 0.0)


@pytest.mark.parametrize(
    ("rate", "why", "seconds"),
    [
        (None, Why.UNKNOWN_LINK, (math.inf, 4)),
        (0.0, Why.LINK_SLOWER, (math.inf, 4)),
        # In 3.9 s not one chunk: nothing would be saved.
        (30.0, Why.LINK_SLOWER, (20, 4)),
        # Three chunks computed while the last one comes.
        (50.0, Why.BOTH_ENDS, (12, 4)),
        (150.0, Why.BOTH_ENDS, (4, 4)),
        # 0.3 s for all, and the engine has not one chunk by then.
        (2000.0, Why.LINK_FASTER, (0.3, 4)),
    ],
)
def test_break_even_takes_the_earliest_start(rate: float | None, why: Why, seconds: tuple[float, float]) -> None:
    decision = decide(EVEN, rate)
    assert decision.why is why
    assert decision[1:3] == pytest.approx(seconds)


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
    assert (found.tokens_per_s, found.double_at) == (pytest.approx(1000), pytest.approx(4000))
    for _ in range(40):
        meter.note(0, 500, 1.0)
    slower = meter.speed()
    assert slower.tokens_per_s == pytest.approx(500, rel=0.01)


STEADY = [(500, 0.5 * i, 0.5 * i + 0.5) for i in range(9)]
# Rates 500, 600 (in half the time), 400.
FALLING = [(500, 0, 1), (300, 1, 1.5), (400, 1.5, 2.5)]


@pytest.mark.parametrize(
    ("samples", "transfers", "expected"),
    [
        *((samples, STEADY, 1000) for samples in (1, 5)),
        (1, FALLING, 400),
        (3, FALLING, 480),
        pytest.param(2, [(9000, 0, 1), (100, 1, 2), (100, 2, 3)], 100, id="the window forgets"),
        pytest.param(5, [(100, 0, 1), (100, 50, 51)], 100, id="idle time counts for nobody"),
        # Requests at once, one done every second: the link carries 100 bytes/s, not 25 to 100.
        pytest.param(5, [(100, 0, float(stop)) for stop in (1, 2, 3, 4)], 100, id="they share the link"),
        pytest.param(1, [(100, 1, 1), (100, 1, 1)], None, id="no time is no rate"),
        pytest.param(1, [(100, 1, 1), (100, 1, 3)], 100, id="what took no time is added to the next"),
    ],
)
def test_rate_is_what_the_link_carried(
    samples: int, transfers: list[tuple[int, float, float]], expected: float | None
) -> None:
    estimator = HarmonicRate(samples)
    assert estimator.bytes_per_s() is None
    for transfer in transfers:
        estimator.add(*transfer)
    assert estimator.bytes_per_s() == (None if expected is None else pytest.approx(expected))


def test_rate_is_asked_for_while_other_loads_add_to_it() -> None:
    estimator, is_over = HarmonicRate(), threading.Event()
    estimator.add(1000, 0.0, 1.0)

    def add() -> None:
        for second in takewhile(lambda _: not is_over.is_set(), count(1)):
            estimator.add(1000, float(second), second + 1.0)

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add)
        try:
            assert all(estimator.bytes_per_s() == 1000.0 for _ in range(100_000))
        finally:
            is_over.set()
        adding.result()


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


def test_deadline_is_what_computing_would_take_within_bounds_and_short_steps_say_nothing() -> None:
    judge = Judge(10.0)
    judge.note_prefill(0, 8, 1.0)
    judge.note_load(8, 100.0, 0.0)
    assert judge.deadline_s(1000) == judge.deadline_s(100_000) == 10.0
    judge.note_prefill(0, 1000, 1.0)
    assert judge.deadline_s(2000) == pytest.approx(2.0)
    assert judge.deadline_s(50_000) == 10.0
    assert judge.deadline_s(1) == DEADLINE_S_MIN


TEN = replace(context(10, (1000,), (0.0,), 0.0, tokens=100), prefill=PrefillSpeed(500))


def test_what_one_process_learnt_is_where_the_next_begins() -> None:
    judge = Judge()
    judge.link.estimator.add(10_000, 0.0, 1.0)
    judge.link.latency_s = 0.02
    judge.note_prefill(0, 1000, 2.0)
    judge.note_decode("tide-1", 1000, 0.5)
    later = Judge()
    later.restore(msgspec.json.decode(msgspec.json.encode(judge.record()), type=JudgeRecord))
    assert later.decide(TEN, "tide-1", 0.0) == judge.decide(TEN, "tide-1", 0.0)
    assert (later.deadline_s(1000), later.latency_s()) == (pytest.approx(2.0), 0.02)
    later.note_prefill(0, 1000, 4.0)
    assert later.deadline_s(1000) == pytest.approx(4.0), "what this process measured counts"


def test_stream_that_was_too_slow_gets_another_chance() -> None:
    """Nobody measures a link that is left alone."""
    judge = Judge()
    judge.restore(JudgeRecord(bytes_per_s=10.0))
    whys = [judge.decide(TEN, "tide-1", now_s).why for now_s in (0.0, MEMORY_S, MEMORY_S + 1, MEMORY_S + 2)]
    assert whys == [Why.LINK_SLOWER, Why.LINK_SLOWER, Why.UNKNOWN_LINK, Why.LINK_SLOWER]


def test_latency_alone_can_decide_for_recomputing_and_decoding_where_it_is_slower_than_the_link() -> None:
    assert decide(EVEN, 1e9, latency_s=0.1).why is Why.LINK_FASTER
    assert decide(EVEN, 1e9, latency_s=4.0).why is Why.LINK_SLOWER
    quick, slow = decide(TEN, 1e6), decide(TEN, 1e6, decode_token_s=0.01)
    assert (quick.why, slow.why) == (Why.LINK_FASTER, Why.LINK_SLOWER)
    assert slow.load_s == pytest.approx(quick.load_s + 10.0)


NAN, INF = math.nan, math.inf
FIVE = Chunk(0, 5, (1,), (0.0,))


def of_chunks(*chunks: Chunk) -> Request:
    return Request(chunks, True, SPEED, 1.0)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (of_chunks, [()], "1 to 8192 chunks"),
        (of_chunks, [(Chunk(1, 2, (1,), (0.0,)),), (Chunk(0, 0, (1,), (0.0,)),)], "starts at token 0"),
        (of_chunks, [(FIVE, Chunk(6, 7, (1,), (0.0,)))], "starts at token 5"),
        (of_chunks, [(Chunk(0, 5, (), ()),)], "expected 0 steps"),
        (of_chunks, [(Chunk(0, 5, (1, 1), (0.0,)),)], "expected 2 steps"),
        (of_chunks, [(FIVE, Chunk(5, 7, (1, 1), (0.0, 0.0)))], "expected 1 steps"),
        (of_chunks, [(Chunk(0, 5, (0,), (0.0,)),)], "every step has bytes"),
        (of_chunks, [(Chunk(0, 5, (1, 1), (0.1, 0.2)),), (Chunk(0, 5, (1,), (NAN,)),)], "lose no more"),
        (partial(Request, CHUNKS, True, SPEED), [(-1.0, 0.0), (NAN, 0.0), (1.0, -0.1), (INF, 0.0)], "deadline|KL goal"),
        (PrefillSpeed, [(0, 1), (-1, 1), (INF, 1), (1, 0), (NAN, 1), (1, NAN)], "must be positive"),
        (cut, [(0, 1), (1, 0)], "at least one token"),
        (cut_for_meeting, [(1000, 200, SPEED, 1.0, 100)], "1 to 100 tokens"),
        (PrefillMeter().note, [(0, 0, 1.0), (5, 3, 1.0), (-1, 3, 1.0), (0, 5, 0.0), (0, 5, NAN)], "takes time"),
        (JudgeRecord, [(-1.0,), (1.0, NAN), (1.0, 1.0, INF)], "finite and not negative"),
    ],
)
def test_figures_that_can_not_be_are_refused(
    make: Callable[..., object], arguments: list[tuple[Any, ...]], message: str
) -> None:
    for given_ in arguments:
        with pytest.raises(ValueError, match=message):
            make(*given_)


# Streaming policies: what every one must do, and what each does by itself.


@st.composite
def requests(draw: st.DrawFn, is_layered: bool) -> Request:
    """Draw requests of a few chunks and steps, with every kind of deadline and goal."""
    steps = draw(st.integers(1, 5))
    chunks, position = [], 0
    for tokens in draw(st.lists(st.integers(1, 2000), min_size=1, max_size=9)):
        sizes = draw(st.lists(st.integers(1, 10**6), min_size=steps, max_size=steps))
        losses = draw(st.lists(st.floats(0, 1), min_size=steps, max_size=steps))
        if not is_layered:
            sizes.sort()
        chunks.append(Chunk(position, position + tokens, tuple(sizes), tuple(sorted(losses, reverse=True))))
        position += tokens
    speed = PrefillSpeed(draw(st.floats(100, 10_000)), draw(st.floats(1000, 100_000)))
    return Request(tuple(chunks), is_layered, speed, draw(st.floats(0, 5)), draw(st.sampled_from([0.0, 0.01, 0.5])))


every_policy = pytest.mark.parametrize("policy", [make() for make in POLICIES.values()], ids=[*POLICIES])


@every_policy
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_plan_is_sound_and_the_same_again_and_planning_ends(policy: StreamPolicy, data: st.DataObject) -> None:
    request = data.draw(requests(not isinstance(policy, CachegenRule)))
    is_begun = data.draw(st.booleans())
    here = tuple(data.draw(st.integers(0, is_begun * request.steps)) for _ in request.chunks)
    progress = Progress(data.draw(st.floats(0, is_begun * 6)), here, here, is_layered=request.is_layered)
    flying: deque[Fetch] = deque()
    given: deque[int] = deque()
    # Each step is asked for once, each chunk computed once, and time passes once by itself.
    for _ in range(2 * len(request.chunks) * (request.steps + 1) + 8):
        plan = policy.plan(request, progress)
        assert policy.plan(request, progress) == plan
        check(policy, request, progress, plan)
        if not plan.fetches and not plan.computes and not flying and not given:
            break
        for fetch in plan.fetches[: data.draw(st.integers(1, PLAN_FETCHES_MAX))]:
            progress = progress.asking(fetch)
            flying.append(fetch)
        progress = progress.assigning(plan.computes)
        given.extend(plan.computes)
        progress = something_ends(data, progress, flying, given)
    assert not flying
    assert not given
    assert all(progress.is_usable(chunk) for chunk in range(len(request.chunks)))
    assert is_ready(request, progress.at(1e9, None))


def check(policy: StreamPolicy, request: Request, progress: Progress, plan: Plan) -> None:
    asked, early = list(progress.asked), set(progress.early)
    assert len(plan.fetches) <= PLAN_FETCHES_MAX
    for fetch in plan.fetches:
        assert 0 <= fetch.step < request.steps
        # Refinements in order, from what is asked for, or each once; of levels only one.
        assert fetch not in early
        if isinstance(policy, DeltasFirstWhenSlow) and fetch.step > asked[fetch.chunk]:
            early.add(fetch)
            continue
        assert asked[fetch.chunk] == (fetch.step if request.is_layered else 0)
        assert fetch.chunk not in progress.computed
        assert progress.now_s < request.deadline_s or not progress.is_usable(fetch.chunk)
        asked[fetch.chunk] = following(fetch, frozenset(early)).step
    assert len(set(plan.computes)) == len(plan.computes)
    assert not progress.assigned.intersection(plan.computes)
    assert all(0 <= chunk < len(request.chunks) for chunk in plan.computes)


def something_ends(data: st.DataObject, progress: Progress, flying: deque[Fetch], given: deque[int]) -> Progress:
    seconds, rate = data.draw(st.floats(0, 2)), data.draw(st.none() | st.floats(1, 1e9))
    progress = progress.at(progress.now_s + seconds, rate)
    if given and (not flying or data.draw(st.booleans())):
        return progress.computing_done(given.popleft())
    return progress.arrived(flying.popleft()) if flying else progress


def asked(request: Request, policy: StreamPolicy, plans: int, start: Progress | None = None) -> list[Fetch]:
    """Ask for whole plans, nothing arrives."""
    progress, fetches = start or Progress.start(request), []
    for _ in range(plans):
        for fetch in policy.plan(request, progress).fetches:
            progress = progress.asking(fetch)
            fetches.append(fetch)
    return fetches


@pytest.mark.parametrize(
    ("rate", "level", "reason"),
    [(600.0, 2, Reason.LEVEL), (599.0, 1, Reason.LEVEL), (200.0, 0, Reason.LEVEL), (199.0, 0, Reason.SMALLEST)],
)
def test_cachegen_takes_the_best_level_with_which_the_rest_fits(rate: float, level: int, reason: Reason) -> None:
    request = context(3, (100, 200, 300), (0.3, 0.2, 0.1), 1.5, is_layered=False)
    progress = Progress(0.5, (1, 0, 0), (1, 0, 0), bytes_per_s=rate)
    assert CachegenRule().plan(request, progress) == ((Fetch(1, level),), (), reason)


def test_cachegen_begins_with_a_middle_level_and_waits_for_the_rate_of_what_is_under_way() -> None:
    request = context(3, (100, 200, 300, 400), (0.4, 0.3, 0.2, 0.1), 1.0, is_layered=False)
    assert CachegenRule().plan(request, Progress.start(request)) == ((Fetch(0, 1),), (), Reason.FIRST)
    request = context(3, (10, 20, 30), (0.5, 0.2, 0.1), 0.1, is_layered=False)
    under_way = Progress.start(request).asking(Fetch(0, 1))
    assert CachegenRule().plan(request, under_way) == ((), (), Reason.WAIT)
    assert CachegenRule().plan(request, under_way.arrived(Fetch(0, 1)).at(0.05, 1000.0)).fetches == (Fetch(1, 1),)


def test_cachegen_sends_text_as_soon_as_recomputing_the_rest_fits() -> None:
    request = context(4, (100, 200), (0.2, 0.1), 2.5, is_layered=False)
    progress = Progress(0.5, (1, 1, 0, 0), (1, 1, 0, 0), bytes_per_s=1e9)
    assert CachegenRule().plan(request, progress) == ((), (2, 3), Reason.TEXT)
    assert CachegenRule().plan(request, progress.at(0.6, 1e9)).reason is Reason.LEVEL


def test_layered_refines_by_quality_per_byte() -> None:
    # The second chunk's refinements gain three times as much a byte as the first's.
    cheap, dear = (10, 10, 20), (10, 30, 60)
    chunks = (Chunk(0, 100, dear, (0.9, 0.5, 0.1)), Chunk(100, 200, cheap, (0.9, 0.5, 0.1)))
    request = Request(chunks, True, SPEED, 1.0)
    order = [Fetch(0, 0), Fetch(1, 0), Fetch(1, 1), Fetch(1, 2), Fetch(0, 1), Fetch(0, 2)]
    assert asked(request, Layered(), 3) == order


def test_layered_looks_past_a_step_that_gains_nothing_itself() -> None:
    late = Chunk(0, 100, (10, 10, 10), (0.9, 0.9, 0.1))
    early = Chunk(100, 200, (10, 10, 10), (0.9, 0.6, 0.5))
    request = Request((late, early), True, SPEED, 1.0)
    assert asked(request, Layered(), 3)[2:] == [Fetch(0, 1), Fetch(0, 2), Fetch(1, 1), Fetch(1, 2)]


def test_anchors_of_all_come_before_single_deltas_of_each_and_over_slow_links_behind_them() -> None:
    request = context(2, (9, 3, 3), (0.9, 0.5, 0.1), 1.0)
    deltas, anchors = [(0, 1), (0, 2), (1, 1), (1, 2)], [(0, 0), (1, 0)]
    assert asked(request, AnchorFirst(), 3) == anchors + deltas
    slow = Progress.start(request).at(0.5, 59.0)
    assert asked(request, DeltasFirstWhenSlow(), 3, slow) == deltas + anchors
    fast = Progress.start(request).at(0.5, 60.0)
    assert DeltasFirstWhenSlow().plan(request, fast) == AnchorFirst().plan(request, fast)


def test_what_was_asked_for_early_is_not_asked_for_again() -> None:
    request = context(1, (9, 3, 3, 3), (0.9, 0.5, 0.2, 0.1), 1.0)
    progress = Progress.start(request).asking(Fetch(0, 2)).asking(Fetch(0, 0))
    assert progress.asked == (1,)
    assert AnchorFirst().plan(request, progress).fetches == ((0, 1), (0, 3))
    assert progress.asking(Fetch(0, 1)).asked == (3,)


def test_two_ended_loads_from_the_end_what_the_engine_does_not_reach() -> None:
    # 2.2 s at 95 % of 1,000 tokens/s: two chunks are the engine's, and are loaded last of all.
    request = context(5, (100, 100), (0.5, 0.1), 2.2)
    plan = TwoEnded().plan(request, Progress.start(request))
    assert plan.computes == (0,)
    bases, refinements, reserve = [(4, 0), (3, 0), (2, 0)], [(4, 1), (3, 1), (2, 1)], [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert asked(request, TwoEnded(), 4) == bases + refinements + reserve
    # With a goal it meets as early as it can.
    request = context(3, (100, 100), (0.5, 0.1), 2.2, kl_goal=0.2)
    assert asked(request, TwoEnded(), 1) == [(2, 0), (1, 0), (0, 0)]


def test_two_ended_has_short_chunks_computed_in_one_pass() -> None:
    request = context(8, (10,), (0.1,), 0.0, tokens=100)
    # No more than 256 tokens, half of what nobody has begun with, what ends by the deadline.
    assert TwoEnded().plan(request, Progress.start(request)).computes == (0, 1)
    met = Progress(0.0, (0,) * 8, (0, 0, 0, 1, 1, 1, 1, 1))
    assert TwoEnded().plan(request, met).computes == (0,)
    # With a reserve: a pass that the deadline cuts off is lost.
    assert TwoEnded().plan(replace(request, deadline_s=0.26), met).computes == (0, 1)
    assert TwoEnded().plan(replace(request, deadline_s=0.24), met).computes == (0,)


@pytest.mark.parametrize("goal", [0.0, 0.2])
def test_two_ended_begins_no_pass_that_the_deadline_cuts_off(goal: float) -> None:
    # 0.1 s a chunk: half of what nobody has begun with is more than ends in time, whether a goal may come first or not.
    for deadline_s, computes in ((0.13, (0,)), (0.26, (0, 1))):
        request = context(8, (10, 10), (0.3, 0.1), deadline_s, goal, tokens=100)
        assert TwoEnded().plan(request, Progress.start(request)).computes == computes


def test_two_ended_computes_whole_passes_while_nothing_comes_and_leaves_the_last_one() -> None:
    request = context(12, (10,), (0.1,), 0.0, tokens=50)

    def planned(computed: int, coming_s: float | None) -> Plan:
        done = frozenset(range(computed))
        progress = Progress(1.0, (0,) * 12, (0,) * 11 + (1,), done, done, None, coming_s)
        return TwoEnded().plan(request, progress)

    assert planned(4, None).computes == planned(4, 1.2).computes == (4, 5, 6)
    assert planned(4, 1.26).computes == (4, 5, 6, 7, 8)
    assert planned(7, 1.24).computes == (7, 8)
    assert planned(7, 1.25) == planned(7, math.inf) == ((), (), Reason.LEFT)
    # A link that is down may come back before the deadline.
    assert TwoEnded().plan(replace(request, deadline_s=9.0), Progress.start(request)).reason is not Reason.LEFT


def test_what_is_asked_for_is_expected_at_its_pace() -> None:
    assert expected_s(1.05, 1.0, 100, 50, 0.0) is None
    assert expected_s(1.5, 1.0, 100, 75, 0.3) is None
    assert expected_s(1.5, 1.0, 100, 75, 0.1) == pytest.approx(3.0)
    assert expected_s(1.5, 1.0, 100, 100, 0.1) == math.inf


def test_pass_is_neighbours_of_so_many_tokens() -> None:
    request = context(8, (10,), (0.1,), 0.0, tokens=100)
    assert leading_pass(request, [2, 3, 4, 5]) == (2, 3)
    assert leading_pass(request, [2, 4]) == (2,)
    assert leading_pass(request, []) == ()
    assert leading_pass(context(2, (1,), (0.0,), 1.0), [0, 1]) == (0,)


def test_two_ended_computes_over_what_is_loaded_only_if_it_ends_in_time() -> None:
    request = context(2, (100, 100), (0.5, 0.1), 2.0)
    progress = Progress(1.0, (1, 1), (1, 1))
    assert TwoEnded().plan(request, progress).computes == (0,)
    assert TwoEnded().plan(request, progress.at(1.01, None)).computes == ()
    # And what never comes on top of what is loaded.
    request = context(4, (100, 100), (0.5, 0.1), 2.0)
    late = Progress(9.0, (1, 0, 1, 0), (1, 1, 1, 1))
    assert TwoEnded().plan(request, late) == ((), (1,), Reason.LATE)
    later = late.assigning([1]).computing_done(1)
    assert TwoEnded().plan(request, later).computes == (3,)


@every_policy
def test_other_kind_of_context_is_refused(policy: StreamPolicy) -> None:
    is_by_level = isinstance(policy, CachegenRule)
    request = context(1, (1,), (0.0,), 1.0, is_layered=is_by_level)
    with pytest.raises(ValueError, match="stored in levels" if is_by_level else "expected a layered context"):
        policy.plan(request, Progress.start(request))
