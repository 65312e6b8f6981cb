"""What every streaming policy must do. Inherit and give the policy."""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.plan import PrefillSpeed
from kvtide.plan.base import PLAN_FETCHES_MAX, Chunk, Fetch, Plan, Progress, Request, StreamPolicy, following, is_ready

# One test inherited by many classes, none of which keeps anything: examples of one are good for all.
_inherited = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


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


class PlanSuite:
    """Conformance of a policy, driven through any order of events."""

    is_layered = True
    # Whether refinements may be asked for before those that come before them.
    is_early = False

    policy: StreamPolicy

    def policy_for(self, request: Request) -> StreamPolicy:
        """Return the policy under test."""
        return self.policy

    @_inherited
    @given(data=st.data())
    def test_every_plan_is_sound_and_planning_ends(self, data: st.DataObject) -> None:
        request = data.draw(requests(self.is_layered))
        policy, progress = self.policy_for(request), Progress.start(request)
        flying: deque[Fetch] = deque()
        given: deque[int] = deque()
        # Each step is asked for once, each chunk computed once, and time passes once by itself.
        for _ in range(2 * len(request.chunks) * (request.steps + 1) + 8):
            plan = policy.plan(request, progress)
            self._check(request, progress, plan)
            if not plan.fetches and not plan.computes and not flying and not given:
                break
            for fetch in plan.fetches[: data.draw(st.integers(1, PLAN_FETCHES_MAX))]:
                progress = progress.asking(fetch)
                flying.append(fetch)
            progress = progress.assigning(plan.computes)
            given.extend(plan.computes)
            progress = self._something_ends(data, progress, flying, given)
        assert not flying
        assert not given
        assert all(progress.is_usable(chunk) for chunk in range(len(request.chunks)))
        assert is_ready(request, progress.at(1e9, None))

    def _check(self, request: Request, progress: Progress, plan: Plan) -> None:
        asked, early = list(progress.asked), set(progress.early)
        assert len(plan.fetches) <= PLAN_FETCHES_MAX
        for fetch in plan.fetches:
            assert 0 <= fetch.step < request.steps
            # Refinements in order, from what is asked for, or each once; of levels only one.
            assert fetch not in early
            if self.is_early and fetch.step > asked[fetch.chunk]:
                early.add(fetch)
                continue
            assert asked[fetch.chunk] == (fetch.step if request.is_layered else 0)
            assert fetch.chunk not in progress.computed
            assert progress.now_s < request.deadline_s or not progress.is_usable(fetch.chunk)
            asked[fetch.chunk] = following(fetch, frozenset(early)).step
        assert len(set(plan.computes)) == len(plan.computes)
        assert not progress.assigned.intersection(plan.computes)
        assert all(0 <= chunk < len(request.chunks) for chunk in plan.computes)

    @staticmethod
    def _something_ends(data: st.DataObject, progress: Progress, flying: deque[Fetch], given: deque[int]) -> Progress:
        seconds, rate = data.draw(st.floats(0, 2)), data.draw(st.none() | st.floats(1, 1e9))
        progress = progress.at(progress.now_s + seconds, rate)
        if given and (not flying or data.draw(st.booleans())):
            return progress.computing_done(given.popleft())
        return progress.arrived(flying.popleft()) if flying else progress

    @_inherited
    @given(data=st.data())
    def test_asks_for_nothing_that_is_here_already(self, data: st.DataObject) -> None:
        request = data.draw(requests(self.is_layered))
        here = tuple(data.draw(st.integers(0, request.steps)) for _ in request.chunks)
        progress = Progress(data.draw(st.floats(0, 6)), here, here, is_layered=self.is_layered)
        self._check(request, progress, self.policy_for(request).plan(request, progress))

    @_inherited
    @given(data=st.data())
    def test_same_state_gives_same_plan(self, data: st.DataObject) -> None:
        request = data.draw(requests(self.is_layered))
        policy = self.policy_for(request)
        first, again = (policy.plan(request, Progress.start(request)) for _ in range(2))
        assert first == again
        assert first.fetches or first.computes
