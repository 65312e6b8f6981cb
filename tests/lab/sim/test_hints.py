"""Advice derived from a trace: who goes on, who does not, and what a policy makes of it."""

from __future__ import annotations

import pytest

from kvtide_lab.sim.hints import HINTS, hints_of
from kvtide_lab.sim.made import made_trace
from kvtide_lab.sim.replay import replay
from kvtide_lab.sim.workload import TraceSource, build_trace

TRACE = build_trace(
    "three sessions",
    16,
    [
        TraceSource(0.0, "a", [1, 2, 3]),
        TraceSource(1.0, "a", [4, 5, 6]),
        # The last block of the turn before was filled in part.
        TraceSource(2.0, "a", [1, 2, 7, 8]),
        TraceSource(3.0, "b", [4, 5, 6, 9]),
    ],
)


def test_ends_are_requests_that_no_longer_one_of_the_tenant_goes_on_from() -> None:
    assert [hint.is_last for hint in hints_of(TRACE, "ends")] == [False, True, True, True]
    assert [hint.is_last for hint in hints_of(TRACE, "lies")] == [True, False, False, False]
    assert [hint.is_last for hint in hints_of(TRACE, "turncoat")] == [False, True, False, False]


def test_retention_comes_from_earlier_gaps_alone() -> None:
    turns = [TraceSource(100.0 * n + 40.0 * turn, "a", [n, *range(2 + turn)]) for n in range(30) for turn in range(2)]
    firsts = [hint.retain_s for hint in hints_of(build_trace("turns", 16, turns), "retain")][::2]
    assert firsts[0] is None
    assert firsts[-1] == pytest.approx(40.0)


@pytest.mark.parametrize("kind", HINTS)
def test_policy_that_takes_no_advice_is_not_changed_by_it(kind: str) -> None:
    trace = made_trace("sessions", 200)
    assert replay(trace, "lru", 50, hints=kind) == replay(trace, "lru", 50)


def test_true_ends_help_and_lies_cost_little() -> None:
    trace = made_trace("sessions", 1500)
    plain, told, lied = (replay(trace, "reuse", 250, hints=kind).hit_rate for kind in (None, "ends", "lies"))
    assert told > plain
    assert lied > plain - 0.01


def test_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="ends, retain, lies, turncoat"):
        hints_of(TRACE, "wishes")
