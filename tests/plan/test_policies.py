"""Streaming policies: what every one must do, and what each does by itself."""

import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.plan import PrefillSpeed
from kvtide.plan.base import (
    PLAN_FETCHES_MAX,
    Chunk,
    Fetch,
    Plan,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    expected_s,
    following,
    is_ready,
    leading_pass,
)
from kvtide.plan.policies import AnchorFirst, CachegenRule, DeltasFirstWhenSlow, Layered, TwoEnded


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


every_policy = pytest.mark.parametrize(
    "policy",
    [CachegenRule(), Layered(), AnchorFirst(), DeltasFirstWhenSlow(), TwoEnded()],
    ids=lambda each: type(each).__name__,
)


def is_layered(policy: StreamPolicy) -> bool:
    """Tell whether a policy takes refinements, and not levels."""
    return not isinstance(policy, CachegenRule)


@every_policy
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_plan_is_sound_and_planning_ends(policy: StreamPolicy, data: st.DataObject) -> None:
    request = data.draw(requests(is_layered(policy)))
    progress = Progress.start(request)
    flying: deque[Fetch] = deque()
    given: deque[int] = deque()
    # Each step is asked for once, each chunk computed once, and time passes once by itself.
    for _ in range(2 * len(request.chunks) * (request.steps + 1) + 8):
        plan = policy.plan(request, progress)
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


@every_policy
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_asks_for_nothing_that_is_here_already(policy: StreamPolicy, data: st.DataObject) -> None:
    request = data.draw(requests(is_layered(policy)))
    here = tuple(data.draw(st.integers(0, request.steps)) for _ in request.chunks)
    progress = Progress(data.draw(st.floats(0, 6)), here, here, is_layered=request.is_layered)
    check(policy, request, progress, policy.plan(request, progress))


@every_policy
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_same_state_gives_same_plan(policy: StreamPolicy, data: st.DataObject) -> None:
    request = data.draw(requests(is_layered(policy)))
    first, again = (policy.plan(request, Progress.start(request)) for _ in range(2))
    assert first == again
    assert first.fetches or first.computes


SPEED = PrefillSpeed(1000)


def context(
    chunks: int,
    sizes: tuple[int, ...],
    kl: tuple[float, ...],
    deadline_s: float,
    kl_goal: float = 0.0,
    is_layered: bool = True,
) -> Request:
    cut = tuple(Chunk(1000 * i, 1000 * i + 1000, sizes, kl) for i in range(chunks))
    return Request(cut, is_layered, SPEED, deadline_s, kl_goal)


def asked(request: Request, policy: StreamPolicy, plans: int) -> list[Fetch]:
    """Ask for whole plans, nothing arrives."""
    progress, fetches = Progress.start(request), []
    for _ in range(plans):
        for fetch in policy.plan(request, progress).fetches:
            progress = progress.asking(fetch)
            fetches.append(fetch)
    return fetches


def test_cachegen_begins_with_a_middle_level() -> None:
    request = context(3, (100, 200, 300, 400), (0.4, 0.3, 0.2, 0.1), 1.0, is_layered=False)
    assert CachegenRule().plan(request, Progress.start(request)) == ((Fetch(0, 1),), (), Reason.FIRST)


@pytest.mark.parametrize(
    ("rate", "level", "reason"),
    [(600.0, 2, Reason.LEVEL), (599.0, 1, Reason.LEVEL), (200.0, 0, Reason.LEVEL), (199.0, 0, Reason.SMALLEST)],
)
def test_cachegen_takes_the_best_level_with_which_the_rest_fits(rate: float, level: int, reason: Reason) -> None:
    request = context(3, (100, 200, 300), (0.3, 0.2, 0.1), 1.5, is_layered=False)
    progress = Progress(0.5, (1, 0, 0), (1, 0, 0), bytes_per_s=rate)
    assert CachegenRule().plan(request, progress) == ((Fetch(1, level),), (), reason)


def test_cachegen_waits_for_the_rate_of_what_is_under_way() -> None:
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


def test_anchors_of_all_come_before_single_deltas_of_each() -> None:
    request = context(2, (9, 3, 3), (0.9, 0.5, 0.1), 1.0)
    steps = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert asked(request, AnchorFirst(), 3) == steps


def test_slow_links_bring_single_deltas_and_then_anchors() -> None:
    request = context(2, (9, 3, 3), (0.9, 0.5, 0.1), 1.0)
    deltas, anchors = [(0, 1), (0, 2), (1, 1), (1, 2)], [(0, 0), (1, 0)]
    slow = Progress.start(request).at(0.5, 59.0)
    planned = []
    for _ in range(3):
        for fetch in DeltasFirstWhenSlow().plan(request, slow).fetches:
            slow = slow.asking(fetch)
            planned.append(fetch)
    assert planned == deltas + anchors
    assert slow.asked == (3, 3)
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


def test_two_ended_has_short_chunks_computed_in_one_pass() -> None:
    chunks = tuple(Chunk(100 * i, 100 * i + 100, (10,), (0.1,)) for i in range(8))
    request = Request(chunks, True, SPEED, 0.0)
    # No more than 256 tokens, half of what nobody has begun with, what ends by the deadline.
    assert TwoEnded().plan(request, Progress.start(request)).computes == (0, 1)
    met = Progress(0.0, (0,) * 8, (0, 0, 0, 1, 1, 1, 1, 1))
    assert TwoEnded().plan(request, met).computes == (0,)
    # With a reserve: a pass that the deadline cuts off is lost.
    assert TwoEnded().plan(Request(chunks, True, SPEED, 0.26), met).computes == (0, 1)
    assert TwoEnded().plan(Request(chunks, True, SPEED, 0.24), met).computes == (0,)


@pytest.mark.parametrize("goal", [0.0, 0.2])
def test_two_ended_begins_no_pass_that_the_deadline_cuts_off(goal: float) -> None:
    # 0.1 s a chunk: half of what nobody has begun with is more than ends in time, whether a goal may come first or not.
    chunks = tuple(Chunk(100 * i, 100 * i + 100, (10, 10), (0.3, 0.1)) for i in range(8))
    start = Progress.start(Request(chunks, True, SPEED, 0.13, goal))
    assert TwoEnded().plan(Request(chunks, True, SPEED, 0.13, goal), start).computes == (0,)
    assert TwoEnded().plan(Request(chunks, True, SPEED, 0.26, goal), start).computes == (0, 1)


def test_two_ended_computes_whole_passes_while_nothing_comes_and_leaves_the_last_one() -> None:
    chunks = tuple(Chunk(50 * i, 50 * i + 50, (10,), (0.1,)) for i in range(12))
    request = Request(chunks, True, SPEED, 0.0)

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
    chunks = tuple(Chunk(100 * i, 100 * i + 100, (10,), (0.1,)) for i in range(8))
    request = Request(chunks, True, SPEED, 0.0)
    assert leading_pass(request, [2, 3, 4, 5]) == (2, 3)
    assert leading_pass(request, [2, 4]) == (2,)
    assert leading_pass(request, []) == ()
    assert leading_pass(context(2, (1,), (0.0,), 1.0), [0, 1]) == (0,)


def test_two_ended_with_a_goal_meets_as_early_as_it_can() -> None:
    request = context(3, (100, 100), (0.5, 0.1), 2.2, kl_goal=0.2)
    assert asked(request, TwoEnded(), 1) == [(2, 0), (1, 0), (0, 0)]


def test_two_ended_computes_over_what_is_loaded_only_if_it_ends_in_time() -> None:
    request = context(2, (100, 100), (0.5, 0.1), 2.0)
    progress = Progress(1.0, (1, 1), (1, 1))
    assert TwoEnded().plan(request, progress).computes == (0,)
    assert TwoEnded().plan(request, progress.at(1.01, None)).computes == ()


def test_two_ended_races_the_link_for_what_is_not_here() -> None:
    request = context(2, (100, 100), (0.5, 0.1), 2.0)
    late = Progress(9.0, (0, 1), (1, 1))
    assert TwoEnded().plan(request, late) == ((), (0,), Reason.LATE)


def test_two_ended_computes_what_never_comes_on_top_of_what_is_loaded() -> None:
    request = context(4, (100, 100), (0.5, 0.1), 2.0)
    late = Progress(9.0, (1, 0, 1, 0), (1, 1, 1, 1))
    assert TwoEnded().plan(request, late).computes == (1,)
    later = late.assigning([1]).computing_done(1)
    assert TwoEnded().plan(request, later).computes == (3,)


def test_after_the_deadline_only_bases_are_asked_for() -> None:
    request = context(3, (100, 100), (0.5, 0.1), 2.0)
    late = Progress(2.0, (1, 0, 1), (1, 0, 1))
    assert Layered().plan(request, late) == ((Fetch(1, 0),), (), Reason.LATE)


def test_the_rule_refuses_layered_contexts() -> None:
    request = context(1, (1,), (0.0,), 1.0)
    with pytest.raises(ValueError, match="stored in levels"):
        CachegenRule().plan(request, Progress.start(request))


@pytest.mark.parametrize("policy", [Layered(), AnchorFirst(), DeltasFirstWhenSlow(), TwoEnded()])
def test_layered_policies_refuse_levels(policy: StreamPolicy) -> None:
    request = context(1, (1,), (0.0,), 1.0, is_layered=False)
    with pytest.raises(ValueError, match="expected a layered context"):
        policy.plan(request, Progress.start(request))
