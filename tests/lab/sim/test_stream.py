from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_plan import context

from kvtide.plan.base import Request, StreamPolicy
from kvtide.plan.policies import CachegenRule, Layered, TwoEnded
from kvtide_lab.sim import stream
from kvtide_lab.sim.curves import CURVES
from kvtide_lab.sim.links import GBIT, LINK_MODELS, Link, link_named, read_link

STEADY = Link("steady", [0, 100], [0, 10_000])


def played(policy: StreamPolicy, request: Request, link: Link = STEADY, latency_s: float = 0.0) -> stream.Outcome:
    return stream.play(policy, request, link, 0.0, stream.Costs(latency_s))


def test_layered_uses_the_time_and_drops_what_comes_late() -> None:
    # Four bases by 2 s, refinements of 0.6 s each: one in time, 30 bytes of the second in vain.
    assert played(Layered(), context(4, (50, 60), (0.5, 0.1), 2.9))[:4] == (2.9, pytest.approx(0.4), 0, 30)


def test_two_ended_meets_in_the_middle_when_it_is_late() -> None:
    # A second a chunk at both ends.
    found = played(TwoEnded(), context(4, (100, 60), (0.5, 0.1), 0.5))
    assert found[:4] == (pytest.approx(2.0), pytest.approx(0.25), 2000, 0)


def test_cachegen_computes_text_behind_what_is_loaded() -> None:
    # The first chunk at the middle level by 2 s, the other three are then text: exactly 3 s more.
    request = context(4, (100, 200, 300), (0.5, 0.2, 0.1), 5.0, is_layered=False)
    assert played(CachegenRule(), request)[:4] == (pytest.approx(4.0), 0.0, 4000, 0)
    late = context(4, (100, 200, 300), (0.5, 0.2, 0.1), 3.9, is_layered=False)
    assert played(CachegenRule(), late).computed_tokens == 0


def test_fixed_level_takes_what_its_bytes_take_and_costs_of_a_machine_take_their_time() -> None:
    request = context(4, (50, 100), (0.5, 0.1), 2.0, is_layered=False)
    assert played(stream.FixedLevel(1), request, latency_s=0.5)[:4] == (pytest.approx(4.5), pytest.approx(0.1), 0, 0)
    costs = stream.Costs(0.5, decode_token_s=(0.0001, 0.0005))
    assert stream.play(stream.FixedLevel(1), request, STEADY, 0.0, costs).ready_s == pytest.approx(4.5 + 4000 * 0.0005)
    # The first chunk by 0.5 s, decoded by 1 s, then the other three as text.
    text = context(4, (25, 50, 75), (0.5, 0.2, 0.1), 3.9, is_layered=False)
    costs = stream.Costs(0.0, decode_token_s=(0.0001, 0.0005, 0.001))
    assert stream.play(CachegenRule(), text, STEADY, 0.0, costs).ready_s == pytest.approx(4.0)


@pytest.mark.parametrize("name", ["uniform", "ar1", "lte"])
@pytest.mark.parametrize(("tokens", "slo_s"), [(9600, 1.0), (32_000, 2.0)])
def test_nobody_beats_the_oracle_and_two_ended_halves_what_the_rule_loses(name: str, tokens: int, slo_s: float) -> None:
    setup = stream.StreamSetup(trials=10, context_tokens=(tokens,), slo_s=(slo_s,), decode_cores=0)
    links = [link_named(name, np.random.default_rng(3), 2 * GBIT)]
    rows = stream.sweep(setup, links, ["cachegen", "layered", "two-ended"])
    by_name = {row.policy: row for row in rows}
    bound = by_name.pop(stream.ORACLE)
    assert all(row.miss_rate >= bound.miss_rate for row in rows)
    assert all(row.kl_mean + row.kl_copy_mean >= 0.99 * (bound.kl_mean + bound.kl_copy_mean) for row in rows)
    assert by_name["two-ended"].miss_rate == bound.miss_rate
    assert by_name["two-ended"].kl_mean <= by_name["cachegen"].kl_mean / 2


def test_newest_tokens_are_worth_more_than_old_ones() -> None:
    curve = CURVES["tide"]
    flat, newest, oldest = [1] * 150, [1] * 146 + [3] * 4, [1] * 4 + [3] * 4 + [1] * 142
    kls = [stream.losses(curve, 9600, kept) for kept in (flat, newest, oldest)]
    assert kls[1][0] < 0.7 * kls[0][0] < kls[2][0]
    assert stream.losses(curve, 9600, [4] * 150) == (0.0, 0.0)


def test_oracle_without_misses_uses_all_the_time() -> None:
    setup = stream.StreamSetup(latency_s=0.0)
    link = Link("steady", [0, 1000], [0, 1000 * GBIT])
    exact = stream.oracle(setup, CURVES["tide"], 9600, 2.5, link, 0.0)
    assert exact[:4] == (pytest.approx(setup.prefill.seconds(0, 9600)), 0.0, 9600, 0)
    rushed = stream.oracle(setup, CURVES["tide"], 32_000, 0.01, link, 0.0)
    assert rushed.ready_s > 0.01
    assert set(rushed.kept) == {0, 4}
    assert rushed.kept.count(4) == rushed.computed_tokens / stream.LAW_TOKENS


def test_report_names_the_best_of_ours_and_how_it_stands() -> None:
    def row(policy: str, miss_rate: float, kl: float) -> stream.StreamRow:
        return stream.StreamRow("a", 1, 1.0, policy, miss_rate, kl, kl, 1.0, 1.0, 0.0, 0.0)

    rows = [
        row("cachegen", 0.5, 0.2),
        row("layered", 0.2, 0.01),
        row("two-ended", 0.1, 0.1),
        row(stream.ORACLE, 0.08, 0.1),
    ]
    standing = stream.stream_report(stream.StreamSetup(), rows).standing
    assert (standing.policy, standing.halved_share) == ("two-ended", 1.0)
    assert standing.miss_over_oracle_max == pytest.approx(0.02)
    assert standing.miss_over_cachegen_max == pytest.approx(-0.4)
    assert stream.stream_report(stream.StreamSetup(), [row("fixed", 0, 0), row(stream.ORACLE, 0, 0)]).standing is None


def test_newest_block_is_refined_first_and_the_middle_last() -> None:
    found = CURVES["tide"].order(12, 256)
    assert found[:13] == [*((block, 0) for block in range(12)), (11, 1)]
    assert sorted(found) == [(block, refinement) for block in range(12) for refinement in range(4)]
    assert all(found.index((block, 2)) > found.index((block, 1)) for block in range(12))
    assert {0, 10} <= {block for block, refinement in found[12:20] if refinement == 1}


# Links that are measured or simulated.

# 100 bytes/s, a pause, 300 bytes/s, again and again.
STEPS = Link("steps", [0, 1, 2, 3], [0, 100, 100, 400])


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("start_s", "size", "arrival_s"), [(0, 50, 0.5), (0, 100, 1), (0, 101, 2 + 1 / 300), (1.5, 30, 2.1), (0, 450, 3.5)]
)
def test_bytes_arrive_when_the_link_has_carried_them(start_s: float, size: int, arrival_s: float) -> None:
    assert STEPS.arrival_s(start_s, size) == pytest.approx(arrival_s)


@given(st.floats(0, 50), st.floats(1, 5000))
def test_arrival_undoes_carried(start_s: float, size: float) -> None:
    stop_s = STEPS.arrival_s(start_s, size)
    assert STEPS.carried(stop_s) - STEPS.carried(start_s) == pytest.approx(size, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "spread", "gaps"), [("lte", (0.65, 1.05), (0.015, 0.075)), ("wifi", (0.6, 1.0), (0.0, 0.0))]
)
def test_models_of_radio_links_are_as_uneven_as_they_say(
    name: str, spread: tuple[float, float], gaps: tuple[float, float]
) -> None:
    link = link_named(name, np.random.default_rng(5), 1e6)
    rates = np.diff([link.carried(tenth / 10) for tenth in range(6000)]) / 0.1
    assert spread[0] < rates.std() / rates.mean() < spread[1]
    assert gaps[0] <= np.mean(rates < 1e3) <= gaps[1]
    # The next tenth of a second is like this one, the next minute is not.
    near, far = (np.corrcoef(rates[:-lag], rates[lag:])[0, 1] for lag in (1, 600))
    assert near > 0.6 > 0.2 > far


@pytest.mark.parametrize("name", LINK_MODELS)
def test_models_have_the_mean_that_they_say_and_repeat(name: str) -> None:
    link, again = (link_named(name, np.random.default_rng(7), 3 * GBIT) for _ in range(2))
    lowest, highest = (2.0, 6.0) if "uniform" in name else (2.999, 3.001)
    assert lowest * GBIT < link.mean_bytes_per_s < highest * GBIT
    assert [link.carried(t) for t in (1, 77)] == [again.carried(t) for t in (1, 77)]


def test_mahimahi_counts_packets_in_their_milliseconds(tmp_path: Path) -> None:
    link = read_link(written(tmp_path, "0\n1\n1\n10\n", "a.down"))
    assert link.cycle_s == 0.01
    assert [link.carried(ms / 1e3) for ms in (1, 9, 10)] == pytest.approx([4500, 4500, 6000])
    assert link.arrival_s(0, 4501) > 0.009


@pytest.mark.parametrize("text", ["time,mbit\n0,8\n2,16\n", "# walked\n0 8\n2\t16 extra\n\n"])
def test_throughputs_hold_until_the_next_line(tmp_path: Path, text: str) -> None:
    link = read_link(written(tmp_path, text.replace("extra", "99")))
    assert link.cycle_s == 4
    assert [link.carried(at_s) for at_s in (1, 2, 4)] == pytest.approx([1e6, 2e6, 6e6])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no lines of a trace"),
        ("# only words\n", "no lines of a trace"),
        ("1\n2\nx\n", "line 3: could not convert"),
        ("5\n3\n", "must not fall"),
        ("1\n-3\n", "0 or more"),
        ("0,1\n1,nan\n", "line 2: expected 2 numbers"),
        ("0,1\n1\n", "line 2: expected 2 numbers"),
        ("0,1\n", "at least two lines"),
        ("0,1\n0,2\n", "growing times"),
        ("0,0\n1,0\n", "never carries anything"),
        ("1e999\n", "0 or more"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_link(written(tmp_path, text))
