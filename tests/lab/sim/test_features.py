"""What a ranking could be told, measured alone."""

from __future__ import annotations

import pytest

from kvtide_lab.sim import Trace, TraceSource, build_trace, joined, made_trace, replay
from kvtide_lab.sim.features import KNOWS, run_features
from kvtide_lab.sim.hints import FACTS, carries, said_of


def told_trace() -> Trace:
    """Return sessions of two requests of which those that say so go on, between others that do not."""
    sources = []
    for number in range(600):
        kind = "tool" if number % 3 == 0 else "text"
        sources.append(TraceSource(10.0 * number, "a", [(number, at) for at in range(4)], {"answer": kind}))
        if kind == "tool":
            longer = [(number, at) for at in range(6)]
            sources.append(TraceSource(10.0 * number + 85.0, "a", longer, {"answer": "text"}))
    return build_trace("told", 16, sources)


def test_fact_that_tells_who_goes_on_pays_and_nothing_else_is_measured_of_what_the_trace_lacks() -> None:
    report = run_features([(told_trace(), 0.007)], "reuse", list(FACTS))
    assert [row.feature for row in report.rows] == ["answer"]
    assert report.means[0].pays
    assert report.rows[0].without == pytest.approx(replay(told_trace(), "reuse", 19).hit_rate)


def test_sizes_pay_where_tenants_differ_and_need_two_of_them() -> None:
    both = joined([made_trace("templates", 500), made_trace("drift", 500)])
    assert run_features([(both, 0.05)], "reuse", ["size"]).means[0].pays
    assert not run_features([(made_trace("drift", 300), 0.05)], "reuse", ["size"]).rows


def test_branch_that_a_named_session_left_is_said_once() -> None:
    prompts = [[1, 2, 3], [1, 2, 3, 4], [1, 5], [1, 5, 6]]
    trace = build_trace("t", 16, [TraceSource(float(at), "a", p, {"session": "s"}) for at, p in enumerate(prompts)])
    assert [said.left for said in said_of(trace, "left")] == [None, None, trace.requests[1].keys[-1], None]
    assert not carries(trace, "role")
    with pytest.raises(ValueError, match="t does not say role"):
        said_of(trace, "role")


def test_unknown_feature_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"expected one of {', '.join(KNOWS)}"):
        run_features([], "mix", ["wish"])
